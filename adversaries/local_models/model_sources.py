"""The model that an attack reads: one that was sent, or one that another attack decoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from adversaries.loadable_network import LoadableNetwork
from fedsim.base.errors import AttackError, ConfigError, first_line
from fedsim.interfaces.attack import (
    ALL,
    CLIENT,
    GLOBAL,
    LAST_RETURNED,
    OPTIMAL,
    Attack,
    Knowledge,
    MessageKind,
    Records,
    RoundsNeeded,
    Target,
)
from fedsim.recording.wire_format import State, Update


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

    @property
    def message_kind(self) -> MessageKind:
        """Return weights for models that clients returned."""
        return "weights" if self.source in self.transcript_sources and self.source != GLOBAL else "any"

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

    def check_message(self, update: Update, knowledge: Knowledge) -> None:
        """Refuse clients that do not send the whole model, where a model that was sent is read."""
        if self.builds_on is None:
            state = update.before if self.source == GLOBAL else returned_weights(update)
            LoadableNetwork(knowledge).load(state, update.name)

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
    """
    if update.gradient is not None:
        raise AttackError(
            f"{update.name}: sent a gradient, no weights, so that there is no returned model to attack; {remedy}"
        )
    return update.after


def decoded_model(knowledge: Knowledge, source: str, client: int) -> State:
    """Return the local model of `client` that the attack titled `source` claims."""
    models = decoded_models(knowledge, source)
    if client not in models:
        raise AttackError(
            f"source: '{source}' decoded no model of client {client}; see why it failed there, or choose another source"
        )
    return models[client]


def decoded_models(knowledge: Knowledge, source: str) -> Mapping[int, State]:
    """Return the local models that the attack titled `source` claims, by client."""
    if knowledge.models is None:
        raise AttackError(
            f"source: there are no models of '{source}'; name an attack of the same file that decodes local models"
        )
    return knowledge.models


def compute_outputs(model: nn.Module, inputs: Tensor, where: str) -> Tensor:
    """Compute the outputs of `model` for all `inputs` as one batch, `example output`."""
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
        raise AttackError(f"{where}: the model outputs NaN or infinite values; choose another source or victim")
    return result


def compute_losses(loss: Callable[[Tensor, Tensor], Tensor], logits: Tensor, labels: Tensor, where: str) -> Tensor:
    """Compute `loss(logits, labels)`, from outputs `record output`."""
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
    """Return inputs and labels of known records on the attack's device."""
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
