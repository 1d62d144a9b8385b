"""Likelihood of a message under what defenses are known to do, and the noise of those that do not say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from fedsim.base.errors import AttackError
from fedsim.interfaces.attack import warn
from fedsim.interfaces.defense import Defense, overrides
from fedsim.interfaces.defense_checks import name_of_defense
from fedsim.interfaces.message_noise import MessageNoise, TrainingFacts, combine_noise, describe_noise_fault
from fedsim.inversion.distances import Tensors
from fedsim.inversion.problem import InversionProblem
from fedsim.recording.wire_format import State
from fedsim.training.settings import known_steps

_LEAST_SIGNAL = 0.02
"""Smallest share of a tensor's root mean square that counts as its signal, under any noise."""
_SMALL_SHARE = 0.3
"""Least size of a rounded number that counts for its variance, as a share of its tensor's signal."""
_TINY = 1e-30


@dataclass(frozen=True, kw_only=True)
class MessageLikelihood:
    """Negative logarithm of the likelihood of the recorded update, by `InversionProblem.noise`.

    A number with Gaussian noise adds its squared residual over twice its variance. A number that
    was left out adds nothing. One that was sent as zero because it is small adds what is beyond its
    bound. Rounding to levels a step apart has the variance r (step - r), where r is the distance to
    the level below, and so depends on the number itself; it is taken at the present dummy data and
    not differentiated (quasi-likelihood).

    Differences between the model of local training and the training itself count as further noise.

    Attributes:
        model_error: standard deviation of that noise, as a share of the root mean square of each
            tensor's signal.
        rounds: some defense rounds numbers at random; otherwise no rounding is looked for.
        censors: some defense sends zeros for small numbers.
    """

    model_error: float = 0.1
    rounds: bool = True
    censors: bool = True

    @classmethod
    def from_problem(cls, problem: InversionProblem, model_error: float) -> Self:
        """Return the likelihood with what occurs in `problem.noise`."""
        noise = problem.noise or MessageNoise()
        censors = any(bool((bound > 0).any()) for bound in noise.bounds.values())
        return cls(model_error=model_error, rounds=bool(noise.rounding_steps), censors=censors)

    def target(self, problem: InversionProblem) -> list[Tensor]:
        """Return the message, its variances, bounds and rounding steps, in units of the mean gradient."""
        noise, scale = problem.noise or MessageNoise(), problem.update_scale
        sent = problem.direction
        variances, bounds, steps = [], [], []
        message_size = torch.cat([tensor.flatten() for tensor in sent]).square().mean().sqrt()
        for name, tensor in zip(problem.parameter_names, sent, strict=True):
            zeros = torch.zeros_like(tensor)
            variance = noise.deviations.get(name, zeros).to(tensor).square()
            step = torch.as_tensor(noise.rounding_steps.get(name, 0.0)).to(tensor)
            # What is zero throughout, such as the gradient of a dead layer, is not exact either.
            size = _signal_size(tensor, variance, step) if bool(tensor.any()) else message_size
            variance = variance + (self.model_error * size).square() + _SMALL_SHARE * size * step + _TINY
            variances.append(variance / scale**2)
            bounds.append(noise.bounds.get(name, zeros).to(tensor) / scale)
            steps.append(step / scale)
        return [*(tensor / scale for tensor in sent), *variances, *bounds, *steps]

    def __call__(self, gradient: Tensors, target: Tensors) -> Tensor:
        """Return the sum over all numbers."""
        count = len(gradient)
        parts = [target[start : start + count] for start in range(0, 4 * count, count)]
        terms = []
        for g, sent, variance, bound, step in zip(gradient, *parts, strict=True):
            residual = g - sent
            if self.censors:
                residual = torch.where(bound > 0, (g.abs() - bound).clamp_min(0), residual)
            if self.rounds:
                variance = variance + _rounding_variance(g.detach(), step)
            terms.append((residual.square() / variance).sum() / 2)
        return torch.stack(terms).sum()


def draw_message(gradient: Tensors, target: Tensors, rng: torch.Generator) -> list[Tensor]:
    """Return a target whose message has another draw of its noise.

    Args:
        gradient: of the most probable data, at which the noise of rounding is taken.
        target: of `MessageLikelihood.target`.
    """
    count = len(gradient)
    sent, variances, _, steps = (target[start : start + count] for start in range(0, 4 * count, count))
    drawn = []
    for value, tensor, variance, step in zip(gradient, sent, variances, steps, strict=True):
        total = variance + _rounding_variance(value.detach(), step)
        deviation = torch.where(total.isfinite(), total, 0.0).sqrt()
        drawn.append(tensor + deviation * torch.randn(tensor.shape, generator=rng).to(tensor))
    return [*drawn, *target[count:]]


def _rounding_variance(values: Tensor, step: Tensor) -> Tensor:
    """Return r (step - r), where r is how far the size of a value is above the level below."""
    remainder = torch.where(step > 0, values.abs().remainder(step.clamp_min(_TINY)), 0.0)
    return remainder * (step - remainder).clamp_min(0)


