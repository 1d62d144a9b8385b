"""What was attacked, what was not and why, and the worst that came out of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from fedsim.base.errors import name_rounds, number_of
from fedsim.base.grouping import group_by
from fedsim.dossier.contents import (
    LEAKS,
    NO_LEAK,
    NOT_CONCLUDED,
    NOTHING_KNOWN,
    Coverage,
    DossierVerdict,
    MissingAttack,
    Number,
    Result,
    WorstScore,
    format_number,
    to_float,
    to_number,
)
from fedsim.dossier.openness import NO_LEAK_VERDICTS, UNJUDGED, explain_openness, list_open_reasons, name_result
from fedsim.interfaces.metric import describe_metric
from fedsim.report import verdicts
from fedsim.report.attack_traits import attack_classes
from fedsim.report.headline import is_reported_beside
from fedsim.report.reported_run import ReportedRun
from fedsim.report.summary import enumerate_words
from fedsim.report.threats import list_granted_facts
from fedsim.report.verdicts import ScoreReading

_MAX_SENTENCES = 3
"""Most open reasons, and most worst cases, that are described."""


def read_finding_facts(run: ReportedRun) -> list[dict[str, Any]]:
    """Return the metadata of each readable finding of a run, with the name of its attack as `attack`."""
    facts = []
    for about in run.finding_facts:
        title = about["attack"]
        facts.append({**about, "title": title, "attack": run.attack_names[title, about["variant"]]})
    return facts


def describe_coverage(run: ReportedRun, findings: Sequence[Mapping[str, Any]]) -> Coverage:
    """Return which clients and rounds were attacked, and what the adversary was granted."""
    clients = set[int]()
    for header in run.recording.headers:
        for reply in header.replies:
            clients.update(reply.members or (reply.client,))
    granted_facts = []
    if findings:
        classes = attack_classes(run.audit, findings, trust=run.trust)
        granted_facts = list_granted_facts(run.audit, findings, classes)
    granted, unusual, victim_data, withheld = list[str](), list[str](), list[str](), list[str]()
    for fact in granted_facts:
        if fact.granted:
            (granted if fact.usual else unusual).append(fact.words)
        elif fact.usual and fact.withheld:
            withheld.append(fact.words)
        if fact.granted and fact.victims:
            victim_data.append(fact.victims)
    # Each victim and round once.
    victims, rounds, attacked_rounds = set[int](), dict[str, None](), set[int]()
    for finding in findings:
        victims.update(finding.get("members") or [int(finding["victim"])])
        rounds[str(finding["round"])] = None
        attacked_rounds.update(finding["rounds"])
    return Coverage(
        clients=len(clients),
        victims=sorted(victims),
        rounds=list(rounds),
        attacked_rounds=sorted(attacked_rounds),
        recorded_rounds=len(run.recording.headers),
        granted=granted,
        unusual=unusual,
        victim_data=victim_data,
        withheld=withheld,
    )


def make_result(
    reading: ScoreReading,
    rows: Sequence[Mapping[str, str]],
    *,
    is_first: bool,
    is_main: bool,
    setting: str = "",
    is_defended: bool = False,
    name: str = "",
) -> Result:
    """Return the result of an attack by a metric.

    Args:
        rows: its scores by all metrics, as rows of `scores.csv` or `sweep.csv`.
        is_main: whether it is the first metric by which the attack is to have one.
        is_defended: whether clients have a defense there.
        name: of the attack, where it is not that of the reading.
    """
    item = reading.summary
    return Result(
        setting=setting,
        is_defended=is_defended,
        attack=name or item.attack,
        metric=item.metric,
        title=item.name,
        higher_is_better=item.higher_is_better,
        mean=to_number(item.mean),
        low=to_number(item.low),
        high=to_number(item.high),
        floor=to_number(item.floor),
        floor_guess=item.floor_guess,
        victims=item.count if item.unit == "victim" else min(item.count, 1),
        unscored=item.num_missing,
        verdict=reading.verdict,
        remark=reading.remark,
        is_baseline=reading.baseline,
        is_first=is_first,
        open_reason=explain_openness(reading, rows, is_main=is_main),
        worst=_find_worst(rows, item.metric, higher_is_better=item.higher_is_better),
    )


def _find_worst(rows: Iterable[Mapping[str, str]], metric: str, *, higher_is_better: bool) -> WorstScore | None:
    """Return the score by `metric` that says most of a victim; of equal ones, the one furthest from its floor."""
    sign = 1.0 if higher_is_better else -1.0
    worst: Mapping[str, str] | None = None
    most = (-math.inf, -math.inf)
    exact_claims = set[tuple[str, ...]]()
    for row in rows:
        value = float(row["value"] or "nan")
        if row["metric"] == "exact" and value == 1:
            exact_claims.add(_claim_key(row))
        exposure = sign * value, -sign * float(row["floor"] or "nan")
        if row["metric"] == metric and not math.isnan(value) and (worst is None or exposure > most):
            worst, most = row, exposure
    if worst is None:
        return None
    seed = f", seed {worst['seed']}" if "cell" in worst else ""
    return WorstScore(
        client=int(worst["victim"]),
        round=f"{worst['round']}{seed}",
        value=to_number(float(worst["value"])),
        floor=to_number(float(worst["floor"] or "nan")),
        is_exact=_claim_key(worst) in exact_claims,
    )


def _claim_key(row: Mapping[str, str]) -> tuple[str, ...]:
    return row["victim"], row["round"], row["repeat"], row["seed"]


def collect_results(run: ReportedRun) -> list[Result]:
    """Return the results of all attacks of a run by all metrics, an attack's first metric first."""
    results = []
    seen, tried = set[str](), set[str]()
    for reading in run.readings:
        item = reading.summary
        rows = [row for row in run.scores if (row["attack"], row["variant"]) == item.attack_key]
        is_judged = reading.verdict not in UNJUDGED
        is_main = item.attack not in tried and not describe_metric(item.metric).meaning
        is_first = is_judged and item.attack not in seen
        results.append(make_result(reading, rows, is_first=is_first, is_main=is_main))
        if is_judged:
            seen.add(item.attack)
        if is_main:
            tried.add(item.attack)
    return results


