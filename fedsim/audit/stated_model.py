"""Check the model, the loss and the records that an attack file states against a recording."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.base.errors import (
    ConfigError,
    TranscriptError,
    describe_error,
    did_you_mean,
    first_line,
    join_first,
    one_line,
)
from fedsim.base.loss_term import describe_undeclared_term
from fedsim.base.task import goal_of
from fedsim.interfaces.knowledge import Knowledge
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State, match_any_names
from fedsim.training.model_state import sendable_shapes

MAX_NAMES = 6
"""Most tensors or clients that one sentence names."""


def check_constants(
    network: nn.Module, build: Callable[[], nn.Module], sent: State, private_names: Collection[str]
) -> None:
    """Check that buffers which the server did not send are the same each time the model is built.

    Buffers that no message of this model would hold (frozen parameters) must also equal what the
    server sent, if it did. Those of parts that stay with clients may have any values.
    """
    persistent = network.state_dict().keys()
    received = match_any_names(sent, shared_shapes(network, private_names)) or {}
    known_names = {*received, *private_names}
    constants = {name: tensor for name, tensor in network.named_buffers() if name not in known_names}
    if not constants:
        return
    rebuilt = dict(build().named_buffers())
    for name, tensor in constants.items():
        kind = "buffer" if name in persistent else "frozen"
        difference = ""
        if not torch.equal(tensor.cpu(), rebuilt[name].cpu()):
            difference = "each time it is built"
        elif kind == "frozen" and name in sent:
            sent_tensor = sent[name].to(tensor.dtype).cpu()
            difference = "" if torch.equal(tensor.cpu(), sent_tensor) else "than the server sent"
        if difference:
            raise ConfigError(
                f"adversary.knowledge.model: its {kind} '{name}' has other values {difference}; "
                "load the values that clients have, or seed it as they do"
            )


def check_outputs(network: nn.Module, knowledge: Knowledge) -> None:
    """Raise ConfigError unless two examples give a logit for each class, and these a loss."""
    outputs = _compute_outputs(network, grey_inputs(network, knowledge, 2))
    classes = knowledge.num_classes
    if complaint := describe_undeclared_term(network, outputs):
        raise ConfigError(f"adversary.knowledge.model: {complaint}")
    if not isinstance(outputs, Tensor):
        raise ConfigError(
            f"adversary.knowledge.model: returns a {type(outputs).__name__}, expected a tensor of logits; say how to "
            'make one of it with [app] outputs = "module:callable", a function of what it returns and of its inputs'
        )
    if classes is not None and tuple(outputs.shape) != (2, classes):
        raise ConfigError(
            f"adversary.knowledge.model: gives outputs of shape {tuple(outputs.shape)} for 2 examples, expected "
            f"(2, {classes}), a logit for each of num_classes; fix num_classes, name the loss that clients minimise "
            "with adversary.knowledge.loss, or make logits with [app] outputs"
        )
    if knowledge.loss is None:
        return
    if outputs.ndim == 4 and goal_of(knowledge.loss) == "classes":
        raise ConfigError(
            f"adversary.knowledge.model: gives outputs of shape {tuple(outputs.shape)} for 2 examples, logits of "
            'pixels, and the loss is one of classes; name loss = "segmentation", or make a logit for each class '
            "with [app] outputs"
        )
    _check_loss(knowledge.loss, outputs)


def _check_loss(compute_loss: Callable[[Tensor, Tensor], Tensor], outputs: Tensor) -> None:
    """Raise ConfigError unless outputs for two examples and some kind of labels give one number."""
    loss, errors = None, list[Exception]()
    # Try class indices, then targets of a regression, then several labels or numbers an example.
    for labels in (torch.zeros(2, dtype=torch.long), torch.zeros(2), torch.zeros(outputs.shape)):
        try:
            loss = compute_loss(outputs, labels.to(outputs.device))
            break
        except Exception as error:  # anybody's function
            errors.append(error)
    else:
        raise ConfigError(
            f"adversary.knowledge.loss: cannot be computed for outputs of shape {tuple(outputs.shape)} and labels of "
            f"shape (2,) ({type(errors[0]).__name__}: {first_line(errors[0])}); name the loss that clients minimise"
        ) from errors[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        returned = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(
            f"adversary.knowledge.loss: gives {returned} for 2 examples, expected one number, "
            "their mean loss; return that"
        )


def _compute_outputs(network: nn.Module, inputs: Tensor) -> Any:
    try:
        with torch.no_grad():
            return network.eval()(inputs)
    except Exception as error:  # anybody's network
        raise ConfigError(
            f"adversary.knowledge.model: does not take {len(inputs)} inputs of shape {tuple(inputs.shape[1:])} "
            f"({describe_error(error)}); fix input_shape or the model"
        ) from error


def grey_inputs(network: nn.Module, knowledge: Knowledge, count: int) -> Tensor:
    """Return `count` examples in the middle of the value range."""
    assert knowledge.input_shape is not None
    assert knowledge.value_range is not None
    middle = sum(map(sum, knowledge.value_range)) / sum(map(len, knowledge.value_range))
    weight = next(network.parameters(), torch.empty(0))
    shape = (count, *knowledge.input_shape)
    return torch.full(shape, float(middle), dtype=weight.dtype, device=weight.device)


def describe_shape_mismatch(network: nn.Module, state: State, private_names: Collection[str]) -> str:
    """Say which shared tensors of `network` and `state` do not fit; empty where all fit."""
    orders = shared_shapes(network, private_names)
    if match_any_names(state, orders) is not None:
        return ""
    has_names = not all(name.isdigit() for name in state)
    complaints = _mismatch_by_name(orders, state) if has_names else _mismatch_by_position(orders, state)
    return one_line(join_first(complaints, MAX_NAMES, "; ")) or "its tensors are of other shapes"


def _mismatch_by_name(orders: Sequence[Mapping[str, torch.Size]], state: State) -> list[str]:
    """Compare a recording whose tensors have names with the model's tensors."""
    all_tensors, trained_tensors = orders[0], orders[-1]
    complaints = []
    for name, shape in trained_tensors.items():
        if name not in state:
            complaints.append(f"'{name}' {tuple(shape)} is not there")
        elif state[name].shape != shape:
            complaints.append(f"'{name}' {tuple(shape)} is recorded as {tuple(state[name].shape)}")
    complaints += [f"the model has no '{name}'" for name in state if name not in all_tensors]
    return complaints


