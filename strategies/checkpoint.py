"""Where a federation stood after a whole round: the global model and what its strategy remembers.

Flower keeps neither. Strategies hold their memory (FedAdam's moments, an adaptive clipping norm) in
attributes; arrays and numbers among them, also those of a wrapped strategy, are saved. Nothing is
pickled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import Strategy

from fedsim.sealed import Arrays, read_sealed, write_sealed


@dataclass(frozen=True)
class Checkpoint:
    """The state of a federation after round `round`; later rounds do not change it.

    Attributes:
        round: the last whole round.
        arrays: the global model after it.
        memory: what the strategy remembers, by attribute; arrays are in `tensors`.
        tensors: copies of the arrays to be written.
    """

    round: int
    arrays: ArrayRecord
    memory: Mapping[str, Any]
    tensors: Arrays

    @classmethod
    def of(cls, number: int, arrays: ArrayRecord, strategy: Strategy) -> Checkpoint:
        """Note where the federation stands."""
        tensors: Arrays = {f"model/{name}": array.numpy() for name, array in arrays.items()}
        memory = dict(_memory(strategy, tensors))
        return cls(number, arrays, memory, {key: np.array(value, order="C") for key, value in tensors.items()})

    @classmethod
    def load(cls, path: Path, strategy: Strategy) -> Checkpoint | None:
        """Read the last checkpoint and put its memory back into `strategy`; None where there is none.

        Raises:
            RunError: the file is damaged.
        """
        if not path.is_file():
            return None
        header, stored = read_sealed(path)
        _restore(strategy, header["memory"], stored)
        arrays = ArrayRecord({name: Array(stored[f"model/{name}"]) for name in header["model"]})
        return cls(header["round"], arrays, header["memory"], stored)

    def save(self, path: Path) -> None:
        """Write the checkpoint in one step.

        Raises:
            RunError: the disk is full or the folder cannot be written.
        """
        header = {"round": self.round, "model": list(self.arrays), "memory": self.memory}
        write_sealed(path, header, self.tensors)


def _memory(strategy: Strategy, tensors: Arrays, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Attributes by path, as JSON; arrays go to `tensors` and leave their kind and keys behind."""
    for name, value in vars(strategy).items():
        path = f"{prefix}{name}"
        if isinstance(value, Strategy):
            yield from _memory(value, tensors, f"{path}.")
        elif value is None or isinstance(value, bool | int | float | str):
            yield path, {"kind": "value", "value": value}
        elif isinstance(value, ArrayRecord):
            tensors.update({f"memory/{path}/{k}": array.numpy() for k, array in value.items()})
            yield path, {"kind": "record", "keys": list(value)}
        elif isinstance(value, Mapping) and value and all(map(_is_array, value.values())):
            tensors.update({f"memory/{path}/{k}": np.asarray(array) for k, array in value.items()})
            yield path, {"kind": "dict", "keys": list(value)}
        elif isinstance(value, list) and value and all(map(_is_array, value)):
            tensors.update({f"memory/{path}/{k}": np.asarray(array) for k, array in enumerate(value)})
            yield path, {"kind": "list", "keys": list(range(len(value)))}


def _is_array(value: object) -> bool:
    """Arithmetic on arrays without axes gives NumPy scalars."""
    return isinstance(value, np.ndarray | np.generic)


def _restore(strategy: Strategy, memory: Mapping[str, Any], stored: Arrays) -> None:
    for path, saved in memory.items():
        owner: Any = strategy
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        if saved["kind"] == "value":
            setattr(owner, name, saved["value"])
            continue
        arrays = {key: stored[f"memory/{path}/{key}"] for key in saved["keys"]}
        if saved["kind"] == "record":
            setattr(owner, name, ArrayRecord({key: Array(array) for key, array in arrays.items()}))
        else:
            setattr(owner, name, arrays if saved["kind"] == "dict" else list(arrays.values()))
