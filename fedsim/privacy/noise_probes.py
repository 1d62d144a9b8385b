"""Probes of a defense's noise: is it as large and as secret as its accountant is told?

Two clients that differ in their secret randomness alone send messages whose difference is noise and
nothing else, whatever the hook does to the data. So no probe has to know how a defense clips.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.base.randomness import generator
from fedsim.interfaces.mechanism import Mechanism
from fedsim.privacy.audited_defense import LARGE, LAYERS, SIZE, AuditedDefense

FALSE_ALARMS = 1e-5
"""Probability that one probe says of a sound defense that it is broken."""
_PAIRS = 100
"""Pairs of clients by which the scale of noise is measured: 1000 numbers of the smallest layer."""
_EXCESS_VARIANCE = {"gaussian": 2.0, "laplace": 3.5, "skellam": 3.0}
"""Variance of the square of a difference of two such draws, in units of its squared mean."""
_FARTHER = 1e3
"""Factor of inputs that are larger than the largest, of which clipping leaves the same."""
_HIDDEN_SHARE = 0.125
"""Difference of two updates that noise hides, in its standard deviations: it changes a test of any message in 5 %."""
_HISTORIES = 24
_HIDDEN_CLIENTS = 20
"""Clients whose messages after these updates are compared; over half of 5 % in each have a chance under 1e-8."""
_LEAST_CHANGE = 0.05
"""Relative change of a message that counts."""
_TOLERANCE = 1e-3
"""Relative error of float32 up to which two results count as equal."""
_LEAST_SHARE = 0.1
"""Share of the variance of noise below which a single number has too little.

