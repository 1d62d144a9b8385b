"""Attacks that have no result: refused, without a finding, or without a score."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fedsim.audit.attacked_rounds import parse_rounds
from fedsim.audit.plan import plan_jobs
from fedsim.base.errors import FedsimError
from fedsim.dossier.contents import MissingAttack
from fedsim.federation.failed_attacks import read_failed_attacks
from fedsim.federation.run_folder import read_refusals
from fedsim.report.failed_attacks import name_victims
from fedsim.report.reported_run import ReportedRun
from fedsim.report.reproduction_needs import strip_folders

Job = tuple[str, str, int, int]
"""Title, round or rounds, victim and random start of an attack."""
_ASKED_FOR = "it was requested, but there is no finding for {}; see log.txt of the run"
_FAILED = "it failed on {}: "
_NOT_MADE = "it was not run on {}"
_NOTHING_SENT = "no message of {} was recorded"
_NO_SCORE = "its finding for {} has no score, so it is unknown whether it is right"


@dataclass
class _Gaps:
    """Attacks without a result, by title and why, with the victims and rounds that this is so of."""

    jobs: dict[tuple[str, str, str, bool], list[Job]] = field(default_factory=dict)

    def add(self, job: Job, why: str, *, is_failure: bool, error: str = "") -> None:
        self.jobs.setdefault((job[0], why, error, is_failure), []).append(job)

    def describe(self) -> list[MissingAttack]:
        """Return them as sentences."""
        missing = []
        for (title, why, error, is_failure), jobs in self.jobs.items():
            sentence = why.format(name_victims(jobs)) + error
            missing.append(MissingAttack(attack=title, why=sentence, is_failure=is_failure))
        return missing


def list_missing_attacks(run: ReportedRun, findings: Sequence[Mapping[str, Any]]) -> list[MissingAttack]:
    """Return the attacks that were refused, and the victims, rounds and starts that an attack has no result of.

    The run keeps which attacks failed, and why. Where it was interrupted, an attack that was asked for
    left no finding: the run's own file names it, or the same command made other findings of that
    victim, round and start.
    """
    made = {_read_job(finding) for finding in findings}
    titles = {job[0] for job in made}
    reasons = _read_reasons(run)
    missing = []
    for title, why in reasons.items():
        if title not in titles:
            missing.append(MissingAttack(attack=title, why=strip_folders(why), is_failure=False))
    planned = _plan_jobs(run, reasons)
    gaps = _Gaps()
    failed = read_failed_attacks(run.folder)
    for attempt in failed:
        gaps.add(attempt.job, _FAILED, is_failure=True, error=strip_folders(attempt.why))
    made_or_failed = made | {attempt.job for attempt in failed}
    for job in dict.fromkeys([*planned, *_list_jobs_of_commands(findings, planned)]):
        if job not in made_or_failed:
            is_sent = _took_part(run, job)
            gaps.add(job, _ASKED_FOR if is_sent else _NOTHING_SENT, is_failure=is_sent)
    # Victims of other attacks, which nobody asked this one for.
    victims = {job[2] for job in made}
    asked = {(job[0], job[2]) for gap_jobs in gaps.jobs.values() for job in gap_jobs}
    for title in dict.fromkeys(job[0] for job in made):
        for victim in sorted(victims - {job[2] for job in made if job[0] == title}):
            if (title, victim) not in asked:
                gaps.add((title, "", victim, 0), _NOT_MADE, is_failure=False)
    for job in _list_unscored(run, findings):
        gaps.add(job, _NO_SCORE, is_failure=True)
    return missing + gaps.describe()


def _read_job(finding: Mapping[str, Any]) -> Job:
    return str(finding["title"]), str(finding["round"]), int(finding["victim"]), int(finding["repeat"])


def _read_reasons(run: ReportedRun) -> dict[str, str]:
    """Return why attacks were refused, now or earlier, by title."""
    reasons = read_refusals(run.folder)
    if run.audit is not None and run.audit.spec.adversary.when != "never":
        with suppress(FedsimError):  # what is granted is not known any more, as on a machine without the data
            reasons |= run.audit.refusal_reasons
    return reasons


def _plan_jobs(run: ReportedRun, refused: Iterable[str]) -> list[Job]:
    """Return what the run's own file asks for, except what was refused."""
    audit = run.audit
    if audit is None or audit.spec.adversary.when == "never":
        return []
    jobs = []
    with suppress(FedsimError):  # a round is not recorded, or code is not installed: the run says so itself
        possible = [(table, attack) for table, attack in audit.attacks if table.title not in refused]
        for job in plan_jobs(audit.transcript, audit.spec.adversary, possible, None, []):
            jobs.append((job.title, job.round, job.victim, job.repeat))
    return jobs


def _list_jobs_of_commands(findings: Sequence[Mapping[str, Any]], planned: Sequence[Job]) -> list[Job]:
    """Return what commands of other attack files asked for: each of its attacks, of each of its victims and rounds."""
    jobs_by_command: dict[str, dict[Job, None]] = {}
    planned_titles = {job[0] for job in planned}
    for finding in findings:
        job = _read_job(finding)
        if job[0] not in planned_titles:
            jobs_by_command.setdefault(str(finding["command"]), {})[job] = None
    asked = []
    for jobs in jobs_by_command.values():
        # An attack on several rounds at once names them otherwise than one on a single round.
        for several in (False, True):
            alike = [job for job in jobs if job[1].isdigit() != several]
            for title in dict.fromkeys(job[0] for job in alike):
                for _, rounds, victim, repeat in alike:
                    asked.append((title, rounds, victim, repeat))
    return asked


def _took_part(run: ReportedRun, job: Job) -> bool:
    """Return whether the server saw anything of a victim in the rounds of a job."""
    rounds = parse_rounds(job[1])
    return any(header.round in rounds and header.find_reply(job[2]) is not None for header in run.recording.headers)


def _list_unscored(run: ReportedRun, findings: Sequence[Mapping[str, Any]]) -> list[Job]:
    """Return the findings without any score, where the run has scores at all."""
    scored = set[tuple[str, str, str, int, int]]()
    for row in run.scores:
        scored.add((row["attack"], row["variant"], row["round"], int(row["victim"]), int(row["repeat"])))
    unscored = []
    for finding in findings:
        title, number, victim, repeat = _read_job(finding)
        if scored and (title, str(finding["variant"]), number, victim, repeat) not in scored:
            unscored.append((title, number, victim, repeat))
    return unscored
