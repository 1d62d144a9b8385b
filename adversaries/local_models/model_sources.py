"""The model that an attack reads: one that was sent, or one that another attack decoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedsim.base.errors import AttackError, ConfigError, first_line
from fedsim.interfaces.attack import (
    ALL,
    CLIENT,
    GLOBAL,
    LAST_RETURNED,
    OPTIMAL,
    Attack,
    Knowledge,
    Records,
    RoundsNeeded,
    Target,
)
from fedsim.inversion.batch_norm import copy_with_batch_statistics
from fedsim.recording.wire_format import State, Update, match_any_names, non_finite_names
from fedsim.training.model_state import load_state, running_statistics


@dataclass(frozen=True, kw_only=True)
class ModelAttack(Attack):
    """Base of the attacks on a model from any source.

    Args:
        source: `global` is w_t of the last inspected round, `last-returned` the last w_T that the
            victim returned; else the title of an attack in the same file that decodes local models,
            or `optimal` for the victim's true optimal local model, which only the evaluator has.
    """

    source: str = LAST_RETURNED

    reads: ClassVar[frozenset[str]] = frozenset({CLIENT})
    rounds_needed: ClassVar[RoundsNeeded] = ALL
    transcript_sources: ClassVar[tuple[str, ...]] = (GLOBAL, LAST_RETURNED)
    """Sources that are in the transcript itself, not in the findings of another attack."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.source.strip():
            raise ConfigError(
                f"source: expected {', '.join(self.transcript_sources)}, {OPTIMAL} or the title of an "
                f"attack, got '{self.source}'"
            )

    @property
    def builds_on(self) -> str | None:
        """Return the title of the attack whose models are read, see `Attack.builds_on`."""
        return None if self.source in self.transcript_sources else self.source

    def _load_network(self, target: Target) -> nn.Module:
        """Return the network that is attacked, see `LoadableNetwork.load`."""
        return LoadableNetwork(target.knowledge).load(*self._source_state(target))

    def _source_state(self, target: Target) -> tuple[State, str]:
        """Return the state that is attacked, and a description of it for errors."""
        transcript, victim = target.transcript, target.victim
        rounds = target.participation_rounds(in_groups=self.builds_on is not None)
        if self.builds_on is not None:
            state = decoded_model(target.knowledge, self.source, victim)
            return state, f"{self.source}, client {victim}"
        if self.source == GLOBAL:
            last = [number for number in transcript.rounds if transcript.clients(number)][-1]
            recipient = victim if last == rounds[-1] else transcript.clients(last)[0]
            return transcript.update(last, recipient).before, f"round {last}, the global model"
        update = transcript.update(rounds[-1], victim)
        return returned_weights(update), f"round {update.round}, client {victim}"


def returned_weights(update: Update, remedy: str = "choose another source") -> State:
    """Return w_T.

    Args:
        remedy: the last part of the error's text.

    Raises:
        AttackError: the client sent a gradient.
    """
    if update.gradient is not None:
        raise AttackError(
            f"round {update.round}, client {update.client}: sent a gradient, no weights, so that there is no returned "
            f"model to attack; {remedy}"
        )
    return update.after


def decoded_model(knowledge: Knowledge, source: str, client: int) -> State:
    """Return the local model of `client` that the attack titled `source` claims.

    Raises:
        AttackError: it claims none for that client, or no attack with that title ran.
    """
    models = decoded_models(knowledge, source)
    if client not in models:
        raise AttackError(
            f"source: '{source}' decoded no model of client {client}; see why it failed there, or choose another source"
        )
    return models[client]


def decoded_models(knowledge: Knowledge, source: str) -> Mapping[int, State]:
    """Return the local models that the attack titled `source` claims, by client.

    Raises:
        AttackError: no attack with that title ran.
    """
    if knowledge.models is None:
        raise AttackError(
            f"source: there are no models of '{source}'; name an attack of the same file that decodes local models"
        )
    return knowledge.models


