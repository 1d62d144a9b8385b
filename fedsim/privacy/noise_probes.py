"""Probes of a defense's noise: is it as large, as fresh and as secret as its accountant is told?

Two clients that differ in their secret randomness alone send messages whose difference is noise and
nothing else, whatever the hook does to the data. So no probe has to know how a defense clips.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from fedsim.base.randomness import generator
from fedsim.interfaces.mechanism import Mechanism
from fedsim.privacy.audited_defense import LARGE, LAYERS, SIZE, AuditedDefense

FALSE_ALARMS = 1e-5
"""Probability that one probe says of a sound defense that it is broken."""
_PAIRS = 100
"""Pairs of clients by which the scale of noise is measured: 1000 numbers of the smallest layer."""
_REPEATS = 10
_EXCESS_VARIANCE = {"gaussian": 2.0, "laplace": 3.5}
"""Variance of the square of a difference of two such draws, in units of its squared mean."""
_TOLERANCE = 1e-3
"""Relative error of float32 up to which two results count as equal."""


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """Result of one probe.

    Attributes:
        question: what was asked, in a few words.
        violation: a sentence that says what breaks the promise; empty where nothing was found.
        unknown: why the probe could not tell; empty where it could.
        seen: what was measured, in a few words.
    """

    question: str
    violation: str = ""
    unknown: str = ""
    seen: str = ""


@dataclass(frozen=True, kw_only=True)
class Neighbours:
    """Two inputs of one step or round that a guarantee makes indistinguishable.

    Attributes:
        without: `example number`.
        canary: likewise, with the canary in it, or in its place.
        direction: `number`, in which the canary points, of norm 1.
    """

    without: Tensor
    canary: Tensor
    direction: Tensor


def make_neighbours(audited: AuditedDefense) -> list[Neighbours]:
    """Return pairs of neighbours in the worst directions: layer by layer, dense, and in all norms.

    An example is added to nothing, to small ones, and to one that points against it, half as
    long, so that the sum changes sides. An update is replaced by its negative.
    """
    directions = []
    for part in LAYERS.values():
        axis = torch.zeros(SIZE)
        axis[part.start] = 1.0
        directions.append(axis)
    dense = torch.randn(SIZE, generator=generator("defense audit", "direction"))
    directions.append(dense / dense.norm())
    pairs = []
    for direction in directions:
        for norm in (1.0, LARGE):
            row = norm * direction[None]
            if audited.hook == "on_update":
                pairs.append(Neighbours(without=-row, canary=row, direction=direction))
                continue
            small = 1e-3 * torch.randn(4, SIZE, generator=generator("defense audit", "small"))
            for others in (torch.zeros(0, SIZE), small, -row / 2):
                pairs.append(Neighbours(without=others, canary=torch.cat([others, row]), direction=direction))
    return pairs


def measure_sensitivity(audited: AuditedDefense, noise: str) -> float:
    """Return the largest distance of the sums of neighbours; NaN where noise depends on the data.

    With the same randomness both sums have the same noise, which cancels. Where two draws of the
    randomness give different distances, it does not, and nothing is known.
    """
    order = 1 if noise == "laplace" else 2
    distances = []
    for pair in make_neighbours(audited):
        by_seed = []
        for seed in (1, 2):
            with_canary = audited.release(pair.canary, audited.new_client("sensitivity", seed))
            without = audited.release(pair.without, audited.new_client("sensitivity", seed))
            by_seed.append(with_canary - without)
        first, second = by_seed
        largest = float(torch.linalg.vector_norm(first, order))
        if float(torch.linalg.vector_norm(first - second, order)) > 0.01 * max(largest, 1e-12):
            return math.nan
        distances.append(largest)
    return max(distances)


def probe_noise(audited: AuditedDefense, mechanism: Mechanism) -> list[ProbeResult]:
    """Measure the noise of each layer at several inputs, against the sensitivity and among inputs."""
    sensitivity = measure_sensitivity(audited, mechanism.noise)
    inputs = _reference_inputs(audited)
    # The variance over clients' secret randomness, by input and layer.
    variances: dict[str, dict[str, float]] = {}
    for name, rows in inputs.items():
        variances[name] = _measure_variances(audited, rows, name)
    return [
        _compare_scale(variances, mechanism, sensitivity),
        _compare_inputs(variances, mechanism),
    ]


def _reference_inputs(audited: AuditedDefense) -> dict[str, Tensor]:
    """Return inputs of different norms and, of a batch, different sizes, by name."""
    dense = LARGE * torch.randn(1, SIZE, generator=generator("defense audit", "reference"))
    inputs = {"zeros": torch.zeros(1, SIZE), "a large gradient": dense}
    if audited.hook == "on_examples":
        inputs["16 examples"] = torch.zeros(16, SIZE)
    return inputs


def _measure_variances(audited: AuditedDefense, rows: Tensor, name: str) -> dict[str, float]:
    """Return by layer the variance of noise over pairs of clients."""
    differences = []
    for pair in range(_PAIRS):
        first, second = (audited.release(rows, audited.new_client(name, pair, side)) for side in (0, 1))
        differences.append(first - second)
    squares = torch.stack(differences).square() / 2
    return {layer: float(squares[:, part].mean()) for layer, part in LAYERS.items()}


def _compare_scale(variances: dict[str, dict[str, float]], mechanism: Mechanism, sensitivity: float) -> ProbeResult:
    """Compare the smallest noise of any layer and input with what the mechanism declares."""
    question = f"noise of each layer is at least {mechanism.scale:.4g} times the largest distance of neighbours"
    if math.isnan(sensitivity):
        if all(variance == 0 for by_layer in variances.values() for variance in by_layer.values()):
            return ProbeResult(question=question, violation=_SECRET.format(where="any layer"))
        return ProbeResult(question=question, unknown="what it draws depends on the data, so distances cannot be told")
    if sensitivity == 0:
        return ProbeResult(question=question, unknown="no input that was tried changes what it sends")
    per_scale = 1.0 if mechanism.noise == "gaussian" else 2.0
    required = per_scale * (mechanism.scale * sensitivity) ** 2
    limit = _normal_limit(FALSE_ALARMS / (len(variances) * len(LAYERS)))
    smallest = math.inf
    violations = []
    for name, by_layer in variances.items():
        for layer, variance in by_layer.items():
            ratio = variance / required
            count = _PAIRS * (LAYERS[layer].stop - LAYERS[layer].start)
            smallest = min(smallest, math.sqrt(ratio))
            if variance == 0:
                violations.append((0.0, _SECRET.format(where=layer)))
            elif (ratio - (1 - _TOLERANCE)) / math.sqrt(_EXCESS_VARIANCE[mechanism.noise] / count) < -limit:
                violations.append((math.sqrt(ratio), _SMALL.format(
                    layer=layer, name=name, share=math.sqrt(ratio), distance=sensitivity, scale=mechanism.scale
                )))  # fmt: skip
    seen = f"smallest: {smallest:.3f} of what is declared, distance {sensitivity:.4g}"
    return ProbeResult(question=question, violation=min(violations)[1] if violations else "", seen=seen)


_SECRET = (
    "the noise of {where} is the same for clients with different secret randomness, so the server can draw it, too; "
    "draw it from `context.rng`"
)
_SMALL = (
    "the noise of {layer} at {name} is {share:.3f} of what the accountant is told: {scale:.4g} times the distance "
    "{distance:.4g} of two neighbours; look for clipping of a batch, noise before clipping, a layer without noise, "
    "shares for more clients than send, or a smaller multiplier"
)


def _compare_inputs(variances: dict[str, dict[str, float]], mechanism: Mechanism) -> ProbeResult:
    """Compare the noise of each layer at different inputs; it is not to depend on them."""
    question = "noise does not depend on the data or on the size of a batch"
    names = list(variances)
    comparisons = len(LAYERS) * (len(names) - 1)
    limit = _normal_limit(FALSE_ALARMS / comparisons / 2)
    largest, violation = 1.0, ""
    for name in names[1:]:
        for layer, part in LAYERS.items():
            first, second = variances[names[0]][layer], variances[name][layer]
            if not first or not second:
                continue
            log_ratio = math.log(second / first)
            spread = math.sqrt(2 * _EXCESS_VARIANCE[mechanism.noise] / (_PAIRS * (part.stop - part.start)))
            if abs(log_ratio) > abs(math.log(largest)):
                largest = second / first
                if abs(log_ratio) > limit * spread + _TOLERANCE:
                    violation = (
                        f"the noise of {layer} is {math.sqrt(largest):.3f} times as large at {name} as at {names[0]}, "
                        "so its size tells what the data are, or how many; divide by the expected number of examples"
                    )
    return ProbeResult(question=question, violation=violation, seen=f"ratio up to {math.sqrt(largest):.3f}")


def probe_freshness(audited: AuditedDefense) -> ProbeResult:
    """Correlate the noise of steps and rounds with one another, layer by layer."""
    question = "noise is drawn anew in each step and round"
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
    return _find_correlation(noise, question)


def _find_correlation(noise: Tensor, question: str) -> ProbeResult:
    pairs = list(combinations(range(len(noise)), 2))
    if not pairs:
        return ProbeResult(question=question, unknown="there is one release only")
    limit = _normal_limit(FALSE_ALARMS / (len(pairs) * len(LAYERS)) / 2)
    largest, violation = 0.0, ""
    for layer, part in LAYERS.items():
        values = noise[:, :, part].flatten(1)
        for first, second in pairs:
            product = float(values[first].norm() * values[second].norm())
            if not product:
                continue
            correlation = float(values[first] @ values[second]) / product
            if abs(correlation) > abs(largest):
                largest = correlation
                if abs(correlation) * math.sqrt(values.shape[1]) > limit:
                    violation = (
                        f"the noise of {layer} in releases {first + 1} and {second + 1} has a correlation of "
                        f"{correlation:.3f}, so that their difference or mean has less; draw it anew each time"
                    )
    return ProbeResult(question=question, violation=violation, seen=f"correlation up to {largest:.3f}")


def _normal_limit(chance: float) -> float:
    """Return the value that a standard normal number exceeds with this probability."""
    from scipy.special import ndtri

    return -float(ndtri(chance))


def list_violations(results: Sequence[ProbeResult]) -> list[str]:
    """Return what breaks the promise."""
    return [result.violation for result in results if result.violation]
