"""The attacks of one adversary on a recording: check them, run them and score their findings.

The same code serves `fedsim run` after the last round, the process that attacks while the rounds go
on, and `fedsim attack` on any recording. All of them read the same transcript, so their results are
equal.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from fedsim.audit import scores
from fedsim.audit.attack_cost import warn_of_cost
from fedsim.audit.attack_runner import explain_missing_isolation, run_stage
from fedsim.audit.cache import FindingCache
from fedsim.audit.evaluation.case import Case
from fedsim.audit.evaluation.evaluator import EvaluationContext
from fedsim.audit.evaluation.foreign_recording import ForeignRecording
from fedsim.audit.evaluation.own_run import OwnRun
from fedsim.audit.evaluation.perceptual_distance import check_backbone
from fedsim.audit.evaluation.truth import Truth
from fedsim.audit.observers import check_observed_rounds, observe_run, read_who
from fedsim.audit.optima import OptimumStore
from fedsim.audit.plan import (
    AttackJob,
    ReportJobProgress,
    TitledAttacks,
    adaptive_attacks,
    check_victims,
    check_victims_are_recorded,
    plan_jobs,
    rounds_to_attack,
    work_stages,
)
from fedsim.audit.plausibility import check_fit
from fedsim.audit.refusals import find_refusals, save_refusals
from fedsim.audit.score_reuse import EarlierScores
from fedsim.audit.targets import TargetMaker
from fedsim.audit.threat_model import (
    check_hidden_state,
    check_model,
    check_private_facts,
    full_knowledge,
    grant_knowledge,
)
from fedsim.audit.truth_files import (
    check_truth,
    check_truths,
    count_examples,
    count_group_examples,
    warn_of_unmatched_names,
)
from fedsim.audit.variants import settings_of
from fedsim.base.errors import ConfigError, KnowledgeError
from fedsim.federation.app_file import read_app_defenses
from fedsim.federation.build_plugins import build_attacks
from fedsim.federation.config import PUBLIC_KEY, AttackFile, Config
from fedsim.federation.data_folder import find_weights_folder
from fedsim.federation.experiment import Experiment
from fedsim.federation.failed_attacks import save_failed_attacks
from fedsim.federation.open_run import OpenRun
from fedsim.interfaces.attack import Knowledge
from fedsim.plugins.code_hashes import hash_plugin_code
from fedsim.plugins.inline import is_object
from fedsim.recording.header import RECORDING_FOLDER
from fedsim.recording.recording_folder import find_round_paths
from fedsim.recording.transcript import Transcript
from fedsim.recording.updates_in_messages import check_source, record_updates
from fedsim.recording.wire_format import Update

log = logging.getLogger(__name__)
_refusal_log = logging.getLogger("fedsim.audit.refused")


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
        awaits_run: the federation is still to run, so what lies in the folder may be of another run.
    """

    folder: OpenRun
    spec: AttackFile
    experiment: Experiment | None
    base_folder: Path
    trust: bool = False
    command: str = "fedsim attack RUN"
    awaits_run: bool = False

    @property
    def has_messages(self) -> bool:
        """Return whether messages of this federation are recorded; a run that failed early leaves none."""
        return not self.awaits_run and bool(find_round_paths(self.folder.transcript))

    @property
    def config(self) -> Config | None:
        """Return the settings of the federation; None where it was recorded elsewhere."""
        return self.experiment.config if self.experiment else None

    @property
    def opener(self) -> Callable[[], Audit]:
        """Return the function with which another process opens the same audit."""
        return partial(
            open_audit, self.folder.path, self.spec, self.base_folder, trust=self.trust, command=self.command
        )

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
            groups=list(self.group_counts),
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
    def group_counts(self) -> dict[tuple[int, ...], set[int]]:
        """Map the clients of each message to the numbers of examples N that it reports."""
        return count_group_examples(self.folder.recording.in_format(self.spec.app))  # the case is made of them

    @cached_property
    def example_counts(self) -> dict[str, set[int]]:
        """Map each client, in order of appearance, to the numbers of examples N it reported."""
        return count_examples(self.group_counts)

    @cached_property
    def least_num_examples(self) -> int | None:
        """Return the least N of any message that may be attacked; None where it is not known."""
        return self.case.least_num_examples(self.spec.adversary, self.example_counts if self.has_messages else {})

    @cached_property
    def expected_message(self) -> Update | None:
        """Return a message as clients of this federation send it; None where it was recorded elsewhere."""
        return self.case.expect_message(self.spec.adversary, self.least_num_examples)

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
        """Map the title of each attack that cannot be made to the sentence that says why."""
        return find_refusals(self)

    def check(self) -> None:
        """Check the whole file before any work, and that at least one of its attacks can be made.

        Raises:
            ConfigError, DataError, PluginError: the file, its data or its code is not usable.
            KnowledgeError: no attack can be made; this is why the first one is refused.
        """
        check_model(self.spec.adversary, self.granted_knowledge)
        if self.awaits_run and self.config is not None:
            check_victims_are_recorded(self.config)
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
                log.warning("%s: %s", table.title, explain_missing_isolation(attack))

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
            save_refusals(self)
            self._warn_of_unisolated_attacks()
        plan = list(plan_jobs(transcript, adversary, self._possible_attacks, rounds, failures))
        if planned_jobs is not None:
            planned_jobs += plan
        for stage in self.stages:
            stage_jobs = [job for job in plan if job.title in stage]
            failed = run_stage(self, stage_jobs, progress)
            failures += [attempt.sentence for attempt in failed]
            # What fails while the rounds go on is attempted again after the last one.
            if rounds is None:
                failed_jobs = {attempt.job for attempt in failed}
                succeeded = [job.key for job in stage_jobs if job.key not in failed_jobs]
                save_failed_attacks(self.folder, failed, succeeded)
        return failures

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
                read_auxiliary=partial(self.case.auxiliary_examples, adversary),
            )
        return self._evaluation_contexts[key]

    @cached_property
    def _evaluation_contexts(self) -> dict[tuple[str, str], EvaluationContext]:
        """Evaluation contexts by [app] and [adversary], as JSON."""
        return {}

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
        """Check the statements of the file about a foreign app against the recording."""
        attacks = [attack for _, attack in self._possible_attacks]
        if attacks and all(attack.subject in ("embeddings", "embedding gradients") for attack in attacks):
            # Messages hold no whole model, and N is the number of rows in a step.
            for client, file in self.case.files.items():
                check_truth(client, Truth.load(file), self.granted_knowledge)
            return
        holds_models = not attacks or any(attack.subject != "answers" for attack in attacks)
        check_fit(self.transcript, self.granted_knowledge, holds_models=holds_models)
        check_truths(self.case.files, self.group_counts, self.granted_knowledge)
        if isinstance(self.spec.app.num_examples, dict):
            warn_of_unmatched_names("[app] num_examples", self.spec.app.num_examples, self.example_counts)
        titled_attacks = [(table.title, attack) for table, attack in self._possible_attacks]
        warn_of_cost(titled_attacks, self.transcript, self.granted_knowledge)


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
    """Return the audit of a run by its own adversary, or by the one that `spec` describes."""
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
