"""The answer of a sweep: which defense stops what, and at which cost; a sentence and a row for each setting."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from fedsim.audit.plan import ADAPTIVE
from fedsim.base.grouping import group_by
from fedsim.interfaces.metric import describe_metric, sort_metrics
from fedsim.report.adaptive import NOT_CONCLUDED
from fedsim.report.attack_outcomes import AttackOutcome, judge_attacks
from fedsim.report.defense_outcomes import (
    DefenseOutcome,
    attack_outcomes,
    read_scores,
)
from fedsim.report.failed_cells import describe_failed_cells
from fedsim.report.html import group_digits
from fedsim.report.learning import explain_low_accuracy
from fedsim.report.paired_differences import signed_text
from fedsim.report.setting_names import SettingNames
from fedsim.report.summary import EXACT, enumerate_words, explain_interval, is_share
from fedsim.report.sweep_accuracy import describe_accuracy_change, describe_mean_accuracy
from fedsim.report.sweep_groups import (
    Labels,
    Row,
    Unit,
    group_scores,
    mean_by_victim_and_seed,
    paired_interval,
    report_address,
)
from fedsim.report.sweep_lead import ONLY_SETTING, SettingRow, write_lead
from fedsim.report.trade_off import strongest_attacks
from fedsim.report.undefended_leaks import explain_no_leak, find_main_metric
from fedsim.report.verdicts import LEAKS, NOT_JUDGED, ScoreReading

_PROMISES = ((1.0, "strong"), (10.0, "weak"), (1000.0, "hardly any"), (math.inf, "none"))
"""How much protection an epsilon up to each of these promises."""


@dataclass(frozen=True, kw_only=True)
class SweepAnswer:
    """What the page of a sweep opens with.

    Attributes:
        lead: the answer in a few sentences; empty where nothing has scores.
        metric: by which the leakage in `rows` is measured; empty where nothing has scores.
        guess: accuracy of the most frequent class; NaN where it is not known.
        no_controls: why settings have no control, each with its name.
        defense_limits: what scores do not say of the defenses of a setting, each with its name.
        failures: sentences on attacks without results in some cells.
    """

    lead: str
    metric: str
    rows: Sequence[SettingRow]
    defended: bool
    guess: float
    seeds: Sequence[str]
    no_controls: Sequence[str]
    defense_limits: Sequence[str]
    failures: Sequence[str]

    @property
    def metric_title(self) -> str:
        """Title of the metric."""
        return describe_metric(self.metric).title


def answer_sweep(rows: Sequence[Row], cells: Sequence[Row], axes: Sequence[str]) -> SweepAnswer:
    """Answer what the defenses of a sweep are worth, or where there are none, what leaks."""
    rows_by_setting: dict[Labels, list[Row]] = defaultdict(list)
    for row in rows:
        rows_by_setting[tuple(row[axis] for axis in axes)].append(row)
    rows_by_cell: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        rows_by_cell[row["cell"]].append(row)
    reasons = {row["cell"]: row["no_control"] for row in cells if row["no_control"]}
    limits_in_cell = {row["cell"]: row["defense_limits"] for row in cells}
    open_rounds_in_cell = {row["cell"]: set(map(int, row["open_rounds"].split())) for row in cells}
    names = SettingNames.from_labels(axes, rows_by_setting)
    metric = find_main_metric(rows, axes)
    # A row for each setting.
    setting_rows, no_controls, defense_limits = [], [], []
    for labels, of_setting in rows_by_setting.items():
        name = names(labels) or ONLY_SETTING
        no_control = next((reasons[row["cell"]] for row in of_setting if row["cell"] in reasons), "")
        if no_control:
            no_controls.append(f"{name} has no control: {no_control}.")
        limits = (limits_in_cell.get(row["cell"], "") for row in of_setting)
        defense_limits += [
            text if text.startswith(name) else f"{name}: {text}" for text in dict.fromkeys(filter(None, limits))
        ]
        control_cells = dict.fromkeys(row["control"] for row in of_setting if row["control"] != row["cell"])
        controls = [row for cell in control_cells for row in rows_by_cell.get(cell, [])]
        open_rounds = set[int]().union(*(open_rounds_in_cell.get(row["cell"], ()) for row in of_setting))
        is_defended = any(row["cell"] != row["control"] for row in of_setting)
        details = attack_outcomes(of_setting, controls, no_control, open_rounds) if is_defended else []
        setting_rows.append(_setting_row(name, axes, metric, of_setting, controls, details))
    has_defenses = any(row.is_defended for row in setting_rows)
    warning = explain_no_leak(rows, axes) if has_defenses else ""
    guesses = [float(row["guess"]) for row in rows if row["guess"]]
    return SweepAnswer(
        lead=write_lead(setting_rows, warning),
        metric=metric,
        rows=sorted(setting_rows, key=lambda row: row.is_defended),
        defended=has_defenses,
        guess=math.fsum(guesses) / len(guesses) if guesses else math.nan,
        seeds=list(dict.fromkeys(row["seed"] for row in rows)),
        no_controls=no_controls,
        defense_limits=defense_limits,
        failures=describe_failed_cells(rows, cells, axes),
    )


def _setting_row(
    name: str,
    axes: Sequence[str],
    metric: str,
    rows: Sequence[Row],
    controls: Sequence[Row],
    details: Sequence[DefenseOutcome],
) -> SettingRow:
    is_defended = any(row["cell"] != row["control"] for row in rows)
    outcomes = judge_attacks(details)
    leaking: list[ScoreReading] = []
    if is_defended:
        verdict, reason = _defense_verdict(outcomes)
    else:
        verdict, reason, leaking = _leak_verdict(rows)
    leakage, difference = _leakage_texts(rows, controls, axes, metric, details)
    proved = [float(row["proved_epsilon"]) for row in rows if row["proved_epsilon"]]
    return SettingRow(
        name=name,
        is_defended=is_defended,
        outcomes=outcomes,
        details=details,
        leaking=list(dict.fromkeys(reading.summary.attack for reading in leaking)),
        verdict=verdict,
        reason=reason,
        leakage=leakage,
        difference=difference,
        accuracy=describe_mean_accuracy(rows),
        accuracy_change=describe_accuracy_change(rows, controls) if is_defended else "",
        proved=_range_text(row["proved_epsilon"] for row in rows),
        promise=describe_epsilon(max(proved)) if proved else "",
        measured=_range_text(row["measured_epsilon"] for row in rows),
        bytes=_bytes_text(rows),
        no_learning=_explain_no_learning(rows),
        href=report_address(rows[0]["run"]),
    )


def _defense_verdict(outcomes: Sequence[AttackOutcome]) -> tuple[str, str]:
    """Return the verdict on a defense, and the reasons: the worst attack first."""
    if not outcomes:
        return NOT_CONCLUDED, "no attack has a score that says anything about leakage"
    attacks: dict[tuple[str, str], list[str]] = defaultdict(list)
    for outcome in outcomes:
        scores = f"{describe_metric(outcome.decisive.metric).title} {outcome.decisive.means_text}".rstrip()
        attacks[outcome.word, outcome.reason].append(f"{outcome.attack} ({scores})")
    reasons = []
    for (word, reason), names in attacks.items():
        shown_word = "" if word == outcomes[0].word else f"{word}, "
        reasons.append(f"{enumerate_words(names)}: {shown_word}{reason}")
    return outcomes[0].word, "; ".join(reasons)


def _leak_verdict(rows: Sequence[Row]) -> tuple[str, str, list[ScoreReading]]:
    """Return the verdict on a setting without a defense, the reason, and the readings that leak."""
    readings = []
    for own_rows in group_by(rows, itemgetter("attack")).values():
        if all(row["baseline"] == "1" for row in own_rows):
            continue
        for metric in sort_metrics({row["metric"] for row in own_rows if row["metric"]}):
            scores = read_scores(own_rows, metric, adaptive=False)
            if scores is not None and scores.reading.verdict:
                readings.append(scores.reading)
    leaking = [reading for reading in readings if reading.verdict == LEAKS]
    metrics_by_attack: dict[str, list[str]] = defaultdict(list)
    for reading in leaking:
        metrics_by_attack[reading.summary.attack].append(describe_metric(reading.summary.metric).title)
    if leaking:
        texts = [f"{attack}, by {enumerate_words(metrics)}" for attack, metrics in metrics_by_attack.items()]
        return LEAKS, "; ".join(texts), leaking
    if not readings:
        return NOT_JUDGED, "", []
    first = min(readings, key=lambda reading: reading.verdict == NOT_JUDGED)
    return (
        first.verdict,
        f"{first.summary.attack}, by {describe_metric(first.summary.metric).title}: {first.remark}",
        [],
    )


def _leakage_texts(
    rows: Sequence[Row],
    controls: Sequence[Row],
    axes: Sequence[str],
    metric: str,
    details: Sequence[DefenseOutcome],
) -> tuple[str, str]:
    """Format what the strongest attack gets beyond the guess by the first metric, and its difference to no defense.

    Where another attack is the strongest one without a defense, the difference names what it is to.
    """
    groups = group_scores(rows, axes, metric)
    better = next((row["better"] for row in rows if row["metric"] == metric), "higher")
    strongest = strongest_attacks(groups, 1 if better == "higher" else -1)
    if not strongest:
        return "", ""
    [group] = strongest
    unit = describe_metric(metric).unit
    of_attack = [row for row in rows if row["attack"] == group.attack and row["metric"] == metric]
    of_form = [row for row in of_attack if (row["knows_defenses"] == "1") == group.knows_defenses]
    gains = _gains(of_form, sign=1 if better == "higher" else -1)
    of_details = [item for item in details if (item.attack, item.metric) == (group.attack, metric)]
    exposed = next((item.exposed for item in of_details), "")
    if math.isnan(group.gain):
        leakage = "no guess to compare with"
    elif group.gain <= 0:
        leakage = f"at the guess on average, but beyond it for {exposed}" if exposed else "at the guess"
    elif group.is_exact:
        leakage = EXACT
    else:
        leakage = signed_text(group.gain, *paired_interval(metric, gains), unit)
    differences = [item.difference for item in of_details]
    difference = ""
    if differences and differences[0] is not None:
        difference = signed_text(differences[0].mean, differences[0].low, differences[0].high, unit)
        undefended = strongest_attacks(group_scores(controls, axes, metric), 1 if better == "higher" else -1)
        if {control.attack for control in undefended} != {group.attack}:
            difference += f", to {group.attack} without a defense"
    other_leak = _describe_other_leak(details, metric) if group.gain <= 0 else ""
    return f"{leakage} ({group.name}){other_leak}", difference


def _describe_other_leak(details: Sequence[DefenseOutcome], metric: str) -> str:
    """Say by which other metric which attack leaks most all the same, as a clause; empty where none does."""
    leaks: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for item in details:
        for side, form in ((item.naive, ""), (item.adaptive, f" {ADAPTIVE}")):
            if item.metric != metric and side is not None and side.reading.verdict == LEAKS:
                score = side.reading.summary
                value = explain_interval(score.mean, is_share=is_share(item.metric))
                text = f"{value}, guess {score.explained_floor} ({item.attack}{form})"
                leaks[item.metric].append((score.gain, text))
    if not leaks:
        return ""
    other = sort_metrics(leaks)[0]
    return f"; by {describe_metric(other).title} {max(leaks[other])[1]}"


def _gains(rows: Sequence[Row], sign: int) -> dict[Unit, float]:
    floors = mean_by_victim_and_seed(rows, "floor")
    values = mean_by_victim_and_seed(rows, "value")
    return {unit: sign * (value - floors[unit]) for unit, value in values.items() if unit in floors}


def describe_epsilon(epsilon: float) -> str:
    """Say how much protection a guarantee with this epsilon promises.

    >>> describe_epsilon(0.8), describe_epsilon(8.0), describe_epsilon(6e4)
    ('strong', 'weak', 'none')
    """
    return next(word for limit, word in _PROMISES if epsilon <= limit)


def _bytes_text(rows: Sequence[Row]) -> str:
    """Format the largest number of bytes; empty where the server saw no single client."""
    sizes = [float(row["bytes"]) for row in rows if row["bytes"]]
    return group_digits(round(max(sizes))) if sizes else ""


def _range_text(texts: Iterable[str]) -> str:
    """Format the value, or lowest to highest of several; empty where there is none."""
    values = sorted({float(text) for text in texts if text})
    ends = [f"{value:.4g}" for value in (values[0], values[-1])] if values else []
    return " to ".join(dict.fromkeys(ends))


def _explain_no_learning(rows: Sequence[Row]) -> str:
    """Say in a sentence that no model of a setting has learnt; empty where one has, or where that is not known."""
    by_seed = {row["seed"]: row for row in rows if row["accuracy"] and row["guess"]}
    if not by_seed:
        return ""
    accuracies = [float(row["accuracy"]) for row in by_seed.values()]
    guess = min(float(row["guess"]) for row in by_seed.values())
    return explain_low_accuracy(accuracies, guess, min(int(row["num_evaluated"]) for row in by_seed.values()))
