"""What the victims of one federation share while attacks on them are set up: the model, answers about it, and w_0.

An attack on a hundred victims asks the same of a hundred models that one builder made, draws the first weights of each,
which nobody uses, and moves the same weights a hundred times. Here each question is asked once, a model that is built
alike twice is copied from then on, and equal weights are moved once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedsim.interfaces.attack import Knowledge
from fedsim.recording.wire_format import State

AnswerT = TypeVar("AnswerT")


class ModelCopies:
    """Builder whose models are copies of one, as soon as another builder has made the same model twice.

    Attributes:
        builder: the other one.
        device: of the models, which are moved there once.
    """

    def __init__(self, builder: Callable[[], nn.Module], device: torch.device) -> None:
        self.builder, self.device = builder, device
        self._first: nn.Module | None = None
        self._moved: nn.Module | None = None
        self._calls = 0

    def __call__(self) -> nn.Module:
        """Return a model of the caller's own."""
        if self._moved is not None:
            return deepcopy(self._moved)
        model = self.builder()
        self._calls += 1
        if self._calls == 1:
            self._first = _copy_if_possible(model)
        elif self._first is not None and _is_same(self._first, model):
            self._moved = self._first.to(self.device)
        else:
            self._first = None  # it makes another one each time
        return model.to(self.device)


_answers: dict[int, dict[tuple[Any, ...], Any]] = {}
"""Answers by the id of the builder of the model, and by question and architecture."""
_moved_weights: dict[torch.device, dict[str, tuple[Tensor, weakref.ref[Tensor]]]] = {}
"""The weights that were moved to a device last: on the CPU, and there for as long as a problem has them."""


def _copy_if_possible(model: nn.Module) -> nn.Module | None:
    try:
        return deepcopy(model)
    except Exception:  # whatever a stranger's layer raises, it is built anew each time
        return None


def _is_same(value: Any, other: Any) -> bool:
    """Return whether two models, or their attributes, are equal; other objects equal only themselves."""
    try:
        return _have_same_parts(value, other)
    except RecursionError:  # a layer that knows the model it is in, say; such a model is built anew each time
        return False


def _have_same_parts(value: Any, other: Any) -> bool:
    if type(value) is not type(other):
        return False
    if isinstance(value, Tensor):
        return _are_equal(value, other)
    if isinstance(value, nn.Module):
        return _have_same_parts(vars(value), vars(other))
    if isinstance(value, dict):
        return list(value) == list(other) and all(_have_same_parts(part, other[name]) for name, part in value.items())
    if isinstance(value, (list, tuple)):
        return len(value) == len(other) and all(map(_have_same_parts, value, other))
    if isinstance(value, (bool, int, float, str, set, torch.dtype, torch.device)):
        return bool(value == other)
    return value is other


def ask_once(question: str, model: nn.Module, knowledge: Knowledge, compute: Callable[[], AnswerT]) -> AnswerT:
    """Return what `compute` says of a model, or has said of one like it from the same builder.

    Models are alike if they are described and hooked alike and take the same inputs. Integers that
    the server sent, such as masks, may decide what a model computes; one that has them is asked anew.

    Args:
        question: names what is asked, and all that it depends on besides the model.
        model: that `knowledge.model` made.
        compute: what it raises is raised each time.
    """
    builder = knowledge.model.builder if isinstance(knowledge.model, ModelCopies) else knowledge.model
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


def share_model(knowledge: Knowledge, builders: dict[int, ModelCopies]) -> Knowledge:
    """Return the knowledge with a builder that victims share who have the same; `builders` are by id."""
    if (builder := knowledge.model) is None:
        return knowledge
    return replace(knowledge, model=builders.setdefault(id(builder), ModelCopies(builder, knowledge.device)))
