"""Which model an attack reads: one that was sent, or one that another attack decoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn

from adversaries.batch_norm import normalising_by_batch
from adversaries.local_updates import rounds_of
from fedsim.attacks import CLIENT, GLOBAL, LAST_RETURNED, OPTIMAL, Attack, Knowledge, Records
from fedsim.errors import AttackError, ConfigError, first_line
from fedsim.recording.transcript import Transcript
from fedsim.training.model_state import load_state, statistics_of
from fedsim.wire.messages import State, Update, by_any, non_finite


@dataclass(frozen=True, kw_only=True)
class ModelAttack(Attack):
    """Base of the attacks on a model from any source.

    Args:
        source: `global` is w_t of the last inspected round, `last-returned` the last w_T that the victim returned;
            else the title of an attack in the same file that decodes local models, or `optimal` for the victim's
            true optimal local model, which only the evaluator has.
    """

    source: str = LAST_RETURNED

    reads: ClassVar[frozenset[str]] = frozenset({CLIENT})
    temporal: ClassVar[bool] = True
    messages: ClassVar[tuple[str, ...]] = (GLOBAL, LAST_RETURNED)
    """The sources that are in the transcript."""

    def __post_init__(self) -> None:
        if not self.source.strip():
            raise ConfigError(
                f"source: expected {', '.join(self.messages)}, {OPTIMAL} or the title of an attack, got '{self.source}'"
            )

    @property
    def builds_on(self) -> str | None:
        """See `Attack.builds_on`."""
        return None if self.source in self.messages else self.source

    def _network(self, transcript: Transcript, knowledge: Knowledge, victim: int) -> nn.Module:
        """The network that is attacked, see `Network.holding`."""
        return Network(knowledge).holding(*self._state(transcript, knowledge, victim))

    def _state(self, transcript: Transcript, knowledge: Knowledge, victim: int) -> tuple[State, str]:
        """The model that is attacked, and whose it is."""
        rounds = rounds_of(transcript, victim, in_groups=self.builds_on is not None)
        if self.builds_on is not None:
            return decoded(knowledge, self.source, victim), f"{self.source}, client {victim}"
        if self.source == GLOBAL:
            last = [number for number in transcript.rounds if transcript.clients(number)][-1]
            seen = transcript.update(last, victim if last == rounds[-1] else transcript.clients(last)[0])
            return seen.before, f"round {last}, the global model"
        update = transcript.update(rounds[-1], victim)
        return returned(update), f"round {update.round}, client {victim}"


def returned(update: Update, instead: str = "choose another source") -> State:
    """w_T.

    Args:
        instead: what the error says to do.

    Raises:
        AttackError: the client sent a gradient.
    """
    if update.gradient is not None:
        raise AttackError(
            f"round {update.round}, client {update.client}: sent a gradient, no weights, so that there is no returned "
            f"model to attack; {instead}"
        )
    return update.after


def decoded(knowledge: Knowledge, source: str, client: int) -> State:
    """What the attack called `source` claims to be the local model of `client`.

    Raises:
        AttackError: it claims nothing of that client, or no models were handed over.
    """
    models = models_of(knowledge, source)
    if client not in models:
        raise AttackError(
            f"source: '{source}' decoded no model of client {client}; see why it failed there, or choose another source"
        )
    return models[client]


def models_of(knowledge: Knowledge, source: str) -> Mapping[int, State]:
    """What the attack called `source` claims to be local models, by client.

    Raises:
        AttackError: no models were handed over.
    """
    if knowledge.models is None:
        raise AttackError(
            f"source: no model of '{source}' was handed over; name an attack of the same file that decodes local models"
        )
    return knowledge.models


class Network:
    """The model that the adversary knows, built once, for one state after another.

    A network of the attack's own, in evaluation mode, on its device.
    """

    def __init__(self, knowledge: Knowledge) -> None:
        assert knowledge.model is not None
        self._model = deepcopy(knowledge.model()).to(knowledge.device).eval()
        self._fresh = {name: tensor.clone() for name, tensor in self._model.state_dict().items()}

    @cached_property
    def _by_batch(self) -> nn.Module:
        return normalising_by_batch(self._model)

    def holding(self, state: State, where: str) -> nn.Module:
        """The network with the weights of `state`, until the next call; nothing else is left of the one before.

        BatchNorm layers whose running statistics were not shared normalise by whatever batch they are given.

        Raises:
            AttackError: the state is of another model, holds NaN, or lacks buffers that are no such statistics.
        """
        found, by_batch = matched(self._model, state, where)
        own = self._by_batch if by_batch else self._model
        load_state(own, {**self._fresh, **found})
        return own


def matched(model: nn.Module, state: State, where: str) -> tuple[State, bool]:
    """`state` under the names of `model`, and whether BatchNorm's running statistics are missing from it.

    Raises:
        AttackError: see `Network.holding`.
    """
    if broken := non_finite(state):
        raise AttackError(
            f"{where}: {broken[0]} of the model holds NaN or infinite values, so that it says nothing; choose another "
            "source or victim"
        )
    whole, statistics = model.state_dict(), statistics_of(model)
    real = [name for name, tensor in whole.items() if tensor.is_floating_point()]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    orders: Sequence[Sequence[str]] = (
        list(whole),
        real,
        [name for name in real if name not in statistics],
        parameters,
    )
    found = by_any(state, ({name: whole[name].shape for name in names} for names in orders))
    if found is None:
        raise AttackError(
            f"{where}: {len(state)} tensors are not the weights of the model, which has {len(parameters)}; attack with "
            "the model of that federation"
        )
    missing = {name for name in real if name not in found}
    if odd := sorted(missing - statistics):
        raise AttackError(
            f"{where}: the model computes with {odd[0]}, which clients of this federation do not share; this attack "
            "needs a model without such buffers, or one that shares them"
        )
    return found, bool(missing)


def outputs(model: nn.Module, inputs: Tensor, where: str) -> Tensor:
    """`example output`, the outputs of `model` for all `inputs` as one batch.

    Raises:
        AttackError: it does not take them, or makes NaN of them.
    """
    try:
        made: Tensor = model(inputs)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        raise AttackError(
            f"{where}: the model does not take inputs of shape {tuple(inputs.shape)} ({first_line(error)}); check that "
            "the records and the model are those of the federation"
        ) from error
    if not made.isfinite().all():
        raise AttackError(
            f"{where}: the model makes NaN or infinite values of the inputs; choose another source or victim"
        )
    return made


def losses(loss: Callable[[Tensor, Tensor], Tensor], made: Tensor, labels: Tensor, where: str) -> Tensor:
    """`loss(made, labels)`, of outputs `record output`.

    Raises:
        AttackError: it does not take them, or makes NaN of them.
    """
    try:
        found = loss(made, labels)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        kind = str(labels.dtype).removeprefix("torch.")
        raise AttackError(
            f"{where}: the loss does not take labels of type {kind} beside outputs of shape {tuple(made.shape)} "
            f"({first_line(error)}); check that the records and the model are those of the federation"
        ) from error
    if found.isnan().any():
        raise AttackError(f"{where}: the loss of known records is NaN; check their labels, or attack another victim")
    return found


def known(records: Records, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and labels of known records on the attack's device.

    Raises:
        AttackError: there are none, or some have no label.
    """
    inputs, labels = records.inputs, records.labels
    if len(inputs) == 0:
        raise AttackError("no record of the victim is known; attack a client that holds data")
    if len(labels) != len(inputs):
        raise AttackError(
            f"of {len(inputs)} known records {len(labels)} have labels; this attack needs the label of each"
        )
    if labels.is_floating_point() and not labels.isfinite().all():
        raise AttackError(
            f"the label of known record {int((~labels.isfinite()).nonzero()[0, 0])} is missing or infinite; this "
            "attack needs the label of each"
        )
    return inputs.to(device), labels.to(device)
