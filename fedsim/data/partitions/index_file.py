"""A partition that is read from a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from fedsim.base.errors import ConfigError, DataError
from fedsim.base.files import parse_json
from fedsim.data import Dataset
from fedsim.data.partitions import Indices


@dataclass(frozen=True, kw_only=True)
class IndexFile:
    """Reads each client's indices from a file: JSON `{"0": [3, 1], "1": [0]}`, or safetensors.

    Args:
        path: the file, relative to the experiment file; `.safetensors` holds one int64 tensor a
            client, called by its id. Ids are 0 to clients - 1, and index 0 is the first training
            example.
    """

    path: str = ""

    def assign(self, dataset: Dataset, clients: int, rng: np.random.Generator) -> list[Indices]:
        """Read each client's indices from the file, without any randomness."""
        if not self.path:
            raise ConfigError("partition.path: index-file needs a file, which is not set")
        path = Path(self.path).expanduser()
        table = _read_table(path)
        expected = [str(client) for client in range(clients)]
        if different := sorted(set(table) ^ set(expected)):
            raise ConfigError(
                f"{path}: expected the clients 0 to {clients - 1} (federation.clients, and those who only test), got "
                f"{len(table)} of which '{different[0]}' is {'too much' if different[0] in table else 'missing'}"
            )
        shares = [_parse_indices(path, client, table[client]) for client in expected]
        _check_shares(path, shares, len(dataset.train), dataset.name)
        return shares


def _read_table(path: Path) -> Mapping[str, Any]:
    if path.exists() and not path.is_file():  # reading a pipe would wait for ever
        raise DataError(f"{path}: is not a file; name another partition.path")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        table = parse_json(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}); name another partition.path") from error
    except (ValueError, RecursionError, SafetensorError) as error:
        kind = "safetensors" if path.suffix == ".safetensors" else "JSON"
        message = " ".join(str(error).split())
        raise DataError(f"{path}: is not {kind} ({message}); write {{client id: [indices]}}") from error
    if not isinstance(table, dict):
        raise DataError(f"{path}: expected a table {{client id: [indices]}}, got a {type(table).__name__}")
    return table


def _parse_indices(path: Path, client: str, value: Any) -> Indices:
    """Return a list or an array as indices; fractions, true and false are refused."""
    is_whole = not isinstance(value, list) or all(type(item) is int for item in value)
    try:
        array = np.asarray(value)
    except ValueError:
        is_whole = False
    if not is_whole or array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
        raise DataError(f"{path}: client {client}: expected a list of at least one whole number")
    return array.astype(np.int64)


def _check_shares(path: Path, shares: list[Indices], count: int, name: str) -> None:
    """Raise a DataError where an index does not exist, or occurs twice."""
    indices = np.concatenate(shares)
    owners = np.repeat(np.arange(len(shares)), [len(share) for share in shares])
    if (outside := np.flatnonzero((indices < 0) | (indices >= count))).size:
        first = outside[0]
        raise DataError(
            f"{path}: client {owners[first]} holds index {indices[first]}, but '{name}' has the training examples "
            f"0 to {count - 1}"
        )
    order = np.argsort(indices, kind="stable")
    if (repeated := np.flatnonzero(np.diff(indices[order]) == 0)).size:
        first, second = order[repeated[0]], order[repeated[0] + 1]
        complaint = f"client {owners[first]} holds index {indices[first]} twice"
        if owners[first] != owners[second]:
            complaint = f"clients {owners[first]} and {owners[second]} both hold index {indices[first]}"
        raise DataError(f"{path}: {complaint}; name each index once")
