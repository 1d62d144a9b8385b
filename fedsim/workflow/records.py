"""Records that are handed over in Python are held against one another, as those are that an experiment file grants."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from fedsim.errors import ConfigError
from fedsim.experiments.twins import hashes
from fedsim.knowledge import KnownCandidates, Records

log = logging.getLogger(__name__)

_NOBODYS = ("auxiliary", "property_records")
"""Records that no client trains on."""


def without_twins(known: Mapping[str, Any]) -> dict[str, Any]:
    """`known`, of whose auxiliary records those are left out, with a warning, that are equal to one of the client's.

    Which records are the client's say `records` and `known_candidates`.

    Raises:
        ConfigError: of a table of records not all parts are of the same length; no auxiliary record is left; or one
            candidate, known or not, is equal to another.
    """
    tables = {name: table for name, table in known.items() if isinstance(table, Records)}
    for name, table in tables.items():
        _check_lengths(name, table)
    _check_different({name: tables[name] for name in ("candidates", "known_candidates") if name in tables})
    own = set(_hashes(tables["records"])) if "records" in tables else set[bytes]()
    if isinstance(asked := tables.get("known_candidates"), KnownCandidates):
        own.update(record for record, member in zip(_hashes(asked), asked.members.tolist(), strict=True) if member)
    kept = {name: _without(name, tables[name], own) for name in _NOBODYS if own and name in tables}
    return {**known, **kept}


def _check_lengths(name: str, table: Records) -> None:
    lengths = {part: len(tensor) if tensor.ndim else 0 for part, tensor in table.tensors.items()}
    if not {"inputs", "labels"} <= set(lengths):
        raise ConfigError(f"attack: {name}: expected tensors of inputs and labels; hand over both")
    if len(set(lengths.values())) > 1 or not lengths["inputs"]:
        told = ", ".join(f"{count} {part}" for part, count in lengths.items())
        raise ConfigError(f"attack: {name}: got {told}; hand over as many of each, and at least one")


def _check_different(tables: Mapping[str, Records]) -> None:
    seen: dict[bytes, str] = {}
    for name, table in tables.items():
        for place, record in enumerate(_hashes(table)):
            if record in seen:
                raise ConfigError(
                    f"attack: {name}: record {place} is equal to {seen[record]}, which could not be told from it; "
                    "leave one of them out"
                )
            seen[record] = f"record {place} of {name}"


def _without(name: str, table: Records, own: set[bytes]) -> Records:
    kept = [place for place, record in enumerate(_hashes(table)) if record not in own]
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
    """Of each record, whatever the types of its numbers."""
    inputs, labels = (part.detach().cpu().double() for part in (table.inputs, table.labels))
    return list(hashes(inputs, labels))
