"""Probes of what the proof of a defense takes for granted: fresh noise, sampling, epsilon and delta."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from fedsim.base.randomness import generator
from fedsim.interfaces.mechanism import Mechanism
from fedsim.privacy.audited_defense import LAYERS, LOAD, SIZE, AuditedDefense
from fedsim.privacy.ceilings import compute_tight_epsilon
from fedsim.privacy.noise_probes import FALSE_ALARMS, ProbeResult, normal_limit
from fedsim.training.sampling import poisson_batches, shuffled_batches
from fedsim.training.settings import LocalTraining

_DELTAS = (1e-3, 1e-5, 1e-8)
_SLACK = 0.02
"""Share by which an epsilon may be below the tight one, for the rounding of privacy losses."""
_BATCHES = 400
_SETTINGS = LocalTraining(local_epochs=1, batch_size=LOAD.batch_size, learning_rate=0.1)
_REPEATS = 10


def probe_sampling(audited: AuditedDefense, mechanism: Mechanism) -> ProbeResult:
    """Compare the sampling that the accountant assumes with the batches that training draws."""
    question = f"examples are sampled independently, with the rate {mechanism.rate:.4g} that the accountant assumes"
    if mechanism.rate == 1:
        return ProbeResult(question=question, seen="no amplification by sampling is claimed")
    if audited.hook == "on_update":
        return ProbeResult(
            question=question,
            violation=f"the accountant assumes that a rate of {mechanism.rate:.4g} hides whether a client takes part, "
            "and an observer of its updates sees that; declare rate 1",
        )
    sampling = audited.defense.sampling(LOAD.num_examples, LOAD.batch_size)
    if sampling is None:
        return ProbeResult(question=question, violation=_describe_fixed_batches())
    sizes = _draw_sizes(sampling.rate)
    seen = f"rate {sampling.rate:.4g}, batches of {sizes.min()} to {sizes.max()} examples"
    if sampling.rate > mechanism.rate * (1 + 1e-9):
        return ProbeResult(
            question=question,
            seen=seen,
            violation=f"training samples at the rate {sampling.rate:.4g}, and the accountant uses "
            f"{mechanism.rate:.4g}; use the rate that `sampling` returns",
        )
    if _are_too_even(sizes, sampling.rate):
        return ProbeResult(question=question, seen=seen, violation=_describe_fixed_batches())
    return ProbeResult(question=question, seen=seen)


def _describe_fixed_batches() -> str:
    sizes = [
        len(batch) for batch in shuffled_batches(LOAD.num_examples, _SETTINGS, generator("defense audit", "fixed"))
    ]
    return (
        f"training draws batches of {min(sizes)} to {max(sizes)} examples, each in exactly one of an epoch, but the "
        "accountant assumes Poisson sampling, whose amplification is proved for independent draws alone; return "
        "Poisson from `sampling`"
    )


def _draw_sizes(rate: float) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    batches = poisson_batches(LOAD.num_examples, rate, _BATCHES, generator("defense audit", "batches"))
    return np.array([len(batch) for batch in batches])


def _are_too_even(sizes: np.ndarray[tuple[int], np.dtype[np.int64]], rate: float) -> bool:
    """Return whether sizes vary less than those of independent draws (dispersion test)."""
    from scipy.stats import chi2

    if rate >= 1:
        return False
    variance = LOAD.num_examples * rate * (1 - rate)
    dispersion = float(((sizes - LOAD.num_examples * rate) ** 2).sum()) / variance
    return float(chi2.cdf(dispersion, len(sizes))) < FALSE_ALARMS


def probe_accountant(audited: AuditedDefense) -> ProbeResult:
    """Compare the promised epsilon with the tight one of the declared mechanism, at several deltas."""
    question = "the promised epsilon is not below that of the declared mechanism, at the delta that is asked for"
    smallest = math.inf
    for rounds in (LOAD.rounds, 5 * LOAD.rounds):
        load = replace(LOAD, rounds=rounds)
        mechanism = audited.defense.mechanism(load)
        for delta in _DELTAS:
            promised = audited.defense.guarantee(load, delta)
            if promised is None or mechanism is None:
                continue
            if promised.delta > delta:
                return ProbeResult(
                    question=question,
                    violation=f"asked for delta = {delta:g}, it states epsilon for {promised.delta:g}; state it for "
                    "the delta that is asked for",
                )
            tight = compute_tight_epsilon(mechanism, delta)
            smallest = min(smallest, promised.epsilon / tight if tight else math.inf)
            if not promised.epsilon >= (1 - _SLACK) * tight - 1e-3:  # NaN promises nothing either
                return ProbeResult(
                    question=question,
                    violation=f"at delta = {delta:g} it promises epsilon = {promised.epsilon:.4g} in {rounds} rounds, "
                    f"but the declared mechanism has {tight:.4g}; look for another delta, rate or number of steps",
                )
    if math.isinf(smallest):
        return ProbeResult(question=question, unknown="it promises no finite epsilon here")
    return ProbeResult(question=question, seen=f"promised over tight epsilon at least {smallest:.3f}")


def probe_freshness(audited: AuditedDefense) -> ProbeResult:
    """Correlate the noise of steps and rounds with one another, and of numbers within each."""
    question = "noise is drawn anew for each number, in each step and round"
    rows = torch.zeros(1, SIZE)
    series = []
    for repeat in range(_REPEATS):
        clients = [audited.new_client("freshness", repeat, side) for side in (0, 1)]
        steps = []
        for _ in range(audited.releases):
            first, second = (audited.release(rows, client) for client in clients)
            steps.append(first - second)
        series.append(torch.stack(steps))
    # `step repeat number`
    noise = torch.stack(series, dim=1)
    return _find_correlation(_list_comparisons(noise), question)


def _list_comparisons(noise: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Return pairs of noise that are to be independent, by what they are."""
    comparisons = {}
    for layer, part in LAYERS.items():
        for first, second in combinations(range(len(noise)), 2):
            name = f"{layer} in releases {first + 1} and {second + 1}"
            comparisons[name] = noise[first, :, part], noise[second, :, part]
        values = noise[:, :, part]
        comparisons[f"neighbouring numbers of {layer}"] = values[..., :-1], values[..., 1:]
    for layer, other in combinations(LAYERS, 2):
        first_values, second_values = noise[:, :, LAYERS[layer]], noise[:, :, LAYERS[other]]
        length = min(first_values.shape[-1], second_values.shape[-1])
        comparisons[f"{layer} and {other}"] = first_values[..., :length], second_values[..., :length]
    return comparisons


def _find_correlation(comparisons: dict[str, tuple[Tensor, Tensor]], question: str) -> ProbeResult:
    limit = normal_limit(FALSE_ALARMS / len(comparisons) / 2)
    farthest, largest_excess, violation = 0.0, 0.0, ""
    for name, (first, second) in comparisons.items():
        product = float(first.norm() * second.norm())
        if not product:
            continue  # a layer without noise is a finding of its own
        correlation = float((first * second).sum()) / product
        farthest = max(farthest, correlation, key=abs)
        excess = abs(correlation) * math.sqrt(first.numel())
        if excess > max(limit, largest_excess):
            largest_excess = excess
            violation = (
                f"the noise of {name} has a correlation of {correlation:.3f}, so that their difference or mean has "
                "less; draw it anew each time"
            )
    return ProbeResult(question=question, violation=violation, seen=f"correlation up to {farthest:.3f}")
