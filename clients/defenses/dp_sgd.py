"""DP-SGD: in each local step the gradient of each example is clipped, and noise is added to their sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from clients.defenses.mixup import Mixup
from fedsim.attacks import Paper
from fedsim.defense import Defense, Guarantee, Participation, Poisson, Setting, called, mixers
from fedsim.errors import ConfigError
from fedsim.privacy.accountants import Accountant, Steps, epsilon_of, noise_multiplier_for
from fedsim.training.gradients import rows_of_examples
from fedsim.wire.messages import State


@dataclass(frozen=True, kw_only=True)
class DpSgd(Defense):
    """Sample examples independently, clip the gradient of each to L2 norm C, add Gaussian noise to the sum.

    A batch has each of the N examples with probability q = min(1, B / N), so it may be empty; the noisy sum is divided
    by q N. The standard deviation of the noise is sigma C in each number, in each step and for each client by itself,
    so the promise holds against the server. What is proved is (epsilon, delta)-differential privacy of all that a
    client sends in the run, for one of its examples added or removed. N, which steps and rate follow from, and the
    metrics that it reports, its training loss among them, are sent in clear and are not covered. Nor are the mean
    and the standard deviation by which the data set is standardised: they count as public.

    Set `noise_multiplier`, or `epsilon`, for which the noise of each client follows from its own sampling rate and its
    steps in all rounds. With both, a noise multiplier that does not keep to epsilon is refused. Neither an infinite
    clip nor no noise is accepted: without the defense, batches would not even be sampled independently.

    Args:
        clip: C, in units of the gradient of the loss.
        clipping: `flat` takes all tensors of a gradient as one vector; `per-layer` clips each of k tensors to
            C / sqrt(k), so that all of them together are no longer than C.
        noise_multiplier: sigma, noise standard deviation divided by C, above 0.
        epsilon: largest privacy loss of a client that takes part in all rounds, dimensionless.
        delta: probability bound, dimensionless, below 1 / N.
        accountant: how steps are composed: `rdp` by Rényi divergences, `prv` by privacy loss distributions, which is
            tighter and takes longer.
        with_mixing: accept that `mixup` makes each example of two records. One record more or less then adds or
            removes one mixture and changes another, so the sensitivity is 3 C, and the guarantee is that of a third of
            the noise.

    Raises:
        ConfigError: a setting is out of range, epsilon cannot be reached, or delta says nothing for a client of this
            size; a layer or another defense mixes examples; clients send the gradient of one fixed mini-batch.

    References:
        Abadi et al.: Deep Learning with Differential Privacy, CCS 2016 (Alg. 1); McMahan et al.: A General Approach to
        Adding Differential Privacy to Iterative Training Procedures, 2018 (Sec. 3: clipping by layers).
        Differs: noise is not drawn to be safe against attacks on floating-point numbers.
    """

    clip: float = 1.0
    clipping: Literal["flat", "per-layer"] = "flat"
    noise_multiplier: float | None = None
    epsilon: float | None = None
    delta: float = 1e-5
    accountant: Accountant = "rdp"
    with_mixing: bool = False

    promise: ClassVar[str] = "(epsilon, delta)-differential privacy of each example, over all rounds"
    against: ClassVar[str] = "the server and all who see what a client sends; N and its metrics are in clear"
    cost: ClassVar[str] = "accuracy; a step takes half as long again, in some networks several times as long"
    paper: ClassVar[Paper] = Paper(
        title="Deep Learning with Differential Privacy",
        authors="Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang",
        venue="CCS",
        year=2016,
        url="https://arxiv.org/abs/1607.00133",
    )

    def __post_init__(self) -> None:
        if self.noise_multiplier is None and self.epsilon is None:
            raise ConfigError("set noise_multiplier, or epsilon, from which it follows")
        for name in ("clip", "noise_multiplier", "epsilon"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name}: expected a finite value above 0, got {value}; or leave the defense out")
        if not 0 < self.delta < 1:
            raise ConfigError(f"delta: expected a probability above 0, below 1, got {self.delta}")

    def check(self, setting: Setting) -> None:
        """See Defense."""
        largest = max(setting.num_examples)
        if self.delta * largest >= 1:
            raise ConfigError(
                f"delta: {self.delta:g} promises nothing to client {setting.num_examples.index(largest)}, which holds "
                f"{largest} examples: to publish one of them at random would be allowed; set it below {1 / largest:.3g}"
            )

    def check_beside(self, others: Sequence[Defense], place: int) -> None:
        """See Defense. Where in their order the mixing stands makes no difference, batches are mixed before."""
        del place
        mixing = mixers(others)
        if not mixing and self.with_mixing:
            raise ConfigError("with_mixing: no defense beside it mixes examples, so it would waste noise; leave it out")
        for other in mixing:
            name = called(other)
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
        """See Defense. For a wanted epsilon, a copy with the noise multiplier of this client."""
        if self.epsilon is None:
            if self.accountant == "prv":
                self.guarantee(participation, self.delta)  # what it cannot compute is to be known before work
            return self
        if self.noise_multiplier is not None:
            self._check_kept(participation, self.epsilon)
            return self
        noise = noise_multiplier_for(self.epsilon, self.delta, *_rate_and_steps(participation), self.accountant)
        return replace(self, noise_multiplier=noise * self._sensitivity)

    def sampling(self, num_examples: int, batch_size: int) -> Poisson:
        """See Defense."""
        return Poisson(rate=_rate(num_examples, batch_size))

    def on_examples(self, gradients: State, expected: float, *, rng: torch.Generator) -> State:
        """See Defense."""
        return self.on_sum(self.clipped_sum(gradients), expected, rng=rng)

    def clipped_sum(self, gradients: State) -> State:
        """The sum over the examples of their clipped gradients, of each tensor `example ...`."""
        flat = {name: rows_of_examples(tensor) for name, tensor in gradients.items()}
        factors = self.example_factors(torch.stack([torch.linalg.vector_norm(rows, dim=1) for rows in flat.values()]))
        return {
            name: (factor @ rows).view(gradients[name].shape[1:])
            for factor, (name, rows) in zip(factors, flat.items(), strict=True)
        }

    def example_factors(self, norms: Tensor) -> Tensor:
        """See Defense."""
        if self.clipping == "per-layer":
            most = self.clip / math.sqrt(len(norms))
            return torch.reciprocal(norms.clamp(min=most)) * most
        whole = torch.linalg.vector_norm(norms, dim=0, keepdim=True)
        return (torch.reciprocal(whole.clamp(min=self.clip)) * self.clip).expand_as(norms)

    def on_sum(self, total: State, expected: float, *, rng: torch.Generator) -> State:
        """See Defense."""
        assert self.noise_multiplier is not None, "of_client was not asked"
        made = {}
        for name, tensor in total.items():
            noise = torch.randn(tensor.shape, generator=rng, dtype=tensor.dtype).to(tensor.device)
            made[name] = noise.mul_(self.noise_multiplier * self.clip).add_(tensor).div_(expected)
        return made

    def guarantee(self, participation: Participation, delta: float) -> Guarantee | None:
        """See Defense. Where the noise is that of a wanted epsilon, of the copy that `of_client` returned."""
        return self.composed([participation], delta)

    def composed(self, done: Sequence[Participation], delta: float) -> Guarantee | None:
        """See Defense. The accountant composes steps of different kinds, too."""
        assert self.noise_multiplier is not None, "of_client was not asked"
        noise = self.noise_multiplier / self._sensitivity
        steps = tuple(sorted(Steps(noise, *_rate_and_steps(some)) for some in done))
        epsilon = epsilon_of(steps, delta, self.accountant)
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

    @property
    def _sensitivity(self) -> float:
        """How far one record moves the sum of clipped gradients at most, in units of C."""
        return 3.0 if self.with_mixing else 1.0

    def _check_kept(self, participation: Participation, wanted: float) -> None:
        """Raise ConfigError where the noise multiplier does not keep to the wanted epsilon."""
        proved = self.guarantee(participation, self.delta)
        if proved is not None and proved.epsilon <= wanted:
            return
        enough = noise_multiplier_for(wanted, self.delta, *_rate_and_steps(participation), self.accountant)
        got = "no finite epsilon" if proved is None else f"epsilon = {proved.epsilon:.4g}"
        raise ConfigError(
            f"noise_multiplier: {self.noise_multiplier:g} gives a client with {participation.num_examples} examples "
            f"{got} in {participation.rounds} rounds, above the wanted {wanted:g}; set it to at least "
            f"{enough * self._sensitivity:.4g}, leave it out, or ask for a larger epsilon"
        )


def _rate(num_examples: int, batch_size: int) -> float:
    return min(1.0, batch_size / num_examples)


def _rate_and_steps(participation: Participation) -> tuple[float, int]:
    """The sampling rate of a client, and its steps in all its rounds."""
    return _rate(participation.num_examples, participation.batch_size), participation.steps * participation.rounds
