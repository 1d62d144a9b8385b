"""DP-SGD: each local step clips the gradient of each example and adds noise to their sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from clients.defenses.mixup import Mixup
from fedsim.base.constraints import PositiveFloat, PositiveShareBelowOne
from fedsim.base.errors import ConfigError
from fedsim.base.papers import cite
from fedsim.interfaces.attack import Paper
from fedsim.interfaces.defense import Defense, Guarantee, Participation, Poisson, Setting, mixing_defenses
from fedsim.interfaces.defense_checks import name_of_defense
from fedsim.interfaces.local_context import LocalContext
from fedsim.interfaces.mechanism import Mechanism
from fedsim.interfaces.message_noise import MessageNoise, TrainingFacts, constant_deviations
from fedsim.privacy.accountants import Accountant, Steps, compute_epsilon, find_noise_multiplier
from fedsim.recording.wire_format import State
from fedsim.training.gradients import flatten_examples


@dataclass(frozen=True, kw_only=True)
class DpSgd(Defense):
    """Sample examples independently, clip their gradients to norm C, add Gaussian noise to the sum.

    A local step of a client

    1. samples a batch (`sampling`): each of the N examples with probability q = min(1, B / N), so
       the batch may be empty;
    2. clips the gradient of each example to L2 norm C and sums them (`clipped_sum`);
    3. adds noise of standard deviation sigma C to each number, and divides by q N (`on_sum`).

    Each client adds its own noise, so the guarantee holds against the server: (epsilon,
    delta)-differential privacy of all that a client sends in the run, for one of its examples added
    or removed. N, from which steps and q follow, and the metrics, such as the training loss, are
    sent in clear and are not covered. Nor are the mean and standard deviation by which the data set
    is standardised: they count as public.

    Set `noise_multiplier`, or `epsilon`: then the noise of each client follows from its q and its
    steps in all rounds. With both, a noise multiplier that does not keep to epsilon is refused.
    Neither an infinite clip nor zero noise is accepted: leave the defense out instead, which also
    samples batches as usual.

    Args:
        clip: C, in units of the gradient of the loss.
        clipping: `flat` takes all tensors of a gradient as one vector; `per-layer` clips each of k
            tensors to C / sqrt(k), so that the norm of all together is at most C.
        noise_multiplier: sigma, noise standard deviation divided by C, above 0.
        epsilon: largest privacy loss of a client that takes part in all rounds, dimensionless.
        delta: probability bound, dimensionless, below 1 / N.
        accountant: method of composition: `rdp` by Rényi divergences, `prv` by privacy loss
            distributions, which is tighter and takes longer.
        with_mixing: accept that `mixup` mixes two records in each example. One record more or less
            then adds or removes one mixture and changes another, so the sensitivity is 3 C, and the
            guarantee is that of a third of the noise.

    Raises:
        ConfigError: a setting is out of range, epsilon cannot be reached, or delta is too large for
            a client's N; a layer or another defense mixes examples; clients send the gradient of
            one fixed mini-batch.

    References:
        [Abadi2016], Alg. 1; [McMahan2018a], Sec. 3, for clipping by layers. Differs: noise is not
        drawn to be safe against attacks on floating-point numbers.
    """

    clip: PositiveFloat = 1.0
    clipping: Literal["flat", "per-layer"] = "flat"
    noise_multiplier: PositiveFloat | None = None
    epsilon: PositiveFloat | None = None
    delta: PositiveShareBelowOne = 1e-5
    accountant: Accountant = "rdp"
    with_mixing: bool = False

    promise: ClassVar[str] = "(epsilon, delta)-differential privacy of each example, over all rounds"
    against: ClassVar[str] = "the server and all who see what a client sends; N and its metrics are in clear"
    cost: ClassVar[str] = "accuracy; a step takes half as long again, in some networks several times as long"
    paper: ClassVar[Paper] = cite("Abadi2016")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_multiplier is None and self.epsilon is None:
            raise ConfigError("set noise_multiplier, or epsilon, from which it follows")

    def check(self, setting: Setting) -> None:
        """Check that delta is below 1 / N for each client."""
        largest = max(setting.num_examples)
        if self.delta * largest >= 1:
            raise ConfigError(
                f"delta: {self.delta:g} promises nothing to client {setting.num_examples.index(largest)}, which holds "
                f"{largest} examples: to publish one of them at random would be allowed; set it below {1 / largest:.3g}"
            )

    def check_combination(self, defenses: Sequence[Defense], position: int) -> None:
        """Raise ConfigError if another defense mixes examples and the guarantee does not cover it.

        The order makes no difference, because batches are mixed before gradients are computed.
        """
        del position
        mixing = mixing_defenses(defenses)
        if not mixing and self.with_mixing:
            raise ConfigError("with_mixing: no other defense mixes examples, so it would waste noise; leave it out")
        for other in mixing:
            name = name_of_defense(other)
            if not isinstance(other, Mixup):
                raise ConfigError(
                    f"{name} makes each example of several records, and no guarantee is known for that; use mixup, or "
                    "leave one of them out"
                )
            if not self.with_mixing:
                raise ConfigError(
                    f"{name} makes each example of two records, so one record more or less moves the sum of gradients "
                    "by 3 C instead of C; set with_mixing = true for the guarantee that is left, or leave one out"
                )

    def of_client(self, participation: Participation) -> Self:
        """Return the defense with the noise multiplier that reaches epsilon for this client."""
        if self.epsilon is None:
            if self.accountant == "prv":
                # If it cannot be computed, fail now and not after training.
                self.guarantee(participation, self.delta)
            return self
        if self.noise_multiplier is not None:
            self._check_epsilon(participation, self.epsilon)
            return self
        noise = find_noise_multiplier(self.epsilon, self.delta, *_rate_and_steps(participation), self.accountant)
        return replace(self, noise_multiplier=noise * self._sensitivity)

    def sampling(self, num_examples: int, batch_size: int) -> Poisson:
        """Return Poisson sampling with probability q."""
        return Poisson(rate=_sampling_rate(num_examples, batch_size))

    def on_examples(self, gradients: State, expected: float, context: LocalContext) -> State:
        """Return the noisy sum of clipped gradients over the expected batch size q N."""
        return self.on_sum(self.clipped_sum(gradients), expected, context)

    def clipped_sum(self, gradients: State) -> State:
        """Return the sum of the examples' clipped gradients; each tensor is `example ...`."""
        flat = {name: flatten_examples(tensor) for name, tensor in gradients.items()}
        factors = self.example_factors(torch.stack([torch.linalg.vector_norm(rows, dim=1) for rows in flat.values()]))
        total: dict[str, Tensor] = {}
        for factor, (name, rows) in zip(factors, flat.items(), strict=True):
            total[name] = (factor @ rows).view(gradients[name].shape[1:])
        return total

    def example_factors(self, norms: Tensor) -> Tensor:
        """Return the factors, `tensor example`, that clip gradients with these norms to C."""
        if self.clipping == "per-layer":
            bound = self.clip / math.sqrt(len(norms))
            return torch.reciprocal(norms.clamp(min=bound)) * bound
        total_norm = torch.linalg.vector_norm(norms, dim=0, keepdim=True)
        return (torch.reciprocal(total_norm.clamp(min=self.clip)) * self.clip).expand_as(norms)

    def on_sum(self, total: State, expected: float, context: LocalContext) -> State:
        """Return the sum of clipped gradients plus noise, over the expected batch size q N."""
        assert self.noise_multiplier is not None, "of_client was not called"
        noisy_mean = {}
        for name, tensor in total.items():
            noise = torch.randn(tensor.shape, generator=context.rng, dtype=tensor.dtype).to(tensor.device)
            noisy_mean[name] = noise.mul_(self.noise_multiplier * self.clip).add_(tensor).div_(expected)
        return noisy_mean

    def guarantee(self, participation: Participation, delta: float) -> Guarantee | None:
        """Return the privacy loss of a client; with `epsilon`, of the copy from `of_client`."""
        return self.compose_guarantees([participation], delta)

    def compose_guarantees(self, participations: Sequence[Participation], delta: float) -> Guarantee | None:
        """Return the privacy loss over participations with different batch sizes or steps."""
        assert self.noise_multiplier is not None, "of_client was not called"
        noise = self.noise_multiplier / self._sensitivity
        steps = tuple(sorted(Steps(noise, *_rate_and_steps(participation)) for participation in participations))
        epsilon = compute_epsilon(steps, delta, self.accountant)
        if epsilon == math.inf:
            return None
        mixed = ", of which two are mixed in each example" if self.with_mixing else ""
        return Guarantee(
            epsilon=epsilon,
            delta=delta,
            neighbours=f"one example added or removed{mixed}",
            accountant={"rdp": "Rényi divergences", "prv": "privacy loss distributions"}[self.accountant]
            + " of the sampled Gaussian mechanism (Opacus)",
        )

    def mechanism(self, participation: Participation) -> Mechanism | None:
        """Return the sampled Gaussian mechanism; None with mixing, where no replacement is proved."""
        assert self.noise_multiplier is not None, "of_client was not called"
        if self.with_mixing:
            return None
        rate, steps = _rate_and_steps(participation)
        return Mechanism(scale=self.noise_multiplier, releases=steps, rate=rate)

    def message_noise(self, sent: State, facts: TrainingFacts) -> MessageNoise | None:
        """Return the noise of all steps together; None where a fact is withheld, or the noise is."""
        if facts.learning_rate is None or facts.steps is None or facts.batch_size is None:
            return None
        if self.noise_multiplier is None:
            return None
        expected = _sampling_rate(facts.num_examples, facts.batch_size) * facts.num_examples
        step_deviation = self.noise_multiplier * self.clip / expected
        deviation = facts.learning_rate * math.sqrt(facts.steps) * step_deviation
        return MessageNoise(deviations=constant_deviations(sent, deviation))

    @property
    def _sensitivity(self) -> float:
        """Return how far one record changes the sum of clipped gradients at most, in units of C."""
        return 3.0 if self.with_mixing else 1.0

    def _check_epsilon(self, participation: Participation, epsilon: float) -> None:
        """Raise ConfigError where the noise multiplier is too small for epsilon."""
        guarantee = self.guarantee(participation, self.delta)
        if guarantee is not None and guarantee.epsilon <= epsilon:
            return
        required = find_noise_multiplier(epsilon, self.delta, *_rate_and_steps(participation), self.accountant)
        got = "no finite epsilon" if guarantee is None else f"epsilon = {guarantee.epsilon:.4g}"
        raise ConfigError(
            f"noise_multiplier: {self.noise_multiplier:g} gives a client with {participation.num_examples} examples "
            f"{got} in {participation.rounds} rounds, above the wanted {epsilon:g}; set it to at least "
            f"{required * self._sensitivity:.4g}, leave it out, or ask for a larger epsilon"
        )


def _sampling_rate(num_examples: int, batch_size: int) -> float:
    return min(1.0, batch_size / num_examples)


def _rate_and_steps(participation: Participation) -> tuple[float, int]:
    """Return the sampling rate of a client, and its number of steps in all its rounds."""
    rate = _sampling_rate(participation.num_examples, participation.batch_size)
    return rate, participation.steps * participation.rounds
