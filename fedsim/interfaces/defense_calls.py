"""Calls of defenses' hooks: each gets copies, and what it returns is checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedsim.base.errors import RunError
from fedsim.interfaces.defense import Defense, overrides
from fedsim.interfaces.local_context import LocalContext
from fedsim.recording.payloads import Payload, State

if TYPE_CHECKING:
    from fedsim.training.local_round import LocalRound


def apply_on_gradient(
    defense: Defense,
    gradient: State,
    context: LocalContext,
) -> State:
    """Apply `defense.on_gradient` to a copy of `gradient` and check the result.

    A tensor that the hook neither changed nor replaced is the same object as in `gradient`.
    """
    if not overrides(defense, "on_gradient"):
        return gradient
    copies = {name: tensor.clone() for name, tensor in gradient.items()}
    result = defense.on_gradient(dict(copies), context)
    return _check_state(f"{type(defense).__name__}.on_gradient", gradient, copies, result)


def apply_on_sum(defense: Defense, total: State, expected: float, parameters: State, context: LocalContext) -> State:
    """Apply `defense.on_sum` to the sum of clipped gradients of `parameters` and check the result."""
    result = defense.on_sum(dict(total), expected, context)
    return _check_state(f"{type(defense).__name__}.on_sum", parameters, parameters, result)


def apply_on_examples(
    defense: Defense, gradients: State, expected: float, parameters: State, context: LocalContext
) -> State:
    """Apply `defense.on_examples` to per-example gradients of `parameters` and check the result."""
    result = defense.on_examples(dict(gradients), expected, context)
    return _check_state(f"{type(defense).__name__}.on_examples", parameters, parameters, result)


def apply_on_update(
    defense: Defense,
    update: State,
    context: LocalContext,
) -> State | Payload:
    """Apply `defense.on_update` to a copy of `update` and check the result, a state or a payload."""
    if not overrides(defense, "on_update"):
        return update
    where = f"{type(defense).__name__}.on_update"
    copies = {name: tensor.clone() for name, tensor in update.items()}
    result = defense.on_update(dict(copies), context)
    if not isinstance(result, Payload):
        return _check_state(where, update, copies, result)
    _check_names(where, update, result.tensors)
    if misfit := result.describe_misfit(update):
        raise RunError(f"{where}: the payload does not fit the update ({misfit})")
    for name, (form, _) in result.tensors.items():
        if form != "delta":
            raise RunError(f"{where}: '{name}' is sent as {form}, expected a payload of deltas")
    return result


def _check_names(where: str, state: State, result: Mapping[str, object]) -> None:
    if differing := sorted(set(state) ^ set(result), key=str):
        problem = "left out" if differing[0] in state else "added"
        raise RunError(
            f"{where}: '{differing[0]}' was {problem}; return the same names, zeros where nothing is to be sent"
        )


def _check_state(where: str, state: State, copies: State, result: Any) -> State:
    """Return a hook's `result` of `copies` of `state` in the dtypes and on the devices of `state`.

    Unchanged tensors are those of `state`.
    """
    if not isinstance(result, Mapping):
        raise RunError(f"{where}: expected a dict of tensors by name back, got {describe_value(result)}")
    _check_names(where, state, result)
    for name, tensor in state.items():
        value = result[name]
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.shape != tensor.shape:
            raise RunError(
                f"{where}: expected '{name}' as a floating tensor of shape {tuple(tensor.shape)} back, "
                f"got {describe_value(value)}"
            )
    checked = {}
    for name, tensor in state.items():
        is_unchanged = result[name] is copies[name] and torch.equal(copies[name], tensor)
        checked[name] = tensor if is_unchanged else result[name].detach().to(tensor)
    return checked


def apply_on_data(
    defense: Defense,
    local: LocalRound,
    context: LocalContext,
) -> Tensor:
    """Apply `defense.on_data` and return the examples of `local` that take part in this round.

    Returns:
        `example`, strictly ascending indices.
    """
    count = len(local.labels)
    if not overrides(defense, "on_data"):
        return torch.arange(count)
    indices = defense.on_data(local, context)
    if not _are_ascending_indices(indices, count):
        raise RunError(
            f"{type(defense).__name__}.on_data: expected ascending places of examples, int64 from 0 to {count - 1}, "
            f"back, got {describe_value(indices)}"
        )
    return indices.detach().cpu()


def _are_ascending_indices(indices: object, count: int) -> bool:
    if not isinstance(indices, Tensor) or indices.dtype != torch.int64 or indices.ndim != 1:
        return False
    is_within = not len(indices) or 0 <= int(indices[0]) <= int(indices[-1]) < count
    return is_within and not bool((indices.diff() <= 0).any())


def apply_on_batch(
    defense: Defense,
    inputs: Tensor,
    labels: Tensor,
    context: LocalContext,
) -> tuple[Tensor, Tensor]:
    """Apply `defense.on_batch` to copies of a mini-batch and check the result."""
    if not overrides(defense, "on_batch"):
        return inputs, labels
    result = defense.on_batch(inputs.clone(), labels.clone(), context)
    where = f"{type(defense).__name__}.on_batch"
    is_pair = isinstance(result, tuple | list) and len(result) == 2
    if not (is_pair and all(isinstance(tensor, Tensor) for tensor in result)):
        raise RunError(f"{where}: expected a pair of tensors (inputs, labels) back, got {describe_value(result)}")
    batch, targets = result
    if not (_has_same_form(batch, inputs) and batch.ndim and len(batch)):
        sizes = ", ".join(map(str, inputs.shape[1:]))
        raise RunError(f"{where}: expected inputs of shape (example, {sizes}) back, got {describe_value(batch)}")
    # Class indices may become probabilities: soft labels.
    is_soft = not labels.is_floating_point() and targets.is_floating_point() and targets.ndim == 2
    has_label_form = _has_same_form(targets, labels)
    if not (targets.ndim and (has_label_form or is_soft)) or len(targets) != len(batch):
        raise RunError(
            f"{where}: expected one label for each of {len(batch)} inputs back, got {describe_value(targets)}"
        )
    return batch.to(inputs), targets.to(labels) if has_label_form else targets.to(inputs)


def _has_same_form(tensor: Tensor, original: Tensor) -> bool:
    """Return whether both are floating point or both are not, and examples have the same shape."""
    same_kind = tensor.is_floating_point() == original.is_floating_point()
    return same_kind and tensor.shape[1:] == original.shape[1:]


def apply_on_features(defense: Defense, features: Tensor, inputs: Tensor, context: LocalContext) -> Tensor:
    """Apply `defense.on_features` to a copy of `features`, `example feature`, and check the result.

    Returns:
        The object `features` itself where the hook changed nothing.
    """
    if not overrides(defense, "on_features"):
        return features
    features_copy = features.clone()
    result = defense.on_features(features_copy, inputs, context)
    if result is features_copy and torch.equal(features_copy, features):
        return features
    if not isinstance(result, Tensor) or not result.is_floating_point() or result.shape != features.shape:
        raise RunError(
            f"{type(defense).__name__}.on_features: expected features of shape {tuple(features.shape)} back, "
            f"got {describe_value(result)}"
        )
    return result.to(features)


def describe_value(value: Any) -> str:
    """Describe a value for an error: dtype and shape of a tensor, or else its type."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}" if value is not None else "nothing"
