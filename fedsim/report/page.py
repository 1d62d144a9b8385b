"""The report of a run, one self-contained page: what leaked, under which threat model, beside accuracy.

It is written from whatever the run folder holds; a bare recording will do. The page is a head and
the sections that panels render, see `fedsim.interfaces.panel`.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from fedsim.audit.audit import Audit
from fedsim.base.errors import FedsimError
from fedsim.base.files import write_text
from fedsim.federation.config import Config
from fedsim.federation.failed_attacks import read_failed_attacks
from fedsim.federation.open_run import OpenRun
from fedsim.modalities import find_modality
from fedsim.recording.adversary_role import AdversaryRole
from fedsim.report import tensorboard
from fedsim.report.attacker_names import list_attackers
from fedsim.report.cards import attack_cards
from fedsim.report.headline import describe_accuracy, describe_attacked, final_accuracy, final_epsilon, headline
from fedsim.report.html import render_page
from fedsim.report.next_steps import CERTAINTY, RUN, AuditedRun, NextStep, suggest_after_audit
from fedsim.report.recovery import describe_recovery
from fedsim.report.reported_run import ReportedRun, open_reported_run
from fedsim.report.round_leakage import draw_rounds, split_by_round
from fedsim.report.run_facts import describe_setting
from fedsim.report.sections import render_sections
from fedsim.report.verdicts import LEAKS


def write_report(
    folder: OpenRun, audit: Audit | None = None, failures: list[str] | None = None, *, trust: bool = False
) -> Path:
    """Write `report.html` from what the run folder holds, and a PNG beside each finding.

    Args:
        audit: who attacked, and where the truth is; by default the run's own experiment says so.
        failures: gets a sentence for each damaged round, each finding that cannot be shown and each panel that
            fails; the page has the others.

    Raises:
        ConfigError: the folder holds neither an experiment nor a recording, or names code and is not trusted; or event
            files are wanted, and the package that writes them is not installed.
    """
    run = open_reported_run(folder, audit, failures, trust=trust)
    tensorboard.check_installed(*run.attack_files)
    run.read_contents()
    sections = render_sections(run)
    leakages = split_by_round(run.merged_readings, run.scores)
    # The head comes last, because a panel may have added a note.
    html = render_page(
        "report.html.j2",
        scripts=["charts.js", "pictures.js", "tables.js"],
        run=run,
        sections=sections,
        setting=describe_setting(run.config) if run.config else "",
        recovery=_describe_recovery(run),
        headline=headline(run.readings),
        attacked=_write_attacked(run),
        is_unscored=bool(run.findings) and not run.scores,
        accuracy=_write_accuracy(run),
        no_learning=run.no_learning.sentence,
        epsilon=final_epsilon(run.metrics),
        certainty=CERTAINTY
        if any(reading.verdict == LEAKS and not reading.baseline for reading in run.readings)
        else "",
        next_steps=_suggest_next_steps(run),
        cards=attack_cards(run.readings, run.findings, run.extreme_examples, run.example_scores, leakages),
        round_charts=draw_rounds(leakages),
        truths=[fact.victims for fact in run.granted_facts if fact.granted and fact.victims],
    )
    write_text(folder.report, html)
    if tensorboard.wants_events(*run.attack_files):
        tensorboard.write_events(folder)
    return folder.report


def _write_attacked(run: ReportedRun) -> str:
    """Say whose messages were attacked; nothing where attacks read sums, or what others than the server saw."""
    if run.other_attackers or any(finding.about["members"] for finding in run.findings):
        return ""
    last = max((header.round for header in run.recording.headers), default=0)  # of an app, whose rounds may have gaps
    return describe_attacked(run.scores, run.config.federation.rounds if run.config else last)


def _write_accuracy(run: ReportedRun) -> str:
    """Say how good the model is; that it is unknown, as for a bare recording, is only said with scores."""
    if run.readings or run.reported_accuracy is not None:
        return describe_accuracy(run.metrics, run.config, run.reported_accuracy)
    return final_accuracy(run.metrics, run.config)


def _suggest_next_steps(run: ReportedRun) -> list[NextStep]:
    # A report that is written anew knows of an attack file by its findings.
    abouts = [finding.about for finding in run.findings]
    commands = list(dict.fromkeys(str(about["command"]) for about in abouts if about["command"]))
    parties = [AdversaryRole.parse(who).party for who in list_attackers(abouts)]
    if run.audit is not None and (len(commands) != 1 or not isinstance(run.audit.spec, Config)):
        commands, parties = [run.audit.command], [run.audit.spec.adversary.role.party]
    situation = AuditedRun(
        readings=run.readings,
        config=run.config,
        num_recorded=len({reply.client for header in run.recording.headers for reply in header.replies}),
        has_failures=bool(read_failed_attacks(run.folder)),
        no_learning=run.no_learning,
        command=commands[0] if commands else f"fedsim attack {RUN}",
        party=parties[0] if parties else "server",
    )
    return suggest_after_audit(situation)


def _describe_recovery(run: ReportedRun) -> str:
    """Say for a lay reader what was recovered, in the words of the data's kind where that is known."""
    if run.experiment is not None:
        with suppress(FedsimError):  # the page says elsewhere what is missing
            modality = find_modality(run.experiment.dataset.task.modality)
            return describe_recovery(run.readings, modality.plural, are_texts=modality.has_tokens)
    return describe_recovery(run.readings, "examples")
