"""Scores in short: one line for each attack and metric, with a confidence interval and a verdict.

Only `reading` decides on a verdict; the page, its headline and the terminal quote it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.attacks import NO_ATTACKS, OPTIMAL
from fedsim.auditing.variants import named
from fedsim.evaluation import statistics
from fedsim.evaluation.imputation import IMPUTED

LEAKS, UNDECIDED, GUESSING = "leaks", "undecided", "no better than guessing"
BEYOND, NOT_BEYOND = "beyond the floor", "not beyond the floor"
LESS_THAN_PUBLIC = "less than public data do"
NOT_JUDGED = "not judged"
FEWEST = 5
_ROUNDING = 1e-9
"""Of a mean gain: a guess that is right as often as its floor is no better than that."""
_OF_FEW_MESSAGES = ("property_accuracy", "property_client_accuracy")
"""Fewest victims from which anything is concluded: by chance, four are all beyond the floor in 1 of 16 cases."""
_SHARES = {
    "label_accuracy", "recover_rate", "tokens_found", "words_found", "source_accuracy", "attribute_accuracy",
    "attribute_balanced_accuracy", "local_accuracy", "recovered",
    "exact", "certified", "false_certificates", "columns_right",
    "tpr_at_1_in_100", "tpr_at_1_in_1000", "property_accuracy", "property_client_accuracy",
}  # fmt: skip
"""Metrics that are shares of something, in [0, 1]."""
_TOGETHER = {"property_auc", "property_client_auc"}
"""Metrics by which a victim is compared with clients that are victims as well, so that their scores err together."""
_COSINES = ("zest", "zest_other_start", "zest_of_optima")
_RANGES = dict.fromkeys(("ssim", "class_ssim", *_COSINES), (-1.0, 1.0))
_UNIT = (
    "mse", "membership_auc", "membership_accuracy", "label_distance", "label_cosine", "property_auc",
    "property_client_auc",
)  # fmt: skip
_RANGES |= dict.fromkeys(_UNIT, (0.0, 1.0))
_RANGES |= dict.fromkeys(
    ("psnr", "class_psnr", "lpips", "parameter_distance", "local_loss", "local_mape"), (0.0, math.inf)
)
"""Lowest and highest value of other metrics."""
_NAMES = {
    "psnr": "PSNR, dB",
    "ssim": "SSIM",
    "mse": "MSE",
    "lpips": "LPIPS",
    "l_sim": "L_sim",
    "l_sim_line": "L_sim, best on the line",
    "class_psnr": "class PSNR, dB",
    "class_ssim": "class SSIM",
    "zest": "Zest",
    "zest_other_start": "Zest, other start",
    "zest_of_optima": "Zest of the two optima",
    "local_mape": "local MAPE, %",
    "membership_auc": "membership AUC",
    "membership_accuracy": "membership balanced accuracy",
    "label_distance": "label distribution, total variation",
    "label_cosine": "label distribution, cosine",
    "property_auc": "property of messages, AUC",
    "property_accuracy": "property of messages, accuracy",
    "property_client_auc": "property of clients, AUC",
    "property_client_accuracy": "property of clients, accuracy",
    "tpr_at_1_in_100": "TPR at FPR 1 %",
    "tpr_at_1_in_1000": "TPR at FPR 0.1 %",
}
NO_LEAKAGE = {
    "l_sim": "how well the claims explain the message, not leakage",
    "l_sim_line": "how well the claims explain the message, not leakage",
    "certified": "what the attack itself is sure of, without the truth",
    "false_certificates": "of those, what is not exact: above 0 the attack is wrong",
}
"""Metrics that say nothing about leakage, and what they say."""
_OF_MODELS = {"parameter_distance", "zest", "local_loss", "local_accuracy", "local_mape"}
"""Metrics whose `ceiling` is no bound, but the score of the victim's optimal local model."""


