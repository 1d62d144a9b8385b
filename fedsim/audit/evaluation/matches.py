"""How often claims that say nothing about a victim match its examples.

Claims are compared with a pool: the examples of the victim, and others of the same classes that it
does not hold. Were the message to say nothing about the victim, its examples would be to the claims
what the others are, so that any choice of as many examples of the pool could be the victim's. Of
the examples of a class that are matched, the number of the victim's is then hypergeometric,
whatever the claims are and however alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.audit.evaluation.truth import Truth
from fedsim.interfaces.modality import PublicExamples

CHANCE = "chance among others"
"""Name of the floor of such metrics, where examples of others are known."""
_MAX_OTHERS, _OTHERS_PER_EXAMPLE = 1000, 40
"""Most examples of others in a pool, or so many for each of the victim's. A verdict on one takes 19."""


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Examples of the victim among others of the same classes.

    Attributes:
        data: `example ...`, those of others first, so that of equal examples another's counts.
        classes: `example`, class indices; all 0 where classes do not count, as in a regression.
        of_victim: `example`, whether it is the victim's.
    """

    data: Tensor
    classes: Tensor
    of_victim: Tensor

    @classmethod
    def from_truth(cls, truth: Truth, others: PublicExamples | None, *, by_class: bool = True) -> Pool | None:
        """Return the pool of a victim; None where no other examples of its classes are known.

        Args:
            by_class: whether others of the same classes alone count, and each class for itself.
        """
        if others is None:
            return None
        true_classes, classes = (_class_indices(part.labels, by_class=by_class) for part in (truth, others))
        labels = sorted(set(true_classes.tolist()))
        most = max(_MAX_OTHERS, _OTHERS_PER_EXAMPLE * len(true_classes)) / len(labels)
        indices = torch.cat([_take_evenly((classes == label).nonzero().flatten(), most) for label in labels])
        if not len(indices):
            return None
        return cls(
            data=torch.cat([others.data[indices], truth.data]),
            classes=torch.cat([classes[indices], true_classes]),
            of_victim=torch.cat([torch.zeros(len(indices)), torch.ones(len(truth.data))]).bool(),
        )

    def expected_share(self, is_matched: Tensor) -> float:
        """Return the share of the victim's examples that as many matches hit on average by chance."""
        expected = 0.0
        for label in set(self.classes.tolist()):
            of_class = self.classes == label
            matches = int(is_matched[of_class].sum())
            expected += matches * float(self.of_victim[of_class].double().mean())
        return expected / int(self.of_victim.sum())


def _class_indices(labels: Tensor, *, by_class: bool) -> Tensor:
    """Return class indices; targets of a regression are of one kind."""
    is_one_kind = labels.is_floating_point() or not by_class
    return torch.zeros(len(labels), dtype=torch.int64) if is_one_kind else labels


def _take_evenly(indices: Tensor, most: float) -> Tensor:
    """Return every second, or third, and so on, so that no more than `most` are left."""
    return indices[:: max(1, math.ceil(len(indices) / most))]