def _signal_size(sent: Tensor, variance: Tensor, step: Tensor) -> Tensor:
    """Return the root mean square of a tensor without its noise.

    Rounding without bias keeps the mean absolute value, which is at most the root mean square.
    """
    known = variance.isfinite()
    count = known.sum().clamp_min(1)
    squares = torch.where(known, sent.square(), 0.0)
    rounding = step * sent.abs()
    noise = torch.where(known, variance + rounding, 0.0)
    mean_square = squares.sum() / count
    signal = ((squares - noise).sum() / count).clamp_min(_LEAST_SIGNAL**2 * mean_square)
    mean_size = torch.where(step > 0, torch.where(known, sent.abs(), 0.0).sum() / count, 0.0)
    return signal.sqrt().maximum(mean_size)


def describe_noise(problem: InversionProblem, title: str) -> tuple[MessageNoise, list[Defense]]:
    """Return the noise of the known defenses together, and those whose `adversary_view` applies.

    Where a defense has no `message_noise`, noise is estimated from the message, and a warning says so.
    """
    sent = dict(zip(problem.parameter_names, problem.direction, strict=True))
    facts = _training_facts(problem)
    parts, viewed, unknown = [], [], []
    for position, defense in enumerate(problem.defenses):
        name = name_of_defense(defense)
        if defense.mixes:  # its view is the mixing of dummy data
            viewed.append(defense)
            unknown.append(name)
            continue
        part = defense.message_noise(sent, facts)
        if part is not None and (fault := describe_noise_fault(part, sent)):
            raise AttackError(f"{problem.where}: 'message_noise' of {name} {fault}; fix the defense")
        if part is not None and part.reads_message:
            # Zeros and levels that a defense made are lost in a sum, and in noise that was added later.
            disturbance = _find_disturbance(problem, sent, facts, position)
            if disturbance:
                name, part = f"{name} {disturbance}", None
        if part is None:
            unknown.append(name)
        else:
            parts.append(part if defense.draws_in_common else part.average_over_clients(problem.num_clients))
        if part is None or part.around_view:
            viewed.append(defense)
    if unknown:
        parts.append(_estimate_noise(problem, sent, unknown, title))
    return combine_noise(parts, sent), viewed


def _training_facts(problem: InversionProblem) -> TrainingFacts:
    """Return the facts of the local training of one client."""
    is_gradient = problem.sent_gradient is not None
    return TrainingFacts(
        num_examples=problem.examples_per_client,
        learning_rate=1.0 if is_gradient else problem.learning_rate,
        steps=1 if is_gradient else known_steps(problem, problem.examples_per_client),
        batch_size=problem.batch_size,
    )


def _find_disturbance(problem: InversionProblem, sent: State, facts: TrainingFacts, position: int) -> str:
    """Say what hides the zeros and levels that the defense at `position` made; empty where nothing does."""
    defense = problem.defenses[position]
    if problem.num_clients > 1 and not defense.draws_in_common:
        return "in a sum over clients"
    # What acts in local training comes before all that acts on the update, whatever their order.
    start = position + 1 if overrides(defense, "on_update") else 0
    for later in problem.defenses[start:]:
        if not overrides(later, "on_update") or later is defense:
            continue
        part = later.message_noise(sent, facts)
        if part is None or part.adds_noise:
            return f"before {name_of_defense(later)}"
    return ""


def _estimate_noise(
    problem: InversionProblem, sent: dict[str, Tensor], unknown: Sequence[str], title: str
) -> MessageNoise:
    names = ", ".join(unknown)
    deviation = estimate_deviation(list(sent.values()), problem.num_examples * (known_steps(problem, 1) or 1))
    if deviation is None:
        warn(
            f"{title} on {problem.where}: {names} has no likelihood, and noise cannot be estimated because no "
            "matrix of the update is larger than N; the message counts as exact beyond the defense's view"
        )
        return MessageNoise()
    warn(
        f"{title} on {problem.where}: {names} has no likelihood, so it is taken by its view, with noise of "
        f"{deviation:.3g} as the message shows it"
    )
    return MessageNoise(deviations={name: torch.full_like(tensor, deviation) for name, tensor in sent.items()})


def estimate_deviation(tensors: Sequence[Tensor], rank: int) -> float | None:
    """Estimate the standard deviation of noise from matrices that have a known rank without it.

    The gradient of a linear layer is of rank N at most, so what is beyond that is noise. The largest
    matrix counts; None where none has more rows and columns than `rank`.

    >>> noise = torch.randn(60, 80, generator=torch.Generator().manual_seed(0))
    >>> 0.95 < estimate_deviation([noise], 2) < 1.0
    True
    """
    matrices = [tensor for tensor in tensors if tensor.ndim == 2 and min(tensor.shape) > rank]
    if not matrices:
        return None
    matrix = max(matrices, key=lambda tensor: tensor.numel())
    values = torch.linalg.svdvals(matrix.double())
    rows, columns = matrix.shape
    return math.sqrt(values[rank:].square().sum().item() / ((rows - rank) * (columns - rank)))


def with_known_noise(problem: InversionProblem, title: str) -> InversionProblem:
    """Return the problem with the noise of its defenses, and only those left whose view applies."""
    noise, viewed = describe_noise(problem, title)
    return replace(problem, noise=noise, defenses=viewed)
