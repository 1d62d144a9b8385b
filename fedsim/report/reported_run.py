"""Everything that a report has read of a run; each panel of the page is handed it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fedsim.audit.audit import Audit
from fedsim.audit.evaluation.empirical_epsilon import EpsilonComparison, read_epsilons
from fedsim.audit.evaluation.proved_ceilings import ProvedCeiling
from fedsim.base.errors import FedsimError, TrustError
from fedsim.federation.config import AttackFile, Config
from fedsim.federation.experiment import Experiment
from fedsim.federation.failed_attacks import read_failed_attacks
from fedsim.federation.integrity import compare_with_manifest
from fedsim.federation.open_run import OpenRun
from fedsim.federation.run_folder import read_metrics, read_refusals
from fedsim.recording.adversary_role import AdversaryRole
from fedsim.recording.reported_accuracy import ReportedAccuracy
from fedsim.report import adaptive, image_scores
from fedsim.report.attack_traits import attack_classes, find_attack_traits, name_attacks, read_metadata, read_scores
from fedsim.report.attacker_names import SERVER, list_attackers
from fedsim.report.cards import choose_examples, examples_by_finding
from fedsim.report.failed_attacks import describe_failed_attacks
from fedsim.report.finding_views import FindingView, read_findings
from fedsim.report.image_scores import ExampleScores, ExtremeExample
from fedsim.report.learning import NoLearning
from fedsim.report.pictures import Gallery
from fedsim.report.recording_summary import Recording, read_recording
from fedsim.report.run_learning import examine_learning, find_reported_accuracy
from fedsim.report.score_ceilings import compute_score_ceilings
from fedsim.report.summary import enumerate_words
from fedsim.report.threats import GrantedFact, list_granted_facts
from fedsim.report.verdicts import AttackTraits, ScoreReading, score_readings


@dataclass(frozen=True, eq=False, kw_only=True)
class ReportedRun:
    """Run as its report sees it; each value is read when it is first asked for, once.

    Attributes:
        folder: the run folder; `folder.recording` is its `Transcript`, with what the server saw.
        audit: the audit that attacked, which knows where the truth is; None if it is unknown.
        trust: whether code that the run folder names may be imported.
        notes: sentences that stand at the head of the page. A panel may add one that concerns the
            whole run.
        failures: a sentence for each thing that is damaged or cannot be shown.
    """

    folder: OpenRun
    audit: Audit | None
    trust: bool = False
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Return the name of the run folder."""
        return self.folder.path.resolve().name

    @property
    def experiment(self) -> Experiment | None:
        """Return the federation behind the recording; None where it was recorded elsewhere."""
        return self.audit.experiment if self.audit else None

    @property
    def config(self) -> Config | None:
        """Return the settings of the experiment; None where it was recorded elsewhere."""
        return self.audit.config if self.audit else None

    @property
    def attack_files(self) -> list[AttackFile]:
        """Return the settings that the report follows: the attack file, and the experiment."""
        files = [self.audit.spec] if self.audit else []
        return [*files, self.config] if self.config else files

    @cached_property
    def recording(self) -> Recording:
        """Return what was recorded, as far as it is not damaged."""
        return read_recording(self.folder, self.notes)

    @cached_property
    def metrics(self) -> Sequence[Mapping[str, str]]:
        """Return the rows of `metrics.csv`: accuracy, loss and spent privacy by round."""
        return read_metrics(self.folder)

    @cached_property
    def reported_accuracy(self) -> ReportedAccuracy | None:
        """Return the accuracy that clients of another's app reported last; None where the run has its own figures."""
        return None if self.metrics else find_reported_accuracy(self.folder)

    @cached_property
    def no_learning(self) -> NoLearning:
        """Return what shows that the model has not learnt, if anything does."""
        return examine_learning(self.folder, self.metrics)

    @cached_property
    def epsilon_audits(self) -> Sequence[EpsilonComparison]:
        """Return the epsilons that were measured by canaries, beside the proved ones."""
        return read_epsilons(self.folder)

    @cached_property
    def score_ceilings(self) -> Sequence[ProvedCeiling]:
        """Return scores of attacks beside the ceilings that the mechanism proves."""
        if self.config is None:
            return []
        return compute_score_ceilings(self.folder, self.scores, self.config.partition.name)

    @cached_property
    def scores(self) -> Sequence[Mapping[str, str]]:
        """Return the rows of `scores.csv`."""
        return read_scores(self.folder)

    @cached_property
    def attack_traits(self) -> Mapping[tuple[str, str], AttackTraits]:
        """Return by title and variant of each attack what its scores are read by."""
        return find_attack_traits(self.attack_names, self.finding_facts, self.audit, trust=self.trust)

    @cached_property
    def finding_facts(self) -> Sequence[Mapping[str, Any]]:
        """Return what each readable finding declares."""
        return list(read_metadata(self.folder))

    @cached_property
    def attack_names(self) -> Mapping[tuple[str, str], str]:
        """Return by title and variant the name of each attack that is scored or has a finding."""
        return name_attacks(self.scores, self.finding_facts)

    @cached_property
    def readings(self) -> Sequence[ScoreReading]:
        """Return what the scores say, by attack and metric: the mean, its floor and a verdict."""
        return score_readings(self.scores, self.attack_traits)

    @cached_property
    def merged_readings(self) -> Sequence[ScoreReading]:
        """Return `readings`, those of an adaptive attack that equals the naive one left out."""
        return adaptive.merge_equal_attacks(self.readings)

    @cached_property
    def example_scores(self) -> ExampleScores:
        """Return by finding and metric the score of each example."""
        return image_scores.add_whole_findings(image_scores.read_example_scores(self.folder), self.scores)

    @cached_property
    def extreme_examples(self) -> Mapping[str, Sequence[ExtremeExample]]:
        """Return by attack the examples that it reconstructed best, worst and in between."""
        return choose_examples(self.readings, self.example_scores)

    @property
    def findings(self) -> Sequence[FindingView]:
        """Return the claims of attacks, each beside the truth where that is known."""
        return self._findings_and_gallery[0]

    @property
    def gallery(self) -> Gallery:
        """Return the images of all findings, those of one victim together."""
        return self._findings_and_gallery[1]

    @cached_property
    def _findings_and_gallery(self) -> tuple[Sequence[FindingView], Gallery]:
        gallery = Gallery()
        findings = read_findings(
            self.folder,
            self.audit,
            self.notes,
            self.failures,
            score_rows=self.scores,
            names=self.attack_names,
            gallery=gallery,
            scores=self.example_scores,
            card_examples=examples_by_finding(self.extreme_examples),
            trust=self.trust,
        )
        return findings, gallery

    @cached_property
    def attacks(self) -> Mapping[str, Any]:
        """Return by title the class of each attack, None if it is unknown."""
        return attack_classes(self.audit, [finding.about for finding in self.findings], trust=self.trust)

    @cached_property
    def other_attackers(self) -> Sequence[AdversaryRole]:
        """Return who made findings beside the server; empty where it made all."""
        attackers = list_attackers(finding.about for finding in self.findings)
        return [AdversaryRole.parse(who) for who in attackers if who != "server"]

    @property
    def attackers(self) -> str:
        """Name all who made findings; the server where there are none."""
        has_server = any(finding.about["attacker"] == "server" for finding in self.findings) or not self.other_attackers
        return enumerate_words([*([SERVER] if has_server else []), *map(str, self.other_attackers)])

    @cached_property
    def granted_facts(self) -> Sequence[GrantedFact]:
        """Return what can be granted to an adversary, and what was."""
        about_findings = [finding.about for finding in self.findings]
        return list_granted_facts(self.audit, about_findings, self.attacks)

    @cached_property
    def integrity(self) -> str:
        """Say which run this is, and whether it is still what was written.

        Differences become a note and a failure.
        """
        verdict = compare_with_manifest(self.folder)
        if verdict.differences:
            differences = "; ".join(verdict.differences)
            self.notes.append(f"This is not the run that was written: {differences}.")
            self.failures.append(f"{self.folder.path}: is not the run that was written: {differences}")
        return verdict.text

    def read_contents(self) -> None:
        """Read what a damaged file can be part of, in the order in which the page shows it.

        Raises:
            RunError: a table of the run is damaged, or a picture cannot be written.
        """
        for reason in self.recording.damaged.values():
            if not any(reason in failure for failure in self.failures):
                self.failures.append(reason)
        self.failures.extend(audit.sentence for audit in self.epsilon_audits if audit.is_broken)
        _ = self.readings, self.metrics, self.findings
        self.failures.extend(item.sentence for item in self.score_ceilings if item.is_exceeded)
        self.notes.extend(self._refused_attacks())
        failed = describe_failed_attacks(read_failed_attacks(self.folder))
        self.notes.extend(f"{sentence.rstrip('.')}." for sentence in failed)
        _ = self.integrity

    def _refused_attacks(self) -> list[str]:
        """Return a sentence for each attack that was refused, now or earlier, and has no finding."""
        titles_of_findings = {finding.about["attack"] for finding in self.findings}
        refused = read_refusals(self.folder)
        audit = self.audit
        if audit is not None and (audit.spec.adversary.when != "never" or titles_of_findings):
            with suppress(FedsimError):  # what is granted is not known any more, as on a machine without the data
                refused |= audit.refusal_reasons
        return [f"Not made: {reason}." for title, reason in refused.items() if title not in titles_of_findings]


