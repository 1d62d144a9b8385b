"""Draw the examples that a client uses in each local step."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fedsim.base.randomness import generator
from fedsim.training.settings import LocalTraining


def shuffled_batches(count: int, settings: LocalTraining, order: torch.Generator) -> Iterator[Tensor]:
    """Yield the indices of each local step's examples, in shuffled epochs drawn from `order`."""
    steps = settings.steps(count)
    while steps > 0:
        epoch = torch.randperm(count, generator=order)
        # To split what is one batch takes longer than to draw it.
        batches = (epoch,) if 0 < count <= settings.batch_size else torch.split(epoch, settings.batch_size)
        for index in batches[:steps]:
            steps -= 1
            yield index


def poisson_batches(count: int, rate: float, steps: int, order: torch.Generator) -> Iterator[Tensor]:
    """Yield each local step's examples, included with probability `rate`, drawn from `order`."""
    for _ in range(steps):
        yield (torch.rand(count, generator=order, dtype=torch.float64) < rate).nonzero().flatten()


def round_batches(
    count: int, settings: LocalTraining, *, seed: int, client: int, number: int
) -> tuple[Tensor, ...] | None:
    """Return the examples of a client's steps in one round, where batches continue over rounds.

    Steps are counted from the first round on, whether or not the client took part in each; so its
    batches in a round follow from the seed, the client and the round alone. With ceil(count / B)
    batches an epoch, FedSGD's step of round r is batch (r - 1) mod ceil(count / B) of epoch (r - 1)
    div ceil(count / B).

    Args:
        count: number of examples of the client.
        number: server round, counted from 1.

    Returns:
        Indices of its examples, one tensor a step; None where each round draws its own batches
        (`batches`).
    """
    if not settings.continues_batches:
        return None
    steps, batches_per_epoch = settings.steps(count), math.ceil(count / settings.batch_size)
    batches_by_epoch: dict[int, tuple[Tensor, ...]] = {}
    step_batches: list[Tensor] = []
    for step in range((number - 1) * steps, number * steps):
        epoch, position = divmod(step, batches_per_epoch)
        epoch = 0 if settings.batches == "fixed" else epoch
        # Only the current epoch is kept.
        if epoch not in batches_by_epoch:
            order = torch.randperm(count, generator=generator(seed, "batches", client, epoch))
            batches_by_epoch = {epoch: torch.split(order, settings.batch_size)}
        step_batches.append(batches_by_epoch[epoch][position])
    return tuple(step_batches)
