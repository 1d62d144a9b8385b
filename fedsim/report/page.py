"""The report of a run, one self-contained page: what leaked, under which threat model, beside accuracy.

It is written from whatever the run folder holds; a bare recording will do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from fedsim.audit.audit import Audit
from fedsim.audit.evaluation.empirical_epsilon import read_epsilons
from fedsim.audit.evaluation.texts import MAX_TEXTS, MAX_WORDS
from fedsim.base.errors import FedsimError
from fedsim.base.files import write_text
from fedsim.base.table_metrics import ROUNDING, TOLERANCE
from fedsim.federation.integrity import compare_with_manifest
from fedsim.federation.open_run import OpenRun
from fedsim.federation.run_folder import RunFolder, read_exposures, read_metrics, read_refusals, read_rows
from fedsim.report import adaptive, exposure, image_scores, tensorboard
from fedsim.report.cards import attack_cards, choose_examples, examples_by_finding
from fedsim.report.charts import Look
from fedsim.report.citations import bibtex, papers
from fedsim.report.curves import ChartGroup, attack_charts, column_title, epsilon_columns, training_charts
from fedsim.report.headline import headline, most_victims
from fedsim.report.html import render_page
from fedsim.report.image_scores import CLOSENESS
from fedsim.report.memberships import roc_charts
from fedsim.report.pictures import Gallery
from fedsim.report.reproduction import reproduction_of
from fedsim.report.run_contents import (
    FindingView,
    Recording,
    attack_classes,
    read_attack_traits,
    read_audit,
    read_findings,
    read_recording,
    read_scores,
)
from fedsim.report.run_facts import defense_promises, missing_updates_text, run_facts, traffic_text
from fedsim.report.sharing import SharingTable, sharing_table
from fedsim.report.summary import MIN_VICTIMS, ScoreReading, join_titles, metric_name, score_readings
from fedsim.report.threats import GrantedFact, list_granted_facts

MAX_FINDINGS, MAX_ROUNDS = 12, 200
"""Most findings whose texts or records are shown, and most rounds listed."""


def write_report(
    folder: OpenRun, audit: Audit | None = None, failures: list[str] | None = None, *, trust: bool = False
) -> Path:
    """Write `report.html` from what the run folder holds, and a PNG beside each finding.

    Args:
        folder: the run folder.
        audit: who attacked, and where the truth is; by default the run's own experiment says so.
        failures: gets a sentence for each damaged round and each finding that cannot be shown; the page has the others.
        trust: import code that the run folder names.

    Raises:
        ConfigError: the folder holds neither an experiment nor a recording, or names code and is not trusted; or event
            files are wanted, and the package that writes them is not installed.
        RunError: the folder cannot be written.
    """
    path, notes = folder.path, list[str]()
    folder.check_holds_run()
    failures = [] if failures is None else failures
    audit = audit or read_audit(folder, notes, failures, trust=trust)
    specs = [audit.spec, *([audit.experiment.config] if audit.experiment else [])] if audit else []
    tensorboard.check_installed(*specs)
    # Read the recording, the scores and the findings.
    recording = read_recording(folder, notes)
    failures += [reason for reason in recording.damaged.values() if not any(reason in text for text in failures)]
    epsilon_audits = read_epsilons(folder)
    failures += [item.sentence for item in epsilon_audits if item.is_broken]
    attack_traits = read_attack_traits(folder, audit, trust=trust)
    scores = read_scores(folder)
    readings, measured = score_readings(scores, attack_traits), read_metrics(folder)
    example_scores, gallery = image_scores.add_word_sets(image_scores.read_example_scores(folder), scores), Gallery()
    extremes = choose_examples(readings, example_scores)
    findings = read_findings(
        folder,
        audit,
        notes,
        failures,
        gallery=gallery,
        scores=example_scores,
        card_examples=examples_by_finding(extremes),
        trust=trust,
    )
    notes += _refused_attacks(folder, audit, findings)
    # Derive what the page says of them.
    attacks = attack_classes(audit, findings, trust=trust)
    readings_once = adaptive.merge_equal_attacks(readings)
    pairs = [pair for pair in adaptive.pair_readings(readings) if pair.outcome]
    granted_facts = list_granted_facts(audit, findings, attacks)
    attack_names = {key: traits.name for key, traits in attack_traits.items()}
    facts = run_facts(audit, recording, notes, failures) | {"Integrity": _integrity(folder, notes, failures)}
    promises = defense_promises(folder, audit, findings, notes)
    reproduction = reproduction_of(audit, recording, findings)
    cited_papers = papers(audit, attacks, recorded=bool(recording.headers))
    html = render_page(
        "report.html.j2",
        scripts=["charts.js", "pictures.js", "tables.js"],
        name=path.resolve().name,
        path=path,
        facts=facts,
        promises=promises,
        sharing=_sharing(audit, findings),
        geometry=_geometry(folder),
        missing_updates=missing_updates_text(recording),
        notes=notes,
        leaks=_readings_by_attack(readings_once),
        fewest=MIN_VICTIMS if most_victims(readings) < MIN_VICTIMS else 0,
        groups=any(finding.about["members"] for finding in findings),
        headline=headline(readings),
        pairs=_pairs_by_attack(pairs),
        remarks=defense_remarks(readings, audit),
        accuracy=_final_accuracy(measured, audit),
        epsilon=_final_epsilon(measured),
        sums=recording.holds_sums,
        epsilons=epsilon_audits,
        exposure=exposure.exposure_table(read_exposures(folder), readings, scores, attack_names),
        inf=math.inf,
        threats=granted_facts,
        truths=[fact.victims for fact in granted_facts if fact.granted and fact.victims],
        attack_rows=_attack_rows(findings),
        single=_example_noun(findings),
        found=findings,
        cards=attack_cards(readings, findings, extremes, example_scores),
        gallery=gallery,
        orders=_orders(gallery),
        absent=_absent_sections(gallery, findings, granted_facts),
        texts_by_victim=_group_by_truth([finding for finding in findings if finding.texts]),
        rows_by_victim=_group_by_truth([finding for finding in findings if finding.rows]),
        tolerance=TOLERANCE,
        rounding=ROUNDING,
        limits={"findings": MAX_FINDINGS, "texts": MAX_TEXTS, "words": MAX_WORDS, "rounds": MAX_ROUNDS},
        training=training_charts(measured),
        attacking=_attack_curves(attacks, findings, readings),
        memberships=roc_charts(findings, attacks),
        recording=recording,
        traffic=traffic_text(recording),
        has_experiment=audit is not None and audit.experiment is not None,
        reproduction=reproduction,
        identity=_identity(folder, audit, recording, reproduction.hash),
        papers=cited_papers,
        bibliography="\n\n".join(bibtex(paper) for _, paper in cited_papers),
    )
    write_text(folder.report, html)
    if tensorboard.wants_events(*specs):
        tensorboard.write_events(folder)
    return folder.report


def _readings_by_attack(readings: Sequence[ScoreReading]) -> dict[str, list[ScoreReading]]:
    groups: dict[str, list[ScoreReading]] = {}
    for reading in readings:
        groups.setdefault(reading.summary.attack, []).append(reading)
    return groups


def _pairs_by_attack(pairs: Sequence[adaptive.NaiveAdaptivePair]) -> dict[str, list[adaptive.NaiveAdaptivePair]]:
    groups: dict[str, list[adaptive.NaiveAdaptivePair]] = {}
    for pair in pairs:
        groups.setdefault(pair.naive.summary.attack, []).append(pair)
    return groups


def _refused_attacks(folder: RunFolder, audit: Audit | None, findings: Sequence[FindingView]) -> list[str]:
    """Return a sentence for each attack that was refused, now or earlier, unless another attack file made it."""
    made_titles = {finding.about["attack"] for finding in findings}
    refused = read_refusals(folder)
    if audit is not None and (audit.spec.adversary.when != "never" or made_titles):
        with suppress(FedsimError):  # what is granted is not known any more, as on a machine without the data
            refused |= audit.refusal_reasons
    return [f"Not made: {reason}." for title, reason in refused.items() if title not in made_titles]


def defense_remarks(readings: Sequence[ScoreReading], audit: Audit | None) -> list[str]:
    """Return a sentence for each attack on clients that defend themselves, see `fedsim.report.adaptive.remarks`."""
    defended = audit is not None and audit.experiment is not None and bool(audit.experiment.config.defense)
    granted = audit is not None and audit.spec.adversary.knowledge.defenses is True
    return adaptive.remarks(readings, defended=defended, granted=granted)


def _attack_curves(
    attacks: Mapping[str, Any], findings: Sequence[FindingView], readings: Sequence[ScoreReading]
) -> ChartGroup:
    """Draw the curves of attacks; an adaptive attack that equals the naive one is drawn together with it."""
    naive_of_equal = adaptive.equal_attacks(readings)
    naive_names = naive_of_equal | {naive: naive for naive in naive_of_equal.values()}
    names = {title: naive_names[title] + adaptive.EQUAL_SUFFIX if title in naive_names else title for title in attacks}
    curves = []
    for finding in findings:
        title = str(finding.about["attack"])
        if finding.curves and title in names:
            curves.append((names[title], finding.curves))
    drawn_names = dict(curves)
    looks = {names[title]: Look(number) for number, title in enumerate(attacks) if names[title] in drawn_names}
    floors = {}
    for reading in readings:
        if reading.summary.metric == "psnr" and reading.summary.attack in names:
            floors[names[reading.summary.attack]] = reading.summary.floor
    return attack_charts(curves, looks, floors)


def _final_accuracy(rows: Sequence[Mapping[str, str]], audit: Audit | None = None) -> str:
    """Say in a sentence how good the recorded model is, by `metrics.csv`; empty where nothing was evaluated.

    By the last evaluated round, on the public test set; where the server has no such figure, as the plain mean over
    clients, each on what it holds out.
    """
    max_examples = audit.experiment.config.federation.evaluate_examples if audit and audit.experiment else None
    test_set = f"at most {max_examples} examples of the public test set" if max_examples else "the public test set"
    for name, unit in (("accuracy", ".1%"), ("loss", ".4g")):
        evaluated = [row for row in rows if row.get(name)]
        last = max((int(row["round"]) for row in evaluated), default=0)
        values = {row["client"]: float(row[name]) for row in evaluated if int(row["round"]) == last}
        server = values.pop("server", None)
        if server is not None:
            return f"The model's final {name} on {test_set} is {server:{unit}} (after round {last})."
        if values:
            mean = float(np.mean(list(values.values())))
            held_out = (
                "what one client holds out" if len(values) == 1 else f"what {len(values)} clients hold out, on average,"
            )
            return f"The model's final {name} on {held_out} is {mean:{unit}} (after round {last})."
    return ""


def _final_epsilon(rows: Sequence[Mapping[str, str]]) -> str:
    """Say in a sentence what the client that spent most has spent by the last round; empty where nothing is proved."""
    last_texts, last_round = dict[str, str](), ""
    for row in rows:
        for column in epsilon_columns(row):
            if row[column]:
                last_texts[column] = f"{column_title(column)} is {float(row[column]):.3g}"
                last_round = row["round"]
    return (
        f"The largest proved {join_titles(list(last_texts.values()))} (after round {last_round})." if last_texts else ""
    )


def _example_noun(findings: Sequence[FindingView]) -> tuple[str, str] | None:
    """Return what an example is called and where to look at it; None where no finding claims examples."""
    if any(finding.pictured for finding in findings):
        return "image", "the pictures"
    if any(finding.texts for finding in findings):
        return "text", "the texts"
    return ("example", "image-scores.csv") if any(finding.num_examples for finding in findings) else None


def _attack_rows(findings: Sequence[FindingView]) -> list[dict[str, Any]]:
    """Describe each attack that found something: settings other than its defaults, its command, its warnings."""
    attacks: dict[str, dict[str, Any]] = {}
    for finding in findings:
        changed = ", ".join(f"{key} = {value}" for key, value in sorted(finding.about["changed"].items()))
        description = {
            "plugin": finding.about["plugin"],
            "changed": changed,
            "knows_defenses": "defenses" in finding.about["granted"],
            "command": finding.about["command"],
            "warnings": {},
        }
        counts = attacks.setdefault(str(finding.about["attack"]), description)["warnings"]
        for warning in finding.about["warnings"]:
            text = str(warning).partition(": ")[2] or str(warning)  # without the victim that it is about
            counts[text] = counts.get(text, 0) + 1
    return [{"name": name} | description for name, description in attacks.items()]


def _sharing(audit: Audit | None, findings: Sequence[FindingView]) -> SharingTable | None:
    """Return the partition of the data, with the attacked clients marked; None where nobody knows it."""
    if audit is None or audit.experiment is None:
        return None
    attacked = {int(str(finding.about["victim"])) for finding in findings}
    with suppress(FedsimError):  # the data set is missing, which a note says already
        return sharing_table(audit.experiment, attacked)
    return None


def _geometry(folder: RunFolder) -> dict[str, Any] | None:
    """Summarise what `fedsim geometry` wrote; None where nobody asked for it."""
    rows = read_rows(folder.geometry, ("round", "client"))
    if not rows:
        return None
    statistics = []
    for name in rows[0]:
        if name not in ("round", "client"):
            values = [float(row[name]) for row in rows]
            statistics.append((name, (fmean(values), min(values), max(values))))
    return {"count": len(rows), "rows": statistics}


def _group_by_truth(findings: Sequence[FindingView]) -> list[list[FindingView]]:
    """Group findings with the same true examples; findings without truth and bags of words stay single."""
    groups: dict[tuple[object, ...], list[FindingView]] = {}
    for position, finding in enumerate(findings):
        texts = tuple(pair.true for pair in finding.texts)
        rows = tuple(map(tuple, finding.rows.true if finding.rows else ()))
        key: tuple[object, ...] = (position,)
        if finding.has_truth and not finding.bag:
            key = (finding.about["who"], finding.about["round"], texts + rows)
        groups.setdefault(key, []).append(finding)
    return list(groups.values())


def _absent_sections(gallery: Gallery, findings: Sequence[FindingView], facts: Sequence[GrantedFact]) -> set[str]:
    """Return which sections the page does not have."""
    sections = {
        "pictures": bool(gallery.grids),
        "texts": any(finding.texts for finding in findings),
        "records": any(finding.rows for finding in findings),
        "memberships": any(finding.roc for finding in findings),
        "threats": bool(facts),
    }
    return {name for name, is_there in sections.items() if not is_there}


def _orders(gallery: Gallery) -> list[tuple[str, str]]:
    """Return the metrics by which images can be sorted, with their names."""
    scored_by = {metric for grid in gallery.grids.values() for metric in grid.scores}
    return [(name.replace("_", "-"), metric_name(name).partition(",")[0]) for name in CLOSENESS if name in scored_by]


def _integrity(folder: OpenRun, notes: list[str], failures: list[str]) -> str:
    """Say which run this is and whether it is still what was written; differences become a note and a failure."""
    verdict = compare_with_manifest(folder)
    if verdict.differences:
        notes.append(f"This is not the run that was written: {'; '.join(verdict.differences)}.")
        failures.append(f"{folder.path}: is not the run that was written: {'; '.join(verdict.differences)}")
    return verdict.text


def _versions(folder: RunFolder) -> str:
    try:
        versions = json.loads((folder.path / "versions.json").read_text(encoding="utf-8"))
        return ", ".join(f"{name} {version}" for name, version in versions.items())
    except (OSError, ValueError, AttributeError):
        return ""


def _run_id(folder: OpenRun) -> str:
    with suppress(FedsimError):  # the facts say under Integrity what was altered
        manifest = folder.manifest.contents
        return manifest.run if manifest else ""
    return ""


def _identity(folder: OpenRun, audit: Audit | None, recording: Recording, findings_hash: str) -> dict[str, str]:
    """Return what tells this run, and a run that is to be the same, from others."""
    experiment = audit.experiment if audit else None
    return {
        "Run": _run_id(folder),
        "Seed": str(experiment.config.federation.seed) if experiment else "",
        "Versions": _versions(folder),
        f"SHA-256 of the {'intact rounds' if recording.damaged else 'recording'}": recording.hash,
        "SHA-256 of all findings": findings_hash,
    }