def read_audit(
    folder: OpenRun, notes: list[str], failures: list[str] | None = None, *, trust: bool = False
) -> Audit | None:
    """Return the audit that the run's own experiment describes; None for a recording made elsewhere.

    Args:
        notes: gets a sentence where the experiment cannot be used.
        failures: gets the error itself.
        trust: import code that the experiment names.

    Raises:
        TrustError: the experiment names code of its own, and is not trusted.
    """
    try:
        config = folder.read_experiment(trust=trust)
    except TrustError:
        raise
    except FedsimError as error:
        notes.append(f"The experiment file is not used: {error}.")
        if failures is not None:
            failures.append(str(error))
        return None
    if config is None:
        return None
    experiment = folder.build_experiment(config)
    return Audit(folder=folder, spec=config, experiment=experiment, base_folder=folder.path, trust=trust)


def open_reported_run(
    folder: OpenRun, audit: Audit | None = None, failures: list[str] | None = None, *, trust: bool = False
) -> ReportedRun:
    """Return the content of a report on a run folder; only its experiment is read yet.

    Args:
        audit: who attacked; by default the run's own experiment says so.
        failures: gets the sentences of `ReportedRun.failures`.
        trust: import code that the run folder names.

    Raises:
        ConfigError: the folder holds neither an experiment nor a recording, or names code and is not trusted.
    """
    folder.check_holds_run()
    notes = list[str]()
    failures = [] if failures is None else failures
    audit = audit or read_audit(folder, notes, failures, trust=trust)
    return ReportedRun(folder=folder, audit=audit, trust=trust, notes=notes, failures=failures)
