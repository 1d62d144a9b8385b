"""Where a federation stood after a whole round: the global model, what its strategy and what its clients remember.

Flower keeps none of them. Strategies hold their memory (FedAdam's moments, an adaptive clipping norm) in
attributes; arrays, numbers and texts among them, in lists, tuples and dicts of any depth, also those of a
wrapped strategy, are saved. Nothing is unpickled. An attribute that is of another kind, and no longer what
it was when the strategy was made, is named: such a run cannot go on as if it had never stopped.
What clients remember is arrays alone, see `fedsim.engines.memory`.
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

from fedsim.engines.memory import Kept
from fedsim.errors import RunError
from fedsim.recording.sealed import Arrays, read_sealed, write_sealed

log = logging.getLogger("fedsim." + __name__)
_DTYPES = frozenset(map(np.dtype, ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")))
_DEEPEST = 20
_HEADER = ("round", "model", "memory", "lost", "clients")
"""What the header of each checkpoint says."""


class _CannotBeSaved(Exception):
    """A value is of a kind that a checkpoint has no form for."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of a federation after round `round`; later rounds change nothing in it but `clients`.

    Attributes:
        round: the last whole round.
        arrays: the global model after it.
        memory: what the strategy remembers, by attribute; arrays are in `tensors`.
        tensors: copies of the arrays to be written, without those of `clients`.
        lost: what it remembers and no checkpoint can hold.
        clients: what each client remembers. Not a copy, because it may be large.
    """

    round: int
    arrays: ArrayRecord
    memory: Mapping[str, Any]
    tensors: Arrays
    lost: list[str] = field(default_factory=list)
    clients: dict[int, Kept] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        number: int,
        arrays: ArrayRecord,
        strategy: Strategy,
        fresh: Mapping[str, bytes | None] | None = None,
        clients: dict[int, Kept] | None = None,
    ) -> Checkpoint:
        """Note what the federation has reached.

        Args:
            fresh: what `opaque` said of the strategy before the first round.
            clients: what each client remembers.
        """
        memory, tensors, now = _looked_at(strategy)
        lost = [path for path, content in now.items() if content is None or (fresh or {}).get(path) != content]
        tensors |= {f"model/{name}": array.numpy() for name, array in arrays.items()}
        copies = {key: np.array(value, order="C") for key, value in tensors.items()}
        return cls(number, arrays, memory, copies, lost, {} if clients is None else clients)

    @classmethod
    def load(cls, path: Path, strategy: Strategy) -> Checkpoint | None:
        """Read the last checkpoint and put its memory back into `strategy`; None where there is none.

        Raises:
            RunError: the file is damaged, or lacks what the strategy or the clients remembered.
        """
        if not path.is_file():
            return None
        header, stored = read_sealed(path)
        if missing := [name for name in _HEADER if name not in header]:
            raise RunError(f"{path}: does not say its '{missing[0]}'; begin the run again with --overwrite")
        if lost := header["lost"]:
            raise RunError(
                f"{path}: does not hold {_listed(lost, strategy)}, so going on would give another run than one that "
                "nobody interrupted; begin it again with --overwrite, or keep only arrays, numbers and texts there"
            )
        clients = _clients(header["clients"], stored, path)
        _restore(strategy, header["memory"], stored)
        arrays = ArrayRecord({name: Array(stored[f"model/{name}"]) for name in header["model"]})
        return cls(header["round"], arrays, header["memory"], stored, clients=clients)

    def save(self, path: Path, durable: bool = False, announce: Callable[[str], None] | None = None) -> None:
        """Write the checkpoint in one step; see `write_sealed`.

        Raises:
            RunError: the disk is full or the folder cannot be written.
        """
        header = {"round": self.round, "model": list(self.arrays), "memory": self.memory, "lost": self.lost}
        header["clients"] = {
            client: {key: list(arrays) for key, arrays in kept.items()} for client, kept in self.clients.items()
        }
        theirs = {
            _place(client, record, name): array
            for client, kept in self.clients.items()
            for record, arrays in enumerate(kept.values())
            for name, array in arrays.items()
        }
        write_sealed(path, header, {**self.tensors, **theirs}, durable=durable, announce=announce)

    def warn(self, strategy: Strategy) -> None:
        """Say what is lost, if anything."""
        if self.lost:
            log.warning(
                "no checkpoint can hold %s, so this run cannot be resumed; only arrays, numbers and texts, in lists, "
                "tuples and dicts, are saved",
                _listed(self.lost, strategy),
            )


def opaque(strategy: Strategy) -> dict[str, bytes | None]:
    """The attributes that a checkpoint has no form for: path to content, as far as there is a way to compare it.

    Functions are left out, being made again from the settings; None is what cannot be compared.
    """
    return _looked_at(strategy)[2]


def _listed(paths: list[str], strategy: Strategy) -> str:
    return f"what {type(strategy).__name__} remembers as {', '.join(paths)}"


def _attributes(strategy: Strategy, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Attributes by path, with those of a wrapped strategy."""
    for name, value in vars(strategy).items():
        if isinstance(value, Strategy):
            yield from _attributes(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _looked_at(strategy: Strategy) -> tuple[dict[str, Any], Arrays, dict[str, bytes | None]]:
    """What can be saved, attributes by path as JSON and the arrays in them; and what cannot, see `opaque`."""
    memory: dict[str, Any] = {}
    tensors: Arrays = {}
    rest: dict[str, bytes | None] = {}
    for path, value in _attributes(strategy):
        own: Arrays = {}
        try:
            memory[path] = _encoded(value, f"memory/{path}", own)
            tensors |= own
        except _CannotBeSaved:
            if not inspect.isroutine(value):
                rest[path] = _content(value)
    return memory, tensors, rest


def _content(value: object) -> bytes | None:
    """Something to compare `value` by; None where there is none."""
    try:
        return pickle.dumps(value)  # nobody reads it
    except Exception:  # whatever a stranger's object raises
        return None


def _encoded(value: Any, path: str, tensors: Arrays, depth: int = 0) -> dict[str, Any]:
    """`value` as JSON that says of what kind it is; arrays go to `tensors`.

    Raises:
        _CannotBeSaved: there is no form for it, or for something in it.
    """
    if depth > _DEEPEST:  # it may hold itself
        raise _CannotBeSaved
    if isinstance(value, np.generic) or type(value) is np.ndarray:  # before numbers: a float64 is a float, too
        if value.dtype not in _DTYPES:
            raise _CannotBeSaved
        tensors[path] = np.asarray(value)
        return {"kind": "array" if isinstance(value, np.ndarray) else "scalar", "at": path}
    if type(value) is bytes:
        tensors[path] = np.frombuffer(value, dtype="u1")
        return {"kind": "bytes", "at": path}
    if value is None or type(value) in (bool, int, float, str):
        return {"kind": "value", "value": value}
    if isinstance(value, ArrayRecord):
        if any(array.stype != "numpy.ndarray" for array in value.values()):
            raise _CannotBeSaved
        items = [[name, _encoded(a.numpy(), f"{path}/{name}", tensors, depth + 1)] for name, a in value.items()]
        return {"kind": "record", "items": items}
    if type(value) is dict:
        if not all(key is None or type(key) in (bool, int, float, str) for key in value):
            raise _CannotBeSaved
        items = [
            [key, _encoded(item, f"{path}/{place}", tensors, depth + 1)]
            for place, (key, item) in enumerate(value.items())
        ]
        return {"kind": "dict", "items": items}
    if type(value) in (list, tuple):
        parts = [_encoded(item, f"{path}/{place}", tensors, depth + 1) for place, item in enumerate(value)]
        return {"kind": type(value).__name__, "items": parts}
    raise _CannotBeSaved


def _decoded(saved: Mapping[str, Any], stored: Arrays) -> Any:
    """The inverse of `_encoded`."""
    kind = saved["kind"]
    if kind == "value":
        return saved["value"]
    if "at" in saved:
        array = stored[saved["at"]]
        return array if kind == "array" else array[()] if kind == "scalar" else array.tobytes()
    if kind in ("list", "tuple"):
        parts = [_decoded(item, stored) for item in saved["items"]]
        return parts if kind == "list" else tuple(parts)
    items = {key: _decoded(item, stored) for key, item in saved["items"]}
    return ArrayRecord({name: Array(array) for name, array in items.items()}) if kind == "record" else items


def _place(client: int, record: int, name: str) -> str:
    """What an array is called that a client remembers in the record of this number."""
    return f"client/{client}/{record}/{name}"


def _clients(named: Mapping[str, Mapping[str, list[str]]], stored: Arrays, path: Path) -> dict[int, Kept]:
    """What each client remembers, taken out of `stored`.

    Raises:
        RunError: something that is `named` is not there.
    """
    try:
        return {
            int(client): {
                key: {name: stored.pop(_place(int(client), record, name)) for name in names}
                for record, (key, names) in enumerate(kept.items())
            }
            for client, kept in named.items()
        }
    except KeyError as error:
        raise RunError(
            f"{path}: lacks {error}, which a client remembers; begin the run again with --overwrite"
        ) from error


def _restore(strategy: Strategy, memory: Mapping[str, Any], stored: Arrays) -> None:
    for path, saved in memory.items():
        owner: Any = strategy
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, name, _decoded(saved, stored))
