"""Thresholds of the user: `leaks`, `undecided`, or a quantity beside a number, such as `psnr>20`.

What cannot be decided counts as reached: silence of a run is no proof that nothing leaks.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fedsim.base.errors import ConfigError, name_rounds, number_of
from fedsim.base.grouping import group_by
from fedsim.dossier.attack_results import list_unjudged
from fedsim.dossier.contents import (
    CANNOT_DECIDE,
    INFINITE,
    LEAKS,
    NO_LEAK,
    NOT_REACHED,
    NOTHING_KNOWN,
    REACHED,
    Dossier,
    Number,
    Outcome,
    Result,
    ThresholdResult,
    format_number,
    to_float,
)
from fedsim.dossier.openness import list_open_reasons, name_result
from fedsim.interfaces.metric import describe_metric
from fedsim.report.summary import enumerate_words

LEAKS_WORD, UNDECIDED_WORD = "leaks", "undecided"
_COMPARISON = re.compile(r"\s*([\w-]+)\s*(>=|<=|>|<)\s*(\S+)\s*")
_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_EPSILONS = (0.0, math.inf)


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """Quantity that a threshold can be about.

    Attributes:
        where: what that value is of.
        higher_is_worse: whether a threshold is a most (`>`) or a least (`<`).
        open_reason: why it may be worse than `value`; empty where it cannot be.
        value_range: the smallest and the largest value that it can have.
    """

    value: Number
    where: str
    higher_is_worse: bool
    open_reason: str = ""
    value_range: tuple[float, float] = (-math.inf, math.inf)


def judge_thresholds(dossier: Dossier, thresholds: Iterable[str]) -> list[ThresholdResult]:
    """Compare a dossier with thresholds of the user."""
    quantities = _collect_quantities(dossier)
    return [_judge_threshold(dossier, threshold, quantities) for threshold in thresholds]


def _judge_threshold(dossier: Dossier, threshold: str, quantities: Mapping[str, Quantity]) -> ThresholdResult:
    word = threshold.strip()
    if word == LEAKS_WORD:
        return _judge_leak(dossier, threshold)
    if word == UNDECIDED_WORD:
        return _judge_undecided(dossier, threshold)
    name, sign, limit = _parse_comparison(threshold, quantities)
    quantity = quantities[name]
    expected = ">" if quantity.higher_is_worse else "<"
    if sign[0] != expected:
        raise ConfigError(
            f"--fail-if '{threshold}': {'higher' if quantity.higher_is_worse else 'lower'} values of {name} are worse, "
            f"so it would pass what is worst; write {name}{expected}{limit:g}"
        )
    _check_limit(threshold, name, sign, limit, quantity.value_range)
    value, where = to_float(quantity.value), quantity.where
    if not dossier.evidence.is_intact:
        return _result(threshold, CANNOT_DECIDE, "files of the run were changed", quantity.value)
    if not math.isnan(value) and _OPERATORS[sign](value, limit):
        return _result(threshold, REACHED, f"{name} is {format_number(quantity.value)} ({where})", quantity.value)
    if quantity.open_reason:
        return _result(threshold, CANNOT_DECIDE, quantity.open_reason, quantity.value)
    return _result(threshold, NOT_REACHED, f"{name} is {format_number(quantity.value)} ({where})", quantity.value)


def _check_limit(threshold: str, name: str, sign: str, limit: float, value_range: tuple[float, float]) -> None:
    """Raise ConfigError where all values that a quantity can have are on one side of a limit."""
    lowest, highest = value_range
    is_beyond = _OPERATORS[sign]
    if is_beyond(lowest, limit) == is_beyond(highest, limit):
        outcome = "always" if is_beyond(lowest, limit) else "never"
        ends = f"{lowest:g} to {highest:g}" if math.isfinite(highest) else f"{lowest:g} up"
        raise ConfigError(
            f"--fail-if '{threshold}': is {outcome} reached, since {name} has values from {ends}; write a limit in "
            "between"
        )


def _result(threshold: str, outcome: Outcome, why: str, observed: Number = None) -> ThresholdResult:
    return ThresholdResult(threshold=threshold, outcome=outcome, why=why, observed=observed)


def _parse_comparison(threshold: str, quantities: Mapping[str, Quantity]) -> tuple[str, str, float]:
    """Return the name of the quantity, the sign and the limit of a threshold."""
    parts = _COMPARISON.fullmatch(threshold)
    if parts is None:
        word = threshold.strip()
        hint = f"; write it as {word}>NUMBER or {word}<NUMBER" if word in quantities else ""
        raise ConfigError(
            f"--fail-if '{threshold}': expected '{LEAKS_WORD}', '{UNDECIDED_WORD}' or a quantity and a number such as "
            f"psnr>20{hint}; it has {', '.join(quantities)}"
        )
    name, sign, number = parts.groups()
    titles = {describe_metric(metric).title.lower(): metric for metric in quantities}
    name = name if name in quantities else titles.get(name.lower(), name)
    if name not in quantities:
        raise ConfigError(
            f"--fail-if '{threshold}': '{name}' names nothing that this dossier has; it has "
            f"{', '.join([LEAKS_WORD, UNDECIDED_WORD, *quantities])}"
        )
    try:
        limit = float(number)
    except ValueError:
        limit = math.nan
    if not math.isfinite(limit):
        raise ConfigError(f"--fail-if '{threshold}': expected a number after {sign}, got '{number}'")
    return name, sign, limit


def _judge_leak(dossier: Dossier, threshold: str) -> ThresholdResult:
    """Return whether anything is shown to leak."""
    if dossier.verdict == LEAKS:
        attacks = dict.fromkeys(name_result(result) for result in relevant_results(dossier) if result.verdict == LEAKS)
        return _result(threshold, REACHED, f"shown by {enumerate_words(list(attacks))}")
    if dossier.verdict == NOTHING_KNOWN:
        return _result(threshold, CANNOT_DECIDE, "nothing that can be relied on was scored")
    if reasons := _explain_unknown(dossier):
        return _result(threshold, CANNOT_DECIDE, "; ".join(reasons))
    return _result(threshold, NOT_REACHED, f"the verdict is '{dossier.verdict}'")


def _judge_undecided(dossier: Dossier, threshold: str) -> ThresholdResult:
    """Return whether it is neither shown that something leaks nor that nothing does."""
    is_open = dossier.verdict not in (LEAKS, NO_LEAK)
    return _result(threshold, REACHED if is_open else NOT_REACHED, f"the verdict is '{dossier.verdict}'")


def _explain_unknown(dossier: Dossier) -> list[str]:
    """Return why attacks that were asked for are not known to find nothing."""
    reasons = []
    if unjudged := list_unjudged(relevant_results(dossier)):
        reasons.append(f"there is no verdict on {enumerate_words(unjudged)}")
    reasons += list_open_reasons(relevant_results(dossier))
    if failed := [attack.attack for attack in dossier.missing if attack.is_failure]:
        names = list(dict.fromkeys(failed))
        reasons.append(f"{enumerate_words(names)} {'lacks' if len(names) == 1 else 'lack'} results that were asked for")
    return reasons


def relevant_results(dossier: Dossier) -> list[Result]:
    """Return the results of attacks, of a sweep those on settings with a defense, if there are any."""
    attacks = [result for result in dossier.results if not result.is_baseline]
    return [result for result in attacks if result.is_defended] or attacks


def _collect_quantities(dossier: Dossier) -> dict[str, Quantity]:
    """Return what thresholds can be about, by name."""
    quantities = {}
    for metric, results in group_by(relevant_results(dossier), lambda result: result.metric).items():
        if not describe_metric(metric).meaning:  # else it says nothing about leakage
            quantities[metric] = _worst_of_metric(metric, results, dossier)
    return quantities | _epsilon_quantities(dossier) | _accuracy_quantity(dossier)


def _worst_of_metric(metric: str, results: Sequence[Result], dossier: Dossier) -> Quantity:
    """Return the worst score of any client by a metric."""
    higher = results[0].higher_is_better
    sign = 1.0 if higher else -1.0
    value_range = describe_metric(metric).value_range
    scored = [result for result in results if result.worst is not None]
    reasons = _explain_unknown(dossier)
    lacking = [result.attack for result in results if result.worst is None or result.unscored]
    if lacking:
        reasons.append(f"{metric} was not computed for all clients of {enumerate_words(list(dict.fromkeys(lacking)))}")
    if not scored:
        return Quantity(
            value=None, where="", higher_is_worse=higher, open_reason="; ".join(reasons), value_range=value_range
        )
    worst = max(scored, key=lambda result: sign * to_float(result.worst.value if result.worst else None))
    assert worst.worst is not None
    where = f"{worst.attack}, client {worst.worst.client}, {name_rounds(worst.worst.round)}"
    return Quantity(
        value=worst.worst.value,
        where=f"{where}, {worst.setting}" if worst.setting else where,
        higher_is_worse=higher,
        open_reason="; ".join(reasons),
        value_range=value_range,
    )


def _epsilon_quantities(dossier: Dossier) -> dict[str, Quantity]:
    """Return the largest proved epsilon, infinite where nothing is proved, and the largest measured one."""
    defended = [setting.name for setting in dossier.settings if setting.is_defended]
    proved = {proof.setting for proof in dossier.proofs}
    unproved = [name for name in defended if name not in proved]
    nothing = f"no guarantee is proved for {enumerate_words(unproved)}" if unproved else "no guarantee is proved"
    epsilon = Quantity(value=INFINITE, where=nothing, higher_is_worse=True, value_range=_EPSILONS)
    if dossier.proofs and not unproved:
        most = max(dossier.proofs, key=lambda proof: to_float(proof.epsilon))
        where = f"{most.defense}, {most.setting}" if most.setting else most.defense
        epsilon = replace(epsilon, value=most.epsilon, where=f"proved of {where}")
    measured = Quantity(
        value=None,
        where="",
        higher_is_worse=True,
        open_reason="no canaries measured epsilon",
        value_range=_EPSILONS,
    )
    if dossier.measured:
        highest = max(dossier.measured, key=lambda item: to_float(item.measured))
        where = f"{highest.defense} of client {highest.client}"
        measured = replace(measured, value=highest.measured, where=where, open_reason="")
    return {"epsilon": epsilon, "measured-epsilon": measured}


def _accuracy_quantity(dossier: Dossier) -> dict[str, Quantity]:
    if dossier.accuracy is None:
        return {}
    value = dossier.accuracy.accuracy
    reason = "" if value is not None else "neither the run nor its clients evaluated the model"
    where = f"of {number_of(dossier.accuracy.examples, 'example')}" if dossier.accuracy.examples else ""
    accuracy = Quantity(value=value, where=where, higher_is_worse=False, open_reason=reason, value_range=(0.0, 1.0))
    return {"accuracy": accuracy}
