"""Links between examples of one client, which follow from units that an example fired anew."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adversaries.exact.layer import FirstLayer


@dataclass(frozen=True, kw_only=True)
class UnitHistory:
    """Examples that changed one unit in one round.

    Attributes:
        already: those that fired it at the broadcast model.
        newly: those that did not, and so fired it only after the client's own steps.
    """

    already: frozenset[int]
    newly: frozenset[int]


def read_histories(
    layer: FirstLayer, supports: Tensor, complete: Tensor, inputs: Tensor, errors: Tensor
) -> Iterable[UnitHistory]:
    """Yield the histories of units that an example fired anew.

    Units whose examples are not all known, or of which one is too near to the threshold to tell
    whether it fired, are left out.

    Args:
        supports: `unit example`, which examples changed a unit.
        complete: `unit`, whether these are all.
        inputs: `example input`, the examples.
        errors: `example`, their standard errors.
    """
    weight, bias = layer.endpoints[0]
    preactivations = (inputs @ weight.T + bias).T
    margins = 4 * errors * weight.norm(dim=1)[:, None]
    is_doubtful = (supports & (preactivations.abs() <= margins)).any(1)
    newly = supports & (preactivations < 0)
    for unit in (complete & newly.any(1) & ~is_doubtful).nonzero()[:, 0].tolist():
        already = supports[unit] & ~newly[unit]
        yield UnitHistory(already=_indices(already), newly=_indices(newly[unit]))


def group_by_client(histories: Sequence[UnitHistory], count: int) -> Tensor:
    """Return `example`, a number for the client of each; those that nothing links are alone.

    An example fires a unit anew only after another example of its client moved that unit. Where all
    that fired the unit before are of one client, so is the new one. The rule is applied until
    nothing changes, as each link may make another history conclusive.

    >>> group_by_client([UnitHistory(already=frozenset({0}), newly=frozenset({2}))], 3)
    tensor([0, 1, 0])

    Args:
        count: number of examples.
    """
    clients = list(range(count))
    waiting = list(dict.fromkeys(histories))
    while True:
        open_histories = []
        for history in waiting:
            senders = {clients[example] for example in history.already}
            if len(senders) != 1:
                open_histories.append(history)
                continue
            merged = senders | {clients[example] for example in history.newly}
            lowest = min(merged)
            clients = [lowest if client in merged else client for client in clients]
        if len(open_histories) == len(waiting):
            break
        waiting = open_histories
    names = sorted(set(clients))
    return torch.tensor([names.index(client) for client in clients])


def _indices(mask: Tensor) -> frozenset[int]:
    return frozenset(mask.nonzero()[:, 0].tolist())
