"""Base of defenses that train on mixtures of a batch's examples."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedsim.base.errors import ConfigError, RunError
from fedsim.interfaces.defense import Defense, Participation, Setting, copy_with_facts, mixing_defenses
from fedsim.interfaces.defense_checks import name_of_defense

log = logging.getLogger("fedsim." + __name__)


@dataclass(frozen=True, kw_only=True)
class Mixing(Defense):
    """Base of defenses whose `on_batch` replaces examples by weighted means of several records.

    Class attributes:
        classes: number of classes, on the copy that `of_client` returns; 0 where it is not known.
    """

    mixes: ClassVar[bool] = True
    classes: ClassVar[int] = 0

    @property
    def records(self) -> int:
        """Return the number of records in one mixture."""
        raise NotImplementedError

    def check(self, setting: Setting) -> None:
        """Check that examples can be mixed, in large enough batches; warn of single examples."""
        if setting.task.vocabulary:
            raise ConfigError("tokens of a text cannot be mixed, they are not quantities; leave the defense out")
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
        batch_size = setting.training.batch_size
        with_single = [client for client, count in enumerate(setting.num_examples) if count % batch_size == 1]
        if with_single:
            log.warning(
                "%s: the last batch of an epoch of client %d is of one example, which has no partner and is not mixed "
                "(clients in all: %d); choose another training.batch_size",
                name_of_defense(self),
                with_single[0],
                len(with_single),
            )

    def check_combination(self, defenses: Sequence[Defense], position: int) -> None:
        """Raise ConfigError if a defense before this one mixes records already."""
        for other in mixing_defenses(defenses[:position]):
            raise ConfigError(
                f"{name_of_defense(other)} before it already mixes the records; mix once, and leave one of them out"
            )

    def of_client(self, participation: Participation) -> Self:
        """Return a copy that knows the number of classes of a soft label."""
        return copy_with_facts(self, classes=participation.num_classes)

    def mix(self, inputs: Tensor, labels: Tensor, weights: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Mix each example of a batch with others of the batch, and its label by the same weights.

        Args:
            inputs: `example ...`.
            labels: `example` class indices or targets, or `example class` probabilities.
            weights: `example record`, the first of the example itself.
            rng: source of the partners.
        """
        members = draw_partners(len(weights), weights.shape[1], rng).to(inputs.device)
        weights = weights.to(inputs)
        mixed_inputs = _weighted_sum(inputs, members, weights)
        return mixed_inputs, _weighted_sum(self._soft_labels(labels).to(inputs), members, weights)

    def _soft_labels(self, labels: Tensor) -> Tensor:
        """Return labels that can be mixed: class indices as `example class` probabilities.

        Raises:
            RunError: the number of classes is not known.
        """
        if labels.is_floating_point():
            return labels
        if not self.classes:
            raise RunError(
                f"{type(self).__name__}: the number of classes is not known, so labels cannot be mixed; train with "
                "the copy that of_client returns for a Participation with num_classes"
            )
        return one_hot(labels, self.classes)


def draw_partners(count: int, records: int, rng: torch.Generator) -> Tensor:
    """Draw the records that each example of a batch is mixed of: `example record`, itself first.

    The batch is put into a random order on a circle, and each record is mixed with those at
    `records` - 1 random distances. So the records of a mixture differ, and each record is part of
    equally many mixtures. If mixtures have two records, these are neighbours: without one record,
    its neighbours are mixed with each other instead, and nothing else changes, which DP-SGD relies
    on.
    """
    order = torch.randperm(count, generator=rng)
    if records == 2:
        other_distances = torch.arange(1, records)
    else:
        other_distances = 1 + torch.randperm(count - 1, generator=rng)[: records - 1]
    distances = torch.cat([torch.zeros(1, dtype=torch.int64), other_distances])
    members = torch.empty((count, records), dtype=torch.int64)
    members[order] = order[(torch.arange(count)[:, None] + distances) % count]
    return members


def _weighted_sum(values: Tensor, members: Tensor, weights: Tensor) -> Tensor:
    """Return the sums, `example ...`, of `values[members]` by weights, both `example record`."""
    axes = (-1, *[1] * (values.ndim - 1))
    return torch.stack([w.view(axes) * values[m] for m, w in zip(members.T, weights.T, strict=True)]).sum(0)
