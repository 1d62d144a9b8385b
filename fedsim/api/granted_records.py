"""Checks of records that are handed over in Python, the same as of those that an experiment file grants."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedsim.base.errors import ConfigError
from fedsim.base.task import Goal, are_classes
from fedsim.federation.overlap import hash_records
from fedsim.interfaces.knowledge import KnownCandidates, KnownRows, PartialRecords, Records
from fedsim.recording.payloads import WORKING_TYPE

log = logging.getLogger(__name__)

_AUXILIARY = ("auxiliary", "property_records")
"""Facts with records that no client trains on."""
_ROUNDING = 1e-3
"""Of the range of values, by which a record in units of the model may be beyond it."""
_Table = TypeVar("_Table", bound=Records)


def check_records(facts: Mapping[str, Any], goal: Goal) -> dict[str, Any]:
    """Return `facts` with records in the types that a model is fed with.

    Args:
        goal: what the model predicts of an example.

    Raises:
        ConfigError: records are of another shape than the model's inputs, or hold NaN, values outside `value_range` or
            labels that are none of the classes; or inputs and labels are not as many.
    """
    return {
        name: _check_table(name, table, facts, goal) if isinstance(table, Records) else table
        for name, table in facts.items()
    }


def _check_table(name: str, table: _Table, facts: Mapping[str, Any], goal: Goal) -> _Table:
    _check_lengths(name, table)
    inputs, labels = table.inputs, table.labels
    shape, bounds, classes = (facts.get(fact) for fact in ("input_shape", "value_range", "num_classes"))
    if bounds is not None or inputs.is_floating_point():  # others are tokens
        inputs = inputs.to(WORKING_TYPE)
    if not (inputs.isfinite().all() and labels.isfinite().all()):
        raise ConfigError(f"attack: {name}: a record holds NaN or infinite values; correct it, or leave it out")
    # Known rows and partial records lack a part of each example.
    if not isinstance(table, KnownRows | PartialRecords):
        if shape is not None and inputs.shape[1:] != shape:
            raise ConfigError(
                f"attack: {name}: its records are of shape {tuple(inputs.shape[1:])}, and input_shape is "
                f"{tuple(shape)}; hand over records of the same shape"
            )
        if bounds is not None and _leaves_range(inputs, bounds):
            raise ConfigError(
                f"attack: {name}: its values are from {inputs.min():g} to {inputs.max():g}, outside value_range; hand "
                "over records in the units in which the client feeds its model"
            )
    if goal == "classes" and classes is not None:
        if not are_classes(labels) or labels.min() < 0 or labels.max() >= classes:
            raise ConfigError(
                f"attack: {name}: its labels, {labels.dtype} from {labels.min():g} to {labels.max():g}, are not one of "
                f"the classes 0 to {classes - 1} for each record; number the classes as the client does"
            )
        labels = labels.long()
    return replace(table, inputs=inputs, labels=labels)


def _leaves_range(inputs: Tensor, bounds: Sequence[Sequence[float]]) -> bool:
    """Return whether a value is outside the range of its channel by more than rounding."""
    if len(bounds[0]) not in (1, inputs.shape[1]):
        return False
    low, high = (torch.tensor(end).reshape(-1, *[1] * (inputs.ndim - 2)).to(inputs) for end in bounds)
    slack = _ROUNDING * (high - low)
    return bool((inputs < low - slack).any() or (inputs > high + slack).any())


def drop_overlap(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Drop, with a warning, auxiliary records that are equal to one that the client trains on, images by any label.

    The client's records are `records` and the members among `known_candidates`.
    """
    tables = {name: table for name, table in facts.items() if isinstance(table, Records)}
    _check_distinct({name: tables[name] for name in ("candidates", "known_candidates") if name in tables})
    # Hashes of the records that the client is known to train on.
    client_hashes = set(_hash_content(tables["records"])) if "records" in tables else set[bytes]()
    if isinstance(candidates := tables.get("known_candidates"), KnownCandidates):
        for record, is_member in zip(_hash_content(candidates), candidates.members.tolist(), strict=True):
            if is_member:
                client_hashes.add(record)
    cleaned = {}
    for name in _AUXILIARY:
        if client_hashes and name in tables:
            cleaned[name] = _drop_records(name, tables[name], client_hashes)
    return {**facts, **cleaned}


def _check_lengths(name: str, table: Records) -> None:
    lengths = {part: len(tensor) if tensor.ndim else 0 for part, tensor in table.tensors.items()}
    if not {"inputs", "labels"} <= set(lengths):
        raise ConfigError(f"attack: {name}: expected tensors of inputs and labels; hand over both")
    if len(set(lengths.values())) > 1 or not lengths["inputs"]:
        counts = ", ".join(f"{count} {part}" for part, count in lengths.items())
        raise ConfigError(f"attack: {name}: got {counts}; hand over as many of each, and at least one")


def _check_distinct(tables: Mapping[str, Records]) -> None:
    seen: dict[bytes, str] = {}
    for name, table in tables.items():
        for index, record in enumerate(_hashes(table)):
            if record in seen:
                raise ConfigError(
                    f"attack: {name}: record {index} is equal to {seen[record]}, which is indistinguishable from it; "
                    "remove one of them"
                )
            seen[record] = f"record {index} of {name}"


def _drop_records(name: str, table: Records, hashes_to_drop: set[bytes]) -> Records:
    """Return a table without the records that have one of these hashes."""
    kept = [index for index, record in enumerate(_hash_content(table)) if record not in hashes_to_drop]
    count = len(table.inputs)
    if not kept:
        raise ConfigError(
            f"attack: {name}: each of the {count} records is equal to one that the client trains on; hand over others"
        )
    if len(kept) == count:
        return table
    log.warning(
        "attack: %s: %d of %d records are left out, because each is equal to one that the client trains on",
        name,
        count - len(kept),
        count,
    )
    index = torch.tensor(kept)
    return replace(table, **{part: tensor[index.to(tensor.device)] for part, tensor in table.tensors.items()})


def _hash_content(table: Records) -> list[bytes]:
    """Return a hash of each record by which it gives another away: of an image whatever its label."""
    return _hashes(replace(table, labels=torch.zeros(len(table.inputs))) if table.inputs.ndim > 2 else table)


def _hashes(table: Records) -> list[bytes]:
    """Return a hash of each record, whatever the types of its numbers."""
    inputs, labels = (part.detach().cpu().double() for part in (table.inputs, table.labels))
    return list(hash_records(inputs, labels))