def metric_name(metric: str) -> str:
    """A metric's name in a text, with its unit."""
    return _NAMES.get(metric, metric.replace("_", " "))


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One metric of one attack over all its victims.

    Further rounds of a victim, and further random starts on an update, say nothing about another victim, so they are
    averaged first. Only where there is one victim is the interval over its rounds, and only where there is one update
    is it over the random starts. Where victims are compared with one another there is none, see `apart`.

    Attributes:
        attack: its name, which tells it from the others.
        made: its title and variant, see `fedsim.auditing.variants`.
        count: number of victims, or of updates where there is but one victim, or of random starts
            where there is but one update.
        unit: what is counted, `victim`, `round` or `start`.
        mean: mean score, each the mean over a victim's images; NaN where `missing`.
        low: where the 95 % confidence interval of `mean` begins, see `interval`; NaN where there is none.
        high: where it ends.
        floor: mean of the floors.
        floor_guess: which guess set the floor most often.
        nearest: mean score of the public examples closest to the true ones, NaN where none are known.
        gain: mean advantage over the floor, counted towards leakage.
        ahead: how many of `count` are beyond their floor.
        ceiling: mean score of perfect findings, NaN where there is no bound.
        values: the score of each of `count`, by what is counted.
        settings: those that differ from the attack's defaults, as JSON.
        granted: names of the facts that the attack was handed.
    """

    attack: str
    made: tuple[str, str]
    metric: str
    count: int
    unit: str
    mean: float
    low: float
    high: float
    floor: float
    floor_guess: str
    nearest: float
    gain: float
    ahead: int
    ceiling: float
    higher_is_better: bool
    missing: str
    values: Mapping[str, float]
    settings: str
    granted: frozenset[str]

    @property
    def knows_defenses(self) -> bool:
        """Whether it is an adaptive attack, which was handed the defenses of the clients."""
        return "defenses" in self.granted

    @property
    def name(self) -> str:
        """The metric's name in a text, with its unit."""
        return metric_name(self.metric)

    @property
    def interval_text(self) -> str:
        """`mean ± margin`, or `mean [low, high]` where the interval is not symmetric about the mean."""
        return interval_text(self.mean, self.low, self.high)

    @property
    def count_text(self) -> str:
        """`n = count`, and of what where that is not of victims."""
        return f"n = {self.count}" + ("" if self.unit == "victim" else f" {self.unit}{'s' * (self.count != 1)}")

    @property
    def text(self) -> str:
        """`mean ± margin (n = count)`, or why there is none."""
        return f"not computed: {self.missing}" if self.missing else f"{self.interval_text} ({self.count_text})"

    @property
    def floor_text(self) -> str:
        """The floor and the guess behind it."""
        if self.missing:
            return ""
        return f"{self.floor:.4g} ({self.floor_guess})" if self.floor_guess else "none"

    @property
    def nearest_text(self) -> str:
        """The score of the nearest public examples, if there are any."""
        return f"{self.nearest:.4g}" if math.isfinite(self.nearest) else ""

    @property
    def direction(self) -> str:
        """Which way is more leakage."""
        return "higher" if self.higher_is_better else "lower"

    @property
    def best_text(self) -> str:
        """The score of the best possible finding, or for local models that of the optimal local model."""
        if not math.isfinite(self.ceiling):
            return ""
        if self.metric in _OF_MODELS:
            return f"{self.ceiling:.4g} by the optimal local model"
        return f"at {'most' if self.higher_is_better else 'least'} {self.ceiling:.4g}"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What has to be known about an attack to read its scores.

    Attributes:
        name: its name, which tells it from the others; empty where the scores alone give the name.
        main_metric: the metric by which it is judged first; empty for the first one.
        source: the model that it takes as its claim; empty where there is none.
    """

    name: str = ""
    main_metric: str = ""
    source: str = ""

    @property
    def baseline(self) -> str:
        """Why this does not count as an attack; empty for an attack."""
        if self.source == OPTIMAL:
            return "no attack: it reads the victim's optimal local model, which only the evaluator has"
        return f"a baseline: it reads the {self.source} model as it was sent" if self.source in NO_ATTACKS else ""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A summary, its verdict in a few words (empty where there is none), and a remark on it."""

    summary: Summary
    verdict: str
    remark: str
    baseline: bool = False


def lines(rows: Iterable[Mapping[str, Any]], kinds: Mapping[tuple[str, str], Kind]) -> list[Line]:
    """A line for each attack and metric; the main metric of an attack comes first.

    Args:
        rows: of `scores.csv`.
        kinds: by the title and the variant of the attack.
    """
    items = summarise(rows, {made: kind.name for made, kind in kinds.items() if kind.name})
    order = list(dict.fromkeys(item.attack for item in items))
    found = []
    for item in sorted(
        items, key=lambda item: (order.index(item.attack), item.metric != _kind(kinds, item).main_metric)
    ):
        why = _kind(kinds, item).baseline
        verdict, remark = reading(item)
        if _kind(kinds, item).source == OPTIMAL:
            verdict, remark = "", ""
        found.append(
            Line(
                summary=item,
                verdict=verdict,
                remark="; ".join(filter(None, (why, remark))),
                baseline=bool(why),
            )
        )
    return found