class LoadableNetwork:
    """A network built once from the adversary's knowledge, into which states are loaded in turn.

    It is in evaluation mode and on the attack's device.
    """

    def __init__(self, knowledge: Knowledge) -> None:
        assert knowledge.model is not None
        self._model = deepcopy(knowledge.model()).to(knowledge.device).eval()
        self._initial_state = {name: tensor.clone() for name, tensor in self._model.state_dict().items()}

    @cached_property
    def _batch_statistics_model(self) -> nn.Module:
        return copy_with_batch_statistics(self._model)

    def load(self, state: State, where: str) -> nn.Module:
        """Load `state` and return the network; it is valid until the next call.

        Tensors that `state` lacks have their initial values. BatchNorm layers whose running
        statistics were not shared normalise by the batch.

        Raises:
            AttackError: the state is of another model, holds NaN, or lacks buffers that are not
                running statistics.
        """
        named_state, lacks_statistics = match_state(self._model, state, where)
        model = self._batch_statistics_model if lacks_statistics else self._model
        load_state(model, {**self._initial_state, **named_state})
        return model


def match_state(model: nn.Module, state: State, where: str) -> tuple[State, bool]:
    """Name the tensors of `state` as `model` does.

    Returns:
        The named state, and whether it lacks BatchNorm's running statistics.

    Raises:
        AttackError: see `LoadableNetwork.load`.
    """
    if broken := non_finite_names(state):
        raise AttackError(
            f"{where}: {broken[0]} of the model holds NaN or infinite values, so that it says nothing; choose another "
            "source or victim"
        )

    # Try the sets of tensors that a federation may share: all, without integers, without running
    # statistics, or parameters alone.
    model_state, statistics = model.state_dict(), running_statistics(model)
    floating = [name for name, tensor in model_state.items() if tensor.is_floating_point()]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    name_lists: Sequence[Sequence[str]] = (
        list(model_state),
        floating,
        [name for name in floating if name not in statistics],
        parameters,
    )
    shape_maps = []
    for names in name_lists:
        shape_maps.append({name: model_state[name].shape for name in names})
    named_state = match_any_names(state, shape_maps)
    if named_state is None:
        raise AttackError(
            f"{where}: {len(state)} tensors are not the weights of the model, which has {len(parameters)}; attack with "
            "the model of that federation"
        )

    missing = {name for name in floating if name not in named_state}
    if missing_buffers := sorted(missing - statistics):
        raise AttackError(
            f"{where}: the model computes with {missing_buffers[0]}, which clients of this federation do not share; "
            "this attack needs a model without such buffers, or one that shares them"
        )
    return named_state, bool(missing)


def compute_outputs(model: nn.Module, inputs: Tensor, where: str) -> Tensor:
    """Compute the outputs of `model` for all `inputs` as one batch, `example output`.

    Raises:
        AttackError: the model does not take the inputs, or its outputs hold NaN.
    """
    try:
        result: Tensor = model(inputs)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        raise AttackError(
            f"{where}: the model does not take inputs of shape {tuple(inputs.shape)} ({first_line(error)}); check that "
            "the records and the model are those of the federation"
        ) from error
    if not result.isfinite().all():
        raise AttackError(
            f"{where}: the model makes NaN or infinite values of the inputs; choose another source or victim"
        )
    return result


def compute_losses(loss: Callable[[Tensor, Tensor], Tensor], logits: Tensor, labels: Tensor, where: str) -> Tensor:
    """Compute `loss(logits, labels)`, from outputs `record output`.

    Raises:
        AttackError: the loss does not take them, or is NaN.
    """
    try:
        result = loss(logits, labels)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        label_type = str(labels.dtype).removeprefix("torch.")
        raise AttackError(
            f"{where}: the loss does not take labels of type {label_type} with outputs of shape {tuple(logits.shape)} "
            f"({first_line(error)}); check that the records and the model are those of the federation"
        ) from error
    if result.isnan().any():
        raise AttackError(f"{where}: the loss of known records is NaN; check their labels, or attack another victim")
    return result


def unpack_records(records: Records, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return inputs and labels of known records on the attack's device.

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
