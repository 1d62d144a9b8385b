"""Which examples a client uses in which step."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fedsim.randomness import generator
from fedsim.training.settings import LocalTraining


def batches(count: int, settings: LocalTraining, order: torch.Generator) -> Iterator[Tensor]:
    """The examples of each local step, drawn from `order`."""
    steps = settings.steps(count)
    while steps > 0:
        for index in torch.split(torch.randperm(count, generator=order), settings.batch_size)[:steps]:
            steps -= 1
            yield index


def poisson_batches(count: int, rate: float, steps: int, order: torch.Generator) -> Iterator[Tensor]:
    """The examples of each of `steps` local steps, each there with probability `rate`, drawn from `order`."""
    for _ in range(steps):
        yield (torch.rand(count, generator=order, dtype=torch.float64) < rate).nonzero().flatten()


def batches_of_round(
    count: int, settings: LocalTraining, *, seed: int, client: int, number: int
) -> tuple[Tensor, ...] | None:
    """The examples of each step that a client takes in round `number`, where batches go on from round to round.

    Steps are counted from the first round on, whether or not the client took part in each; so what it does in a
    round follows from the seed, the client and the round alone. With ceil(count / B) batches an epoch, FedSGD's
    step of round r is batch (r - 1) mod ceil(count / B) of epoch (r - 1) div ceil(count / B).

    Args:
        count: examples that the client holds.
        seed: of the run.
        number: server round, counted from 1.

    Returns:
        Indices into its examples, one tensor a step; None where each round draws its own (`batches`).
    """
    if not settings.goes_on:
        return None
    steps, in_epoch = settings.steps(count), math.ceil(count / settings.batch_size)
    cuts: dict[int, tuple[Tensor, ...]] = {}
    found = []
    for step in range((number - 1) * steps, number * steps):
        epoch, place = divmod(step, in_epoch)
        epoch = 0 if settings.batches == "fixed" else epoch
        if epoch not in cuts:
            order = torch.randperm(count, generator=generator(seed, "batches", client, epoch))
            cuts = {epoch: torch.split(order, settings.batch_size)}
        found.append(cuts[epoch][place])
    return tuple(found)
