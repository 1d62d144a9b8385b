"""Work on a run folder, from the first check to the report; each function returns the results of its attacks.

An attack that fails, or cannot be made, does not stop the others: it becomes a sentence in `AuditResult.failures`. A
request that is not valid, or of which no attack can be made, is refused before work starts.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedsim.api.adversaries import Adversary
from fedsim.api.logs import log_to_file
from fedsim.audit.audit import Audit, make_audit
from fedsim.audit.evaluation.empirical_epsilon import measure_epsilon
from fedsim.audit.evaluation.proved_ceilings import ProvedCeiling
from fedsim.audit.plan import AttackJob, ReportJobProgress
from fedsim.base.errors import ConfigError, FedsimError, TrustError, number_of
from fedsim.exposure.of_clients import failure_sentences as unmeasured
from fedsim.federation.config import Config
from fedsim.federation.failed_attacks import read_failed_attacks
from fedsim.federation.integrity import start_late_manifest
from fedsim.federation.open_run import OpenRun
from fedsim.federation.resolve import resolve
from fedsim.federation.run_folder import RunFolder, read_exposures, read_metrics
from fedsim.federation.simulation import run_federation
from fedsim.recording.header import NODE_FAILED
from fedsim.report.adaptive import defense_remarks
from fedsim.report.attack_traits import read_attack_traits, read_scores
from fedsim.report.headline import describe_accuracy, headline
from fedsim.report.learning import NoLearning
from fedsim.report.next_steps import CERTAINTY, AuditedRun, NextStep, suggest_after_audit
from fedsim.report.page import write_report
from fedsim.report.recovery import describe_recovery
from fedsim.report.round_leakage import split_by_round
from fedsim.report.run_learning import examine_learning, find_reported_accuracy
from fedsim.report.score_ceilings import compute_score_ceilings
from fedsim.report.tensorboard import check_installed
from fedsim.report.verdicts import LEAKS, ScoreReading, score_readings

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """Results of work on a run.

    Attributes:
        readings: each attack's scores over the victims that were asked for; empty without attacks.
        remarks: sentences on them: what the clients' defense is worth, whether the model has not learnt, and which
            findings of earlier attacks are left out.
        answer: what leaked, how sure that is, and at which accuracy, in a few sentences; empty without attacks.
        failures: one sentence for each attack, score or picture that failed.
        planned_jobs: all that the adversary was to do, what failed included.
        variants: by the title of each attack its variant, which distinguishes its findings from those of earlier
            settings.
        ceilings: each score beside the most that the clients' defenses let anybody reach; empty
            where they prove nothing.
    """

    folder: RunFolder
    readings: Sequence[ScoreReading] = ()
    remarks: Sequence[str] = ()
    answer: str = ""
    next_steps: Sequence[NextStep] = ()
    failures: list[str] = field(default_factory=list)
    planned_jobs: Sequence[AttackJob] = ()
    variants: Mapping[str, str] = field(default_factory=dict)
    ceilings: Sequence[ProvedCeiling] = ()


def run(
    config: Config, folder: OpenRun, *, overwrite: bool = False, follow: ReportJobProgress | None = None
) -> AuditResult:
    """Run the federation that `config` describes, attack what its server saw, and report."""
    return _run(config, folder, resume=False, overwrite=overwrite, follow=follow)


def resume(folder: OpenRun, *, trust: bool = False, follow: ReportJobProgress | None = None) -> AuditResult:
    """Resume an interrupted run, make the attacks that are not made yet, and report; see `run`."""
    with folder.hold_lock():
        config = folder.read_experiment(trust=trust)
        if config is None:
            raise ConfigError(f"{folder.path}: holds no run to resume; expected {folder.experiment.name} in it")
        if config.federation.address and not trust:
            raise TrustError(
                f"{folder.experiment}: federation.address: '{config.federation.address}' is a machine that the run "
                "folder names, which would be sent code and data of yours, and is not joined unasked; pass --trust if "
                "you trust the author of the folder"
            )
        return _run(config, folder, resume=True, overwrite=False, follow=follow)


def _run(
    config: Config, folder: OpenRun, *, resume: bool, overwrite: bool, follow: ReportJobProgress | None
) -> AuditResult:
    config = config if resume else config.without_data_hash()
    check_installed(config)
    attacked = config.adversary.when != "never" and bool(config.attack)
    if attacked:
        experiment = folder.build_experiment(resolve(config))
        audit = Audit(folder=folder, spec=config, experiment=experiment, base_folder=folder.path, awaits_run=True)
        audit.check()
        audit.log_refusals()  # now, because training may take hours
    with folder.hold_lock(), log_to_file(folder.log):
        run_federation(config, folder, resume=resume, overwrite=overwrite)
        no_learning = examine_learning(folder, read_metrics(folder)).sentence
        if no_learning:
            log.warning("%s", no_learning)  # now, because attacks may take hours
        failures = _lost_clients(folder) + _measure_epsilon(config, folder) + unmeasured(read_exposures(folder))
        # the code that the experiment names was accepted above
        done = (
            _attack_and_score(make_audit(folder, None, trust=True), follow) if attacked else AuditResult(folder=folder)
        )
        done.failures.extend(failures)
        write_report(folder, None, done.failures, trust=True)
    if no_learning and attacked:  # again, because tables of scores come between
        return replace(done, remarks=[*done.remarks, no_learning])
    return done


def attack(
    folder: OpenRun, adversary: Adversary, *, trust: bool = False, follow: ReportJobProgress | None = None
) -> AuditResult:
    """Attack a recorded run, or the recording of a Flower app, and report."""
    with begin_audit(folder, adversary, trust=trust) as audit:
        old_times = _finding_times(folder)
        done = _attack_and_score(audit, follow)
        if old_times and not done.failures and _finding_times(folder) == old_times:
            log.info(
                "nothing new: all these findings are there already; name other clients, rounds or settings, as in "
                "%s --set %s",
                adversary.command.replace("RUN", str(folder.path), 1),
                shlex.quote(_setting_with_new_attacks(audit)),
            )
        write_report(folder, audit, done.failures, trust=trust)
    return done


def report(folder: OpenRun, *, trust: bool = False) -> AuditResult:
    """Write `report.html` anew from the contents of a run folder."""
    folder.check_exists()
    done = AuditResult(folder=folder)
    with folder.hold_lock():
        write_report(folder, None, done.failures, trust=trust)
    return done


@contextmanager
def begin_audit(folder: OpenRun, adversary: Adversary, *, trust: bool) -> Iterator[Audit]:
    """Lock a run and yield its audit by `adversary`, once it is checked that the attacks can work.

    Where the run has no manifest, one is begun.
    """
    folder.check_exists()
    with folder.hold_lock():
        audit = make_audit(folder, adversary.spec, adversary.beside, trust=trust, command=adversary.command)
        check_installed(audit.spec)
        with log_to_file(folder.log):
            audit.check()
            start_late_manifest(folder, audit.experiment)
            folder.check_key()
            if audit.experiment is not None:
                folder.note_experiment(audit.experiment.config)
            yield audit


def _attack_and_score(audit: Audit, follow: ReportJobProgress | None) -> AuditResult:
    planned: list[AttackJob] = []
    failures = audit.run(follow, planned_jobs=planned)
    rows: list[Mapping[str, Any]] = list(audit.score(failures))
    # The folder may hold findings of further victims, from earlier attacks.
    victims = {job.victim for job in planned}
    asked_rows = [row for row in rows if row["victim"] in victims]
    readings = score_readings(asked_rows, read_attack_traits(audit.folder, read_scores(audit.folder), audit=audit))
    remarks = defense_remarks(readings, audit)
    for attack, leakage in split_by_round(readings, asked_rows).items():
        remarks.append(f"{attack}: {leakage.sentence}")
    if further_victims := len({row["victim"] for row in rows} - victims):
        remarks.append(
            f"Findings of {number_of(further_victims, 'further victim')}, from earlier attacks, are in the report and "
            "not counted here."
        )
    learning = examine_learning(audit.folder, read_metrics(audit.folder))
    ceilings: Sequence[ProvedCeiling] = ()
    if audit.experiment is not None:
        ceilings = compute_score_ceilings(audit.folder, asked_rows, audit.experiment.config.partition.name)
    return AuditResult(
        folder=audit.folder,
        readings=readings,
        remarks=remarks,
        answer=_write_answer(audit, readings, learning),
        next_steps=_suggest_next_steps(audit, readings, learning),
        failures=failures,
        planned_jobs=planned,
        variants=audit.cache.variants,
        ceilings=ceilings,
    )


def _write_answer(audit: Audit, readings: Sequence[ScoreReading], learning: NoLearning) -> str:
    """Say what leaked, how sure that is, and at which accuracy, as the report does."""
    sentences = [describe_recovery(readings, "examples"), headline(readings)]
    if any(reading.verdict == LEAKS and not reading.baseline for reading in readings):
        sentences.append(CERTAINTY)
    if readings:
        rows = read_metrics(audit.folder)
        reported = None if rows else find_reported_accuracy(audit.folder)
        sentences.append(describe_accuracy(rows, audit.config, reported))
        if audit.config is None:  # of an own run it is said as a remark
            sentences.append(learning.sentence)
    return " ".join(filter(None, sentences))


def _suggest_next_steps(audit: Audit, readings: Sequence[ScoreReading], learning: NoLearning) -> list[NextStep]:
    num_recorded = 0
    with suppress(FedsimError):  # a round is damaged, which is a failure already
        num_recorded = len(audit.example_counts)
    situation = AuditedRun(
        readings=readings,
        config=audit.config,
        num_recorded=num_recorded,
        has_failures=bool(read_failed_attacks(audit.folder)),
        no_learning=learning,
        folder=str(audit.folder.path),
        command=audit.command,
        party=audit.spec.adversary.role.party,
    )
    return suggest_after_audit(situation)


def _lost_clients(folder: OpenRun) -> list[str]:
    """Return a sentence for each recorded round that lacks clients through no fault of theirs."""
    if not any(folder.transcript.glob("round-*.safetensors")):
        return []
    transcript, sentences = folder.recording, []
    for number in transcript.rounds:
        failures = transcript.header(number).failures
        lost = {client: reason for client, reason in failures.items() if reason.startswith(NODE_FAILED)}
        if lost:
            client, reason = next(iter(lost.items()))
            sentences.append(
                f"round {number}: without {len(lost)} of its clients, whose node failed (client {client}: {reason}), "
                "so it is another round than that of all clients; fix the host, and run it again"
            )
    return sentences


def _measure_epsilon(config: Config, folder: OpenRun) -> list[str]:
    """Measure epsilon where clients carried canaries; return a sentence where that failed."""
    if config.canaries is None:
        return []
    try:
        measure_epsilon(folder, folder.build_experiment(resolve(config)))
    except FedsimError as error:
        return [f"epsilon was not measured: {error}"]
    return []


def _setting_with_new_attacks(audit: Audit) -> str:
    """Return a setting with which further attacks would be made: on another client, or from another start."""
    adversary, clients = audit.spec.adversary, sorted(map(int, audit.example_counts))
    attacked = clients if adversary.victims == "all" else adversary.victims or clients[:1]
    not_attacked = [client for client in clients if client not in attacked]
    return f"adversary.victims=[{not_attacked[0]}]" if not_attacked else f"adversary.repeats={adversary.repeats + 1}"


def _finding_times(folder: RunFolder) -> dict[Path, int]:
    """Return by file when each finding was written."""
    return {path: path.stat().st_mtime_ns for path in folder.findings.rglob("*.safetensors")}
