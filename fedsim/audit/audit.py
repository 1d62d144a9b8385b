"""Run the attacks of one adversary on a recording, save their findings and score them.

The same code serves `fedsim run` after the last round, the process that attacks while the rounds go
on, and `fedsim attack` on any recording. All of them read the same transcript, so their results are
equal.
"""

from __future__ import annotations

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

from fedsim.audit import scores
from fedsim.audit.cache import FindingCache
from fedsim.audit.evaluation.case import Case
from fedsim.audit.evaluation.evaluator import EvaluationContext, FindingSpec, check_claim
from fedsim.audit.evaluation.foreign_recording import ForeignRecording
from fedsim.audit.evaluation.memberships import CANDIDATES_DIGEST
from fedsim.audit.evaluation.own_run import OwnRun
from fedsim.audit.evaluation.perceptual_distance import check_backbone
from fedsim.audit.evaluation.truth import Truth
from fedsim.audit.isolation import Isolation, attempt_all
from fedsim.audit.job_log import JobClock, JobLog, describe_failure, report_job_counts
from fedsim.audit.observers import check_observed_rounds, observe_run, read_who, shows_sums
from fedsim.audit.optima import OptimumStore
from fedsim.audit.plan import (
    AttackJob,
    TitledAttacks,
    adaptive_attacks,
    check_victims,
    plan_jobs,
    rounds_to_attack,
    work_stages,
)
from fedsim.audit.plausibility import check_fit, check_truth, check_truths, count_examples, warn_of_cost
from fedsim.audit.score_reuse import EarlierScores
from fedsim.audit.targets import PendingJob, TargetMaker
from fedsim.audit.threat_model import (
    check_hidden_state,
    check_model,
    check_private_facts,
    facts_in_headers,
    full_knowledge,
    grant_knowledge,
    private_facts,
)
from fedsim.audit.variants import changed_settings, settings_of
from fedsim.audit.visibility import explain_group_refusal
from fedsim.base.errors import (
    AttackCrash,
    AttackError,
    ConfigError,
    DataError,
    FedsimError,
    KnowledgeError,
    TranscriptError,
)
from fedsim.base.files import temporary_folder
from fedsim.base.progress import track
from fedsim.base.workers import run_in_processes
from fedsim.data.cache import cache_folder
from fedsim.federation.app_file import read_app_defenses
from fedsim.federation.build import Experiment, build_attacks, find_data_folder, find_weights_folder
from fedsim.federation.config import PUBLIC_KEY, AttackFile, Config
from fedsim.federation.failed_attacks import FailedAttack, save_failed_attacks
from fedsim.federation.open_run import OpenRun
from fedsim.federation.run_folder import read_refusals
from fedsim.interfaces.attack import (
    FAILURES,
    GROUP,
    GROUPS,
    OPTIMAL,
    Attack,
    Knowledge,
    Outcome,
    Progress,
    VictimTask,
)
from fedsim.plugins.code_hashes import hash_plugin_code
from fedsim.plugins.inline import is_object
from fedsim.recording.header import RECORDING_FOLDER, Header
from fedsim.recording.transcript import Transcript
from fedsim.recording.updates_in_messages import check_source, record_updates
from fedsim.recording.wire_format import State

log = logging.getLogger(__name__)
_refusal_log = logging.getLogger("fedsim.audit.refused")

