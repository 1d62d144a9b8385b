"""Clients train on means of pairs of records."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from clients.defenses.mixing import Mixing
from fedsim.attacks import Paper
from fedsim.defense import Setting
from fedsim.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Mixup(Mixing):
    """Mix each example of a batch with another one of it; so are the labels, which become probabilities of classes.

    Pairs are drawn anew in each batch. Each record is mixed with one other, and is the other of one more. A batch of
    one example has no partner and is trained on as it is: where a client's N leaves one over in each epoch, a warning
    says so, and under Poisson sampling such batches come up by chance. No formal guarantee.

    Args:
        alpha: the weight of an example is drawn from Beta(alpha, alpha), one weight for all of a batch; 0 mixes
            nothing. Left out, it is one half: the average of the pair.
        regression: whether the targets of a regression are mixed, too.

    Raises:
        ConfigError: `alpha` is out of range, the data are texts, the task is a regression and `regression` is not set,
            or batches or clients have fewer than two examples.

    References:
        Zhang, Cisse, Dauphin, Lopez-Paz: mixup: Beyond Empirical Risk Minimization, ICLR 2018. As a
        defense, with averages of pairs: Driouich et al.: Local Model Reconstruction Attacks in Federated Learning and
        their Uses, App. D.4. Differs: the partner is never the example itself, which in a random permutation happens
        to one example a batch on average, and would leave its record as it is.
    """

    alpha: float | None = None
    regression: bool = False

    against: ClassVar[str] = (
        "a server that reconstructs records: it finds mixtures; one that knows the defense may take these apart"
    )
    cost: ClassVar[str] = "accuracy, where classes do not mix well; no bytes, hardly any time"
    paper: ClassVar[Paper] = Paper(
        title="mixup: Beyond Empirical Risk Minimization",
        authors="Zhang, Cisse, Dauphin, Lopez-Paz",
        venue="ICLR",
        year=2018,
        url="https://arxiv.org/abs/1710.09412",
    )

    def __post_init__(self) -> None:
        if self.alpha is not None and not 0 <= self.alpha < math.inf:
            raise ConfigError(f"alpha: expected a finite value of at least 0, got {self.alpha}; leave it out for 1/2")

    @property
    def records(self) -> int:
        """See Mixing."""
        return 2

    def check(self, setting: Setting) -> None:
        """See Defense."""
        super().check(setting)
        if not setting.task.num_classes and not self.regression:
            raise ConfigError(
                "regression: the task is a regression, whose targets would be mixed like the inputs, as if it were "
                "linear; set regression = true if that is meant, or leave the defense out"
            )

    def on_batch(self, inputs: Tensor, labels: Tensor, *, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """See Defense."""
        weight = self._weight(rng)
        if weight == 1 or len(inputs) < 2:
            return inputs, labels
        return self.mixed(inputs, labels, torch.tensor([weight, 1 - weight]).expand(len(inputs), 2), rng)

    def adversary_batch(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """See Defense. Each record is mixed with the next one on a circle, by the mean of the larger weight."""
        weight = self._larger
        return tuple(weight * whole + (1 - weight) * whole.roll(-1, 0) for whole in (inputs, labels))  # type: ignore[return-value]

    @property
    def _larger(self) -> float:
        """Mean of the larger weight of a pair; on a circle walked the other way round, it is the record's own."""
        if self.alpha is None:
            return 0.5
        if not self.alpha:
            return 1.0
        from scipy.special import betainc

        return float(1 - betainc(self.alpha + 1, self.alpha, 0.5))

    def _weight(self, rng: torch.Generator) -> float:
        """Of the example itself."""
        if self.alpha is None:
            return 0.5
        if not self.alpha:
            return 1.0
        seed = int(torch.randint(2**63 - 1, (), generator=rng))
        return float(np.random.default_rng(seed).beta(self.alpha, self.alpha))