def _kind(kinds: Mapping[tuple[str, str], Kind], item: Summary) -> Kind:
    return kinds.get(item.made, Kind())


def reading(item: Summary) -> tuple[str, str]:
    """A verdict in a few words, and the reason for it.

    `leaks` means that more than half of such victims are beyond the floor: the mean is, and so many of the attacked
    victims are that tossing a coin for each would give as many in at most 5 % of cases (sign test). Unlike an interval
    of the mean, this holds for scores of any distribution, with two modes or with infinite PSNR; where scores are of a
    few messages, the coin falls as the floor says. With fewer than five
    victims no outcome is that rare, and the rounds of one victim say nothing about another victim. There the verdict
    only says what was seen: `beyond the floor`, `not beyond the floor`, or `undecided` where it is some of them. So it
    does where victims are compared with one another, see `apart`.
    """
    if item.missing:
        return NOT_JUDGED, item.missing
    if (about := NO_LEAKAGE.get(item.metric)) is not None:
        return "", about
    if math.isnan(item.gain):
        return "", "no floor to compare with"
    told = f"{item.ahead} of {item.count} {item.unit}{'s' * (item.count != 1)}"
    if not apart(item.metric, item.unit) or item.count < FEWEST:
        verdict = {item.count: BEYOND, 0: NOT_BEYOND}.get(item.ahead, UNDECIDED)
        few = "of one victim only" if item.unit != "victim" else few_text(item.metric)
        if verdict == NOT_BEYOND and item.floor_guess == IMPUTED and item.gain < 0:
            verdict = LESS_THAN_PUBLIC
        beyond = " beyond the floor" if verdict in (UNDECIDED, LESS_THAN_PUBLIC) else ""
        return verdict, "one victim only" if item.count == 1 else f"{told}{beyond}, {few}"
    rare = statistics.more_than_half(item.ahead, item.count, expected=_luck(item))
    if rare and item.gain > _ROUNDING:
        return LEAKS, told
    if rare or item.gain > _ROUNDING:
        return UNDECIDED, f"{told} beyond the floor"
    behind = statistics.fewer_than_half(item.ahead, item.count) and item.gain < 0
    return (LESS_THAN_PUBLIC if behind and item.floor_guess == IMPUTED else GUESSING), f"{told} beyond the floor"


def _luck(item: Summary) -> float:
    """Return how often a guess as good as the floor is ahead of it, by chance alone; at least half.

    Where a victim's score is of one message, and so 0 or 1, the guess is ahead of its floor whenever it is right: as
    often as the floor says. So it is, nearly, of a few messages.
    """
    return max(0.5, item.floor) if item.metric in _OF_FEW_MESSAGES else 0.5


def headline(found: Sequence[Line]) -> str:
    """The result in short: a sentence for each metric and verdict.

    Each attack is reported by its first metric that has a verdict and, if it does not leak by that one, by the first
    metric by which it does. Baselines get sentences of their own.
    """
    attacks = [line for line in found if not line.baseline]
    besides = _told(_besides(attacks))
    sentences = [*_told(_firsts(attacks)), *(f"Besides, {text[0].lower()}{text[1:]}" for text in besides)]
    if baselines := [line for line in found if line.baseline and line.verdict]:
        sentences += ["Baselines are not counted as attacks.", *_told(_firsts(baselines))]
    if silent := [title for title in _titles(attacks) if not any(_judged(attacks, title))]:
        sentences.append(f"There is no verdict on {_all_of(silent)}.")
    if sentences and (most := most_victims(found)) < FEWEST:
        only = "one victim was" if most <= 1 else f"{most} victims were"
        sentences.append(f"Only {only} attacked, too few to conclude from.")
    return " ".join(sentences)


def most_victims(found: Iterable[Line]) -> int:
    """The largest number of victims that any score is about."""
    return max((line.summary.count if line.summary.unit == "victim" else 1 for line in found), default=0)


def _titles(found: Iterable[Line]) -> list[str]:
    return list(dict.fromkeys(line.summary.attack for line in found))


