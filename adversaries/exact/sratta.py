"""SRATTA: which examples behind a secure sum belong to one client (Marchand, 2023)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adversaries.exact.layer import (
    FirstLayer,
    check_first_layer,
    check_first_layer_is_sent,
    predict_labels,
    read_first_layer,
)
from adversaries.exact.lone_examples import LayerChange, find_lone_examples, measure_change
from adversaries.exact.unit_supports import find_supports
from fedsim.base.errors import AttackError
from fedsim.base.papers import cite
from fedsim.interfaces.attack import GROUP, Attack, Knowledge, Paper, Progress, RoundsNeeded, Target, warn
from fedsim.interfaces.findings import ExampleGroups
from fedsim.recording.wire_format import Update


@dataclass(frozen=True, kw_only=True)
class Sratta(Attack):
    """Recover examples from the sums of several rounds, and group them by client.

    1. Divide the change of each unit's weights by that of its bias (`find_lone_examples`): where a
       unit saw one example only, that is the example, and units and rounds agree on it.
    2. Explain the change of each unit in each round as a sum of few examples (`find_supports`).
    3. See which of these fired the unit at the broadcast model (`read_histories`). One that did not
       was brought to fire it by its own client's steps, and so by an example of the same client. If
       a single example, or several of one client, fired the unit before, they share the client.
    4. Join clients until no unit adds a link (`group_by_client`). Examples without a link are alone.

    Clients must take several local steps of SGD without weight decay, in groups that stay the same
    from round to round. An example that no unit sees alone is not recovered, and one that two
    clients hold joins what is claimed of each.

    References:
        [Marchand2023], Sect. 4 and 5.
        Differs: an input is confirmed by a second unit or round, where the paper knows that pixels
        have 256 values; matching pursuit works on whitened changes; one training, where the paper
        reads 20 from different models.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"model", "loss", "input_shape", "value_range"})
    paper: ClassVar[Paper] = cite("Marchand2023")
    reads: ClassVar[frozenset[str]] = frozenset({GROUP})
    rounds_needed: ClassVar[RoundsNeeded] = 2
    main_metric: ClassVar[str] = "pairs_right"

    def check_facts(self, knowledge: Knowledge, num_examples: int | None = None, granted: Collection[str] = ()) -> None:
        """Refuse a network without a first linear layer that it reads."""
        check_first_layer(knowledge)

    def check_message(self, update: Update, knowledge: Knowledge) -> None:
        """Refuse messages without that layer."""
        check_first_layer_is_sent(update, knowledge)

    def _run(self, target: Target, progress: Progress) -> ExampleGroups:
        if not target.members:
            raise AttackError(
                f"client {target.victim}: its messages are seen in clear, so that whose examples they hold is "
                "known; read them with 'spear-ica', or attack under [secure_aggregation]"
            )
        where = f"client {target.victim} and its group"
        numbers = target.participation_rounds()
        total_steps = len(numbers) + 1
        # Recover examples.
        changes = list[LayerChange]()
        for number in numbers:
            layer = read_first_layer(target.read_update(number), target.knowledge)
            changes.append(measure_change(layer, len(target.members)))
        lone = find_lone_examples(changes, target.rng).select_certified()
        if not len(lone.inputs):
            raise AttackError(
                f"{where}: no three units or rounds give the same input for sure, as where each unit sees several "
                "examples, or where noise, coarse rounding, weight decay or an optimizer other than SGD changes the "
                "quotients; attack more rounds (adversary.rounds), or a wider first layer"
            )
        progress(1, total_steps, {"objective": 1.0})
        # Link them round by round.
        histories = list[UnitHistory]()
        for step, change in enumerate(changes, start=2):
            supports, complete = find_supports(change.rows, change.errors, lone.inputs, lone.errors)
            histories += read_histories(change.layer, supports, complete, lone.inputs, lone.errors)
            progress(step, total_steps, {"objective": 1 - float(complete.double().mean())})
        clients = group_by_client(histories, len(lone.inputs))
        if len(set(clients.tolist())) == len(clients):
            warn(
                f"{self.title} on {where}: nothing links any of the {len(clients)} recovered examples, as where "
                "clients take one step a round, or few units are explained; each is claimed to be of a client of its "
                "own"
            )
        last = changes[-1].layer
        return ExampleGroups(
            data=last.to_unit_range(lone.inputs),
            labels=predict_labels(last, lone.inputs),
            certified=lone.certified,
            claims="client",
            clients=clients,
        )


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
