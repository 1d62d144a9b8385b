"""A sound defense of each kind, and twelve with one planted bug each.

All keep to the contract of a defense, and claim the privacy of the sound one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.base.randomness import generator
from fedsim.interfaces.attack import Paper
from fedsim.interfaces.defense import Defense, Guarantee, Participation, Poisson
from fedsim.interfaces.local_context import LocalContext
from fedsim.interfaces.mechanism import Mechanism
from fedsim.privacy.ceilings import compute_tight_epsilon
from fedsim.recording.wire_format import State

CLIP = 1.0


@dataclass(frozen=True, kw_only=True)
class SoundGradients(Defense):
    """DP-SGD: clip each example over all layers, sum, add noise, divide by the expected size."""

    noise_multiplier: float = 1.0
    paper: ClassVar[Paper] = Paper(title="none", authors="nobody", venue="none", year=2000, url="")
    promise: ClassVar[str] = "differential privacy of each example"

    def sampling(self, num_examples: int, batch_size: int) -> Poisson | None:
        return Poisson(rate=batch_size / num_examples)

    def on_examples(self, gradients: State, expected: float, context: LocalContext) -> State:
        total = {name: rows.sum(0) for name, rows in self.clip_rows(gradients).items()}
        return {name: (tensor + self.draw(tensor, name, context)) / expected for name, tensor in total.items()}

    def clip_rows(self, gradients: State) -> State:
        norms = torch.stack([rows.flatten(1).norm(dim=1) for rows in gradients.values()]).norm(dim=0)
        factors = CLIP / norms.clamp(min=CLIP)
        return {name: torch.einsum("e,e...->e...", factors, rows) for name, rows in gradients.items()}

    def draw(self, like: Tensor, name: str, context: LocalContext) -> Tensor:
        del name
        return self.noise_multiplier * CLIP * torch.randn(like.shape, generator=context.rng)

    def mechanism(self, participation: Participation) -> Mechanism | None:
        rate = participation.batch_size / participation.num_examples
        releases = participation.steps * participation.rounds
        return Mechanism(scale=self.noise_multiplier, rate=rate, releases=releases)

    def guarantee(self, participation: Participation, delta: float) -> Guarantee | None:
        mechanism = self.mechanism(participation)
        assert mechanism is not None
        epsilon = compute_tight_epsilon(mechanism, delta)
        return Guarantee(epsilon=epsilon, delta=delta, neighbours="one example", accountant="PLD")


class BatchClipping(SoundGradients):
    """It clips the sum of a batch in place of each example."""

    def clip_rows(self, gradients: State) -> State:
        norm = torch.stack([rows.sum(0).norm() for rows in gradients.values()]).norm()
        return {name: rows * (CLIP / norm.clamp(min=CLIP)) for name, rows in gradients.items()}


class NoiseBeforeClipping(SoundGradients):
    """It adds noise to the sum of gradients, and clips that."""

    def on_examples(self, gradients: State, expected: float, context: LocalContext) -> State:
        noisy = {}
        for name, rows in gradients.items():
            noisy[name] = rows.sum(0) + self.draw(rows[:0].sum(0), name, context)
        norm = torch.stack([tensor.norm() for tensor in noisy.values()]).norm()
        return {name: tensor * (CLIP / norm.clamp(min=CLIP)) / expected for name, tensor in noisy.items()}


class HalfTheNoise(SoundGradients):
    """It adds half of the noise that the accountant assumes."""

    def draw(self, like: Tensor, name: str, context: LocalContext) -> Tensor:
        return super().draw(like, name, context) / 2


class NoisyWeightsOnly(SoundGradients):
    """It adds no noise to biases."""

    def draw(self, like: Tensor, name: str, context: LocalContext) -> Tensor:
        noise = super().draw(like, name, context)
        return torch.zeros_like(noise) if name.endswith("bias") else noise


class WrongRate(SoundGradients):
    """It samples four times as often as the accountant is told."""

    def sampling(self, num_examples: int, batch_size: int) -> Poisson | None:
        return Poisson(rate=min(1.0, 4 * batch_size / num_examples))


class SameNoiseEachStep(SoundGradients):
    """It draws noise once a round, and adds it in each step."""

    def draw(self, like: Tensor, name: str, context: LocalContext) -> Tensor:
        key = f"noise of {name}"
        if key not in context.memory:
            context.memory[key] = super().draw(like, name, context)
        return context.memory[key]


class NoiseOfPublicSeed(SoundGradients):
    """It seeds the noise by the round and the step, which the server knows."""

    def draw(self, like: Tensor, name: str, context: LocalContext) -> Tensor:
        rng = generator("public", context.round, context.step, name)
        return self.noise_multiplier * CLIP * torch.randn(like.shape, generator=rng)


class FixedBatches(SoundGradients):
    """It leaves batches as they are, and has them accounted as Poisson samples."""

    def sampling(self, num_examples: int, batch_size: int) -> Poisson | None:
        return None


class OtherDelta(SoundGradients):
    """It states the epsilon of delta = 0.01 whatever it is asked for."""

    def guarantee(self, participation: Participation, delta: float) -> Guarantee | None:
        guarantee = super().guarantee(participation, 1e-2)
        assert guarantee is not None
        return replace(guarantee, delta=delta)


class SizeInWeights(SoundGradients):
    """It divides by the number of examples in the batch, so that the noise tells it."""

    def on_examples(self, gradients: State, expected: float, context: LocalContext) -> State:
        size = max(1, len(next(iter(gradients.values()))))
        sums = super().on_examples(gradients, expected, context)
        return {name: tensor * expected / size for name, tensor in sums.items()}


@dataclass(frozen=True, kw_only=True)
class SoundShares(Defense):
    """Clip the update, and add a share of the noise that the sum over `needed` clients is to have."""

    noise_multiplier: float = 4.0
    needed: int = 6
    paper: ClassVar[Paper] = SoundGradients.paper
    promise: ClassVar[str] = "differential privacy of each client under secure aggregation"

    def on_update(self, update: State, context: LocalContext) -> State:
        norm = torch.stack([tensor.norm() for tensor in update.values()]).norm()
        factor = CLIP / norm.clamp(min=CLIP)
        share = self.noise_multiplier * CLIP / math.sqrt(self.needed)
        sent = {}
        for name, tensor in update.items():
            sent[name] = tensor * factor + share * torch.randn(tensor.shape, generator=context.rng)
        return sent

    def mechanism(self, participation: Participation) -> Mechanism | None:
        scale = self.noise_multiplier / 2
        return Mechanism(scale=scale, releases=participation.rounds, unit="client", neighbours="replaced")

    def guarantee(self, participation: Participation, delta: float) -> Guarantee | None:
        mechanism = self.mechanism(participation)
        assert mechanism is not None
        epsilon = compute_tight_epsilon(mechanism, delta)
        return Guarantee(epsilon=epsilon, delta=delta, neighbours="one client", accountant="PLD")


@dataclass(frozen=True, kw_only=True)
class SharesForAll(SoundShares):
    """It counts on the noise of all ten clients, and fewer survive."""

    needed: int = 10


@dataclass(frozen=True, kw_only=True)
class SoundMasks(SoundShares):
    """Round the clipped update, and add a secret mask modulo `modulus`: one message says nothing.

    The noise that the sum is to have is left out; only the masks are under audit here.
    """

    modulus: int = 1 << 11
    reduces: bool = True

    def on_update(self, update: State, context: LocalContext) -> State:
        norm = torch.stack([tensor.norm() for tensor in update.values()]).norm()
        factor, sent = 512 * CLIP / norm.clamp(min=CLIP), {}
        for name, tensor in update.items():
            mask = torch.randint(self.modulus, tensor.shape, generator=context.rng)
            masked = (tensor * factor).round().long() + mask
            sent[name] = (masked.remainder(self.modulus) if self.reduces else masked).float()
        return sent

    def mechanism(self, participation: Participation) -> Mechanism | None:
        return None

    def guarantee(self, participation: Participation, delta: float) -> Guarantee | None:
        return Guarantee(epsilon=0.01, delta=delta, neighbours="one client", accountant="uniform masks")


@dataclass(frozen=True, kw_only=True)
class SumsWithoutModulus(SoundMasks):
    """It adds masks without reducing by the modulus, so that large sums tell large numbers."""

    reduces: bool = False


PLANTED: dict[str, tuple[type[Defense], int, int]] = {
    "clipping by batch": (BatchClipping, 1, 1),
    "noise before clipping": (NoiseBeforeClipping, 1, 1),
    "half the noise": (HalfTheNoise, 1, 1),
    "noise of one layer missing": (NoisyWeightsOnly, 1, 1),
    "wrong rate": (WrongRate, 1, 1),
    "the same noise each step": (SameNoiseEachStep, 1, 1),
    "noise from the seed that the server knows": (NoiseOfPublicSeed, 1, 1),
    "fixed batches accounted as Poisson": (FixedBatches, 1, 1),
    "epsilon of the wrong delta": (OtherDelta, 1, 1),
    "shares too small after drop-outs": (SharesForAll, 10, 6),
    "sums without modulus": (SumsWithoutModulus, 1, 1),
    "N leaked through weights": (SizeInWeights, 1, 1),
}
"""Class of each planted bug, with the numbers of clients whose messages are summed, and of survivors."""
SOUND: dict[str, tuple[type[Defense], int, int]] = {
    "gradients": (SoundGradients, 1, 1),
    "shares": (SoundShares, 10, 6),
    "masks": (SoundMasks, 1, 1),
}
