"""Attack a recording, score what was found, write both down.

The same code serves `fedsim run` after the last round, a worker beside the round loop, and
`fedsim attack` on a recording made anywhere; all read the same transcript, so results are equal.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim import metrics
from fedsim.attack import GLOBAL, KNOWLEDGE, LAST_RETURNED, OPTIMAL, Attack, Knowledge, Progress
from fedsim.auditing.claims import Owed
from fedsim.auditing.isolation import Isolation, attempt
from fedsim.auditing.threat_model import (
    as_sent,
    check_model,
    check_private,
    check_sent,
    full_knowledge,
    grant,
    grant_private,
    private,
    sent_along,
)
from fedsim.auditing.variants import VARIANT, changed, columns, variant
from fedsim.auditing.workers import in_processes
from fedsim.datasets import Dataset
from fedsim.datasets.cache import cache_folder
from fedsim.errors import (
    AttackCrash,
    AttackError,
    ConfigError,
    DataError,
    FedsimError,
    KnowledgeError,
    RunError,
    TranscriptError,
    did_you_mean,
    one_line,
    what_it_said,
)
from fedsim.evaluation.imputation import Guess, Imputation
from fedsim.evaluation.inference_scores import (
    DRAWS,
    REFERENCES,
    Memory,
    score_inference,
    score_local_model,
    score_representatives,
)
from fedsim.evaluation.local_optimum import METHOD, local_optimum
from fedsim.evaluation.scoring import Public, Score, Truth, score
from fedsim.evaluation.similarity import Message
from fedsim.evaluation.zest import draw_references
from fedsim.experiments.build import Experiment, build_attacks, data_folder
from fedsim.experiments.config import AdversaryTable, AttackFile, Config
from fedsim.experiments.run_folder import RunFolder
from fedsim.files import fresh_folder
from fedsim.findings import (
    Finding,
    Inference,
    LocalModel,
    Reconstruction,
    Representatives,
    Texts,
    load_claim,
    load_finding,
    read_about,
    save_finding,
)
from fedsim.plugins import registry
from fedsim.plugins.code import UNREADABLE, code_hash, file_hash
from fedsim.plugins.objects import is_object
from fedsim.progress import tell, tracked
from fedsim.randomness import generator, one_thread
from fedsim.recording.manifest import is_noted
from fedsim.recording.transcript import RECORDING, Header, Transcript, hash_state
from fedsim.wire.messages import State

log = logging.getLogger(__name__)

SCORES = (
    "attack", "victim", "round", "repeat", "metric", "value", "floor", "floor_guess", "nearest_public", "ceiling",
    "higher_is_better", "examples", "seed", "missing", *VARIANT,
)  # fmt: skip
IMAGES = ("attack", "victim", "round", "repeat", "image", "metric", "value", *VARIANT)
_SHOWN = 20
"""Most clients named in a sentence."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One attack on one victim's update (or updates, for an attack on several rounds), from one random start."""

    title: str
    plugin: str
    attack: Attack
    rounds: tuple[int, ...]
    victim: int
    repeat: int
    command: str = ""

    @property
    def round(self) -> str:
        """The round that is attacked, or `first-last` for an attack on several."""
        return "-".join(map(str, sorted({self.rounds[0], self.rounds[-1]})))

    @property
    def name(self) -> str:
        """File name without its ending, unique within the attack's folder."""
        return f"round-{self.round}-client-{self.victim}-repeat-{self.repeat}"


ProgressOf = Callable[[Job, int, int, Mapping[str, float]], None]
"""Called as `progress(job, iteration, iterations, values)`."""


class Models(Mapping[int, State]):
    """A model of each client, read when it is asked for."""

    def __init__(self, readers: Mapping[int, Callable[[], State]]) -> None:
        self._readers = readers

    def __getitem__(self, client: int) -> State:
        return self._readers[client]()

    def __contains__(self, client: object) -> bool:
        return client in self._readers  # without reading

    def __iter__(self) -> Iterator[int]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


