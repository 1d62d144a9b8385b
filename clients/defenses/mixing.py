"""What defenses share that train on mixtures of a batch's examples instead of the examples."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedsim.defense import Defense, Participation, Setting, called, informed, mixers
from fedsim.errors import ConfigError, RunError

log = logging.getLogger("fedsim." + __name__)


@dataclass(frozen=True, kw_only=True)
class Mixing(Defense):
    """Base of the defenses whose `on_batch` makes each example of a batch a weighted mean of several records.

    Class attributes:
        classes: number of classes, on the copy that `of_client` returns; 0 where it is not known.
    """

    mixes: ClassVar[bool] = True
    classes: ClassVar[int] = 0

    @property
    def records(self) -> int:
        """How many records make one example."""
        raise NotImplementedError

    def check(self, setting: Setting) -> None:
        """See Defense. A batch of one example, which has no partner, is refused where it is the rule."""
        if setting.task.kind == "text":
            raise ConfigError("tokens of a text cannot be mixed, they are no quantities; leave the defense out")
        smallest = min(setting.num_examples)
        if setting.training.batch_size < self.records:
            raise ConfigError(
                f"training.batch_size: one example is made of {self.records} records of a batch, "
                f"got {setting.training.batch_size}; make batches larger"
            )
        if smallest < self.records:
            raise ConfigError(
                f"client {setting.num_examples.index(smallest)} holds {smallest} training examples, but one example is "
                f"made of {self.records} records; choose a partition that gives each client at least as many"
            )
        if alone := [c for c, count in enumerate(setting.num_examples) if count % setting.training.batch_size == 1]:
            log.warning(
                "%s: the last batch of an epoch of client %d is of one example, which has no partner and is not mixed "
                "(clients in all: %d); choose another training.batch_size",
                called(self),
                alone[0],
                len(alone),
            )

    def check_beside(self, others: Sequence[Defense], place: int) -> None:
        """See Defense."""
        for other in mixers(others[:place]):
            raise ConfigError(
                f"{called(other)} before it already mixes the records; mix once, and leave one of them out"
            )

    def of_client(self, participation: Participation) -> Self:
        """See Defense. The copy knows how many classes a soft label has."""
        return informed(self, classes=participation.num_classes)

    def mixed(self, inputs: Tensor, labels: Tensor, weights: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Each example of a batch mixed with others of the batch, and its label with theirs by the same weights.

        Args:
            inputs: `example ...`.
            labels: `example` class indices or targets, or `example class` probabilities.
            weights: `example record`, the first of the example itself.
        """
        members = partners(len(weights), weights.shape[1], rng).to(inputs.device)
        weights = weights.to(inputs)
        return blended(inputs, members, weights), blended(self._quantities(labels).to(inputs), members, weights)

    def _quantities(self, labels: Tensor) -> Tensor:
        """`labels` as numbers that can be mixed: class indices as `example class` probabilities.

        Raises:
            RunError: nobody said how many classes there are.
        """
        if labels.is_floating_point():
            return labels
        if not self.classes:
            raise RunError(
                f"{type(self).__name__}: the number of classes is not known, so labels cannot be mixed; train with "
                "the copy that of_client returns for a Participation with num_classes"
            )
        return one_hot(labels, self.classes)


def partners(count: int, records: int, rng: torch.Generator) -> Tensor:
    """`example record`: which records of a batch each of its examples is made of, itself first.

    The batch is put into a random order on a circle, and each record meets those at `records` - 1 random distances. So
    the records of an example differ, and each record is part of as many examples as any other. Two records are
    neighbours: then a batch without one record is mixed as if the circle had been closed where it stood, which DP-SGD
    relies on.
    """
    order = torch.randperm(count, generator=rng)
    others = torch.arange(1, records) if records == 2 else 1 + torch.randperm(count - 1, generator=rng)[: records - 1]
    apart = torch.cat([torch.zeros(1, dtype=torch.int64), others])
    found = torch.empty((count, records), dtype=torch.int64)
    found[order] = order[(torch.arange(count)[:, None] + apart) % count]
    return found


def blended(values: Tensor, members: Tensor, weights: Tensor) -> Tensor:
    """`example ...`: the sums over `members`, `example record`, of `values`, by `weights` of the same shape."""
    axes = (-1, *[1] * (values.ndim - 1))
    return torch.stack([w.view(axes) * values[m] for m, w in zip(members.T, weights.T, strict=True)]).sum(0)