Over all pairs, a number of sound noise is below it with a probability under 1e-20.
"""


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
class NoiseVariance:
    """Variance of noise over clients' secret randomness.

    Attributes:
        mean: over the numbers of a layer.
        smallest: of any of them.
    """

    mean: float
    smallest: float


_Variances = dict[str, dict[str, NoiseVariance]]
"""Variances by input and layer."""


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


def measure_sensitivity(audited: AuditedDefense, noise: str, release: int = 1) -> float:
    """Return the largest distance of the sums of neighbours; NaN where noise depends on the data.

    With the same randomness both sums have the same noise, which cancels. Where two draws of the
    randomness give different distances, it does not, and nothing is known.

    Args:
        noise: distribution that its mechanism declares.
        release: number of the step or round in which neighbours differ.
    """
    order = 1 if noise == "laplace" else 2
    distances = []
    for pair in make_neighbours(audited):
        by_seed = []
        for seed in (1, 2):
            with_canary = _make_release(audited, pair.canary, release, "sensitivity", seed)
            without = _make_release(audited, pair.without, release, "sensitivity", seed)
            by_seed.append(with_canary - without)
        first, second = by_seed
        largest = float(torch.linalg.vector_norm(first, order))
        if float(torch.linalg.vector_norm(first - second, order)) > 0.01 * max(largest, 1e-12):
            return math.nan
        distances.append(largest)
    return max(distances)


def probe_noise(audited: AuditedDefense, mechanism: Mechanism) -> list[ProbeResult]:
    """Measure the noise of each layer at several inputs, against the sensitivity and among inputs.

    The last release is measured besides, as noise may change from step to step.
    """
    inputs = _reference_inputs(audited)
    variances: _Variances = {}
    for name, rows in inputs.items():
        variances[name] = _measure_variances(audited, rows, name)
    results = [
        _compare_scale(variances, mechanism, measure_sensitivity(audited, mechanism.noise), audited.releases),
        _compare_inputs(variances, mechanism),
    ]
    if (last := audited.releases) > 1:
        at_end = {"zeros": _measure_variances(audited, inputs["zeros"], "zeros at the end", last)}
        distance = measure_sensitivity(audited, mechanism.noise, last)
        results.append(_compare_scale(at_end, mechanism, distance, last, in_release=f" in release {last}"))
        results.append(_compare_histories(audited, mechanism, inputs["a large gradient"]))
        results.append(_compare_hidden_histories(audited, variances["zeros"]))
    return results


def _make_release(
    audited: AuditedDefense, rows: Tensor, number: int, *key: int | str, history: Tensor | None = None
) -> Tensor:
    """Return release `number` of a new client, which has nothing to say in those before, or each time `history`."""
    client = audited.new_client(*key)
    for _ in range(number - 1):
        audited.release(torch.zeros(1, SIZE) if history is None else history, client)
    return audited.release(rows, client)


def _reference_inputs(audited: AuditedDefense) -> dict[str, Tensor]:
    """Return inputs of different norms and, of a batch, different sizes, by name."""
    dense = LARGE * torch.randn(1, SIZE, generator=generator("defense audit", "reference"))
    inputs = {"zeros": torch.zeros(1, SIZE), "a large gradient": dense}
    if audited.hook == "on_examples":
        inputs["16 examples"] = torch.zeros(16, SIZE)
    return inputs


def _measure_variances(
    audited: AuditedDefense, rows: Tensor, name: str, release: int = 1, history: Tensor | None = None
) -> dict[str, NoiseVariance]:
    """Return by layer the variance of noise over pairs of clients."""
    differences = []
    for pair in range(_PAIRS):
        sides = (0, 1)
        first, second = (_make_release(audited, rows, release, name, pair, side, history=history) for side in sides)
        differences.append(first - second)
    squares = torch.stack(differences).square().mean(0) / 2
    variances = {}
    for layer, part in LAYERS.items():
        variances[layer] = NoiseVariance(mean=float(squares[part].mean()), smallest=float(squares[part].min()))
    return variances


def _compare_scale(
    variances: _Variances, mechanism: Mechanism, sensitivity: float, releases: int, in_release: str = ""
) -> ProbeResult:
    """Compare the smallest noise of any layer and input with what the mechanism declares.

    Args:
        in_release: which of them is probed, in words; empty for the first.
    """
    scale = _needed_scale(mechanism, releases)
    question = f"noise of each layer{in_release} is at least {scale:.4g} times the largest distance of neighbours"
    for by_layer in variances.values():
        for layer, variance in by_layer.items():
            if variance.mean == 0:
                return ProbeResult(question=question, violation=_SECRET.format(where=layer))
    if math.isnan(sensitivity):
        return ProbeResult(question=question, unknown="what it draws depends on the data, so distances are unknown")
    if sensitivity == 0:
        return ProbeResult(question=question, unknown="no input that was tried changes what it sends")
    # The variance of each layer is tested against the declared one; all tests together raise few false alarms.
    per_scale = 2.0 if mechanism.noise == "laplace" else 1.0
    required = per_scale * (scale * sensitivity) ** 2
    limit = normal_limit(FALSE_ALARMS / (len(variances) * len(LAYERS)))
    smallest = math.inf
    violations = []
    for name, by_layer in variances.items():
        for layer, variance in by_layer.items():
            ratio = variance.mean / required
            count = _PAIRS * (LAYERS[layer].stop - LAYERS[layer].start)
            smallest = min(smallest, math.sqrt(ratio))
            share = math.sqrt(ratio)
            text = _SMALL
            is_small = (ratio - (1 - _TOLERANCE)) / math.sqrt(_EXCESS_VARIANCE[mechanism.noise] / count) < -limit
            if not is_small and variance.smallest < _LEAST_SHARE * required:
                is_small, share, text = True, math.sqrt(variance.smallest / required), f"a number in {_SMALL}"
            if is_small:
                where = f"{layer}{in_release} at {name}"
                violations.append((share, text.format(where=where, share=share, distance=sensitivity, scale=scale)))
    seen = f"smallest: {smallest:.3f} of what is declared, distance {sensitivity:.4g}"
    return ProbeResult(question=question, violation=min(violations)[1] if violations else "", seen=seen)


def _needed_scale(mechanism: Mechanism, releases: int) -> float:
    """Return the scale of each release that all together are no more than what is declared.

    Several releases under independent noise are as one under less: by the root of their number for
    Gaussian or Skellam noise, by their number for Laplace noise.
    """
    surplus = max(1.0, releases / mechanism.releases)
    return mechanism.scale * (surplus if mechanism.noise == "laplace" else math.sqrt(surplus))


_SECRET = (
    "the noise of {where} is the same for clients with different secret randomness, so the server can draw it, too; "
    "draw it from `context.rng`"
)
_SMALL = (
    "the noise of {where} is {share:.3f} of what the accountant assumes: {scale:.4g} times the distance "
    "{distance:.4g} of two neighbours; look for clipping of a batch, noise before clipping, a layer without noise, "
    "shares for more clients than send, more releases than are accounted for, or a smaller multiplier"
)


def _compare_histories(audited: AuditedDefense, mechanism: Mechanism, rows: Tensor) -> ProbeResult:
    """Compare the noise of the second release after data of which the first one says the same.

    Messages may decide how the next ones are clipped and noised, and data may not, which a defense remembers.

    Args:
        rows: so large that any clipping leaves the same of them and of larger ones.
    """
    question = "noise does not depend on earlier data of which the messages say nothing"
    reference = _make_release(audited, rows, 1, "histories")

    def says_the_same(scale: float) -> bool:
        release = _make_release(audited, scale * rows, 1, "histories")
        return torch.allclose(reference, release, rtol=0.0, atol=_TOLERANCE * max(float(reference.abs().max()), 1e-12))

    if not says_the_same(_FARTHER):
        return ProbeResult(question=question, unknown="messages tell large inputs from larger ones")
    histories = {
        "zeros after a large gradient": rows,
        "zeros after a larger one": _FARTHER * rows,
        "zeros after a barely clipped one": _find_smallest_scale(says_the_same) * rows,
    }
    variances = {}
    for name, history in histories.items():
        variances[name] = _measure_variances(audited, torch.zeros(1, SIZE), "after", 2, history)
    return _compare_inputs(variances, mechanism, question)


def _find_smallest_scale(holds: Callable[[float], bool]) -> float:
    """Return about the smallest scale in [1e-12, 1] from which on a condition holds, which does at 1."""
    low, high = -12.0, 0.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(10**middle) else (middle, high)
    return float(10**high)


def _compare_hidden_histories(audited: AuditedDefense, noise: Mapping[str, NoiseVariance]) -> ProbeResult:
    """Look for a length of earlier data at which the next message changes, though noise hides the difference.

    Each history is longer than the one before by a small share of the noise, so under the same randomness their
    messages are nearly the same. Where a defense follows these messages, few clients change what they send next from
    one history to another; where most of them do, it follows the data.

    Args:
        noise: of the first release, by layer.
    """
    question = "noise does not depend on earlier data that are hidden in their message"
    step = _HIDDEN_SHARE * math.sqrt(min(variance.mean for variance in noise.values()))
    if not step:
        return ProbeResult(question=question, unknown="a layer has no noise")
    direction = torch.randn(1, SIZE, generator=generator("defense audit", "hidden"))
    direction /= direction.norm()
    most_changed, length = 0, 0.0
    previous: list[Tensor] = []
    for number in range(_HISTORIES + 1):
        history = number * step * direction
        released = [
            _make_release(audited, torch.zeros(1, SIZE), 2, "hidden", client, history=history)
            for client in range(_HIDDEN_CLIENTS)
        ]
        changes = [float((new - old).norm() / old.norm()) for new, old in zip(released, previous, strict=False)]
        changed = sum(change > _LEAST_CHANGE for change in changes)
        if changed > most_changed:
            most_changed, length = changed, number * step
        previous = released
    counted = f"{most_changed} of {_HIDDEN_CLIENTS} clients"
    violation = (
        f"{counted} send something else after an update that is {length:.3g} long than after one that is "
        f"{length - step:.3g} long, which their noise hides, so its size reveals the data; let it follow from messages "
        "alone"
    )
    return ProbeResult(
        question=question,
        violation=violation if most_changed > _HIDDEN_CLIENTS / 2 else "",
        seen=f"at most {counted} change, of updates up to {_HISTORIES * step:.3g} long in one direction",
    )


def _compare_inputs(
    variances: _Variances,
    mechanism: Mechanism,
    question: str = "noise does not depend on the data or on the size of a batch",
) -> ProbeResult:
    """Compare the noise of each layer at different inputs; it is not to depend on them."""
    names = list(variances)
    comparisons = len(LAYERS) * (len(names) - 1)
    limit = normal_limit(FALSE_ALARMS / comparisons / 2)
    farthest, largest_excess, violation = 0.0, 0.0, ""
    for name in names[1:]:
        for layer, part in LAYERS.items():
            first, second = variances[names[0]][layer].mean, variances[name][layer].mean
            if not first or not second:
                continue  # a layer without noise is a finding of its own
            log_ratio = math.log(second / first)
            farthest = max(farthest, log_ratio, key=abs)
            spread = math.sqrt(2 * _EXCESS_VARIANCE[mechanism.noise] / (_PAIRS * (part.stop - part.start)))
            excess = (abs(log_ratio) - _TOLERANCE) / spread
            if excess > max(limit, largest_excess):
                largest_excess = excess
                violation = (
                    f"the noise of {layer} is {math.exp(log_ratio / 2):.3f} times as large at {name} as at "
                    f"{names[0]}, so its size reveals the data, or their number; divide by the expected number of "
                    "examples, and let no clip follow data"
                )
    return ProbeResult(question=question, violation=violation, seen=f"ratio up to {math.exp(farthest / 2):.3f}")


def normal_limit(chance: float) -> float:
    """Return the value that a standard normal number exceeds with this probability."""
    from scipy.special import ndtri

    return -float(ndtri(chance))


def list_violations(results: Sequence[ProbeResult]) -> list[str]:
    """Return what breaks the promise."""
    return [result.violation for result in results if result.violation]
