"""Differences between the scores of two runs, paired by victim where both attacked the same clients."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedsim.audit.evaluation import statistics
from fedsim.base.errors import number_of
from fedsim.interfaces.metric import describe_metric, explain_no_verdict
from fedsim.report.summary import (
    EXACT,
    Summary,
    are_independent,
    compares_victims,
    difference_by_shared_candidates,
    difference_interval,
    explain_inconclusive,
    interval_text,
    join_titles,
    mean_by_unit,
    summarise,
)
from fedsim.report.verdicts import UNDECIDED

MORE, LESS, NOT_SHOWN, EQUAL = "leaks more", "leaks less", "no difference shown", "equal"
SEEN_MORE, SEEN_LESS, MIXED = "more, as far as seen", "less, as far as seen", "neither, as far as seen"
FEWEST, ONE_SIDED_LEVEL = 6, 0.025
"""Fewest victims from which anything is concluded, for of five all differ in one direction by chance in 1 of 16 cases;
and significance level of a test for each direction."""
_PARTITION_SETTINGS = ("data.", "partition.", "federation.seed", "federation.clients")
"""Settings that determine who holds what."""
Rows = Sequence[Mapping[str, Any]]
"""Rows of `scores.csv`."""
Update = tuple[str, str, str]
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Difference of one metric of one attack between two runs.

    Attributes:
        attack: its name in the runs' reports; where these differ, the one that says more of its settings.
        base: the scores over all victims of the first run.
        other: those of the other run.
        first: the mean of `base`, over the updates that both runs attacked where the difference is paired.
        value: the same of `other`.
        paired: whether the difference is taken victim by victim.
        count: how many differences, one a victim (or a round, or a random start: see `Summary.unit`), or, where it is
            not paired, the smaller of the two numbers of victims.
        unit: what is counted.
        mean: of `other` less `base`; NaN where nothing can be compared.
        low: where the 95 % confidence interval of `mean` begins; NaN where there is none.
        high: where it ends.
        verdict: one of this module's words; empty for a metric that says nothing about leakage.
        missing: why the scores of the two runs are not compared; empty where they are.
        remark: the reason, and what else differs between the two attacks.
        is_equal: whether both runs have the same score of each update, and none that the other lacks.
    """

    attack: str
    base: Summary
    other: Summary
    first: float
    value: float
    paired: bool
    count: int
    unit: str
    mean: float
    low: float
    high: float
    verdict: str
    missing: str
    remark: str
    is_equal: bool


def difference_text(item: Difference) -> str:
    """Format the mean difference and its interval; – where nothing can be subtracted, as of two infinite means."""
    return "–" if math.isnan(item.mean) else interval_text(item.mean, item.low, item.high)


def score_beside_floor(mean: float, summary: Summary) -> str:
    """Format the mean score of a run, and beside it what a guess without the messages got, where there is one."""
    score = EXACT if summary.is_exact else f"{mean:.4g}"
    if not summary.floor_guess or math.isnan(summary.floor):
        return score
    return f"{score} (guess {summary.floor:.4g})"


