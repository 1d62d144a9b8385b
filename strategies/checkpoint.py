"""Where a federation stood after a whole round: the global model and what its strategy remembers.

Flower keeps neither. Strategies hold their memory (FedAdam's moments, an adaptive clipping norm) in
attributes; arrays and numbers among them, also those of a wrapped strategy, are saved. Nothing is
pickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fedsim.errors import RunError

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Checkpoint:
    """The state of a federation after round `round`."""

    round: int
    arrays: ArrayRecord

    @classmethod
    def load(cls, path: Path, strategy: Strategy) -> Checkpoint | None:
        """Read the last checkpoint and put its memory back into `strategy`; None where there is none.

        Raises:
            RunError: the file is damaged.
        """
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="np") as file:
                header = json.loads(file.metadata()["fedsim"])
                stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise RunError(f"{path}: is damaged ({error}); remove it to begin the run again") from error
        _restore(strategy, header["memory"], stored)
        arrays = ArrayRecord({name: Array(stored[f"model/{name}"]) for name in header["model"]})
        return cls(header["round"], arrays)

    def save(self, path: Path, strategy: Strategy) -> None:
        """Write the checkpoint in one step.

        Raises:
            RunError: the disk is full or the folder cannot be written.
        """
        tensors: Arrays = {f"model/{name}": array.numpy() for name, array in self.arrays.items()}
        memory = dict(_memory(strategy, tensors))
        header = {"round": self.round, "model": list(self.arrays), "memory": memory}
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            contiguous = {key: np.ascontiguousarray(value) for key, value in tensors.items()}
            save_file(contiguous, temporary, metadata={"fedsim": json.dumps(header)})
            temporary.replace(path)
        except (OSError, SafetensorError) as error:
            temporary.unlink(missing_ok=True)
            raise RunError(f"{path}: cannot be written ({error}); make room and resume the run") from error


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
        elif isinstance(value, Mapping) and value and all(isinstance(v, np.ndarray) for v in value.values()):
            tensors.update({f"memory/{path}/{k}": array for k, array in value.items()})
            yield path, {"kind": "dict", "keys": list(value)}
        elif isinstance(value, list) and value and all(isinstance(v, np.ndarray) for v in value):
            tensors.update({f"memory/{path}/{k}": array for k, array in enumerate(value)})
            yield path, {"kind": "list", "keys": list(range(len(value)))}


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
