"""What the victims of one federation share while attacks on them are set up: answers about the model, and w_0.

An attack on a hundred victims asks the same of a hundred models that one builder made, and moves the same weights a
hundred times. Here each question is asked once, and equal weights are moved once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedsim.interfaces.attack import Knowledge
from fedsim.recording.wire_format import State

AnswerT = TypeVar("AnswerT")
_answers: dict[int, dict[tuple[Any, ...], Any]] = {}
"""Answers by the id of the builder of the model, and by question and architecture."""
_moved_weights: dict[torch.device, dict[str, tuple[Tensor, weakref.ref[Tensor]]]] = {}
"""The weights that were moved to a device last: on the CPU, and there for as long as a problem has them."""


def ask_once(question: str, model: nn.Module, knowledge: Knowledge, compute: Callable[[], AnswerT]) -> AnswerT:
    """Return what `compute` says of a model, or has said of one like it from the same builder.

    Models are alike if they are described and hooked alike and take the same inputs. Integers that
    the server sent, such as masks, may decide what a model computes; one that has them is asked anew.

    Args:
        question: names what is asked, and all that it depends on besides the model.
        model: that `knowledge.model` made.
        knowledge: granted facts of the victim.
        compute: what it raises is raised each time.
    """
    builder = knowledge.model
    if any(not buffer.is_floating_point() and buffer.ndim for buffer in model.buffers()):
        return compute()
    if id(builder) not in _answers:
        try:
            weakref.finalize(builder, _answers.pop, id(builder), None).atexit = False
        except TypeError:  # no weak reference leads to such an object
            return compute()
        _answers[id(builder)] = {}
    answers = _answers[id(builder)]
    hooks = tuple(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    modes = tuple(module.training for module in model.modules())
    key = question, repr(model), hooks, modes, knowledge.input_shape, knowledge.device
    if key not in answers:
        answers[key] = compute()
    answer: AnswerT = answers[key]
    return answer


def move_weights(state: State, names: Sequence[str], device: torch.device) -> list[Tensor]:
    """Return the tensors of these names on a device; those that equal the last victim's are not moved again.

    Nobody may change them, because attacks on other victims read them too.
    """
    if device.type == "cpu":
        return [state[name] for name in names]
    last_weights = _moved_weights.get(device, {})
    weights: dict[str, tuple[Tensor, weakref.ref[Tensor]]] = {}
    moved: list[Tensor] = []
    for name in names:
        tensor = state[name]
        held, reference = last_weights.get(name, (None, None))
        on_device = reference() if reference is not None else None
        if held is None or on_device is None or not _are_equal(held, tensor):
            held, on_device = tensor, tensor.to(device)
            weakref.finalize(on_device, _forget, device, name).atexit = False
        weights[name] = held, weakref.ref(on_device)
        moved.append(on_device)
    _moved_weights[device] = weights
    return moved


def _forget(device: torch.device, name: str) -> None:
    """Let go of the copy on the CPU of weights that no problem has any more."""
    _, reference = _moved_weights.get(device, {}).get(name, (None, None))
    if reference is not None and reference() is None:
        del _moved_weights[device][name]


def _are_equal(held: Tensor, tensor: Tensor) -> bool:
    return held.dtype == tensor.dtype and held.shape == tensor.shape and torch.equal(held, tensor)
