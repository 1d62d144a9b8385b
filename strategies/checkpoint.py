"""Checkpoint of a federation after a round: global model, state of the strategy and of clients.

Flower saves none of these. Strategies hold their state (FedAdam's moments, an adaptive clipping
norm) in attributes. Attributes that are arrays, numbers or texts, in lists, tuples and dicts of any
depth, are saved, also those of a wrapped strategy. Nothing is unpickled. If an attribute of another
kind changed since the strategy was made, the run cannot be resumed exactly, and the attribute is
named. The state of clients is arrays only, see `fedsim.federation.engines.client_state`.
"""

from __future__ import annotations

import inspect
import logging
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import Strategy

from fedsim.base.errors import RunError
from fedsim.federation.engines.client_state import ClientState
from fedsim.recording.sealed_files import Arrays, read_sealed_file, write_sealed_file

log = logging.getLogger("fedsim." + __name__)
_DTYPES = frozenset(map(np.dtype, ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")))
_MAX_DEPTH = 20
_HEADER_KEYS = ("round", "model", "memory", "lost", "clients")


class _CannotBeSavedError(Exception):
    """Raised for a value of a kind that a checkpoint cannot hold."""


@dataclass(frozen=True)
class Checkpoint:
    """State of a federation after round `round`; later rounds change nothing in it but `clients`.

    Attributes:
        round: the last whole round.
        arrays: the global model after it.
        memory: the attributes of the strategy by path, as JSON; their arrays are in `tensors`.
        tensors: copies of the arrays to be written, without those of `clients`.
        unsavable: paths of changed attributes of the strategy that a checkpoint cannot hold.
        clients: client to its state. Not a copy, because it may be large.
    """

    round: int
    arrays: ArrayRecord
    memory: Mapping[str, Any]
    tensors: Arrays
    unsavable: list[str] = field(default_factory=list)
    clients: dict[int, ClientState] = field(default_factory=dict)

    @classmethod
    def capture(
        cls,
        number: int,
        arrays: ArrayRecord,
        strategy: Strategy,
        fresh: Mapping[str, bytes | None] | None = None,
        clients: dict[int, ClientState] | None = None,
    ) -> Checkpoint:
        """Capture the state that the federation has after round `number`.

        Args:
            arrays: the global model.
            strategy: the strategy, whose attributes are copied.
            fresh: `unsavable_attributes` of the strategy before the first round.
        """
        memory, tensors, unsavable = _split_attributes(strategy)
        changed = [path for path, value in unsavable.items() if value is None or (fresh or {}).get(path) != value]
        tensors |= {f"model/{name}": array.numpy() for name, array in arrays.items()}
        copies = {key: np.array(value, order="C") for key, value in tensors.items()}
        return cls(number, arrays, memory, copies, changed, {} if clients is None else clients)

    @classmethod
    def load(cls, path: Path, strategy: Strategy) -> Checkpoint | None:
        """Read the last checkpoint and restore `strategy` from it; None where there is none.

        Raises:
            RunError: the file is damaged, or lacks what the strategy or the clients remembered.
        """
        if not path.is_file():
            return None
        header, stored = read_sealed_file(path)
        if missing := [name for name in _HEADER_KEYS if name not in header]:
            raise RunError(f"{path}: does not say its '{missing[0]}'; begin the run again with --overwrite")
        if unsavable := header["lost"]:
            raise RunError(
                f"{path}: does not hold {_describe_attributes(unsavable, strategy)}, so resuming would give another "
                "run than an uninterrupted one; begin it again with --overwrite, or keep only arrays, numbers and "
                "texts there"
            )
        clients = _pop_client_states(header["clients"], stored, path)
        _restore(strategy, header["memory"], stored)
        arrays = ArrayRecord({name: Array(stored[f"model/{name}"]) for name in header["model"]})
        return cls(header["round"], arrays, header["memory"], stored, clients=clients)

    def save(self, path: Path, durable: bool = False, announce: Callable[[str], None] | None = None) -> None:
        """Write the checkpoint in one step; see `write_sealed_file`.

        Raises:
            RunError: the disk is full or the folder cannot be written.
        """
        header = {"round": self.round, "model": list(self.arrays), "memory": self.memory, "lost": self.unsavable}
        header["clients"] = {
            client: {key: list(arrays) for key, arrays in state.items()} for client, state in self.clients.items()
        }
        client_tensors: Arrays = {}
        for client, state in self.clients.items():
            for record, arrays in enumerate(state.values()):
                for name, array in arrays.items():
                    client_tensors[_client_tensor_key(client, record, name)] = array
        write_sealed_file(path, header, {**self.tensors, **client_tensors}, durable=durable, announce=announce)

    def warn(self, strategy: Strategy) -> None:
        """Log the attributes that cannot be saved, if there are any."""
        if self.unsavable:
            log.warning(
                "no checkpoint can hold %s, so this run cannot be resumed; only arrays, numbers and texts, in lists, "
                "tuples and dicts, are saved",
                _describe_attributes(self.unsavable, strategy),
            )


def unsavable_attributes(strategy: Strategy) -> dict[str, bytes | None]:
    """Return the attributes that a checkpoint cannot hold: path to pickled value.

    The pickles serve only comparison. A value that cannot be pickled is None. Functions are left
    out: they are made again from the settings.
    """
    return _split_attributes(strategy)[2]


def _describe_attributes(paths: list[str], strategy: Strategy) -> str:
    return f"what {type(strategy).__name__} remembers as {', '.join(paths)}"


def _iterate_attributes(strategy: Strategy, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of each attribute, also of a wrapped strategy."""
    for name, value in vars(strategy).items():
        if isinstance(value, Strategy):
            yield from _iterate_attributes(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _split_attributes(strategy: Strategy) -> tuple[dict[str, Any], Arrays, dict[str, bytes | None]]:
    """Return savable attributes as JSON by path, their arrays, and `unsavable_attributes`."""
    memory: dict[str, Any] = {}
    tensors: Arrays = {}
    unsavable: dict[str, bytes | None] = {}
    for path, value in _iterate_attributes(strategy):
        attribute_tensors: Arrays = {}
        try:
            memory[path] = _encode(value, f"memory/{path}", attribute_tensors)
            tensors |= attribute_tensors
        except _CannotBeSavedError:
            if not inspect.isroutine(value):
                unsavable[path] = _pickle_or_none(value)
    return memory, tensors, unsavable


def _pickle_or_none(value: object) -> bytes | None:
    try:
        return pickle.dumps(value)  # for comparison only, never unpickled
    except Exception:  # any object may raise anything
        return None


def _encode(value: Any, path: str, tensors: Arrays, depth: int = 0) -> dict[str, Any]:
    """Return `value` as JSON that names its kind; put its arrays into `tensors`.

    Raises:
        _CannotBeSavedError: a checkpoint cannot hold it, or something in it.
    """
    if depth > _MAX_DEPTH:  # it may contain itself
        raise _CannotBeSavedError
    # Arrays come before numbers, because a NumPy float64 is a float, too.
    if isinstance(value, np.generic) or type(value) is np.ndarray:
        if value.dtype not in _DTYPES:
            raise _CannotBeSavedError
        tensors[path] = np.asarray(value)
        return {"kind": "array" if isinstance(value, np.ndarray) else "scalar", "at": path}
    if type(value) is bytes:
        tensors[path] = np.frombuffer(value, dtype="u1")
        return {"kind": "bytes", "at": path}
    if value is None or type(value) in (bool, int, float, str):
        return {"kind": "value", "value": value}
    if isinstance(value, ArrayRecord):
        if any(array.stype != "numpy.ndarray" for array in value.values()):
            raise _CannotBeSavedError
        items = [[name, _encode(a.numpy(), f"{path}/{name}", tensors, depth + 1)] for name, a in value.items()]
        return {"kind": "record", "items": items}
    if type(value) is dict:
        if not all(key is None or type(key) in (bool, int, float, str) for key in value):
            raise _CannotBeSavedError
        items = []
        for position, (key, item) in enumerate(value.items()):
            items.append([key, _encode(item, f"{path}/{position}", tensors, depth + 1)])
        return {"kind": "dict", "items": items}
    if type(value) in (list, tuple):
        elements = [_encode(item, f"{path}/{position}", tensors, depth + 1) for position, item in enumerate(value)]
        return {"kind": type(value).__name__, "items": elements}
    raise _CannotBeSavedError


def _decode(saved: Mapping[str, Any], stored: Arrays) -> Any:
    """Return the value that `_encode` made `saved` and `stored` of."""
    kind = saved["kind"]
    if kind == "value":
        return saved["value"]
    if "at" in saved:
        array = stored[saved["at"]]
        if kind == "array":
            return array
        return array[()] if kind == "scalar" else array.tobytes()
    if kind in ("list", "tuple"):
        elements = [_decode(item, stored) for item in saved["items"]]
        return elements if kind == "list" else tuple(elements)
    items = {key: _decode(item, stored) for key, item in saved["items"]}
    return ArrayRecord({name: Array(array) for name, array in items.items()}) if kind == "record" else items


def _client_tensor_key(client: int, record: int, name: str) -> str:
    return f"client/{client}/{record}/{name}"


def _pop_client_states(
    names_of_clients: Mapping[str, Mapping[str, list[str]]], stored: Arrays, path: Path
) -> dict[int, ClientState]:
    """Return the state of each client, and remove its arrays from `stored`.

    Raises:
        RunError: an array that the header names is missing.
    """
    states: dict[int, ClientState] = {}
    try:
        for client, records in names_of_clients.items():
            state: ClientState = {}
            for record, (key, names) in enumerate(records.items()):
                state[key] = {name: stored.pop(_client_tensor_key(int(client), record, name)) for name in names}
            states[int(client)] = state
    except KeyError as error:
        raise RunError(
            f"{path}: lacks {error}, which a client remembers; begin the run again with --overwrite"
        ) from error
    return states


def _restore(strategy: Strategy, memory: Mapping[str, Any], stored: Arrays) -> None:
    for path, saved in memory.items():
        owner: Any = strategy
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, name, _decode(saved, stored))
