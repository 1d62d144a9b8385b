"""Statistical model of what a defense leaves unsure in a message, for an adversary that knows the defense."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedsim.recording.wire_format import State


@dataclass(frozen=True, kw_only=True)
class TrainingFacts:
    """What an adversary knows of the local training behind one message; None is withheld.

    Attributes:
        num_examples: N.
        learning_rate: of local training; 1 where the client sent a gradient.
        steps: T, local steps; 1 where the client sent a gradient.
        batch_size: B.
    """

    num_examples: int
    learning_rate: float | None = None
    steps: int | None = None
    batch_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class MessageNoise:
    """Distribution of a message around its expectation, number by number.

    States have the names and shapes of the message; a name that is missing means that the property
    does not occur there.

    Attributes:
        deviations: standard deviation of Gaussian noise; infinite for a number that was left out.
        bounds: for a number that was sent as zero because it is small, its largest possible size;
            0 for all others.
        rounding_steps: distance of the levels to which numbers are rounded at random, without bias.
        around_view: the expectation is the `adversary_view` of the defense; otherwise it is the
            update as it was before the defense.
    """

    deviations: State = field(default_factory=dict)
    bounds: State = field(default_factory=dict)
    rounding_steps: Mapping[str, float] = field(default_factory=dict)
    around_view: bool = True

    @property
    def adds_noise(self) -> bool:
        """Return whether some number has Gaussian noise of finite size."""
        return any(bool((tensor.isfinite() & (tensor > 0)).any()) for tensor in self.deviations.values())

    @property
    def reads_message(self) -> bool:
        """Return whether bounds, levels or omissions were read from the numbers of the message.

        Which whole tensors are left out follows from the settings of a defense.
        """
        for tensor in self.deviations.values():
            if tensor.isinf().any() and not tensor.isinf().all():
                return True
        return bool(self.bounds) or bool(self.rounding_steps)

    def average_over_clients(self, num_clients: int) -> MessageNoise:
        """Return the noise of the mean of so many clients' messages, each with this noise of its own."""
        deviations = {name: tensor / math.sqrt(num_clients) for name, tensor in self.deviations.items()}
        return replace(self, deviations=deviations)


def describe_noise_fault(noise: MessageNoise, sent: State) -> str:
    """Return what is wrong with the noise that a defense states of a message; an empty text where nothing is.

    >>> describe_noise_fault(MessageNoise(rounding_steps={"bias": 0.0}), {"bias": torch.zeros(2)})
    "has 0.0 as the rounding step of 'bias', expected a finite one above 0"
    """
    for name, tensor in [*noise.deviations.items(), *noise.bounds.items()]:
        if name not in sent or tensor.shape != sent[name].shape:
            return f"describes '{name}' in another shape than the message has, or it is not in it"
        if not bool((tensor >= 0).all()):
            return f"has a deviation or bound of '{name}' below 0, or NaN"
    for name, step in noise.rounding_steps.items():
        if name not in sent or not 0 < step < math.inf:
            return f"has {step} as the rounding step of '{name}', expected a finite one above 0"
    return ""


def constant_deviations(sent: State, deviation: float) -> dict[str, Tensor]:
    """Return the same standard deviation for each number of a message.

    >>> constant_deviations({"bias": torch.zeros(2)}, 0.5)
    {'bias': tensor([0.5000, 0.5000])}
    """
    return {name: torch.full_like(tensor, deviation) for name, tensor in sent.items()}


def omission_deviations(mask: Tensor) -> Tensor:
    """Return the deviations of numbers of which those in `mask` were left out, and all others are exact."""
    return torch.where(mask, math.inf, 0.0)


def combine_noise(parts: Sequence[MessageNoise], sent: State) -> MessageNoise:
    """Combine the noise of several defenses, as if each acted on its own.

    Variances add up. Of several bounds the smallest counts, and of several roundings the coarsest.

    >>> first = MessageNoise(deviations={"bias": torch.tensor([3.0])})
    >>> second = MessageNoise(deviations={"bias": torch.tensor([4.0])})
    >>> combine_noise([first, second], {"bias": torch.zeros(1)}).deviations["bias"]
    tensor([5.])
    """
    deviations: dict[str, Tensor] = {}
    bounds: dict[str, Tensor] = {}
    steps: dict[str, float] = {}
    for name, tensor in sent.items():
        variance = torch.zeros_like(tensor)
        bound = torch.full_like(tensor, math.inf)
        for part in parts:
            if name in part.deviations:
                variance = variance + part.deviations[name].to(tensor).square()
            if name in part.bounds:
                part_bound = part.bounds[name].to(tensor)
                bound = torch.where(part_bound > 0, bound.minimum(part_bound), bound)
            if name in part.rounding_steps:
                steps[name] = max(part.rounding_steps[name], steps.get(name, 0.0))
        deviations[name] = variance.sqrt()
        bounds[name] = torch.where(bound.isinf(), 0.0, bound)
    return MessageNoise(deviations=deviations, bounds=bounds, rounding_steps=steps)