def conclude(results: Sequence[Result], *, is_complete: bool) -> DossierVerdict:
    """Return the verdict on all attacks together; baselines do not count.

    A leak by any metric counts. That none is shown takes a verdict on every attack, all of its scores,
    and no metric that leaves it open, see `Result.open_reason`.

    Args:
        is_complete: whether no attack failed.
    """
    attacks = [result for result in results if not result.is_baseline]
    judged = [result for result in attacks if result.verdict not in UNJUDGED]
    if any(result.verdict == verdicts.LEAKS for result in judged):
        return LEAKS
    if not judged:
        return NOTHING_KNOWN
    is_open = any(result.verdict not in NO_LEAK_VERDICTS for result in judged) or bool(list_open_reasons(attacks))
    return NOT_CONCLUDED if is_open or list_unjudged(results) or not is_complete else NO_LEAK


def list_unjudged(results: Iterable[Result]) -> list[str]:
    """Return the attacks without a verdict by any metric."""
    is_judged: dict[str, bool] = {}
    for result in results:
        if not result.is_baseline:
            name = name_result(result)
            is_judged[name] = is_judged.get(name, False) or result.verdict not in UNJUDGED
    return [name for name, judged in is_judged.items() if not judged]


def describe_openness(results: Sequence[Result]) -> list[str]:
    """Say why a leak is not excluded although none is shown, for the first few results."""
    reasons = list_open_reasons(results)
    sentences = [f"A leak is not excluded by {reason}." for reason in reasons[:_MAX_SENTENCES]]
    if further := reasons[_MAX_SENTENCES:]:
        sentences.append(f"The same holds for {number_of(len(further), 'further metric')}.")
    return sentences


def describe_failures(missing: Sequence[MissingAttack]) -> list[str]:
    """Say which attacks were asked for and lack results."""
    failed = list(dict.fromkeys(attack.attack for attack in missing if attack.is_failure))
    if not failed:
        return []
    lack, subject = ("lacks", "it") if len(failed) == 1 else ("lack", "they")
    return [f"{enumerate_words(failed)} {lack} requested results, so it is unknown what {subject} would have shown."]


def list_reported(results: Iterable[Result]) -> list[list[Result]]:
    """Return for each attack its results that the headline reports: by its first metric, and by which more leaks.

    Baselines and attacks without a verdict have none.
    """
    of_attacks = [result for result in results if not result.is_baseline and result.verdict not in UNJUDGED]
    reported = []
    for judged in group_by(of_attacks, name_result).values():
        first = next((result for result in judged if result.is_first), None)
        if first is None:
            continue
        further = []
        for result in judged:
            if result is not first and is_reported_beside(first.verdict, result.verdict, result.metric):
                further.append(result)
        reported.append([first, *further])
    return reported


def describe_worst(results: Iterable[Result]) -> Iterator[str]:
    """Yield sentences on the client that each attack tells most of; leaks come first.

    Each is by the first metric that shows a leak, or else by the attack's first one. An attack that tells no more of
    that client than a guess does is left out.
    """
    chosen = []
    for reported in list_reported(results):
        leaking = [result for result in reported if result.verdict == verdicts.LEAKS]
        chosen.append(leaking[0] if leaking else reported[0])
    leaks_first = sorted(chosen, key=lambda result: result.verdict != verdicts.LEAKS)
    yield from map(describe_worst_case, islice(filter(_is_beyond_floor, leaks_first), _MAX_SENTENCES))


def _is_beyond_floor(result: Result) -> bool:
    """Return whether the worst score is further from nothing than that of a guess about the same client."""
    if result.worst is None or result.worst.floor is None:
        return False
    gain = to_float(result.worst.value) - to_float(result.worst.floor)
    return gain > 0 if result.higher_is_better else gain < 0


def describe_worst_case(result: Result) -> str:
    """Say which client an attack tells most of."""
    worst = result.worst
    assert worst is not None
    metric = describe_metric(result.metric)
    what = f"{metric.title} is {_quantity(worst.value, metric.unit)}"
    guess = f", where a guess without any message gets {_quantity(worst.floor, metric.unit)}"
    if worst.is_exact and metric.exact_from < math.inf:
        what = "all its examples were recovered exactly"
        guess = f"; by {metric.title}, a guess without any message gets {_quantity(worst.floor, metric.unit)}"
    where = f" ({result.setting})" if result.setting else ""
    return (
        f"The client most exposed to {result.attack}{where} is client {worst.client}, in {name_rounds(worst.round)}: "
        f"{what}{guess if worst.floor is not None else ''}."
    )


def _quantity(number: Number, unit: str) -> str:
    return f"{format_number(number)} {unit}".rstrip()
