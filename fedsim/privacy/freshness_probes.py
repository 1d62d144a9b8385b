"""Probe of a defense's noise: is each number of it drawn anew?"""

from __future__ import annotations

import math
from itertools import combinations

import torch
from torch import Tensor

from fedsim.privacy.audited_defense import LAYERS, SIZE, AuditedDefense
from fedsim.privacy.noise_probes import FALSE_ALARMS, ProbeResult, normal_limit

_REPEATS = 10


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