def _judged(found: Iterable[Line], title: str) -> list[Line]:
    return [line for line in found if line.summary.attack == title and line.verdict not in ("", NOT_JUDGED)]


def telling(found: Sequence[Line]) -> dict[str, list[Line]]:
    """By attack, the lines that say what it is worth: the headline and the cards of the page tell these.

    The first is that of its first metric that has a verdict. If the attack does not leak by that, those of all metrics
    follow by which it does. An attack without a verdict has no lines.
    """
    judged = {title: _judged(found, title) for title in _titles(found)}
    leaking = (LEAKS, BEYOND)
    return {
        title: own[:1] + [line for line in own[1:] if own[0].verdict not in leaking and line.verdict in leaking]
        for title, own in judged.items()
    }


def _firsts(found: Sequence[Line]) -> list[list[Line]]:
    """Of each attack that has a verdict, the line of its first metric."""
    return [own[:1] for own in telling(found).values() if own]


def _besides(attacks: Sequence[Line]) -> list[list[Line]]:
    """Of each attack that does not leak by its first metric, the lines of all by which it does, by verdict."""
    by_verdict = (
        [line for line in own[1:] if line.verdict == verdict]
        for own in telling(attacks).values()
        for verdict in (LEAKS, BEYOND)
    )
    return [some for some in by_verdict if some]


def _told(claims: Iterable[Sequence[Line]]) -> list[str]:
    """`By METRICS, ATTACKS leak.` of lines of one attack and verdict each; attacks of which it is so together."""
    groups: dict[tuple[str, str], list[str]] = {}
    for some in claims:
        metrics = _enumerated(list(dict.fromkeys(line.summary.name.split(",")[0] for line in some)))
        groups.setdefault((metrics, some[0].verdict), []).append(some[0].summary.attack)
    order = list(dict.fromkeys(metrics for metrics, _ in groups))
    return [
        f"By {metrics}, {_claim(groups[metrics, verdict], verdict)}."
        for metrics in order
        for verdict in _CLAIMS
        if (metrics, verdict) in groups
    ]


_CLAIMS = {
    LEAKS: ("leaks", "leak"),
    BEYOND: (f"is {BEYOND}", f"are {BEYOND}"),
    UNDECIDED: (f"is {UNDECIDED}", f"are {UNDECIDED}"),
    GUESSING: (f"is {GUESSING}", f"are {GUESSING}"),
    NOT_BEYOND: (f"is {NOT_BEYOND}", f"are {NOT_BEYOND}"),
    LESS_THAN_PUBLIC: (f"tells {LESS_THAN_PUBLIC}", f"tell {LESS_THAN_PUBLIC}"),
}
"""What a sentence says of one attack, and of several, by verdict."""


def _claim(titles: Sequence[str], verdict: str) -> str:
    """`sme and spear-ica leak`."""
    return f"{_all_of(titles)} {_CLAIMS[verdict][len(titles) > 1]}"


def _all_of(titles: Sequence[str]) -> str:
    """Titles of attacks within a sentence, in quotes where one contains a comma."""
    return _enumerated([f"'{title}'" for title in titles] if any("," in title for title in titles) else titles)


