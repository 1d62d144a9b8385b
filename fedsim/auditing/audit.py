"""Attack a recording, score what was found, write both down.

The same code serves `fedsim run` after the last round, a process that works while the round loop goes on, and
`fedsim attack` on a recording made anywhere. All of them read the same transcript, so their results are equal.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from fedsim import metrics
from fedsim.attacks import FAILURES, GROUP, GROUPS, OPTIMAL, Attack, Knowledge, Order, Outcome, Progress
from fedsim.auditing import scores
from fedsim.auditing.cache import Cache, Models
from fedsim.auditing.fit import check_fit, check_truths, counts_of, warn_of_cost
from fedsim.auditing.isolation import Isolation, attempts
from fedsim.auditing.optima import Optima
from fedsim.auditing.outcomes import Turn, Turns, counted, sentence
from fedsim.auditing.plan import Job, Named, adaptive_ones, check_victims, chosen_rounds, first_of, in_order, jobs
from fedsim.auditing.sight import Sight, does_not_read
from fedsim.auditing.threat_model import (
    as_sent,
    check_model,
    check_private,
    check_sent,
    full_knowledge,
    grant,
    grant_private,
    of_group,
    private,
    sent_along,
)
from fedsim.auditing.variants import changed, settings_of
from fedsim.auditing.workers import in_processes
from fedsim.datasets.cache import cache_folder
from fedsim.errors import (
    AttackCrash,
    AttackError,
    ConfigError,
    DataError,
    FedsimError,
    KnowledgeError,
    TranscriptError,
)
from fedsim.evaluation.case import Case, ForeignRecording, OwnRun
from fedsim.evaluation.kind import Bench, Owed, evaluator_of
from fedsim.evaluation.local_optimum import METHOD
from fedsim.evaluation.truth import Truth
from fedsim.experiments.build import Experiment, build_attacks, data_folder
from fedsim.experiments.config import AppTable, AttackFile, Config, check
from fedsim.experiments.run_folder import RunFolder, refusals
from fedsim.files import fresh_folder
from fedsim.plugins.code import code_hash
from fedsim.plugins.objects import is_object
from fedsim.progress import tracked
from fedsim.randomness import adversary_key, generator
from fedsim.recording.header import RECORDING, Header
from fedsim.recording.reading import Reading
from fedsim.recording.transcript import Transcript
from fedsim.recording.updates_in_messages import check_whence, record_updates
from fedsim.wire.messages import State

log = logging.getLogger(__name__)
_refusals = logging.getLogger("fedsim.auditing.refused")

ProgressOf = Callable[[Job, int, int, Mapping[str, float]], None]
"""Called as `progress(job, iteration, iterations, values)`."""


@dataclass(frozen=True, kw_only=True)
class _Due:
    """A job whose finding is not there.

    Attributes:
        first: the first round in which its victim took part.
        members: for whom the victim stands.
        knowledge: what the attack is granted.
        fingerprint: of all that the finding follows from.
    """

    job: Job
    first: int
    members: tuple[int, ...]
    knowledge: Knowledge
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The attacks of one adversary on one recording.

    Attributes:
        folder: the run.
        spec: whom to attack with what, and what the adversary knows.
        experiment: the federation behind the recording; None where it was recorded elsewhere.
        beside: folder of the attack file, in which `module:callable` and truth files are found.
        trust: import code that the run folder names by `module:callable`.
        command: the command that makes these findings again; each finding keeps it.
    """

    folder: RunFolder
    spec: AttackFile
    experiment: Experiment | None
    beside: Path
    trust: bool = False
    command: str = "fedsim attack RUN"

    @cached_property
    def case(self) -> Case:
        """What the recording is of."""
        files: dict[str, Path] = {}
        for key, file in self.spec.truth.items():
            if (called := self._called(key)) in files:
                raise ConfigError(f"truth.{key}: names client {called}, as another key does; leave one of them out")
            files[called] = self.beside / file
        return OwnRun(files, self.experiment) if self.experiment else ForeignRecording(files)

    @cached_property
    def attacks(self) -> Named:
        """The attacks of the file, each with its table; where defenses are known, also those that adapt to them."""
        found = build_attacks(self.spec)
        if self.spec.adversary.knowledge.defenses is not True or not (self.experiment and self.experiment.defenses):
            return found
        return [*found, *adaptive_ones(found)]

    @cached_property
    def stages(self) -> list[list[str]]:
        """Their titles in the order of work, see `in_order`."""
        return in_order({table.title: a.builds_on for table, a in self.attacks}, known=self.experiment is not None)

    @cached_property
    def granted(self) -> Knowledge:
        """What the adversary is granted about every victim."""
        return grant(self.spec.adversary, self.experiment, self.beside, self.spec.app)

    @cached_property
    def transcript(self) -> Transcript:
        """What was recorded, read as the file says that it is meant."""
        return Transcript(self.folder.path, reading=_reading(self.spec.app))

    @cached_property
    def counts(self) -> dict[str, set[int]]:
        """By client, in order of first appearance, N of its updates."""
        return counts_of(self.transcript)

    @cached_property
    def cache(self) -> Cache:
        """The findings in the folder."""
        return Cache(
            folder=self.folder,
            attacks=self.attacks,
            order=list(itertools.chain.from_iterable(self.stages)),
            granted=self.spec.adversary.knowledge,
            beside=self.beside,
            seed=self.case.seed,
            own=self.experiment is not None,
            app=self.spec.app,
        )

    @cached_property
    def optimum(self) -> Optima:
        """Gives the optimal local model of a client, which is computed once and kept in the run folder."""
        return Optima(cache=self.cache, case=self.case)

    def truth(self, victim: int, number: int | None, members: Sequence[int] = ()) -> Truth | None:
        """See `Case.truth`."""
        return self.case.truth(victim, number, members)

    @cached_property
    def refused(self) -> dict[str, str]:
        """By title, the sentence why an attack is not made: it is not granted what it needs, or is for other data.

        One that builds on such an attack is not made either.
        """
        granted = [*private(self.spec.adversary), *self._sent_along()]
        attacks, found = {table.title: attack for table, attack in self.attacks}, dict[str, str]()
        for title in itertools.chain.from_iterable(self.stages):
            attack = attacks[title]
            try:
                self.case.check_kind(title, attack)
                attack.check(self.granted, granted)
                self._check_reads(attack)
            except KnowledgeError as error:
                found[title] = str(error)
            if (source := attack.builds_on) in found:
                found.setdefault(title, f"{title} builds on '{source}', which is not made; name another source")
        return found

    def check(self) -> None:
        """Make sure that the file says nothing that cannot be, and that some attack of it can be made.

        Raises:
            ConfigError, DataError, PluginError: something cannot be, before any work.
            KnowledgeError: no attack can be made; this is why the first one is refused.
        """
        check_model(self.spec.adversary, self.granted)
        _ = self.cache.model_code  # hashed soon after the import, before its file can change
        for _, attack in self.attacks:
            code_hash(type(attack))  # for the same reason
            settings_of(attack)
        if self.attacks and len(self.refused) == len(self.attacks):
            raise KnowledgeError(next(iter(self.refused.values())))
        self.case.check_files()
        if self.experiment is not None and self.spec.app != AppTable():
            raise ConfigError(
                "app: says what the messages of somebody else's app mean; this is a run of fedsim, which knows; leave "
                "[app] out"
            )
        if self.experiment is None and self.folder.path.is_dir():
            self._check_fit()
        check_private(self.spec.adversary, self.experiment, bool(self.spec.truth))
        metrics.check_weights(_weights())

    @property
    def _possible(self) -> Named:
        """The attacks that are not refused."""
        return [(table, attack) for table, attack in self.attacks if table.title not in self.refused]

    def tell_refused(self) -> None:
        """Log why attacks are not made; said again, each sentence is shown once (`fedsim.workflow.logs.Once`)."""
        for why in self.refused.values():
            _refusals.error("%s", why)

    def _keep_refused(self) -> None:
        """Write down why attacks are not made, beside what other files are refused; a later report says both."""
        before = refusals(self.folder)
        mine = {table.title for table, _ in self.attacks}
        now = {title: why for title, why in before.items() if title not in mine} | self.refused
        if now != before:
            rows = [{"attack": title, "why": why} for title, why in now.items()]
            self.folder.write_table(self.folder.refused, ("attack", "why"), rows)
            self.folder.settle()

    def _check_reads(self, attack: Attack) -> None:
        """Raise KnowledgeError where the server of our own run sees nothing that `attack` could read."""
        secure = self.experiment is not None and self.experiment.config.secure_aggregation is not None
        if secure and not attack.observes & {GROUP, GROUPS}:
            raise KnowledgeError(f"{attack.called} does not apply: {does_not_read(attack)}")

    def run(
        self,
        progress: ProgressOf | None = None,
        rounds: Iterable[int] | None = None,
        planned: list[Job] | None = None,
    ) -> list[str]:
        """Attack, and return one sentence for each attack that is `refused` or failed; the others go on.

        Findings that are already there, and were made with the same settings and the same code, are kept.

        Args:
            progress: called as `progress(job, iteration, iterations, values)`.
            rounds: attack only these of the rounds that are to be attacked, and leave out attacks on several rounds
                at once; None attacks everything.
            planned: gets every job, those that fail among them.

        Raises:
            ConfigError: a round that is to be attacked, or a victim that an attack file names, is recorded nowhere;
                nothing was attacked.
            FedsimError: see `check`.
        """
        self.check()
        transcript, adversary = self.transcript, self.spec.adversary
        # A run that is not finished has not seen all clients yet, and one that samples clients may never see some.
        if rounds is None and not isinstance(self.spec, Config):
            check_victims(transcript, adversary, chosen_rounds(transcript, adversary, rounds))
        failures = list(self.refused.values())
        if rounds is None:
            self.tell_refused()
            self._keep_refused()
        plan = list(jobs(transcript, adversary, self._possible, rounds, failures))
        if planned is not None:
            planned += plan
        for stage in self.stages:
            todo = [job for job in plan if job.title in stage]
            with fresh_folder() as room, closing(self._work(transcript, todo, progress or _silent, room)) as work:
                for job, error in counted(work, todo):
                    if error is not None:
                        failures.append(sentence(job, error))
                        told = isinstance(error, FedsimError) and not isinstance(error, AttackCrash)
                        log.error("%s", failures[-1], exc_info=None if told else error)
        return failures

    def score(self, failures: list[str] | None = None) -> list[dict[str, Any]]:
        """See `fedsim.auditing.scores.score`."""
        return scores.score(self.cache, self._bench_of, [] if failures is None else failures)

    def _bench_of(self, about: Mapping[str, Any]) -> Bench:
        """What a finding is judged with: the messages and the protocol as its attack read them.

        The file may say otherwise of somebody else's recording by now; a claim that was read from gradients does not
        become one about weights.

        Raises:
            FedsimError: code that it was made with does not load, or may not.
        """
        app, adversary = self.spec.app, self.spec.adversary
        if self.experiment is None and about["knowledge"] is not None:
            kind = type(adversary.knowledge)
            known = adversary.knowledge.model_dump(exclude_unset=True) | about["knowledge"]
            known = {name: value for name, value in known.items() if value != kind.model_fields[name].default}
            app = check(AppTable, about["app"] or {}, "app")
            knowledge = check(kind, known, "adversary.knowledge")
            adversary = adversary.model_copy(update={"knowledge": knowledge})
        read_as = app.model_dump_json(), adversary.model_dump_json()
        if read_as not in self._benches:
            self._benches[read_as] = Bench(
                case=self.case,
                recording=self.folder.path,
                knowledge=full_knowledge(adversary, self.experiment, self.beside, app),
                optimum=self.optimum,
                weights=_weights(),
                reading=_reading(app),
            )
        return self._benches[read_as]

    @cached_property
    def _benches(self) -> dict[tuple[str, str], Bench]:
        """By what the messages mean and what is known of the protocol."""
        return {}

    def attack(self, transcript: Transcript, job: Job, progress: Progress, isolation: Isolation) -> None:
        """Do one job and save what was found.

        Raises:
            FedsimError: the attack cannot be done, or failed.
        """
        for _, error in self._attack(transcript, [job], lambda _, *told: progress(*told), isolation):
            if error is not None:
                raise error

    def _attack(
        self, transcript: Transcript, jobs: Sequence[Job], progress: ProgressOf, isolation: Isolation
    ) -> Iterator[tuple[Job, BaseException | None]]:
        """Do the jobs of one attack, at once where that saves time, and save each finding as soon as it is there.

        Yields:
            Each job with what it raised, or None.
        """
        attack, plugin = jobs[0].attack, jobs[0].plugin
        ours = is_object(plugin) or code_hash(type(attack)) is None  # or an object of the user's own program
        left, due = deque(jobs), dict[Order, tuple[_Due, Turn]]()
        ready = deque[tuple[Job, BaseException | None]]()

        def orders(turns: Turns) -> Iterator[Order]:
            while left:
                job = left.popleft()
                try:
                    if (found := self._due(transcript, job)) is None:
                        ready.append((job, None))
                        continue
                except FAILURES as error:
                    ready.append((job, error))
                    continue
                turn = Turn(turns)
                order = Order(
                    transcript=transcript.only(job.rounds),
                    knowledge=found.knowledge,
                    victim=job.victim,
                    rng=generator(adversary_key(self.case.seed), "attack", job.round, job.victim, job.repeat),
                    progress=partial(progress, job),
                    turn=turn.taken,
                )
                due[order] = found, turn
                yield order

        with Turns() as turns:
            while left:
                many = len(left)
                why: BaseException = AttackError(f"{attack.called} gave neither a finding nor a reason")
                try:
                    for order, outcome in (attempts if ours else isolation.attempts)(attack, orders(turns)):
                        found, turn = due.pop(order)
                        turn.end()
                        yield found.job, self._kept(transcript, found, outcome, turn)
                        while ready:
                            yield ready.popleft()
                except FAILURES as error:  # of several at once, which they all fail with; the others go on
                    why = error
                for found, turn in due.values():
                    turn.end()
                    ready.append((found.job, why))
                due.clear()
                if len(left) == many:  # it asked for none of them
                    ready += [(job, why) for job in left]
                    left.clear()
                yield from ready
                ready.clear()

    def _due(self, transcript: Transcript, job: Job) -> _Due | None:
        """What there is to do for `job`; None where its finding is there already."""
        first = first_of(transcript, job)
        members = self._members(transcript, first, job)
        knowledge, upstream = self._knowledge(transcript, job, first, members)
        fingerprint = self.cache.fingerprint(job, knowledge, transcript, upstream)
        if self.cache.is_there(job, fingerprint):
            return None
        return _Due(job=job, first=first, members=members, knowledge=knowledge, fingerprint=fingerprint)

    def _kept(self, transcript: Transcript, due: _Due, outcome: Outcome, turn: Turn) -> BaseException | None:
        """Save what was found; what was raised instead, or what is wrong with it."""
        if isinstance(outcome, BaseException):
            return outcome
        try:
            evaluator_of(outcome).form(outcome, self._owed(transcript, due))
            self.cache.keep(outcome, self.cache.place(due.job), self._about(due, turn))
        except FAILURES as error:
            return error
        return None

    def _about(self, due: _Due, turn: Turn) -> dict[str, object]:
        """What is saved beside a finding."""
        job, granted = due.job, self.spec.adversary.knowledge.model_dump(mode="json")
        return {
            "attack": job.title,
            "plugin": job.plugin,
            "round": job.round,
            "rounds": list(job.rounds),
            "first_round": due.first,
            "victim": job.victim,
            "members": list(due.members),
            "repeat": job.repeat,
            "settings": settings_of(job.attack),
            "changed": changed(job.attack),
            "variant": self.cache.variants[job.title],
            "command": self.command,
            "code": code_hash(type(job.attack)),
            "model_code": self.cache.model_code,
            "granted": due.knowledge.granted(),
            "knowledge": {name: granted[name] for name in sorted(job.attack.handed())},
            "app": self.spec.app.model_dump(mode="json", exclude_defaults=True),
            "partial_records": due.knowledge.partial_records.column if due.knowledge.partial_records else "",
            "fingerprint": due.fingerprint,
            "warnings": turn.warnings,
            "seconds": round(turn.seconds, 2),
        }

    def isolation(self, room: Path) -> Isolation:
        """Where attacks of other packages run: nothing there leads to the run, its data or the truth."""
        hidden = [self.folder.path, *(self.beside / file for file in self.spec.truth.values())]
        hidden += filter(None, [data_folder()])
        with suppress(DataError):  # there is no cache folder
            hidden.append(cache_folder())
        return Isolation(room, hidden)

    def _members(self, transcript: Transcript, number: int, job: Job) -> tuple[int, ...]:
        """For whom the victim stands: the group whose sum is attacked; nobody where it stands for itself.

        Raises:
            AttackError: nobody says how many examples there are.
        """
        victim, reply = job.victim, transcript.header(number).reply_of(job.victim)
        assert reply is not None
        if not transcript.reading.counted(victim, reply.num_examples):
            raise AttackError(
                f"round {number}, client {victim}: it reported no number of examples that it trained on; say it with "
                "[app] num_examples"
            )
        if not reply.members or GROUPS in job.attack.observes:
            return ()
        members = ", ".join(map(str, reply.members))
        log.warning("round %d: client %d stands for the sum over clients %s", number, victim, members)
        return tuple(reply.members)

    def _called(self, key: str) -> str:
        """The client that a key of [truth] stands for: itself, or of `#3` the third one that appears."""
        if not key.startswith("#"):
            return key
        seen = list(self.counts)
        place = int(key.removeprefix("#"))
        if not 1 <= place <= len(seen):
            raise ConfigError(f"truth.{key}: {len(seen)} clients are recorded; expected #1 to #{len(seen)}")
        return seen[place - 1]

    def _check_fit(self) -> None:
        """Make sure that what the file says of somebody's app fits what was recorded; see `fedsim.auditing.fit`."""
        check_fit(self.transcript, self.granted)
        check_truths(self.case.files, self.counts, self.granted)
        warn_of_cost([(table.title, attack) for table, attack in self._possible], self.transcript, self.granted)

    def _sent_along(self) -> list[str]:
        """Facts of the protocol that the headers of a recording made elsewhere state, and that are not withheld."""
        if self.experiment is not None or not self.folder.path.is_dir():
            return []
        transcript, headers = self.transcript, list[Header]()
        for number in transcript.rounds:
            with suppress(TranscriptError):  # a damaged round is reported when it is attacked
                headers = [transcript.header(number)]
                break
        return [name for name in sent_along(headers) if getattr(self.spec.adversary.knowledge, name) is not False]

    def _work(
        self, transcript: Transcript, todo: Sequence[Job], progress: ProgressOf, room: Path
    ) -> Generator[tuple[Job, BaseException | None]]:
        """Do the jobs `todo`, several at once on a CPU; yield each with the exception that it raised, or None."""
        self._find_optima(sorted({job.victim for job in todo if job.attack.builds_on == OPTIMAL}))
        workers = self.spec.adversary.workers or min(os.cpu_count() or 1, (len(todo) + 1) // 2)
        if workers > 1 and self.granted.device.type == "cpu":
            arguments = (self.folder.path, self.spec, self.beside, self.trust, self.command, room)
            yield from in_processes(todo, workers, _worker, arguments, progress)
            return
        with self.isolation(room) as isolation:
            for title in dict.fromkeys(job.title for job in todo):
                alike = [job for job in todo if job.title == title]
                yield from self._attack(transcript, alike, progress, isolation)

    def _owed(self, transcript: Transcript, due: _Due) -> Owed:
        """The form that a finding has to have."""

        def before() -> State:
            reply = transcript.header(due.first).reply_of(due.job.victim)
            assert reply is not None
            return transcript.update(due.first, reply.client).before

        return Owed(
            where=f"round {due.job.round}, client {due.job.victim}",
            knowledge=due.knowledge,
            before=before,
            task=self.case.task,
            clients=self.case.clients,
        )

    def _knowledge(
        self, transcript: Transcript, job: Job, first: int, members: Sequence[int]
    ) -> tuple[Knowledge, list[str]]:
        """What the attack of `job` is granted, and the hashes of the models among it."""
        adversary, declared = self.spec.adversary, job.attack.handed()
        truth = self.truth(job.victim, first, members) if declared.intersection(private(adversary)) else None
        headers = [header for number in job.rounds if (header := transcript.header(number)).reply_of(job.victim)]
        check_sent(self.experiment, headers, job.victim)
        common = of_group(as_sent(self.granted, adversary, headers, declared), len(members))
        knowledge = grant_private(common, adversary, self.experiment, job.victim, truth, declared, members)
        knowledge = knowledge.only(declared)
        if (title := job.attack.builds_on) is None:
            return knowledge, []
        if title == OPTIMAL:
            clients = Sight([transcript.header(number) for number in job.rounds]).everyone
            optima = Models({client: partial(self.optimum, client) for client in clients})
            return dataclasses.replace(knowledge, models=optima), [METHOD]
        models, hashes = self.cache.decoded(title, job)
        return dataclasses.replace(knowledge, models=models), hashes

    def _find_optima(self, clients: Sequence[int]) -> None:
        """Find the optimal local models of `clients`, several at once, where they are not in the run folder yet."""
        missing = [client for client in clients if not self.optimum.is_there(client)]
        workers = min(self.spec.adversary.workers or os.cpu_count() or 1, len(missing))
        if workers > 1:
            arguments = (self.folder.path, self.spec, self.beside, self.trust)
            found = in_processes(missing, workers, _optimum_worker, arguments, _silent)
            for client, error in tracked(found, "optimal local models", len(missing)):
                if error is not None:  # the attack that needs it will fail and be reported
                    log.warning("client %d: no optimal local model: %s", client, error)


def _reading(app: AppTable) -> Reading:
    said = app.model_dump(exclude={"num_examples", "outputs", "frozen", "messages"})
    counts = app.num_examples
    by_client = {int(key): count for key, count in counts.items()} if isinstance(counts, dict) else counts
    return Reading(**said | {"names": tuple(said["names"])}, num_examples=by_client)


def open_audit(
    path: Path,
    spec: AttackFile | None,
    beside: Path | None = None,
    *,
    trust: bool = False,
    command: str = "fedsim attack RUN",
) -> Audit:
    """The audit of the run in `path`, with its own adversary or the one that `spec` describes.

    Args:
        trust: import code that the run folder names.
        command: the command that makes the findings again.

    Raises:
        ConfigError: the recording was made elsewhere and no attack file is given, no attack is named, or the run names
            code and is not trusted.
    """
    if not path.is_dir():
        raise ConfigError(f"{path}: no such run folder")
    folder = RunFolder(path)
    config = folder.read_experiment(trust=trust)
    if spec is None and config is None:
        raise ConfigError(f"{path}: was recorded elsewhere, so it names no attacks; give an attack file")
    chosen: AttackFile = spec if spec is not None else config  # type: ignore[assignment]
    if not chosen.attack:
        raise ConfigError("attack: no attack is named; add an [[attack]] table with a name")
    if path.resolve().name == RECORDING and folder.transcript == path:
        raise ConfigError(f"{path}: is the recording in a run folder; name the folder around it")
    if chosen.app.messages:
        if folder.transcript.is_dir():
            check_whence(Transcript(path), chosen.app.messages, chosen.app.record)
        else:
            with folder.held():
                record_updates(path, chosen.app.messages, chosen.app.record, trust=trust)
    if not folder.transcript.is_dir():
        raise ConfigError(f"{path}: holds no recording; name the folder that has {RECORDING}/ or rounds in it")
    return Audit(
        folder=folder,
        spec=chosen,
        experiment=Experiment(config) if config else None,
        beside=beside or path,
        trust=trust,
        command=command,
    )


@contextmanager
def _worker(
    path: Path, spec: AttackFile, beside: Path, trust: bool, command: str, room: Path
) -> Iterator[Callable[[Job, Progress], None]]:
    """Gives the function with which a worker process attacks."""
    audit = open_audit(path, spec, beside, trust=trust, command=command)
    with audit.isolation(room) as isolation:
        yield lambda job, progress: audit.attack(audit.transcript, job, progress, isolation)


@contextmanager
def _optimum_worker(
    path: Path, spec: AttackFile, beside: Path, trust: bool
) -> Iterator[Callable[[int, Progress], object]]:
    """Gives the function with which a worker process finds optimal local models."""
    audit = open_audit(path, spec, beside, trust=trust)
    yield lambda client, progress: audit.optimum(client)


def _silent(job: Any, iteration: int, iterations: int, values: Mapping[str, float]) -> None:
    """Report nothing."""


def _weights() -> Path | None:
    """The folder with the weights of networks that scores need."""
    return folder / "weights" if (folder := data_folder()) else None
