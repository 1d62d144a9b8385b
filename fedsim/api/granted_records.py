"""Checks of records that are handed over in Python, the same as of those that an experiment file grants."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from fedsim.base.errors import ConfigError
from fedsim.federation.overlap import hash_records
from fedsim.interfaces.knowledge import KnownCandidates, Records

log = logging.getLogger(__name__)

_AUXILIARY = ("auxiliary", "property_records")
"""Facts with records that no client trains on."""


def drop_overlap(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Drop, with a warning, auxiliary records that are equal to a record that the client trains on.

    The client's records are `records` and the members among `known_candidates`.
    """
    tables = {name: table for name, table in facts.items() if isinstance(table, Records)}
    for name, table in tables.items():
        _check_lengths(name, table)
    _check_distinct({name: tables[name] for name in ("candidates", "known_candidates") if name in tables})
    # Hashes of the records that the client is known to train on.
    client_hashes = set(_hashes(tables["records"])) if "records" in tables else set[bytes]()
    if isinstance(candidates := tables.get("known_candidates"), KnownCandidates):
        for record, is_member in zip(_hashes(candidates), candidates.members.tolist(), strict=True):
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
    kept = [index for index, record in enumerate(_hashes(table)) if record not in hashes_to_drop]
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


def _hashes(table: Records) -> list[bytes]:
    """Return a hash of each record, whatever the types of its numbers."""
    inputs, labels = (part.detach().cpu().double() for part in (table.inputs, table.labels))
    return list(hash_records(inputs, labels))
