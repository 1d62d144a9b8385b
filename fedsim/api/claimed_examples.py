"""Check and convert what a caller of `fedsim.score` hands over."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from fedsim.audit.evaluation.scoring import claimed_data
from fedsim.base.errors import ConfigError
from fedsim.base.task import infer_modality
from fedsim.interfaces.finding_checks import MAX_CLASSES
from fedsim.interfaces.findings import Finding, Reconstruction, Texts
from fedsim.interfaces.modality import PublicExamples
from fedsim.modalities import find_modality

log = logging.getLogger(__name__)

_OTHER_UNIT = 0.05
"""Share of the spread of the true numbers below which others seem to be in another unit."""
_RANGE_TOLERANCE = 1e-3
"""Share of the value range by which a value may lie outside of it, by rounding."""
Bounds = tuple[list[float], list[float]]
"""Lowest and highest values, one for each channel or one for all."""


def _are_tokens(examples: Tensor) -> bool:
    return not examples.is_floating_point()


def _read_tensor(name: str, values: Any) -> Tensor:
    """Return a tensor of what the caller gives."""
    try:
        tensor = torch.as_tensor(values).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"score: {name}: expected a tensor or an array, got {type(values).__name__}") from error
    if not tensor.numel():
        raise ConfigError(f"score: {name}: is empty; hand over at least one example")
    if tensor.is_complex() or (tensor.is_floating_point() and not tensor.isfinite().all()):
        raise ConfigError(f"score: {name}: holds values that are NaN, infinite or complex; expected real numbers")
    return tensor


def read_examples(name: str, values: Any, bounds: Bounds) -> Tensor:
    """Return tokens as int64, and numbers as float32 in [0, 1]."""
    tensor = _read_tensor(name, values)
    shape = tuple(tensor.shape)
    if tensor.ndim < 2:
        raise ConfigError(f"score: {name}: expected examples along the first of two or more axes, got shape {shape}")
    if _are_tokens(tensor):
        if tensor.ndim != 2 or tensor.dtype == torch.bool or int(tensor.min()) < 0 or int(tensor.max()) >= MAX_CLASSES:
            raise ConfigError(
                f"score: {name}: integers are tokens, 'example position' from 0 to {MAX_CLASSES - 1}, got "
                f"{tensor.dtype} of shape {shape}; hand over other numbers as floating point, as in x / 255"
            )
        return tensor.long()
    axes = (-1, *[1] * (tensor.ndim - 2))
    low, high = (torch.tensor(end, dtype=torch.float64) for end in bounds)
    if len(low) not in (1, tensor.shape[1]):
        raise ConfigError(f"score: value_range: {len(low)} values do not fit the {tensor.shape[1]} channels of {name}")
    scaled = (tensor.double() - low.reshape(axes)) / (high - low).reshape(axes)
    if ((scaled - 0.5).abs() > 0.5 + _RANGE_TOLERANCE).any():
        raise ConfigError(
            f"score: {name}: has values from {tensor.min():.4g} to {tensor.max():.4g}, beyond the value_range; name "
            "the range of the data, or clamp them"
        )
    return scaled.clamp(0, 1).float()


def find_modality_name(name: str, true: Tensor) -> str:
    """Return the name of the modality of the true examples: `name`, or if it is empty the one that their axes imply."""
    shape = tuple(true.shape[1:])
    name = name or infer_modality(shape, has_tokens=_are_tokens(true))
    if not name:
        raise ConfigError(f"score: modality: which examples have the shape {shape}? name it, as modality='series'")
    modality = find_modality(name)
    if len(modality.axes) != len(shape) or modality.has_tokens != _are_tokens(true):
        values = "tokens" if modality.has_tokens else "numbers"
        raise ConfigError(
            f"score: modality: '{name}' has {values} with the axes {', '.join(modality.axes)}, the truth has "
            f"{true.dtype} of shape {shape}; name another one, or reshape the examples"
        )
    return name


def _check_same_kind(name: str, examples: Tensor, true: Tensor) -> None:
    """Raise ConfigError unless examples are of the kind and shape of the true ones."""
    if _are_tokens(examples) != _are_tokens(true):
        kinds = {True: "integers (tokens)", False: "floating point numbers"}
        raise ConfigError(
            f"score: {name}: holds {kinds[_are_tokens(examples)]}, the truth {kinds[_are_tokens(true)]}; "
            "hand over both in one form"
        )
    if examples.shape[1:] != true.shape[1:]:
        raise ConfigError(
            f"score: {name}: has examples of shape {tuple(examples.shape[1:])}, those of the truth have "
            f"{tuple(true.shape[1:])}; reshape them"
        )


def read_claim(claimed: Any, bounds: Bounds, true: Tensor) -> Reconstruction | Texts:
    """Return the claim as a finding, whose labels do not count yet unless it was one."""
    if isinstance(claimed, Finding) and not isinstance(claimed, Reconstruction | Texts):
        raise ConfigError(
            f"score: claimed: a {type(claimed).__name__} claims no examples; hand over a Reconstruction or Texts"
        )
    is_finding = isinstance(claimed, Reconstruction | Texts)
    examples = claimed_data(claimed) if is_finding else read_examples("claimed", claimed, bounds)
    _check_same_kind("claimed", examples, true)
    if is_finding:
        finding: Reconstruction | Texts = claimed
        return finding
    labels = torch.zeros(len(examples), dtype=torch.int64)
    return (
        Texts(tokens=examples, labels=labels) if _are_tokens(examples) else Reconstruction(data=examples, labels=labels)
    )


def read_labels(
    claimed: Any, labels: Any, true_labels: Any, num_true: int, num_claimed: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return the claimed labels and the true ones; None where they are not known."""
    is_finding = isinstance(claimed, Finding)
    if is_finding and labels is not None:
        raise ConfigError("score: labels: the finding claims labels already; leave this out")
    if true_labels is None:
        if labels is not None:
            raise ConfigError("score: true_labels: labels are claimed, which need these to be scored; hand them over")
        return None, None
    true_classes = _read_label_tensor("true_labels", true_labels, num_true)
    claims = claimed.labels if is_finding else labels
    if claims is None:
        return None, true_classes
    claimed_labels = _read_label_tensor("labels", claims, num_claimed)
    if claimed_labels.is_floating_point() != true_classes.is_floating_point():
        raise ConfigError("score: labels: are of another kind than true_labels, classes or targets; hand over one kind")
    return claimed_labels, true_classes