ReportJobProgress = Callable[[AttackJob, int, int, Mapping[str, float]], None]
"""Callback `progress(job, iteration, iterations, values)`."""


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Attacks of one adversary on one recording.

    Attributes:
        folder: the run.
        spec: which clients to attack, with which attacks, and what the adversary knows.
        experiment: the federation behind the recording; None where it was recorded elsewhere.
        base_folder: folder of the attack file; `module:callable` and truth files are found there.
        trust: import code that the run folder names by `module:callable`.
        command: the command that makes these findings again; each finding keeps it.
    """

    folder: OpenRun
    spec: AttackFile
    experiment: Experiment | None
    base_folder: Path
    trust: bool = False
    command: str = "fedsim attack RUN"

    @property
    def config(self) -> Config | None:
        """Return the settings of the federation; None where it was recorded elsewhere."""
        return self.experiment.config if self.experiment else None

    @cached_property
    def case(self) -> Case:
        """Return what the evaluator knows of the recording: its experiment and its truth files."""
        files: dict[str, Path] = {}
        for key, file in self.spec.truth.items():
            client = self._client_of_key(key)
            if client in files:
                raise ConfigError(f"truth.{key}: names client {client}, as another key does; leave one of them out")
            files[client] = self.base_folder / file
        if self.experiment:
            if PUBLIC_KEY in files:
                raise ConfigError(f"truth.{PUBLIC_KEY}: the data set of this run has test examples; leave the key out")
            return OwnRun(files, self.experiment)
        columns = self.spec.adversary.knowledge.columns
        defenses = []
        if self.spec.adversary.knowledge.defenses is True:
            defenses = read_app_defenses(self.folder.app, trust=self.trust)
        return ForeignRecording(
            files,
            columns=columns if isinstance(columns, list) else (),
            defenses=tuple(defenses),
            is_defended=self.spec.app.defended,
        )

    @cached_property
    def attacks(self) -> TitledAttacks:
        """Return the attacks of the file with their tables, and the adaptive ones.

        Where the adversary knows the defenses, each attack that reads them is also made adaptively.
        """
        attacks = build_attacks(self.spec)
        if self.spec.adversary.knowledge.defenses is not True or not self.case.defenses:
            return attacks
        return [*attacks, *adaptive_attacks(attacks)]

    @cached_property
    def stages(self) -> list[list[str]]:
        """Return the titles of the attacks in the order of work, see `work_stages`."""
        sources = {table.title: attack.builds_on for table, attack in self.attacks}
        return work_stages(sources, has_optima=not self.case.is_described_by_file)

    @cached_property
    def granted_knowledge(self) -> Knowledge:
        """Return what the adversary is granted about every victim."""
        return grant_knowledge(self.spec.adversary, self.case, self.base_folder, self.spec.app)

    @cached_property
    def transcript(self) -> Transcript:
        """Return what the adversary sees of the recorded messages, read in the format that the file states."""
        return observe_run(self.folder, self.case, self.spec.adversary, self.spec.app)

    @cached_property
    def example_counts(self) -> dict[str, set[int]]:
        """Map each client, in order of appearance, to the numbers of examples N it reported."""
        return count_examples(self.folder.recording.in_format(self.spec.app))  # the case is made of them

    @cached_property
    def cache(self) -> FindingCache:
        """Return the findings that are in the folder."""
        return FindingCache(
            folder=self.folder,
            attacks=self.attacks,
            titles=list(itertools.chain.from_iterable(self.stages)),
            knowledge_table=self.spec.adversary.knowledge,
            base_folder=self.base_folder,
            case=self.case,
            app=self.spec.app,
            who=self.spec.adversary.who,
        )

    @cached_property
    def optimum(self) -> OptimumStore:
        """Return the store of optimal local models: each is computed once, in the run folder."""
        return OptimumStore(cache=self.cache, case=self.case)

    @cached_property
    def targets(self) -> TargetMaker:
        """Return the maker of the attacks' targets."""
        return TargetMaker(
            transcript=self.transcript,
            adversary=self.spec.adversary,
            granted=self.granted_knowledge,
            case=self.case,
            cache=self.cache,
            optimum=self.optimum,
        )

    @cached_property
    def refusal_reasons(self) -> dict[str, str]:
        """Map the title of each attack that cannot be made to the sentence that says why.

        Such an attack lacks knowledge that it needs, is for other data, cannot read sums over
        groups, or builds on an attack that cannot be made.
        """
        granted_facts = [*private_facts(self.spec.adversary), *self._facts_in_headers()]
        attacks = {table.title: attack for table, attack in self.attacks}
        reasons = dict[str, str]()
        for title in itertools.chain.from_iterable(self.stages):
            attack = attacks[title]
            try:
                self.case.check_kind(title, attack)
                attack.check_knowledge(self.granted_knowledge, granted_facts)
                self._check_observations(attack)
                self._check_message_facts(attack)
            except KnowledgeError as error:
                reasons[title] = str(error)
            source = attack.builds_on
            if source in reasons:
                reasons.setdefault(
                    title,
                    f"{title} builds on '{source}', which is not made; name another source",
                )
        return reasons

    def check(self) -> None:
        """Check the whole file before any work, and that at least one of its attacks can be made.

        Raises:
            ConfigError, DataError, PluginError: the file, its data or its code is not usable.
            KnowledgeError: no attack can be made; this is why the first one is refused.
        """
        check_model(self.spec.adversary, self.granted_knowledge)
        # Code is hashed soon after the import, before its file can change.
        _ = self.cache.model_code
        for _, attack in self.attacks:
            hash_plugin_code(type(attack))
            settings_of(attack)
        if self.attacks and len(self.refusal_reasons) == len(self.attacks):
            raise KnowledgeError(next(iter(self.refusal_reasons.values())))
        self.case.check_files()
        self.case.check_format(self.spec.app)
        if self.case.is_described_by_file and self.folder.path.is_dir():
            self._check_fit()
        check_hidden_state(self.spec.adversary, self.granted_knowledge)  # after what says which tensor is at fault
        check_private_facts(self.spec.adversary, self.case)
        task = self.case.task
        shape = task.input_shape if task else self.granted_knowledge.input_shape
        check_backbone(find_weights_folder(), shape)

    @property
    def _possible_attacks(self) -> TitledAttacks:
        return [(table, attack) for table, attack in self.attacks if table.title not in self.refusal_reasons]

    def log_refusals(self) -> None:
        """Log why attacks are not made.

        Sentences may be logged several times; each is shown once (`fedsim.api.logs.OnceFilter`).
        """
        for reason in self.refusal_reasons.values():
            _refusal_log.error("%s", reason)

    def _warn_of_unisolated_attacks(self) -> None:
        """Warn of attacks whose class no other process can import, so that the truth is within their reach."""
        for table, attack in self._possible_attacks:
            if is_object(table.name):
                log.warning(
                    "%s: its class '%s' is in the program itself, so that it works beside the data and remembers other "
                    "victims; put it into a module file, and it works in a process that has neither",
                    table.title,
                    type(attack).__name__,
                )

    def _save_refusals(self) -> None:
        """Save why attacks are not made, and keep the reasons that other files wrote.

        A later report shows both.
        """
        old_refusals = read_refusals(self.folder)
        titles = {table.title for table, _ in self.attacks}
        of_other_files = {title: reason for title, reason in old_refusals.items() if title not in titles}
        new_refusals = of_other_files | self.refusal_reasons
        if new_refusals != old_refusals:
            rows = [{"attack": title, "why": reason} for title, reason in new_refusals.items()]
            self.folder.write_table(self.folder.refusals, ("attack", "why"), rows)

    def _check_observations(self, attack: Attack) -> None:
        """Raise KnowledgeError where the adversary sees nothing that `attack` reads."""
        who = self.spec.adversary.who
        is_of_feature_party = attack.subject == "embedding gradients"
        if is_of_feature_party and who != "feature-party":
            raise KnowledgeError(
                f"{attack.title} is an attack of a feature party, which sees gradients of its embeddings and no "
                "labels; set who = 'feature-party' in [adversary]"
            )
        if who == "feature-party" and not is_of_feature_party:
            raise KnowledgeError(
                f"{attack.title} does not apply: a feature party sees its own messages alone, and this attack is on "
                "what others hold or sent; leave out who"
            )
        role = self.spec.adversary.role
        shows_sums_alone = role.reads_messages and not role.colluders and self.case.shows_sums_alone
        # How many others take part is known as soon as a round is recorded.
        if who not in ("server", "feature-party") and self.folder.transcript.is_dir():
            shows_sums_alone = shows_sums(self.transcript)
        if shows_sums_alone and not attack.accepted_observations & {GROUP, GROUPS}:
            raise KnowledgeError(f"{attack.title} does not apply: {explain_group_refusal(attack, who)}")

    def _check_message_facts(self, attack: Attack) -> None:
        """Raise KnowledgeError where `attack` reads what messages show and the threat model withholds."""
        adversary = self.spec.adversary
        if not adversary.knowledge.num_examples and attack.needs_num_examples:
            raise KnowledgeError(
                f"{attack.title} reads N, the number of examples of a client, which the threat model withholds; grant "
                "it (adversary.knowledge.num_examples), or choose an attack that works without it, as membership-cosine"
            )
        several = adversary.rounds == "all" or len(adversary.rounds or ()) > 1
        joins_rounds = several and not attack.reads_one_round() and attack.needs_client_ids
        if not adversary.knowledge.client_ids and joins_rounds:
            raise KnowledgeError(
                f"{attack.title} joins what a client sent in several rounds, and the threat model withholds which "
                "messages are of the same client; grant it (adversary.knowledge.client_ids), attack one round "
                "(adversary.rounds), or choose linkability, which finds the messages of a client"
            )

    def run(
        self,
        progress: ReportJobProgress | None = None,
        rounds: Iterable[int] | None = None,
        planned_jobs: list[AttackJob] | None = None,
    ) -> list[str]:
        """Make all attacks; return one sentence for each attack that is refused or failed.

        The other attacks go on. Findings that were made with the same settings and the same code
        are kept.

        Args:
            progress: called as `progress(job, iteration, iterations, values)`.
            rounds: attack only these of the rounds that are to be attacked, and leave out attacks
                on several rounds at once; None attacks everything.
            planned_jobs: gets every job, those that fail among them.

        Raises:
            ConfigError: a round that is to be attacked, or a victim that an attack file names, is
                not recorded; nothing was attacked.
            FedsimError: see `check`.
        """
        self.check()
        transcript, adversary = self.transcript, self.spec.adversary
        # A run that is not finished has not seen all clients yet, and one that samples clients may
        # never see some. So victims are checked for attack files only.
        if rounds is None and not isinstance(self.spec, Config):
            check_victims(transcript, adversary, rounds_to_attack(transcript, adversary, rounds))
        if adversary.who != "server":
            check_observed_rounds(transcript, rounds_to_attack(transcript, adversary, rounds))
        failures = list(self.refusal_reasons.values())
        if rounds is None:
            self.log_refusals()
            self._save_refusals()
            self._warn_of_unisolated_attacks()
        plan = list(plan_jobs(transcript, adversary, self._possible_attacks, rounds, failures))
        if planned_jobs is not None:
            planned_jobs += plan
        for stage in self.stages:
            stage_jobs = [job for job in plan if job.title in stage]
            failed = self._run_stage(stage_jobs, progress or _ignore_progress)
            failures += [attempt.sentence for attempt in failed]
            # What fails while the rounds go on is attempted again after the last one.
            if rounds is None:
                failed_jobs = {attempt.job for attempt in failed}
                succeeded = [job.key for job in stage_jobs if job.key not in failed_jobs]
                save_failed_attacks(self.folder, failed, succeeded)
        return failures

    def _run_stage(self, stage_jobs: Sequence[AttackJob], progress: ReportJobProgress) -> list[FailedAttack]:
        """Run jobs of attacks that do not build on one another; return those that failed."""
        failed = list[FailedAttack]()
        with (
            temporary_folder() as folder,
            closing(self._run_jobs(stage_jobs, progress, folder)) as results,
        ):
            for job, error in report_job_counts(results, stage_jobs):
                if error is not None:
                    failed.append(describe_failure(job, error))
                    # A FedsimError needs no traceback: its sentence says it all.
                    says_all = isinstance(error, FedsimError) and not isinstance(error, AttackCrash)
                    log.error("%s", failed[-1].sentence, exc_info=None if says_all else error)
        return failed

    def score(self, failures: list[str] | None = None) -> list[dict[str, Any]]:
        """Score all findings in the folder, see `fedsim.audit.scores.score_findings`."""
        failures = [] if failures is None else failures
        earlier = EarlierScores(cache=self.cache, spec=self.spec)
        return scores.score_findings(self.cache, self._evaluation_context, failures, earlier)

    def judge(self, failures: list[str]) -> list[dict[str, Any]]:
        """Score all findings as `score` does, and write no scores."""
        return scores.judge_findings(self.cache, self._evaluation_context, failures)[0]

    def _evaluation_context(self, about: Mapping[str, Any]) -> EvaluationContext:
        """Return what a finding is judged with: messages and protocol as its attack read them.

        Raises:
            FedsimError: code that it was made with does not load, or is not trusted.
        """
        app, adversary = self.case.tables_of_finding(self.spec, about)
        adversary = adversary.model_copy(update={"who": read_who(about)})
        key = app.model_dump_json(), adversary.model_dump_json()
        if key not in self._evaluation_contexts:
            self._evaluation_contexts[key] = EvaluationContext(
                case=self.case,
                open_recording=partial(observe_run, self.folder, self.case, adversary, app),
                knowledge=full_knowledge(adversary, self.case, self.base_folder, app),
                optimum=self.optimum,
                weights=find_weights_folder(),
            )
        return self._evaluation_contexts[key]

    @cached_property
    def _evaluation_contexts(self) -> dict[tuple[str, str], EvaluationContext]:
        """Evaluation contexts by [app] and [adversary], as JSON."""
        return {}

    def attack(self, job: AttackJob, progress: Progress, isolation: Isolation) -> None:
        """Run one job and save its finding.

        Raises:
            FedsimError: the attack cannot be done, or failed.
        """

        def job_progress(job: AttackJob, iteration: int, iterations: int, values: Mapping[str, float]) -> None:
            progress(iteration, iterations, values)

        for _, error in self._attack_jobs([job], job_progress, isolation):
            if error is not None:
                raise error

    def _attack_jobs(
        self, jobs: Sequence[AttackJob], progress: ReportJobProgress, isolation: Isolation
    ) -> Iterator[tuple[AttackJob, BaseException | None]]:
        """Run the jobs of one attack, at once where it can, and save each finding when it is there.

        Yields:
            Each job with what it raised, or None.
        """
        attack, plugin = jobs[0].attack, jobs[0].plugin
        # An object of the user's own program has no file that another process could import.
        in_this_process = is_object(plugin) or hash_plugin_code(type(attack)) is None
        remaining = deque(jobs)
        running = dict[VictimTask, tuple[PendingJob, JobLog]]()
        ready = deque[tuple[AttackJob, BaseException | None]]()
        clock = JobClock()

        def orders() -> Iterator[VictimTask]:
            """Prepare a job each time the attack asks for one; skip those that are done."""
            while remaining:
                job = remaining.popleft()
                try:
                    pending = self.targets.prepare(job)
                except FAILURES as error:
                    ready.append((job, error))
                    continue
                if pending is None:
                    ready.append((job, None))
                    continue
                job_log = JobLog(clock)
                order = VictimTask(
                    target=pending.target,
                    progress=partial(progress, job),
                    log_context=job_log.record,
                )
                running[order] = pending, job_log
                yield order

        run_orders = attempt_all if in_this_process else isolation.attempt_all
        while remaining:
            count = len(remaining)
            error: BaseException = AttackError(f"{attack.title} gave neither a finding nor a reason")
            try:
                for order, outcome in run_orders(attack, orders()):
                    pending, job_log = running.pop(order)
                    job_log.end()
                    yield pending.job, self._save_outcome(pending, outcome, job_log)
                    while ready:
                        yield ready.popleft()
            except FAILURES as raised:
                error = raised
            # Jobs under way fail with this error; those that were not begun are tried again.
            for pending, job_log in running.values():
                job_log.end()
                ready.append((pending.job, error))
            running.clear()
            # An attack that asks for no job at all fails on all of them.
            if len(remaining) == count:
                ready += [(job, error) for job in remaining]
                remaining.clear()
            yield from ready
            ready.clear()

    def _save_outcome(self, pending: PendingJob, outcome: Outcome, job_log: JobLog) -> BaseException | None:
        """Save a finding; return what was raised instead of it, or what is wrong with it."""
        if isinstance(outcome, BaseException):
            return outcome
        try:
            check_claim(outcome, self._finding_spec(pending))
            path = self.cache.finding_path(pending.job)
            self.cache.save(outcome, path, self._finding_metadata(pending, job_log))
        except FAILURES as error:
            return error
        return None

    def _finding_metadata(self, pending: PendingJob, job_log: JobLog) -> dict[str, object]:
        """Return what is saved with a finding."""
        job, target = pending.job, pending.target
        granted = self.spec.adversary.knowledge.model_dump(mode="json")
        partial_records = target.knowledge.partial_records
        return {
            "attack": job.title,
            "plugin": job.plugin,
            "round": job.round,
            "rounds": list(job.rounds),
            "first_round": pending.first,
            "victim": job.victim,
            "members": list(target.members),
            "repeat": job.repeat,
            "settings": settings_of(job.attack),
            "changed": changed_settings(job.attack),
            "variant": self.cache.variants[job.title],
            "command": self.command,
            "code": hash_plugin_code(type(job.attack)),
            "model_code": self.cache.model_code,
            "granted": target.knowledge.granted_facts(),
            "knowledge": {name: granted[name] for name in sorted(job.attack.facts_to_grant())}
            | self.cache.withheld_messages,
            "app": self.spec.app.model_dump(mode="json", exclude_defaults=True),
            "partial_records": partial_records.column if partial_records else "",
            "fingerprint": pending.fingerprint,
            "warnings": job_log.warnings,
            "seconds": round(job_log.seconds, 2),
            **self._tuning_note(job.title),
            **self._candidates_note(pending),
            **({} if self.spec.adversary.who == "server" else {"attacker": self.spec.adversary.who}),
        }

    def _tuning_note(self, title: str) -> dict[str, str]:
        """Return how the settings of an attack were chosen, where its table says so."""
        notes = [table.tuned for table, _ in self.attacks if table.title == title and table.tuned]
        return {"tuned": notes[0]} if notes else {}

    def _candidates_note(self, pending: PendingJob) -> dict[str, str]:
        """Return the hash of the candidates where truth files hold them, since these files may change."""
        adversary, target = self.spec.adversary, pending.target
        if target.knowledge.candidates is None or not self.case.is_described_by_file:
            return {}
        clients = target.members or (pending.job.victim,)
        drawn = self.case.draw_candidates(clients, str(adversary.knowledge.candidates), adversary.candidates)
        return {CANDIDATES_DIGEST: drawn.digest}

    def isolation(self, room: Path) -> Isolation:
        """Return the processes of attacks of other packages, which learn no path to run or truth.

        Args:
            room: folder in which each process gets a folder of its own.
        """
        hidden = [self.folder.path, *(self.base_folder / file for file in self.spec.truth.values())]
        hidden += filter(None, [find_data_folder()])
        with suppress(DataError):  # there is no cache folder
            hidden.append(cache_folder())
        return Isolation(room, hidden)

    def _client_of_key(self, key: str) -> str:
        """Return the client that a key of [truth] names: itself, or of `#3` the third recorded."""
        if not key.startswith("#"):  # a client, or the public examples
            return key
        recorded = list(self.example_counts)
        position = int(key.removeprefix("#"))
        if not 1 <= position <= len(recorded):
            raise ConfigError(f"truth.{key}: {len(recorded)} clients are recorded; expected #1 to #{len(recorded)}")
        return recorded[position - 1]

    def _check_fit(self) -> None:
        """Check what the file says of a foreign app against the recording."""
        attacks = [attack for _, attack in self._possible_attacks]
        if attacks and all(attack.subject in ("embeddings", "embedding gradients") for attack in attacks):
            # Messages hold no whole model, and N is the number of rows in a step.
            for client, file in self.case.files.items():
                check_truth(client, Truth.load(file), self.granted_knowledge)
            return
        check_fit(self.transcript, self.granted_knowledge)
        check_truths(self.case.files, self.example_counts, self.granted_knowledge)
        titled_attacks = [(table.title, attack) for table, attack in self._possible_attacks]
        warn_of_cost(titled_attacks, self.transcript, self.granted_knowledge)

    def _facts_in_headers(self) -> list[str]:
        """Name the facts that headers of a foreign recording state, except those withheld."""
        if not self.case.is_described_by_file or not self.folder.path.is_dir():
            return []
        transcript, headers = self.transcript, list[Header]()
        for number in transcript.rounds:
            with suppress(TranscriptError):  # a damaged round is reported when it is attacked
                headers = [transcript.header(number)]
                break
        knowledge = self.spec.adversary.knowledge
        return [name for name in facts_in_headers(headers) if getattr(knowledge, name) is not False]

    def _run_jobs(
        self, jobs: Sequence[AttackJob], progress: ReportJobProgress, folder: Path
    ) -> Generator[tuple[AttackJob, BaseException | None]]:
        """Run `jobs`, several at once on a CPU.

        Args:
            folder: for the processes of attacks of other packages.

        Yields:
            Each job with what it raised, or None.
        """
        self._find_optima(sorted({job.victim for job in jobs if job.attack.builds_on == OPTIMAL}))
        workers = self.spec.adversary.workers or min(os.cpu_count() or 1, (len(jobs) + 1) // 2)
        if workers > 1 and self.granted_knowledge.device.type == "cpu":
            arguments = (self.folder.path, self.spec, self.base_folder, self.trust, self.command, folder)
            yield from run_in_processes(jobs, workers, _attack_worker, arguments, progress)
            return
        with self.isolation(folder) as isolation:
            for title in dict.fromkeys(job.title for job in jobs):
                jobs_of_attack = [job for job in jobs if job.title == title]
                yield from self._attack_jobs(jobs_of_attack, progress, isolation)

    def _finding_spec(self, pending: PendingJob) -> FindingSpec:
        """Return the form that a finding of this job must have."""

        def broadcast() -> State:
            transcript = self.transcript
            reply = transcript.header(pending.first).find_reply(pending.job.victim)
            assert reply is not None
            return transcript.update(pending.first, reply.client).before

        return FindingSpec(
            where=f"round {pending.job.round}, client {pending.job.victim}",
            knowledge=pending.target.knowledge,
            before=broadcast,
            task=self.case.task,
            clients=self.case.clients,
        )

    def _find_optima(self, clients: Sequence[int]) -> None:
        """Compute the optimal local models of `clients` that are missing, several at once."""
        missing = [client for client in clients if not self.optimum.is_saved(client)]
        workers = min(self.spec.adversary.workers or os.cpu_count() or 1, len(missing))
        if workers > 1:
            arguments = (self.folder.path, self.spec, self.base_folder, self.trust)
            results = run_in_processes(missing, workers, _optimum_worker, arguments, _ignore_progress)
            for client, error in track(results, "optimal local models", len(missing)):
                if error is not None:  # the attack that needs it will fail and be reported
                    log.warning("client %d: no optimal local model: %s", client, error)


def open_audit(path: Path, spec: AttackFile | None, base_folder: Path | None = None, **options: Any) -> Audit:
    """Open the run in `path`, in a process that writes no more than findings; see `make_audit`."""
    return make_audit(OpenRun(path), spec, base_folder, **options)


def make_audit(
    folder: OpenRun,
    spec: AttackFile | None,
    base_folder: Path | None = None,
    *,
    trust: bool = False,
    command: str = "fedsim attack RUN",
) -> Audit:
    """Return the audit of a run by its own adversary, or by the one that `spec` describes.

    Args:
        trust: import code that the run folder names.
        command: the command that makes the findings again.

    Raises:
        ConfigError: the recording was made elsewhere and no attack file is given, no attack is
            named, or the run names code and is not trusted.
    """
    folder.check_exists()
    path, config = folder.path, folder.read_experiment(trust=trust)
    if spec is None and config is None:
        raise ConfigError(f"{path}: was recorded elsewhere, so it names no attacks; give an attack file")
    chosen: AttackFile = spec if spec is not None else config  # type: ignore[assignment]
    if not chosen.attack:
        raise ConfigError("attack: no attack is named; add an [[attack]] table with a name")
    if path.resolve().name == RECORDING_FOLDER and folder.transcript == path:
        raise ConfigError(f"{path}: is the recording in a run folder; name the folder around it")
    # Extract updates from raw messages, or check that they were extracted from these messages.
    if chosen.app.messages:
        app = chosen.app
        source = (app.messages, app.record, app.broadcast_record, app.broadcast_messages)
        if any(folder.transcript.glob("round-*")):  # a recorder leaves an empty folder where nothing is an update
            check_source(folder.recording, *source)
        else:
            with folder.hold_lock():
                record_updates(path, *source, trust=trust)
    if not folder.transcript.is_dir():
        raise ConfigError(f"{path}: holds no recording; name the folder that has {RECORDING_FOLDER}/ or rounds in it")
    return Audit(
        folder=folder,
        spec=chosen,
        experiment=folder.build_experiment(config) if config else None,
        base_folder=base_folder or path,
        trust=trust,
        command=command,
    )


@contextmanager
def _attack_worker(
    path: Path, spec: AttackFile, base_folder: Path, trust: bool, command: str, folder: Path
) -> Iterator[Callable[[AttackJob, Progress], None]]:
    """Give the function with which a worker process attacks."""
    audit = open_audit(path, spec, base_folder, trust=trust, command=command)
    with audit.isolation(folder) as isolation:
        yield lambda job, progress: audit.attack(job, progress, isolation)


@contextmanager
def _optimum_worker(
    path: Path, spec: AttackFile, base_folder: Path, trust: bool
) -> Iterator[Callable[[int, Progress], None]]:
    """Give the function with which a worker process computes optimal local models."""
    audit = open_audit(path, spec, base_folder, trust=trust)

    def compute_optimum(client: int, progress: Progress) -> None:
        audit.optimum(client)

    yield compute_optimum


def _ignore_progress(job: Any, iteration: int, iterations: int, values: Mapping[str, float]) -> None:
    pass