def _mismatch_by_position(orders: Sequence[Mapping[str, torch.Size]], state: State) -> list[str]:
    """Compare a recording whose tensors have numbers as names with the model's tensors."""
    order = next((order for order in orders if len(order) == len(state)), orders[-1])
    recorded = [state[name] for name in sorted(state, key=int)]
    complaints = []
    for (name, shape), tensor in zip(order.items(), recorded, strict=False):
        if shape != tensor.shape:
            complaints.append(f"'{name}' {tuple(shape)} is recorded as {tuple(tensor.shape)}")
    if len(order) != len(state):
        complaints.append(f"the model has {len(order)} tensors, the recording {len(state)}")
    return complaints


def check_record_names(transcript: Transcript) -> None:
    """Raise ConfigError where [app] names a record, and all messages have a single one."""
    app = transcript.message_format
    named = app.record or app.broadcast_record
    if not named or app.messages:
        return
    for number in transcript.rounds:
        with suppress(TranscriptError):  # a damaged round is reported when it is attacked
            replies = transcript.header(number).replies
            if any(reply.records for reply in replies):
                return
    key = "record" if app.record else "broadcast_record"
    raise ConfigError(
        f"app.{key}: '{named}' chooses between records of arrays, and each of these messages has a single one, "
        "whatever its name; leave the key out"
    )


def find_private_names(network: nn.Module, parts: Sequence[str], sent: State) -> frozenset[str]:
    """Return the tensors of the model that [app] private says to stay with the clients."""
    tensors = network.state_dict()
    names: set[str] = set()
    for part in parts:
        of_part = {name for name in tensors if name == part or name.startswith(f"{part}.")}
        if not of_part:
            known = [name for name, module in network.named_modules() if name and module.state_dict()]
            raise ConfigError(f"app.private: the model has no part '{part}', {did_you_mean(part, known)}")
        names |= of_part
    if shared := sorted(names & sent.keys()):
        raise ConfigError(
            f"app.private: '{shared[0]}' is in the messages, so the server sees it; name only parts that no client "
            "sends"
        )
    if names and not any(name in tensors for name in sent):
        raise ConfigError(
            "app.private: the arrays of the messages have other names than the model's, so it is unknown which of "
            "them are missing; name them with [app] names"
        )
    return frozenset(names)


def shared_shapes(network: nn.Module, private_names: Collection[str]) -> list[Mapping[str, torch.Size]]:
    """Return the sets of tensors that a federation may send whose clients keep some of them."""
    return [
        {name: shape for name, shape in names.items() if name not in private_names}
        for names in sendable_shapes(network)
    ]