def explain_other_clients(base: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> str:
    """Return why clients of one number hold different data in two runs; empty if they hold the same.

    Args:
        base, other: settings of the runs by `table.key`; None where they are not known.
    """
    if base is None or other is None:
        return "the settings of a recording made elsewhere are not known"
    differing = []
    for key in sorted({*base, *other}):
        if key.startswith(_PARTITION_SETTINGS) and base.get(key) != other.get(key):
            differing.append(key)
    if not differing:
        return ""
    return f"{', '.join(differing)} {'differs' if len(differing) == 1 else 'differ'}"


def differences(base: Rows, other: Rows, why_not_paired: str = "") -> list[Difference]:
    """Return a difference for each attack and metric that both runs scored, in the order of `base`.

    Args:
        why_not_paired: what `explain_other_clients` says.
    """
    base_summaries, other_summaries = summarise(base), summarise(other)
    partners = _partners(base_summaries, other_summaries)
    other_by_key = {(item.attack, item.metric): item for item in other_summaries}
    results = []
    for summary in base_summaries:
        key = partners.get(summary.attack, ""), summary.metric
        if key in other_by_key:
            results.append(_difference(summary, other_by_key[key], base, other, why_not_paired))
    return results


def explain_equality(items: Sequence[Difference]) -> str:
    """Say in a sentence that all scores of two runs are equal; empty where one is not, or nothing is compared."""
    compared = [item for item in items if not (item.base.missing and item.other.missing)]
    if not compared or not all(item.is_equal for item in compared):
        return ""
    attacks = list(dict.fromkeys(item.attack for item in compared))
    metrics = len(dict.fromkeys(item.base.metric for item in compared))
    most = max(compared, key=lambda item: item.count)
    counts = number_of(most.count, most.unit)
    return f"equal: all scores of {join_titles(attacks)}, by {number_of(metrics, 'metric')} over {counts}"


def unshared_attacks(base: Rows, other: Rows) -> tuple[list[str], list[str]]:
    """Return the attacks that only `base` scored, and those that only `other` did."""
    base_titles, other_titles = _unmatched_titles(base, other)
    return (
        [name for name, title in base_titles.items() if title not in other_titles.values()],
        [name for name, title in other_titles.items() if title not in base_titles.values()],
    )


def incomparable_attacks(base: Rows, other: Rows) -> list[str]:
    """Return a sentence for each attack that both runs scored, but in ways that cannot be compared.

    It was made in other ways, or some of its scores are by a metric that only one of the runs has.
    """
    base_titles, other_titles = _unmatched_titles(base, other)
    sentences = []
    for title in dict.fromkeys(base_titles.values()):
        if title in other_titles.values():
            base_names = join_titles([name for name in base_titles if base_titles[name] == title])
            other_names = join_titles([name for name in other_titles if other_titles[name] == title])
            sentences.append(
                f"{base_names} is not compared with {other_names}: they are not known to be made with the same "
                "settings and granted facts."
            )
    return sentences + _unshared_metrics(base, other)


def _unshared_metrics(base: Rows, other: Rows) -> list[str]:
    """Return a sentence for each attack of both runs with metrics that are those of one run alone."""
    base_summaries, other_summaries = summarise(base), summarise(other)
    sentences = []
    for base_name, other_name in _partners(base_summaries, other_summaries).items():
        base_metrics = {item.metric: item.name for item in base_summaries if item.attack == base_name}
        other_metrics = {item.metric: item.name for item in other_summaries if item.attack == other_name}
        unshared = base_metrics.keys() ^ other_metrics.keys()
        if unshared:
            names = join_titles(sorted((base_metrics | other_metrics)[metric] for metric in unshared))
            sentences.append(f"{base_name} has scores by {names} in only one of the two runs.")
    return sorted(sentences)


def _unmatched_titles(base: Rows, other: Rows) -> tuple[dict[str, str], dict[str, str]]:
    """Return by name the titles of the attacks of either run that have no partner in the other."""
    base_summaries, other_summaries = summarise(base), summarise(other)
    partners = _partners(base_summaries, other_summaries)
    return (
        {item.attack: item.attack_key[0] for item in base_summaries if item.attack not in partners},
        {item.attack: item.attack_key[0] for item in other_summaries if item.attack not in partners.values()},
    )


def _partners(base: Sequence[Summary], other: Sequence[Summary]) -> dict[str, str]:
    """Map the attacks of the first run to those of the other: by equal names or, of the rest, by equal settings.

    A run names an attack by its title alone where it made it in one way, and by what differs where in several.
    """
    same = {item.attack for item in base} & {item.attack for item in other}
    base_names = _names_by_settings([item for item in base if item.attack not in same])
    other_names = _names_by_settings([item for item in other if item.attack not in same])
    by_settings = {name: other_names[key] for key, name in base_names.items() if key in other_names}
    return {name: name for name in same} | by_settings


def _names_by_settings(items: Iterable[Summary]) -> dict[tuple[str, str, frozenset[str]], str]:
    """Return names by title, settings and granted facts, where only one attack has these."""
    names = defaultdict[tuple[str, str, frozenset[str]], set[str]](set)
    for item in items:
        names[item.attack_key[0], item.settings, item.granted].add(item.attack)
    return {key: several.pop() for key, several in names.items() if len(several) == 1}


def _difference(base: Summary, other: Summary, base_rows: Rows, other_rows: Rows, why_not_paired: str) -> Difference:
    unlike, unpaired = _explain_unlike_scores(base, other), bool(why_not_paired)
    missing = base.missing or other.missing or unlike
    if unlike:
        result = _ScoreDifferences(base.mean, other.mean, math.nan, math.nan, math.nan, 0, base.unit)
    elif unpaired:
        result = _compare_unpaired(base, other)
    else:
        result = _compare_paired(base, other, base_rows, other_rows)
    is_equal = result.is_equal and not missing
    shared_error = 0.0
    if result.count:
        candidates = [*base.examples.values(), *other.examples.values()]
        shared_error = difference_by_shared_candidates(base.metric, candidates)
    low, high = _widen_by_shared_candidates(result, shared_error)
    verdict, remark = ("", missing) if missing else _judge(base, result, why_not_paired, shared_error)
    if is_equal and verdict:
        verdict, remark = EQUAL, f"in {number_of(result.count, result.unit)}"
    # What else differs between the two attacks.
    remarks = [remark]
    if result.num_unmatched and result.count:
        remarks.append(f"without {number_of(result.num_unmatched, 'score')} that only one run has")
    if base.settings != other.settings:
        remarks.append("its settings differ")
    if base.granted != other.granted:
        remarks.append("its granted facts differ")
    if verdict:
        remarks += [f"scores of a run are {item.doubt_text}" for item in (base, other) if item.num_in_doubt]
    return Difference(
        attack=max(base.attack, other.attack, key=len),
        base=base,
        other=other,
        first=result.first,
        value=result.value,
        paired=not unpaired,
        count=result.count,
        unit=result.unit,
        mean=result.mean,
        low=low,
        high=high,
        verdict=verdict,
        missing=missing,
        remark="; ".join(filter(None, remarks)),
        is_equal=is_equal,
    )


def _explain_unlike_scores(base: Summary, other: Summary) -> str:
    """Say why two scores by one metric cannot be compared; empty where they can."""
    if base.higher_is_better != other.higher_is_better:
        return "higher values are better in one run and worse in the other; score both with the same metric"
    if base.instrument == other.instrument:
        return ""
    return (
        f"measured with '{base.instrument}' in one run and with '{other.instrument}' in the other, whose values cannot "
        "be compared; score both with the same"
    )


@dataclass(frozen=True)
class _ScoreDifferences:
    """Differences of scores in short.

    Attributes:
        first, value, mean, low, high, count, unit: see `Difference`.
        num_more, num_less: differences towards more and towards less leakage.
        num_unmatched: scores without a partner.
        is_equal: whether each score has a partner, which is equal.
        test: direction that Mann and Whitney's test shows: 1 for more leakage, -1 for less, 0 for neither.
    """

    first: float
    value: float
    mean: float
    low: float
    high: float
    count: int
    unit: str
    num_more: int = 0
    num_less: int = 0
    num_unmatched: int = 0
    is_equal: bool = False
    test: int = 0


def _compare_paired(base: Summary, other: Summary, base_rows: Rows, other_rows: Rows) -> _ScoreDifferences:
    """Subtract scores by update and random start, then average the differences as scores are, see `Summary`."""
    base_scores, other_scores = _scores_by_start(base, base_rows), _scores_by_start(other, other_rows)
    shares = _scores_by_start(base, base_rows, EXACT), _scores_by_start(other, other_rows, EXACT)
    exact = {key for key, share in shares[0].items() if share == shares[1].get(key) == 1}
    differences = subtract_pairs(base.metric, other_scores, base_scores, exact)
    shared = differences.keys()
    unit, array = _mean_by_unit(differences)
    first = statistics.mean(_mean_by_unit({key: base_scores[key] for key in shared})[1])
    value = statistics.mean(_mean_by_unit({key: other_scores[key] for key in shared})[1])
    low, high = difference_interval(base.metric, array, unit)
    towards_leakage = array if base.higher_is_better else -array
    return _ScoreDifferences(
        first if shared else base.mean,
        value if shared else other.mean,
        statistics.mean(array),
        low,
        high,
        len(array),
        unit,
        num_more=int((towards_leakage > 0).sum()),
        num_less=int((towards_leakage < 0).sum()),
        num_unmatched=len(base_scores) + len(other_scores) - 2 * len(shared),
        is_equal=bool(shared) and base_scores.keys() == other_scores.keys() and not any(differences.values()),
    )


def subtract_pairs(
    metric: str, values: Mapping[_Key, float], others: Mapping[_Key, float], exact: Collection[_Key]
) -> dict[_Key, float]:
    """Return the differences of scores that both have, see `statistics.subtract_scores`, in the order of `others`.

    Args:
        exact: keys of which all claims are exact in both. Nothing more or less leaks there by a metric of examples, be
            it 150 dB or 90.
    """
    of_examples = describe_metric(metric).of_examples
    differences = {}
    for key, other in others.items():
        if key in values:
            is_exact = of_examples and key in exact
            differences[key] = 0.0 if is_exact else float(statistics.subtract_scores(values[key], other))
    return differences


def _mean_by_unit(values: Mapping[Update, float]) -> tuple[str, NDArray[np.float64]]:
    """Return what is counted, and a mean for each, see `summary.mean_by_unit`."""
    rows = [{"victim": victim, "round": number, "value": value} for (victim, number, _), value in values.items()]
    unit, by_unit = mean_by_unit(rows, "value")
    return unit, np.array(list(by_unit.values()))


def _scores_by_start(item: Summary, rows: Rows, metric: str = "") -> dict[Update, float]:
    """Return the scores of an attack by victim, round and random start; by its metric unless another is named."""
    title, variant = item.attack_key
    scores = defaultdict(list)
    for row in rows:
        key = row["attack"], row["variant"], row["metric"]
        if key == (title, variant, metric or item.metric) and not row["missing"]:
            scores[str(row["victim"]), str(row["round"]), str(row["repeat"])].append(float(row["value"]))
    return {key: float(np.mean(values)) for key, values in scores.items()}


def _compare_unpaired(base: Summary, other: Summary) -> _ScoreDifferences:
    """Compute Welch's interval of the difference of two means, and Mann and Whitney's test.

    The test, unlike the interval, allows for infinite scores.
    """
    from scipy.stats import mannwhitneyu, ttest_ind  # which takes a second to import

    base_scores, other_scores = (np.array(list(item.values.values())) for item in (base, other))
    count = min(len(base_scores), len(other_scores))
    unit = base.unit if base.unit == other.unit else "start"
    low = high = math.nan
    if (
        not compares_victims(base.metric, unit)
        and count > 1
        and np.isfinite([*base_scores, *other_scores]).all()
        and base_scores.std() + other_scores.std()
    ):
        with warnings.catch_warnings():  # SciPy's, of equal scores in one of the runs, whose variance is just 0
            warnings.simplefilter("ignore", RuntimeWarning)
            interval = ttest_ind(other_scores, base_scores, equal_var=False).confidence_interval()
            low, high = map(float, interval)
    test = 0
    if count:
        statistic, p_value = mannwhitneyu(other_scores, base_scores)
        direction = float(np.sign(statistic - len(base_scores) * len(other_scores) / 2))
        if p_value <= 2 * ONE_SIDED_LEVEL:
            test = int(direction if base.higher_is_better else -direction)
    return _ScoreDifferences(base.mean, other.mean, other.mean - base.mean, low, high, count, unit, test=test)


def _judge(base: Summary, result: _ScoreDifferences, why_not_paired: str, shared_error: float) -> tuple[str, str]:
    """Return a verdict, and the reason for it.

    By a sign test over victims, or by Mann and Whitney's test where they are not paired. Unlike an interval of the
    mean, both hold for scores of any distribution, with infinite PSNR or all the same.
    """
    if reason := explain_no_verdict(base.metric):
        return "", reason
    if not result.count:
        return "", "no victim was attacked in both runs"
    counts = number_of(result.count, result.unit)
    enough = are_independent(base.metric, result.unit) and result.count >= FEWEST
    caveat = explain_inconclusive(base.metric) if result.unit == "victim" else "too few to tell"
    if why_not_paired:
        reason = f"{counts}, not paired, since {why_not_paired}"
        if not enough:
            return "", f"{reason}; {caveat}"
        return _allow_for_shared_candidates(result, _judge_by_ranks(base, result), reason, shared_error)
    reason = f"more in {result.num_more}, less in {result.num_less} of {counts}"
    if not enough:
        seen = {(True, False): SEEN_MORE, (False, True): SEEN_LESS}
        return seen.get((result.num_more > 0, result.num_less > 0), MIXED), f"{reason}, {caveat}"
    return _allow_for_shared_candidates(result, _judge_by_signs(result), reason, shared_error)


def _widen_by_shared_candidates(result: _ScoreDifferences, shared_error: float) -> tuple[float, float]:
    """Return the interval of the mean difference with the error of candidates that all have in common, as in a sweep.

    NaN for a rate at a threshold that they set, whose error is not known.
    """
    if result.is_equal or not shared_error:
        return result.low, result.high
    if math.isinf(shared_error):
        return math.nan, math.nan
    return statistics.widen_interval(result.low, result.high, result.mean, statistics.NORMAL_QUANTILE * shared_error)


def _allow_for_shared_candidates(
    result: _ScoreDifferences, verdict: str, reason: str, shared_error: float
) -> tuple[str, str]:
    """Return a verdict and its reason, where victims may share the non-members.

    Those that score higher by chance in one of the runs then move all victims the same way, which tests over
    victims take for so many voices, see `mean_deviation_by_chance`.
    """
    reach = statistics.NORMAL_QUANTILE * shared_error * math.sqrt(1 + 1 / result.count)
    if not reach or verdict not in (MORE, LESS) or abs(result.mean) > reach:
        return verdict, reason
    return NOT_SHOWN, f"{reason}, who may share their candidates"


def _judge_by_ranks(base: Summary, result: _ScoreDifferences) -> str:
    """Judge by Mann and Whitney's test; undecided where the difference of the means points the other way."""
    towards_leakage = result.mean if base.higher_is_better else -result.mean
    if result.test * towards_leakage < 0:
        return UNDECIDED
    return {1: MORE, -1: LESS}.get(result.test, NOT_SHOWN)


def _judge_by_signs(result: _ScoreDifferences) -> str:
    """Judge by the sign test; equal scores count for neither direction."""
    for verdict, count in ((MORE, result.num_more), (LESS, result.num_less)):
        if statistics.is_more_than_half(count, result.count, ONE_SIDED_LEVEL):
            return verdict
    return NOT_SHOWN
