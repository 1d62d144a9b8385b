"""Mixup: clients train on weighted means of pairs of records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from clients.defenses.mixing import Mixing
from fedsim.base.constraints import NonNegativeFloat
from fedsim.base.errors import ConfigError
from fedsim.base.papers import cite
from fedsim.interfaces.attack import Paper
from fedsim.interfaces.defense import Setting
from fedsim.interfaces.local_context import LocalContext


@dataclass(frozen=True, kw_only=True)
class Mixup(Mixing):
    """Mix each example of a batch, and its label, with another one.

    Labels become class probabilities. Pairs are drawn anew in each batch, on a circle: each record
    is mixed with the next one, and the record before is mixed with it. A batch of one example is
    trained on without mixing. A warning is logged where a client's N leaves one example over in
    each epoch; under Poisson sampling, such batches occur by chance. No formal guarantee.

    Args:
        alpha: the weight of an example is drawn from Beta(alpha, alpha), one weight for all of a
            batch; 0 mixes nothing. By default the weight is one half: the average of the pair.
        regression: whether the targets of a regression are mixed, too.

    Raises:
        ConfigError: `alpha` is out of range, the data are texts, the task is a regression and
            `regression` is not set, or batches or clients have fewer than two examples.

    References:
        [Zhang2018a]. As a defense, with averages of pairs: [Driouich2022], App. D.4. Differs: the
        partner is never the example itself, as it is in a random permutation for one example a
        batch on average, whose record is then not mixed.
    """

    alpha: NonNegativeFloat | None = None
    regression: bool = False

    against: ClassVar[str] = (
        "a server that reconstructs records: it finds mixtures; one that knows the defense may take these apart"
    )
    cost: ClassVar[str] = "accuracy, where classes do not mix well; no bytes, hardly any time"
    paper: ClassVar[Paper] = cite("Zhang2018a")

    @property
    def records(self) -> int:
        """Return the number of records in one mixture."""
        return 2

    def check(self, setting: Setting) -> None:
        """Check that examples can be mixed, and targets of a regression only if it is allowed."""
        super().check(setting)
        if setting.task.goal == "masks":
            raise ConfigError("it mixes labels of examples, and what is learned is masks; leave it out")
        if setting.task.goal == "numbers" and not self.regression:
            raise ConfigError(
                "regression: the task is a regression, whose targets would be mixed like the inputs, as if it were "
                "linear; set regression = true if that is meant, or leave the defense out"
            )

    def on_batch(self, inputs: Tensor, labels: Tensor, context: LocalContext) -> tuple[Tensor, Tensor]:
        """Return the batch with each example mixed with a partner."""
        weight = self._draw_weight(context.rng)
        if weight == 1 or len(inputs) < 2:
            return inputs, labels
        return self.mix(inputs, labels, torch.tensor([weight, 1 - weight]).expand(len(inputs), 2), context.rng)

    def adversary_batch(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the batch with each record mixed with the next, by the mean larger weight.

        An adversary does not know the order of records, so it may assume that each record's own
        weight is the larger one: otherwise it is so on the circle in the other direction.
        """
        weight = self._mean_larger_weight
        mixed_inputs = weight * inputs + (1 - weight) * inputs.roll(-1, 0)
        mixed_labels = weight * labels + (1 - weight) * labels.roll(-1, 0)
        return mixed_inputs, mixed_labels

    @property
    def _mean_larger_weight(self) -> float:
        """Return the mean of the larger weight of a pair."""
        if self.alpha is None:
            return 0.5
        if not self.alpha:
            return 1.0
        from scipy.special import betainc

        return float(1 - betainc(self.alpha + 1, self.alpha, 0.5))

    def _draw_weight(self, rng: torch.Generator) -> float:
        """Draw the weight of the example itself."""
        if self.alpha is None:
            return 0.5
        if not self.alpha:
            return 1.0
        seed = int(torch.randint(2**63 - 1, (), generator=rng))
        return float(np.random.default_rng(seed).beta(self.alpha, self.alpha))