def _read_label_tensor(name: str, values: Any, count: int) -> Tensor:
    """Return `count` classes as int64, or targets as float32."""
    tensor = _read_tensor(name, values)
    if tensor.shape != (count,):
        raise ConfigError(f"score: {name}: expected one for each of {count} examples, got shape {tuple(tensor.shape)}")
    if tensor.is_floating_point():
        return tensor.float()
    if int(tensor.min()) < 0 or int(tensor.max()) >= MAX_CLASSES:
        seen = f"{int(tensor.min())} to {int(tensor.max())}"
        raise ConfigError(f"score: {name}: expected classes from 0 to {MAX_CLASSES - 1}, got {seen}")
    return tensor.long()


def read_public(
    public: Any, labels: Any, bounds: Bounds, true: Tensor, true_classes: Tensor | None
) -> PublicExamples | None:
    """Return the public examples; None where there are none.

    Examples that equal a true one are left out, with a warning, as a run leaves them out of auxiliary records.
    """
    if public is None:
        if labels is not None:
            raise ConfigError(
                "score: public_labels: there are no public examples to which they belong; hand over public"
            )
        return None
    examples = read_examples("public", public, bounds)
    _check_same_kind("public", examples, true)
    if is_in_other_units(examples, true):
        raise ConfigError(
            f"score: public: of the value_range it spans {_measure_spread(examples):.2g} and the truth "
            f"{_measure_spread(true):.2g}, so it seems to be in other units, and no guess made of it would "
            "be near; scale it as the truth"
        )
    is_other = ~_find_equal_rows(examples, true)
    if not is_other.any():
        raise ConfigError("score: public: holds true examples alone; hand over examples that the client does not hold")
    if not is_other.all():
        count = int((~is_other).sum())
        log.warning("score: public: %d of %d examples equal a true one and are left out", count, len(examples))
    if true_classes is None:
        return PublicExamples(data=examples[is_other], labels=torch.zeros(int(is_other.sum()), dtype=torch.int64))
    if labels is None:
        raise ConfigError(
            "score: public_labels: guesses know the classes by true_labels, and need these too; hand them over, or "
            "leave true_labels out"
        )
    classes = _read_label_tensor("public_labels", labels, len(examples))
    if classes.is_floating_point() != true_classes.is_floating_point():
        raise ConfigError("score: public_labels: are of another kind than true_labels; hand over classes or targets")
    return PublicExamples(data=examples[is_other], labels=classes[is_other])


def is_in_other_units(examples: Tensor, true: Tensor) -> bool:
    """Return whether numbers, in the value range, vary so much less than the true ones that their unit is another."""
    return not _are_tokens(true) and _measure_spread(examples) < _OTHER_UNIT * _measure_spread(true)


def _measure_spread(examples: Tensor) -> float:
    return float(examples.max() - examples.min())


def _find_equal_rows(examples: Tensor, true: Tensor) -> Tensor:
    """Return `example`, whether each of `examples` equals a true one."""
    rows = set(map(bytes, true.numpy()))
    return torch.tensor([bytes(row) in rows for row in examples.numpy()])