def _enumerated(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def listed(titles: Sequence[str]) -> str:
    """Titles of attacks, separated by commas, or by semicolons where a title contains a comma."""
    return ("; " if any("," in title for title in titles) else ", ").join(titles)


def summarise(rows: Iterable[Mapping[str, Any]], names: Mapping[tuple[str, str], str] | None = None) -> list[Summary]:
    """Group rows of `scores.csv` by attack and metric, in order of appearance.

    One attack made with several settings is several attacks, whose names say what differs (`sme (iterations=10)`).

    Args:
        names: see `fedsim.auditing.variants.named`.
    """
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in named(rows, names):
        groups[str(row["attack"]), str(row["metric"])].append(row)
    return [_summary(attack, metric, group) for (attack, metric), group in groups.items()]


def _summary(attack: str, metric: str, group: list[Mapping[str, Any]]) -> Summary:
    computed = [row for row in group if not row["missing"]]
    unit, by_unit = units(computed, "value")
    values, floors = _array(by_unit), _array(units(computed, "floor")[1])
    guesses = [str(row["floor_guess"]) for row in computed]
    higher = str(group[0]["higher_is_better"]) == "True"
    low, high = interval(metric, values, unit)
    gains = statistics.gains(values, floors, higher_is_better=higher)
    return Summary(
        attack=attack,
        made=(group[0]["title"], group[0]["variant"]),
        metric=metric,
        count=len(values),
        unit=unit,
        mean=statistics.mean(values),
        low=low,
        high=high,
        floor=statistics.mean(floors),
        floor_guess=max(guesses, key=guesses.count, default=""),
        nearest=statistics.mean(_array(units(computed, "nearest_public")[1])),
        gain=statistics.mean(gains),
        ahead=int((gains > 0).sum()),
        ceiling=float(np.mean([float(row["ceiling"]) if row["ceiling"] != "" else math.nan for row in group])),
        higher_is_better=higher,
        missing="" if len(values) else str(group[0]["missing"]),
        values=by_unit,
        settings=str(group[0]["settings"]),
        granted=frozenset(str(group[0]["granted"]).split()),
    )


def units(rows: Iterable[Mapping[str, Any]], column: str) -> tuple[str, dict[str, float]]:
    """What is counted, and a value for each: victims; of one victim its rounds; of one update its random starts."""
    victims: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        victims[str(row["victim"])][str(row["round"])].append(float(row[column]))
    means = {
        victim: {number: float(np.mean(starts)) for number, starts in updates.items()}
        for victim, updates in victims.items()
    }
    if len(means) > 1:
        return "victim", {victim: float(np.mean(list(updates.values()))) for victim, updates in means.items()}
    for rounds in means.values():
        if len(rounds) > 1:
            return "round", rounds
    starts = [start for updates in victims.values() for starts in updates.values() for start in starts]
    return "start" if len(starts) > 1 else "victim", {str(place): start for place, start in enumerate(starts)}


def _array(by_unit: Mapping[str, float]) -> NDArray[np.float64]:
    return np.array(list(by_unit.values()))


def is_share(metric: str) -> bool:
    """Whether a metric is a share of something."""
    return metric in _SHARES


def apart(metric: str, unit: str = "victim") -> bool:
    """Whether scores by `metric` of so many victims of one run are as many independent cases.

    Those of rounds or of random starts of one victim are not. Nor are those of victims that are compared with one
    another: by the AUC of a property a message that is out of order costs its sender, and all of the other kind. An
    interval over such victims would hold the true mean in some 70 of 100 cases; other runs have to tell.
    """
    return unit == "victim" and metric not in _TOGETHER


def err_together(metric: str, unit: str) -> bool:
    """Whether scores by `metric` are of victims of one run that are compared with one another, see `apart`."""
    return unit == "victim" and not apart(metric)


def few_text(metric: str) -> str:
    """Why nothing is concluded from victims."""
    return "too few to tell" if apart(metric) else "which are compared with one another"


def value_range(metric: str) -> tuple[float, float]:
    """The lowest and the highest value of a metric."""
    return (0.0, 1.0) if is_share(metric) else _RANGES.get(metric, (-math.inf, math.inf))


def interval(metric: str, values: NDArray[np.float64], unit: str = "victim") -> tuple[float, float]:
    """The 95 % confidence interval of a metric's mean, see `fedsim.evaluation.statistics.interval`.

    NaN where it is over victims of one run that are not `apart`.
    """
    if err_together(metric, unit):
        return math.nan, math.nan
    lowest, highest = value_range(metric)
    return statistics.interval(values, share=is_share(metric), lowest=lowest, highest=highest)


def difference_interval(metric: str, values: NDArray[np.float64], unit: str = "victim") -> tuple[float, float]:
    """The same of the mean of paired differences of a metric."""
    if err_together(metric, unit):
        return math.nan, math.nan
    if not is_share(metric):
        return statistics.interval(values)
    low, high = statistics.interval((values + 1) / 2, share=True)  # differences of shares lie in [-1, 1]
    return 2 * low - 1, 2 * high - 1


def interval_text(mean: float, low: float, high: float) -> str:
    """`mean ± margin`, or `mean [low, high]` where that is not symmetric, or the mean alone where there is none."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return f"{mean:.4g}"
    below, above = mean - low, high - mean
    if math.isclose(below, above, rel_tol=1e-6, abs_tol=1e-12):
        return f"{mean:.4g} ± {above:.2g}"
    return f"{mean:.4g} [{low:.2g}, {high:.2g}]"