@dataclass(frozen=True, kw_only=True)
class Audit:
    """An adversary set upon one recording.

    Attributes:
        folder: the run.
        spec: whom to attack with what, and what the adversary knows.
        experiment: the federation behind the recording; None where it was recorded elsewhere.
        beside: folder of the attack file, in which `module:callable` and truth files are found.
        trust: import code that the run folder names by `module:callable`.
        command: what makes these findings again; each keeps it.
    """

    folder: RunFolder
    spec: AttackFile
    experiment: Experiment | None
    beside: Path
    trust: bool = False
    command: str = "fedsim attack RUN"

    def check(self) -> None:
        """Make sure that every attack can be built and is granted what it needs.

        Raises:
            ConfigError, PluginError, KnowledgeError: before any work.
        """
        knowledge = grant(self.spec.adversary, self.experiment, self.beside)
        check_model(self.spec.adversary, knowledge)
        _ = self._model_code  # of its file as it is now, soon after the import
        granted = [*private(self.spec.adversary), *self._sent_along()]
        self._stages()
        for table, attack in build_attacks(self.spec):
            if self.experiment:
                _check_kind(table.title, attack, self.experiment.dataset)
            attack.check(knowledge, granted)
            code_hash(type(attack))  # likewise
        for file in self.spec.truth.values():
            Truth.load(self.beside / file)
        check_private(self.spec.adversary, self.experiment, bool(self.spec.truth))
        metrics.check_weights(_weights())

    def run(self, progress: ProgressOf | None = None, rounds: Iterable[int] | None = None) -> list[str]:
        """Attack, and return one sentence for each attack that failed; the others go on.

        Findings that are already there, made with the same settings and the same code of a plug-in, are kept.

        Args:
            progress: told `(job, iteration, iterations, values)`.
            rounds: attack only these among the rounds that are to be attacked; attacks on several rounds at once wait
                for a call without it.

        Raises:
            ConfigError: a round that is to be attacked, or a victim of an attack file, is recorded nowhere; nothing
                was attacked.
        """
        self.check()
        transcript = Transcript(self.folder.path)
        failures: list[str] = []
        jobs = list(self._jobs(transcript, rounds, failures))
        for stage in self._stages():
            todo = [job for job in jobs if job.title in stage]
            with fresh_folder() as room, closing(self._work(transcript, todo, progress or _silent, room)) as work:
                for job, error in _counted(work, todo):
                    if error is not None:
                        failures.append(_sentence(job, error))
                        told = isinstance(error, FedsimError) and not isinstance(error, AttackCrash)
                        log.error("%s", failures[-1], exc_info=None if told else error)
        return failures

    def _sent_along(self) -> list[str]:
        """Facts of the protocol that a recording made elsewhere tells itself, and that are not withheld."""
        if self.experiment is not None or not self.folder.path.is_dir():
            return []
        transcript, headers = Transcript(self.folder.path), list[Header]()
        for number in transcript.rounds:
            with suppress(TranscriptError):  # it is reported when it is attacked
                headers = [transcript.header(number)]
                break
        return [name for name in sent_along(headers) if getattr(self.spec.adversary.knowledge, name) is not False]

    def _stages(self) -> list[list[str]]:
        """See `_in_order`."""
        return _in_order({table.title: a.builds_on for table, a in build_attacks(self.spec)}, self.experiment)

    def _work(
        self, transcript: Transcript, jobs: Sequence[Job], progress: ProgressOf, room: Path
    ) -> Generator[tuple[Job, BaseException | None]]:
        """Do `jobs`, several at once on a CPU; each with what it raised."""
        self._find_optima(sorted({job.victim for job in jobs if job.attack.builds_on == OPTIMAL}))
        workers = self.spec.adversary.workers or min(os.cpu_count() or 1, (len(jobs) + 1) // 2)
        if workers > 1 and grant(self.spec.adversary, self.experiment, self.beside).device.type == "cpu":
            arguments = (self.folder.path, self.spec, self.beside, self.trust, room)
            yield from in_processes(jobs, workers, _worker, arguments, progress)
            return
        with self._isolation(room) as isolation:
            for job in jobs:
                yield job, self._try(transcript, job, progress, isolation)

    def _jobs(self, transcript: Transcript, rounds: Iterable[int] | None, failures: list[str]) -> Iterable[Job]:
        """What to do, round by round; attacks on several rounds come first."""
        adversary = self.spec.adversary
        present: dict[int, list[int]] = {}
        chosen = _chosen_rounds(transcript, adversary, rounds)
        # A run that still goes on has not seen all clients, and one that samples them may never see some.
        if rounds is None and not isinstance(self.spec, Config):
            _check_victims(transcript, adversary, chosen)
        for number in chosen:
            try:
                present[number] = transcript.clients(number)
            except FedsimError as error:
                failures.append(str(error))
                log.error("%s", error)
        attacks = build_attacks(self.spec)
        everyone = sorted({client for clients in present.values() for client in clients})
        views: list[tuple[tuple[int, ...], list[int], bool]] = []
        if present and rounds is None:  # a run that still goes on has not seen all rounds
            views.append((tuple(present), everyone, True))
        views += [((number,), clients, False) for number, clients in present.items()]
        for numbers, clients, temporal in views:
            for victim in _chosen_victims(clients, adversary):
                for table, attack in attacks:
                    for repeat in range(adversary.repeats if attack.temporal == temporal else 0):
                        yield Job(
                            title=table.title,
                            plugin=table.name,
                            attack=attack,
                            rounds=numbers,
                            victim=victim,
                            repeat=repeat,
                            command=self.command,
                        )

    def _isolation(self, room: Path) -> Isolation:
        """Where attacks of other packages run, which are not to be led to the run, its data or any truth."""
        hidden = [self.folder.path, *(self.beside / file for file in self.spec.truth.values())]
        hidden += filter(None, [data_folder()])
        with suppress(DataError):  # there is none
            hidden.append(cache_folder())
        return Isolation(room, hidden)

    def _try(
        self, transcript: Transcript, job: Job, progress: ProgressOf, isolation: Isolation
    ) -> BaseException | None:
        try:
            self.attack(transcript, job, partial(progress, job), isolation)
        except (Exception, SystemExit) as error:  # attacks may be strangers' code; one that breaks breaks only itself
            return error
        return None

    def attack(self, transcript: Transcript, job: Job, progress: Progress, isolation: Isolation) -> None:
        """Do one job and save what was found.

        Raises:
            FedsimError: the attack cannot be done, or failed.
        """
        path = self._finding(job)
        first = _first_of(transcript, job)
        knowledge, upstream = self._knowledge(transcript, job, first)
        fingerprint = self._fingerprint(job, knowledge, transcript, upstream)
        if self._is_ours(path) and _is_there(job, load_claim(path)[1], fingerprint, self._model_code):
            return
        started = time.monotonic()
        with _overheard() as warnings:
            finding = self._found(transcript, job, knowledge, progress, isolation)
        before = transcript.update(first, job.victim).before if isinstance(finding, LocalModel) else None
        self._owed(transcript, job, knowledge, first, before).check(finding)
        about = {
            "attack": job.title,
            "plugin": job.plugin,
            "round": job.round,
            "rounds": list(job.rounds),
            "first_round": first,
            "victim": job.victim,
            "repeat": job.repeat,
            "settings": dataclasses.asdict(job.attack),
            "changed": changed(job.attack),
            "variant": self._variants[job.title],
            "command": job.command,
            "code": code_hash(type(job.attack)),
            "model_code": self._model_code,
            "granted": knowledge.granted(),
            "partial_records": knowledge.partial_records.column if knowledge.partial_records else "",
            "fingerprint": fingerprint,
            "warnings": warnings,
            "seconds": round(time.monotonic() - started, 2),
        }
        self._keep(finding, path, about)

    def _keep(self, finding: Finding, path: Path, about: Mapping[str, object]) -> None:
        save_finding(finding, path, about)
        self.folder.note(path)

    def _finding(self, job: Job) -> Path:
        """Where what `job` finds is kept."""
        return self._homes[job.title] / f"{job.name}.safetensors"

    def _is_ours(self, path: Path) -> bool:
        """Whether a finding is there, and is the one that this run's manifest names; another is made anew."""
        if not path.is_file():
            return False
        if not is_noted(self.folder.path, path):
            log.warning("%s/%s: is not what this run found, so it is made anew", path.parent.name, path.name)
            return False
        return True

    def _found(
        self, transcript: Transcript, job: Job, knowledge: Knowledge, progress: Progress, isolation: Isolation
    ) -> Finding:
        """What the attack of `job` finds, here or, where it is of another package, in a process of its own.

        Raises:
            AttackCrash: it raised something else than a FedsimError, or its process died.
        """
        ours = is_object(job.plugin) or code_hash(type(job.attack)) is None  # or an object of the user's own program
        return (attempt if ours else isolation.attempt)(
            job.attack,
            transcript.only(job.rounds),
            knowledge,
            victim=job.victim,
            rng=generator(self.seed, "attack", job.round, job.victim, job.repeat),
            progress=progress,
        )

    def _owed(self, transcript: Transcript, job: Job, knowledge: Knowledge, first: int, before: State | None) -> Owed:
        """The form that the finding of `job` has to have."""
        return Owed(
            where=f"round {job.round}, client {job.victim}",
            knowledge=knowledge,
            before=before,
            task=self.experiment.dataset.task if self.experiment else None,
            clients=self.experiment.config.federation.clients if self.experiment else None,
        )

    def _knowledge(self, transcript: Transcript, job: Job, first: int) -> tuple[Knowledge, list[str]]:
        """What the attack of `job` is handed, and what tells the models among it from others."""
        adversary, declared = self.spec.adversary, job.attack.declared()
        truth = self.truth(job.victim, first) if declared.intersection(private(adversary)) else None
        headers = [transcript.header(number) for number in job.rounds if job.victim in transcript.clients(number)]
        check_sent(self.experiment, headers, job.victim)
        common = as_sent(grant(adversary, self.experiment, self.beside), adversary, headers, declared)
        knowledge = grant_private(common, adversary, self.experiment, job.victim, truth, declared).only(declared)
        if (title := job.attack.builds_on) is None:
            return knowledge, []
        if title == OPTIMAL:
            clients = sorted({client for number in job.rounds for client in transcript.clients(number)})
            optima = Models({client: partial(self.optimum, client) for client in clients})
            return dataclasses.replace(knowledge, models=optima), [METHOD]
        models, hashes = self._decoded(title, job)
        return dataclasses.replace(knowledge, models=models), hashes

    def _decoded(self, title: str, job: Job) -> tuple[Models, list[str]]:
        """What the attack called `title` found of each client, with its present settings, in the rounds of `job`.

        And the hash of each such model: what builds on it stays as long as the model does.
        """
        models: dict[int, Callable[[], State]] = {}
        hashes, now = [], self._present()[title]
        for path in sorted(self._homes[title].glob(f"round-{job.round}-client-*-repeat-{job.repeat}.*")):
            if path.suffix != ".safetensors" or not is_noted(self.folder.path, path):
                continue
            about, digest = _model_at(path, path.stat().st_mtime_ns)
            if _made_with(about) != now or about.get("rounds", list(job.rounds)) != list(job.rounds):
                continue
            if digest is None:
                raise ConfigError(
                    f"attack.{job.title}.source: '{title}' claims no local models; name an attack that does"
                )
            models[int(str(about["victim"]))] = partial(_read_model, path)
            hashes.append(digest)
        return Models(models), hashes

    def _fingerprint(self, job: Job, knowledge: Knowledge, transcript: Transcript, upstream: Sequence[str] = ()) -> str:
        """Names everything that the finding of `job` follows from."""
        labels = None if knowledge.labels is None else knowledge.labels.tolist()
        headers = [transcript.header(number).plain() for number in job.rounds]
        table = self.spec.adversary.knowledge.model_dump()
        granted = {name: table[name] for name in knowledge.granted()}
        code = [] if (own := code_hash(type(job.attack))) is None else [{"code": own}]
        outside = [] if self.experiment else _records_hash(knowledge)  # a run's own records do not change
        model = [] if self._model_code is None else [{"model": self._model_code}]
        parts = [repr(job.attack), granted, labels, self.seed, headers, *upstream, *code, *outside, *model]
        text = json.dumps(parts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def _model_code(self) -> str | None:
        """Hash of the file of a model that the attack file names; None where it names none."""
        setting = self.spec.adversary.knowledge.model
        if not isinstance(setting, str):
            return None
        registry.load_object(setting, self.beside)
        return file_hash(sys.modules[setting.partition(":")[0]])

    def _present(self) -> dict[str, tuple[Any, ...]]:
        """Variant, code and model's code of each attack of the file as they are now, by title; see `_made_with`."""
        return {
            table.title: (self._variants[table.title], code_hash(type(attack)), self._model_code)
            for table, attack in build_attacks(self.spec)
        }

    @cached_property
    def _variants(self) -> dict[str, str]:
        """By title what tells the findings that an attack makes now from those that it made otherwise.

        That is plug-in, settings, what the file grants of what it reads, and the variant of the attack that it builds
        on. An edited plug-in is no other variant: its old findings cannot be made again, and are replaced.
        """
        found: dict[str, str] = {}
        attacks = {table.title: (table.name, attack) for table, attack in build_attacks(self.spec)}
        granted = self.spec.adversary.knowledge.model_dump()
        for title in itertools.chain.from_iterable(self._stages()):
            plugin, attack = attacks[title]
            known = {name: granted[name] for name in KNOWLEDGE if name in attack.declared()}
            found[title] = variant(plugin, dataclasses.asdict(attack), known, found.get(attack.builds_on or ""))
        return found

    @cached_property
    def _homes(self) -> dict[str, Path]:
        """By title the folder of what an attack finds, which nothing else is in: the title, or `title-VARIANT`."""
        return {title: self._home(self.folder.findings / title, own) for title, own in self._variants.items()}

    def _home(self, plain: Path, own: str) -> Path:
        for path in sorted(plain.glob("*.safetensors")):
            with suppress(TranscriptError):  # one that cannot be read is told of where it is asked for
                if read_about(path).get("variant") != own:
                    return plain.with_name(f"{plain.name}-{own}")
        return plain

    @property
    def seed(self) -> int:
        """Seed of the run; 0 for recordings made elsewhere."""
        return self.experiment.seed if self.experiment else 0

    def truth(self, victim: int, number: int | None) -> Truth | None:
        """What `victim` held, or None where nobody says.

        Of a client who sends gradients, the mini-batch of round `number`, or all its training examples where it is
        None; for an attack on several rounds, that is the first of them in which the victim took part.
        """
        if str(victim) in self.spec.truth:
            return Truth.load(self.beside / self.spec.truth[str(victim)])
        if self.experiment is None:
            return None
        data, labels = (
            self.experiment.data.train(victim) if number is None else self.experiment.attacked(victim, number)
        )
        dataset = self.experiment.dataset
        return Truth(data=_in_unit_range(data, dataset), labels=labels, padding=dataset.padding)

    def truth_about(self, finding: Reconstruction | Texts, about: Mapping[str, Any]) -> Truth | None:
        """What those held whose examples `finding` claims, or None where nobody says.

        Raises:
            DataError: examples of the whole federation are claimed, and nobody says what that is.
        """
        victim = int(about["victim"])
        if isinstance(finding, Representatives):
            return self.truth(victim, None)
        if finding.claims != "federation":
            return self.truth(victim, None if finding.claims == "client" else first_round(about))
        if self.experiment is None:
            raise DataError(
                "truth: examples of the whole federation are claimed, and of a recording made elsewhere only those of "
                "some victims are named; claim 'client'"
            )
        parts = self.experiment.data.train_parts(range(self.experiment.config.federation.clients))
        inputs, labels = (torch.cat(of_all) for of_all in zip(*parts, strict=True))
        dataset = self.experiment.dataset
        return Truth(data=_in_unit_range(inputs, dataset), labels=labels, padding=dataset.padding)

    def optimum(self, client: int, *, elsewhere: bool = False) -> State:
        """theta_c*, what `client` would train on its data alone from w_0 on; found once and kept in the run folder.

        Args:
            elsewhere: from other random weights than w_0, to which nothing in the messages is near.
        """
        assert self.experiment is not None
        path = self._optimum_path(client, elsewhere=elsewhere)
        if not self._is_ours(path):
            data, labels = self.experiment.data.train(client)
            beginning = " from other random weights" if elsewhere else ""
            log.info("client %d: training its optimal local model%s, for comparison", client, beginning)
            with one_thread(), torch.enable_grad():  # an attack that asks for it may compute without slopes
                found = local_optimum(
                    self.experiment.new_model(),
                    self.experiment.other_start() if elsewhere else self.experiment.initial_state(),
                    self.experiment.data.to_model(data),
                    labels,
                    self.experiment.dataset.task.loss,
                )
            self._keep(LocalModel(state=found), path, {"client": client})
        finding, _ = load_finding(path)
        assert isinstance(finding, LocalModel)
        return finding.state

    def _optimum_path(self, client: int, *, elsewhere: bool = False) -> Path:
        return self.folder.optima / METHOD / f"client-{client}{'-other-start' if elsewhere else ''}.safetensors"

    def _find_optima(self, clients: Sequence[int]) -> None:
        """Make sure that `optimum` knows `clients`, several at once; others are found when they are asked for."""
        missing = [client for client in clients if not self._is_ours(self._optimum_path(client))]
        workers = min(self.spec.adversary.workers or os.cpu_count() or 1, len(missing))
        if workers > 1:
            arguments = (self.folder.path, self.spec, self.beside, self.trust)
            found = in_processes(missing, workers, _optimum_worker, arguments, _silent)
            for client, error in tracked(found, "optimal local models", len(missing)):
                if error is not None:  # whoever asks for it will fail, too, and is reported
                    log.warning("client %d: no optimal local model: %s", client, error)

    def public(self) -> Public | None:
        """Examples of the same kind that no client holds, for floors."""
        if self.experiment is None:
            return None
        test = self.experiment.dataset.test
        data = _in_unit_range(test.inputs(slice(0, 5000)), self.experiment.dataset)
        return Public(data=data, labels=test.labels[:5000])

    def score(self, failures: list[str] | None = None) -> list[dict[str, Any]]:
        """Judge every finding in the folder and write `scores.csv` and `image-scores.csv`.

        Findings of attacks that the file no longer names, or makes with other settings or knowledge now, are judged
        too, each as what it is; those that an attack made before its code changed are not, for they cannot be made
        again, and would share its mean.

        A finding that cannot be judged leaves the others' scores alone.

        Args:
            failures: gets one sentence for each finding that cannot be judged.
        """
        rows, images = [], []
        now = self._present()
        public, memory = self.public(), Memory()
        failures = [] if failures is None else failures
        paths = _findings(self.folder)
        for path in tracked(paths, "scoring", len(paths)):
            try:
                if not is_noted(self.folder.path, path):
                    raise RunError(f"{path}: is not what this run found; remove it, or attack again to make it anew")
                finding, about = load_claim(path)
                mine, theirs = now.get(str(about["attack"]), ("",)), _made_with(about)
                if mine[0] == theirs[0] and mine != theirs:
                    log.warning("%s/%s: not scored: made with other code", path.parent.name, path.name)
                    continue
            except FedsimError as error:
                log.error("%s/%s: not scored: %s", path.parent.name, path.name, error)
                if not any(str(error) in told for told in failures):  # an attack that is to be made again has said so
                    failures.append(f"not scored: {error}")
                continue
            try:
                scores, examples = self._judged(finding, about, public, memory)
            except Exception as error:  # whatever a stranger's finding does to those who compare it
                told = isinstance(error, FedsimError)
                who = f"{about['attack']}, round {about['round']}, client {about['victim']}"
                failures.append(f"{who}: not scored: {error if told else one_line(what_it_said(error))}")
                log.error("%s", failures[-1], exc_info=None if told else error)
                continue
            where = {key: about[key] for key in ("attack", "victim", "round", "repeat")} | columns(about)
            rows += [where | _row(item, examples) | {"seed": self.seed} for item in scores]
            for item in scores:
                images += [
                    where | {"metric": item.metric, "image": place, "value": value}
                    for place, value in enumerate(item.per_image)
                ]
        self.folder.write_table(self.folder.scores, SCORES, rows)
        self.folder.write_table(self.folder.images, IMAGES, images)
        self.folder.settle()
        return rows

    def _judged(
        self, finding: Finding, about: Mapping[str, Any], public: Public | None, memory: Memory
    ) -> tuple[list[Score], int]:
        """The scores of one finding, none where nobody knows the truth, and of how many examples they speak.

        Raises:
            DataError: the finding does not fit what the victim held.
        """
        victim = int(about["victim"])
        if isinstance(finding, LocalModel | Inference) and self.experiment is None:
            log.warning(
                "%s, client %d: not scored: what the victim held is told by an experiment only", about["attack"], victim
            )
            return [], 0
        if isinstance(finding, LocalModel):
            return self._judged_model(finding, about, victim, memory)
        if isinstance(finding, Inference):
            answers, imputed = self._answers(finding, about, victim), self._imputed(finding, about, victim)
            return score_inference(finding, answers, imputed), len(finding.scores)
        truth = self.truth_about(finding, about)
        if truth is None:
            return [], 0
        if finding.labels.is_floating_point() != truth.labels.is_floating_point():
            raise DataError("truth: the victim's labels are of another kind than the attack claims, classes or targets")
        rng = generator(self.seed, "floor", victim)
        if isinstance(finding, Representatives):
            scores = score_representatives(finding, truth.data, truth.labels, public=public, rng=rng)
            return scores, len(finding.labels)
        scores = score(
            finding,
            truth,
            public=public,
            rng=rng,
            weights=_weights(),
            labels_granted="labels" in about["granted"],
            message=self._message(finding, about, victim),
        )
        return scores, len(truth.labels)

    def _message(self, finding: Reconstruction | Texts, about: Mapping[str, Any], victim: int) -> Message | None:
        """What the finding was read from, as far as L_sim takes it; None for texts, and where it is several messages.

        None too where nobody says what the model is, or the recording is not there.
        """
        known = full_knowledge(self.spec.adversary, self.experiment, self.beside)
        several = "-" in str(about["round"])
        if (
            isinstance(finding, Texts)
            or finding.claims != "update"
            or several
            or known.model is None
            or known.value_range is None
        ):
            return None
        assert known.loss is not None
        low, high = (torch.tensor(end) for end in known.value_range)
        try:
            update = Transcript(self.folder.path).update(first_round(about), victim)
        except FedsimError as error:
            log.warning("%s, client %d: no L_sim: %s", about["attack"], victim, error)
            return None
        settings = self.experiment.training if self.experiment else None
        return Message(model=known.model(), loss=known.loss, update=update, value_range=(low, high), settings=settings)

    def _judged_model(
        self, finding: LocalModel, about: Mapping[str, Any], victim: int, memory: Memory
    ) -> tuple[list[Score], int]:
        assert self.experiment is not None
        data, dataset = self.experiment.data, self.experiment.dataset
        inputs, labels = data.train(victim)
        first, _, last = str(about["round"]).partition("-")
        transcript = Transcript(self.folder.path)
        inspected = (n for n in transcript.rounds if int(first) <= n <= int(last or first))
        present = {number: clients for number in inspected if (clients := transcript.clients(number))}
        newest = max(present)
        proxies = {"global model": transcript.update(newest, present[newest][0]).before}
        returned = transcript.update(max(n for n, clients in present.items() if victim in clients), victim)
        if returned.gradient is None:
            proxies["last-returned model"] = returned.after
        proxies["first model"] = self.experiment.initial_state()  # w_0, which the server knows whatever was recorded
        other, why = self._other_optimum(victim)
        scores = score_local_model(
            finding.state,
            self.optimum(victim),
            proxies,
            model=self.experiment.new_model(),
            inputs=data.to_model(inputs),
            labels=labels,
            loss=dataset.task.loss,
            references=[data.to_model(dataset.test.inputs(drawn)) for drawn in self._references],
            elsewhere=other,
            columns=dataset.columns,
            target=dataset.target,
            memory=memory,
        )
        if why:
            scores.append(Score(metric="zest_other_start", value=math.nan, missing=why))
        return scores, len(labels)

    def _other_optimum(self, victim: int) -> tuple[State | None, str]:
        """The optimum from other random weights, or why there is none; of texts, which Zest cannot compare, neither."""
        assert self.experiment is not None
        if self.experiment.dataset.vocabulary:
            return None, ""
        try:
            return self.optimum(victim, elsewhere=True), ""
        except RunError as error:
            log.warning("client %d: no optimum from other random weights: %s", victim, error)
            return None, f"there is no optimum from other random weights ({error})"

    @cached_property
    def _references(self) -> list[Tensor]:
        """Which public examples Zest explains models on, a draw each; one draw where it takes them all."""
        assert self.experiment is not None
        test = self.experiment.dataset.test
        draws = DRAWS if len(test) > REFERENCES else 1
        return [draw_references(test, REFERENCES, self.seed, draw) for draw in range(draws)]

    def _answers(self, finding: Inference, about: Mapping[str, Any], victim: int) -> Tensor:
        """The truth about each record: who of the candidates holds it, or its category."""
        assert self.experiment is not None
        data = self.experiment.data
        own, _ = data.indices(victim)
        if finding.of == "source":
            shares = [data.indices(candidate)[0] for candidate in finding.candidates.tolist()]
            return torch.from_numpy(np.stack([np.isin(own, share) for share in shares], axis=1))
        column = self.experiment.dataset.column(str(about["partial_records"]))
        return column.values(data.train(victim)[0])

    def _imputed(self, finding: Inference, about: Mapping[str, Any], victim: int) -> Guess | None:
        """What the public records say of the attribute; None of sources, and where no records are public."""
        assert self.experiment is not None
        dataset = self.experiment.dataset
        if finding.of == "source" or not len(dataset.test):
            return None
        name = str(about["partial_records"])
        if name not in self._imputations:
            self._imputations[name] = Imputation.learnt(dataset.test, dataset.column(name), self.seed)
        return self._imputations[name].guess(*self.experiment.data.train(victim))

    @cached_property
    def _imputations(self) -> dict[str, Imputation]:
        """By the column that they are of: to learn one takes seconds, and it serves all victims."""
        return {}


def first_round(about: Mapping[str, object]) -> int:
    """The first round in which the victim of a finding sent something."""
    return int(str(about.get("first_round", str(about["round"]).partition("-")[0])))


def _weights() -> Path | None:
    """Where networks that scores need have their weights."""
    return folder / "weights" if (folder := data_folder()) else None


def _first_of(transcript: Transcript, job: Job) -> int:
    """The first of the job's rounds that its victim took part in; clients are not sampled for each."""
    for number in job.rounds:
        if job.victim in transcript.clients(number):
            return number
    if len(job.rounds) == 1:
        transcript.update(job.rounds[0], job.victim)  # says why it is not there
    raise AttackError(f"client {job.victim}: is recorded in none of the rounds {job.round}; attack another client")


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
        command: what the findings say that makes them again.

    Raises:
        ConfigError: the recording was made elsewhere and no attack file is given, no attack is named, or the run names
            code and is not trusted.
    """
    if not path.is_dir():
        raise ConfigError(f"{path}: no such run folder")
    folder = RunFolder(path)
    config = folder.read_experiment(trust=trust)
    if spec is None and config is None:
        raise ConfigError(f"{path}: was recorded elsewhere, so it says nothing of attacks; give an attack file")
    chosen: AttackFile = spec if spec is not None else config  # type: ignore[assignment]
    if not chosen.attack:
        raise ConfigError("attack: no attack is named; add an [[attack]] table with a name")
    if path.resolve().name == RECORDING and folder.transcript == path:
        raise ConfigError(f"{path}: is the recording in a run folder; name the folder around it")
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


def attack_round(path: Path, number: int, *, trust: bool = False) -> None:
    """Attack one round of a run that is still going on; called in a process of its own.

    What fails here is tried again, and reported, at the end of the run.
    """
    audit = open_audit(path, None, trust=trust)
    if any(audit.folder.transcript.glob("*.safetensors")):  # a recording plan may have kept nothing yet
        try:
            audit.run(rounds=[number])
        except FedsimError as error:
            log.warning("round %d was not attacked in the round loop: %s", number, error)


@contextmanager
def round_attacker(path: Path) -> Iterator[Callable[[int, Progress], None]]:
    """The function with which a process beside the round loop, which trusts its code, attacks round after round."""
    yield lambda number, progress: attack_round(path, number, trust=True)


def _counted(results: Iterable[tuple[Job, Any]], jobs: Sequence[Job]) -> Iterator[tuple[Job, Any]]:
    """Pass `results` on and tell, for each attack, how many of its jobs are done."""
    totals, done = Counter(job.title for job in jobs), Counter[str]()
    for title, total in totals.items():
        tell(title, 0, total)
    for job, result in results:
        yield job, result
        done[job.title] += 1
        tell(job.title, done[job.title], totals[job.title])


@contextmanager
def _worker(
    path: Path, spec: AttackFile, beside: Path, trust: bool, room: Path
) -> Iterator[Callable[[Job, Progress], None]]:
    """The function that a worker process attacks with."""
    audit = open_audit(path, spec, beside, trust=trust)
    transcript = Transcript(path)
    with audit._isolation(room) as isolation:
        yield lambda job, progress: audit.attack(transcript, job, progress, isolation)


def _is_there(job: Job, about: Mapping[str, object], fingerprint: str, model_code: str | None) -> bool:
    """Whether the finding that `about` tells of is that of `job`, and a line that says so, or why it is not."""
    who, code = f"{job.title} on client {job.victim}, round {job.round}", code_hash(type(job.attack))
    codes = {f"of {job.plugin}": ("code", code), "of the model": ("model_code", model_code)}
    if homeless := [whose for whose, (_, now) in codes.items() if now == UNREADABLE]:
        log.info("%s: attacked anew, for the code %s is in no file", who, homeless[0])
        return False
    if about.get("fingerprint") == fingerprint:
        log.info("%s: already there", who)
        return True
    changed = [whose for whose, (key, now) in codes.items() if about.get(key) != now]
    if about.get("plugin") == job.plugin and changed:
        log.info("%s: attacked anew, for the code %s has changed", who, changed[0])
    return False


@contextmanager
def _overheard() -> Iterator[list[str]]:
    """What attacks warn of meanwhile, each sentence once: the report tells it beside what they found."""
    heard: dict[str, None] = {}

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard[record.getMessage()] = None

    listener, logger, told = Listener(logging.WARNING), logging.getLogger("fedsim.adversaries"), list[str]()
    logger.addHandler(listener)
    try:
        yield told
    finally:
        logger.removeHandler(listener)
        told += heard


def _sentence(job: Job, error: BaseException) -> str:
    where = f"round {job.round}, client {job.victim}: "
    if isinstance(error, FedsimError) and not isinstance(error, AttackCrash):
        told = re.search(rf"client {job.victim}\b", str(error))
        return f"{job.title}, {'' if told else where}{error}"
    what = str(error).splitlines()[0] if isinstance(error, AttackCrash) else one_line(what_it_said(error))
    return f"{job.title}, {where}{what}"


@contextmanager
def _optimum_worker(
    path: Path, spec: AttackFile, beside: Path, trust: bool
) -> Iterator[Callable[[int, Progress], object]]:
    """The function with which a worker process finds optimal local models."""
    audit = open_audit(path, spec, beside, trust=trust)
    yield lambda client, progress: audit.optimum(client)


@cache
def _model_at(path: Path, changed: int) -> tuple[dict[str, object], str | None]:
    """About a finding that was written then, and the hash of the model in it; None where it claims none.

    Many jobs build on one model, so it is read once.
    """
    finding, about = load_claim(path)
    return about, hash_state(finding.state) if isinstance(finding, LocalModel) else None


def _read_model(path: Path) -> State:
    finding, _ = load_finding(path)
    assert isinstance(finding, LocalModel)
    return finding.state


def _in_order(builds_on: Mapping[str, str | None], experiment: Experiment | None) -> list[list[str]]:
    """Titles of attacks in the order of work: first those that need no other's findings, then those that build on them.

    Raises:
        ConfigError: an attack builds on one that the file does not name, on itself in the end, or on the truth where
            nobody knows it.
    """
    for title, source in builds_on.items():
        if source == OPTIMAL and experiment is None:
            raise ConfigError(
                f"attack.{title}.source: '{OPTIMAL}' is for the run of an experiment, whose data are known; "
                "a recording made elsewhere has no optimal local models"
            )
        if source is not None and source != OPTIMAL and source not in builds_on:
            known = [name for name in builds_on if name != title]
            raise ConfigError(
                f"attack.{title}.source: there is no attack '{source}' in the file to take local models from, "
                f"{did_you_mean(source, [*known, GLOBAL, LAST_RETURNED, OPTIMAL])}"
            )
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for title, source in builds_on.items():
        sorter.add(title, *([source] if source is not None and source in builds_on else []))
    try:
        sorter.prepare()
    except CycleError as error:
        raise ConfigError(f"attack: {' builds on '.join(reversed(error.args[1]))}; name another source") from error
    stages = []
    while ready := list(sorter.get_ready()):
        stages.append(sorted(ready, key=list(builds_on).index))
        sorter.done(*ready)
    return stages


def _silent(job: Any, iteration: int, iterations: int, values: Mapping[str, float]) -> None:
    """Report nothing."""


def _in_unit_range(data: Tensor, dataset: Dataset) -> Tensor:
    """`data` of `dataset` as findings claim it: its value range becomes [0, 1]; tokens stay as they are."""
    low, high = dataset.value_range
    return data if dataset.vocabulary else (data - low) / (high - low)


def _check_kind(title: str, attack: Attack, dataset: Dataset) -> None:
    """Raise KnowledgeError where the data are texts and the attack is not for them, or the other way round."""
    if dataset.vocabulary and not attack.texts and "value_range" in attack.needs:
        raise KnowledgeError(
            f"{title} needs a value range, which the tokens of '{dataset.name}' do not have; choose an attack on "
            "texts, as tgias-ro-text, or data of numbers"
        )
    if "num_classes" in attack.needs and not dataset.task.num_classes:
        raise KnowledgeError(
            f"{title} is an attack on classes, which the regression of '{dataset.name}' does not have; choose another "
            "attack, or data with classes"
        )
    if attack.texts and not dataset.vocabulary:
        raise KnowledgeError(
            f"{title} is an attack on texts, and '{dataset.name}' holds numbers; choose an attack on numbers, or texts"
        )


def snapshots_psnr(finding: Reconstruction, truth: Truth) -> list[float]:
    """Mean PSNR of each snapshot; the evaluator's curve, unknown to the attack."""
    if finding.snapshots is None:
        return []
    return [metrics.psnr(metrics.paired(data, truth.data), truth.data).mean().item() for data in finding.snapshots]


def _records_hash(knowledge: Knowledge) -> list[str]:
    """Of the records that are granted, where there are any."""
    held = [table for table in (knowledge.records, knowledge.partial_records) if table is not None]
    tensors = [tensor.contiguous().numpy() for table in held for tensor in (table.inputs, table.labels)]
    return [hashlib.sha256(tensor.tobytes()).hexdigest() for tensor in tensors]


def _chosen_rounds(transcript: Transcript, adversary: AdversaryTable, only: Iterable[int] | None) -> Sequence[int]:
    """The rounds to attack; with `only`, those among them, for a run that has not come to the others yet."""
    recorded = transcript.rounds
    chosen = recorded if adversary.rounds == "all" else adversary.rounds or recorded[:1]
    if only is not None:
        return [number for number in only if number in chosen and number in recorded]
    for number in chosen:
        if number not in recorded:
            raise ConfigError(f"adversary.rounds: round {number} is not recorded; recorded: {recorded}")
    return chosen


def _check_victims(transcript: Transcript, adversary: AdversaryTable, chosen: Sequence[int]) -> None:
    """Raise ConfigError where a victim is named who is in no round, not even as one who failed there."""
    missing = set(adversary.victims) if isinstance(adversary.victims, list) else set()
    seen: set[int] = set()
    for number in dict.fromkeys([*chosen, *transcript.rounds]):
        if not missing:
            return
        try:
            header = transcript.header(number)
        except FedsimError:  # a damaged round, of which nobody knows who was in it; it is reported when it is attacked
            return
        present = {reply.client for reply in header.replies} | set(header.failures)
        missing -= present
        seen |= present
    if missing:
        shown = sorted(seen)
        told = f"{shown[:_SHOWN]} and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else str(shown)
        raise ConfigError(f"adversary.victims: client {min(missing)} is not recorded; recorded: {told}")


def _chosen_victims(present: list[int], adversary: AdversaryTable) -> Sequence[int]:
    if adversary.victims == "all":
        return present
    return present[:1] if adversary.victims is None else adversary.victims


def _findings(folder: RunFolder) -> list[Path]:
    """Finding files by attack, round, victim and repeat, in the order of their numbers."""

    def key(path: Path) -> tuple[str, list[int]]:
        return path.parent.name, [int(part) for part in path.stem.split("-") if part.isdigit()]

    return sorted(folder.findings.glob("*/*.safetensors"), key=key)


def _made_with(about: Mapping[str, Any]) -> tuple[Any, ...]:
    """Variant, code and model's code of a finding."""
    return tuple(about.get(key) for key in ("variant", "code", "model_code"))


def _row(item: Score, examples: int) -> dict[str, Any]:
    row = {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
    del row["per_image"]
    return row | {"examples": examples, "ceiling": "" if item.ceiling is None else item.ceiling}
