"""Files of rounds, in the safetensors format: written as updates come, and verified as they are read."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fedsim.base.errors import RunError
from fedsim.base.files import read_all, write_parts
from fedsim.recording.header import (
    DIFFERS_BY_CLIENT,
    FORMAT_VERSION,
    RECORDABLE,
    Header,
    Reply,
    damage_error,
    hash_bytes,
    hash_state,
    seal_header,
    state_bytes,
)
from fedsim.recording.payloads import State
from fedsim.recording.wire_format import Update

# Generous estimates of the bytes that the header of a round's file needs.
_BYTES_PER_ROUND, _BYTES_PER_REPLY, _BYTES_PER_TENSOR = 4096, 512, 128
_MAX_HEADER_BYTES = 100_000_000  # safetensors refuses to read larger ones
_CHUNK_BYTES = 1 << 24
_WAITING_BYTES = 1 << 22
"""Bytes of tensors from which they are written; until then copies of them wait, to be written at once."""
Index = dict[str, list[tuple[int, str, str]]]
"""Key prefix, such as `client/3`, to the position, name and key of each of its tensors."""
_BYTES_OF_TYPE = {name: dtype.itemsize for dtype, name in RECORDABLE.items()}
"""Name of a type in a file to the bytes of one number."""


class RoundFile:
    """Writer of one round in the safetensors format, as updates come, without copying large tensors.

    The format begins with a header of all positions, so space is reserved for it; should it not
    suffice, the tensors are moved. The writer of the safetensors library needs all tensors at once,
    copies each twice and holds the interpreter lock. Reading is done by the library.

    Args:
        path: of the file, which exists and is empty.
        expected: about how many updates will come.
        recipe: what updates are computed again with; their arrays are then left out, see
            `Header.recipe`.
    """

    def __init__(self, path: Path, number: int, expected: int, recipe: Mapping[str, int | str] | None = None) -> None:
        # Not "w+b": if a file was truncated, even an empty one, ext4 starts to write it out when it is closed.
        self._file = path.open("r+b", buffering=0)
        self._number = number
        self._expected = expected
        self._recipe = recipe or {}
        self._header_space = 0
        self._data_end = 0
        self._waiting: list[memoryview] = []  # what is to be written next
        self._written_end = 0
        self._entries: dict[str, object] = {}
        self._broadcast_hashes: list[str] = []
        self._index_of_state: dict[int, tuple[State, int]] = {}  # by id of the state
        self._replies: dict[tuple[int, int], Reply] = {}  # by client and message
        self.sha256 = ""
        """Hash of the header, once it is written."""

    def __enter__(self) -> RoundFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def add(self, update: Update) -> None:
        """Write an update, or in a round by recipe its hash alone."""
        if update.client < 0:
            raise RunError(f"round {self._number}: a reply says that it comes from client {update.client}, below 0")
        if (update.client, update.message) in self._replies:
            raise RunError(
                f"round {self._number}: two replies say that they come from client {update.client}; "
                "give every node a different partition-id"
            )
        sent = update.payload.arrays()
        if not self._header_space:
            names = () if self._recipe else (*update.before, *sent)
            self._reserve_header(0 if self._recipe else self._expected, names)
        if id(update.before) not in self._index_of_state:
            memory = state_bytes(update.before)
            digest = hash_bytes(update.before, memory)
            if digest not in self._broadcast_hashes:
                self._write_state(f"broadcast/{len(self._broadcast_hashes)}", update.before, memory)
                self._broadcast_hashes.append(digest)
            # The reference to the state keeps Python from reusing its id.
            self._index_of_state[id(update.before)] = (update.before, self._broadcast_hashes.index(digest))
        if self._recipe:
            self._check_recipe(update)
        memory = state_bytes(sent)
        reply = Reply(
            client=update.client,
            num_examples=update.num_examples,
            broadcast=self._index_of_state[id(update.before)][1],
            sha256=hash_bytes(sent, memory),
            kind=update.payload.kind,
            metrics=dict(update.metrics),
            records=update.records,
            members=update.members,
            message=update.message,
            remarks=update.remarks,
            num_bytes=update.payload.nbytes if self._recipe else 0,
        )
        if not self._recipe:
            self._write_state(reply.key_prefix, sent, memory)
        self._replies[update.client, update.message] = reply

    def _check_recipe(self, update: Update) -> None:
        """Raise RunError where clients of a round by recipe got, or sent, more than one model."""
        if len(self._broadcast_hashes) > 1:
            reason = "the strategy sends clients different models"
        elif update.message != 1 or update.members or update.records:
            reason = f"client {update.client} sends more than one update"
        else:
            return
        raise self._recipe_error(reason)

    def _recipe_error(self, reason: str) -> RunError:
        return RunError(
            f"round {self._number}: {reason}, which no recipe contains, so its updates could not be computed again; "
            "set "
            '[recording] keep = "updates" and begin again'
        )

    def finish(self, failures: Mapping[int, str], config: Mapping[str, object]) -> None:
        """Write the header over the updates that were added."""
        if self._recipe and DIFFERS_BY_CLIENT in config:
            raise self._recipe_error(f"the strategy sends clients different {config[DIFFERS_BY_CLIENT]}")
        header = Header(
            version=FORMAT_VERSION,
            round=self._number,
            broadcasts=self._broadcast_hashes,
            replies=[self._replies[answer] for answer in sorted(self._replies)],
            failures=dict(sorted(failures.items())),
            config=dict(config),
            recipe=self._recipe,
        )
        self._write_header(header)

    def write_again(self, header: Header, states: Iterable[tuple[str, State]]) -> None:
        """Write a round that was recorded already: these states, by prefix, under its header."""
        self._reserve_header(len(header.replies), ())
        for prefix, state in states:
            self._write_state(prefix, state, state_bytes(state))
        self._write_header(header)

    def _write_header(self, header: Header) -> None:
        # Of 100 000 replies, each copy of the header takes 40 MB.
        seal, self.sha256 = seal_header(header.to_text())
        text = json.dumps({"__metadata__": {"fedsim": seal}, **self._entries}, separators=(",", ":"))
        del seal
        head = text.encode()
        del text
        size = len(head) + -len(head) % 8
        if size > _MAX_HEADER_BYTES:
            raise RunError(
                f"round {self._number}: {len(self._entries)} tensors are more than one file can name; "
                "record fewer clients ([recording] clients)"
            )
        if size > self._header_space:
            self._grow_header(size)
        space = self._header_space
        start = [memoryview(part) for part in (space.to_bytes(8, "little"), head, b" " * (space - len(head)))]
        # A small round is written at once.
        if self._written_end:
            self._write_waiting()
            write_parts(self._file, start, 0)
        else:
            write_parts(self._file, [*start, *self._waiting], 0)

    def _reserve_header(self, num_updates: int, names: Iterable[str]) -> None:
        """Leave space for a header of so many updates, each with tensors of these names."""
        bytes_per_update = sum(len(name) + _BYTES_PER_TENSOR for name in names)
        space = _BYTES_PER_ROUND + num_updates * (_BYTES_PER_REPLY + bytes_per_update)
        self._header_space = min(space + -space % 8, _MAX_HEADER_BYTES)

    def _write_state(self, prefix: str, state: State, memory: Mapping[str, memoryview]) -> None:
        """Write the `state_bytes` of `state`, widest types first: readers need values at a multiple of their width."""
        positions = {name: position for position, name in enumerate(state)}
        num_waiting = len(self._waiting)
        for name, tensor in sorted(state.items(), key=lambda item: (-item[1].element_size(), item[0])):
            if tensor.dtype not in RECORDABLE:
                raise RunError(
                    f"round {self._number}: {prefix} sent '{name}' as {tensor.dtype}, which cannot be recorded"
                )
            if padding := -self._data_end % tensor.element_size():
                self._add_tensor(f"padding/{self._data_end}", "U8", [padding], memoryview(bytes(padding)))
            key = f"{prefix}/{positions[name]:04d}/{name}"
            self._add_tensor(key, RECORDABLE[tensor.dtype], list(tensor.shape), memory[name])
        if self._data_end - self._written_end >= _WAITING_BYTES:
            self._write_waiting()
        else:
            # The caller may write the next update into the memory of this one, which is hashed already.
            self._waiting[num_waiting:] = [memoryview(b"".join(self._waiting[num_waiting:]))]

    def _add_tensor(self, key: str, dtype: str, shape: list[int], data: memoryview) -> None:
        self._waiting.append(data)
        start, end = self._data_end, self._data_end + len(data)
        self._entries[key] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        self._data_end = end

    def _write_waiting(self) -> None:
        write_parts(self._file, self._waiting, 8 + self._header_space + self._written_end)
        self._waiting, self._written_end = [], self._data_end

    def _grow_header(self, space: int) -> None:
        """Enlarge the space for the header: move the tensors that are written, from the last chunk to the first."""
        for start in reversed(range(0, self._written_end, _CHUNK_BYTES)):
            chunk = memoryview(bytearray(min(_CHUNK_BYTES, self._written_end - start)))
            read_all(self._file, chunk, 8 + self._header_space + start)
            write_parts(self._file, [chunk], 8 + space + start)
        self._header_space = space


class RoundReader:
    """Reads states, and holds the file and the broadcast that were read last.

    A file is opened anew where it was replaced. Errors name the file and say that it is damaged.
    """

    def __init__(self) -> None:
        # Signature, open file and index of the file that was read last.
        self._last_file: tuple[tuple[int, ...], Any, Index] | None = None
        self._last_broadcast: tuple[tuple[Path, str], State] | None = None
        self._verified: set[tuple[Path, str]] = set()

    def read_index(self, path: Path) -> Index:
        """Return the tensors that a file has, by the prefixes of their states."""
        try:
            return self._open_file(path)[1]
        except (OSError, SafetensorError, ValueError) as error:
            raise damage_error(path, str(error)) from error

    def read_state(self, path: Path, prefix: str, expected: str) -> State:
        """Return the state under a prefix, whose SHA-256 is the expected one."""
        key = (path, prefix)
        # Nearly all updates of a round share the broadcast; each gets a copy, which it may change.
        if self._last_broadcast is not None and self._last_broadcast[0] == key:
            return _copy_state(self._last_broadcast[1])
        try:
            file, index = self._open_file(path)
            state = {name: file.get_tensor(tensor_key) for _, name, tensor_key in index.get(prefix, [])}
            digest = expected if key in self._verified else hash_state(state)
        except (OSError, SafetensorError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise damage_error(path, str(error)) from error
        if digest != expected:
            raise damage_error(path, f"the bytes of {prefix} are not those that were recorded")
        if prefix.startswith("broadcast/"):
            self._verified.add(key)
            self._last_broadcast = key, _copy_state(state)
        return state

    def _open_file(self, path: Path) -> tuple[Any, Index]:
        """Return a file and its index, cached because parsing thousands of names takes long."""
        status = path.stat()
        signature = (status.st_ino, status.st_size, status.st_mtime_ns)
        if self._last_file is None or self._last_file[0] != signature:
            self._last_file = None
            file: Any = safe_open(path, framework="pt")
            self._last_file = signature, file, _build_index(file.keys())
        return self._last_file[1:]


def count_bytes(path: Path, prefixes: Collection[str]) -> dict[str, int]:
    """Return the bytes of the arrays under each of the prefixes; no array is read."""
    sizes = dict.fromkeys(prefixes, 0)
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                prefix = "/".join(key.split("/", 2)[:2])
                if prefix in sizes:
                    array = file.get_slice(key)
                    sizes[prefix] += math.prod(array.get_shape()) * _BYTES_OF_TYPE[array.get_dtype()]
    except (OSError, SafetensorError, KeyError) as error:
        raise damage_error(path, str(error)) from error
    return sizes


def _build_index(keys: Iterable[str]) -> Index:
    """Group the keys of a round's file by prefix; each tensor with its position, name and key."""
    index: Index = {}
    for key in keys:
        kind, _, rest = key.partition("/")
        owner, _, rest = rest.partition("/")
        position, slash, name = rest.partition("/")
        if slash:  # keys of padding have fewer parts
            index.setdefault(f"{kind}/{owner}", []).append((int(position), name, key))
    return {prefix: sorted(entries) for prefix, entries in index.items()}


def _copy_state(state: State) -> State:
    return {name: tensor.clone() for name, tensor in state.items()}
