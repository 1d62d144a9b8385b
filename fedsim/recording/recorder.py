"""Recorder of what a curious server sees: it writes one safetensors file a round.

Nothing in a recording needs pickle. A file holds the broadcast state once, the arrays of each
client as it sent them, and one header. It is written under a temporary name and renamed, so a
killed run leaves only whole rounds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from fedsim.base.errors import RunError, TranscriptError
from fedsim.base.files import check_no_link, remove_leftovers, replace_atomically, write_all
from fedsim.recording.header import (
    FORMAT_VERSION,
    RECORDABLE,
    RECORDING_FOLDER,
    ROUND_FILE,
    Header,
    Reply,
    hash_state,
    seal_header,
    tensor_bytes,
)
from fedsim.recording.manifest import ManifestFile
from fedsim.recording.payloads import State
from fedsim.recording.wire_format import Update

# Generous estimates of the bytes that the header of a round's file needs.
_BYTES_PER_ROUND, _BYTES_PER_REPLY, _BYTES_PER_TENSOR = 4096, 512, 128
_MAX_HEADER_BYTES = 100_000_000  # safetensors refuses to read larger ones
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True)
class RecordingPlan:
    """Selection of the messages to record, so that a recording's size stays bounded.

    Attributes:
        rounds: keep only these rounds; None keeps all.
        clients: keep only these clients; None keeps all.
        every: keep every k-th of those rounds, beginning with the first.
    """

    rounds: Sequence[int] | None = None
    clients: Sequence[int] | None = None
    every: int = 1

    def keeps_round(self, number: int) -> bool:
        """Return whether messages of round `number` are kept."""
        if self.rounds is not None:
            return number in sorted(self.rounds)[:: self.every]
        return (number - 1) % self.every == 0

    def keeps_client(self, client: int) -> bool:
        """Return whether messages of `client` are kept."""
        return self.clients is None or client in self.clients


@dataclass(frozen=True)
class Recorder:
    """Writer that appends rounds to the transcript in `folder`.

    Each round of a folder called `transcript` is noted in the manifest of the run folder around it.

    Args:
        folder: folder of the round files; made when missing.
        plan: selection of the messages to keep.
        resume: accept a folder that already holds rounds; those are kept and may be rewritten.
        durable: wait in `write` until the round is on the disk.
        manifest: of the run around the folder, where that is open already.

    Raises:
        TranscriptError: the folder holds an earlier recording and `resume` is not set.
        RunError: the folder cannot be written.
    """

    folder: Path
    plan: RecordingPlan = field(default_factory=RecordingPlan)
    resume: bool = False
    durable: bool = False
    manifest: ManifestFile | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_no_link(self.folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.folder)
        except OSError as error:
            raise RunError(f"{self.folder}: cannot be written ({error.strerror}); choose another folder") from error
        if not self.resume and any(self.folder.glob("round-*.safetensors")):
            raise TranscriptError(
                f"{self.folder}: already holds a recording; choose another folder, resume it, or remove it"
            )
        run = None if self.resume else self._run_manifest
        if run and run.contents and run.contents.rounds:
            run.start()  # its rounds were removed: this is another recording

    @cached_property
    def _run_manifest(self) -> ManifestFile | None:
        """Return the manifest of the run around the folder; None where it is in no run."""
        if self.folder.name != RECORDING_FOLDER:
            return None
        return self.manifest or ManifestFile(self.folder.parent)

    def note(self, path: Path) -> None:
        """Note the hash of another file of the run in its manifest."""
        if self._run_manifest:
            self._run_manifest.note(path)

    def write(
        self,
        number: int,
        updates: Iterable[Update],
        failures: Mapping[int, str] | None = None,
        config: Mapping[str, object] | None = None,
        *,
        expected: int | None = None,
    ) -> None:
        """Write round `number` in one step: all of it or nothing.

        A sequence is written by ascending client and message. Updates of a generator are written as
        they come, so that memory holds one at a time. Updates whose `before` is the same state
        share its copy on disk.

        Args:
            number: the round.
            updates: the updates; those of clients that the plan does not keep are skipped.
            failures: client to reason; read after the last of `updates`.
            config: protocol facts.
            expected: about how many updates will be kept, where `updates` is no sequence.

        Raises:
            RunError: the disk is full, the folder cannot be written, or two updates answer one
                message to one client; earlier rounds stay.
        """
        if not self.plan.keeps_round(number):
            for update in updates:
                del update
            return
        path = self.folder / ROUND_FILE.format(number)
        if isinstance(updates, Sequence):
            updates = sorted(updates, key=lambda update: (update.client, update.message))
            expected = sum(self.plan.keeps_client(update.client) for update in updates)
        try:
            with (
                replace_atomically(path, durable=self.durable) as temporary,
                _RoundFile(temporary, number, expected or 1) as file,
            ):
                for update in _iterate_updates(updates, number):
                    if self.plan.keeps_client(update.client):
                        file.add(update)
                file.finish(failures or {}, config or {})
            if self._run_manifest:
                with self._run_manifest.edit(durable=self.durable) as noted:
                    noted.add_round(number, file.sha256)
        except OSError as error:
            raise RunError(
                f"{path}: cannot be written ({error.strerror}); "
                "the rounds before it are kept, make room and resume the run"
            ) from error


def _iterate_updates(updates: Iterable[Update], number: int) -> Iterator[Update]:
    """Yield `updates`; an OSError in it is one of the network, not of the disk."""
    try:
        yield from updates
    except OSError as error:
        raise RunError(f"round {number}: the replies did not arrive ({error}); resume the run") from error


class _RoundFile:
    """Writer of one round in the safetensors format, as updates come, without copying tensors.

    The format begins with a header of all positions, so space is reserved for it; should it not
    suffice, the tensors are moved. The writer of the safetensors library needs all tensors at once,
    copies each twice and holds the interpreter lock. Reading is done by the library.
    """

    def __init__(self, path: Path, number: int, expected: int) -> None:
        self._file = path.open("w+b", buffering=0)
        self._number = number
        self._expected = expected
        self._header_space = 0
        self._data_end = 0
        self._entries: dict[str, object] = {}
        self._broadcast_hashes: list[str] = []
        self._index_of_state: dict[int, tuple[State, int]] = {}  # by id of the state
        self._replies: dict[tuple[int, int], Reply] = {}  # by client and message
        self.sha256 = ""
        """Hash of the header, once it is written."""

    def __enter__(self) -> _RoundFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def add(self, update: Update) -> None:
        if update.client < 0:
            raise RunError(f"round {self._number}: a reply says that it comes from client {update.client}, below 0")
        if (update.client, update.message) in self._replies:
            raise RunError(
                f"round {self._number}: two replies say that they come from client {update.client}; "
                "give every node a partition-id of its own"
            )
        if not self._header_space:
            self._reserve_header(update)
        if id(update.before) not in self._index_of_state:
            digest = hash_state(update.before)
            if digest not in self._broadcast_hashes:
                self._write_state(f"broadcast/{len(self._broadcast_hashes)}", update.before)
                self._broadcast_hashes.append(digest)
            # The reference to the state keeps Python from reusing its id.
            self._index_of_state[id(update.before)] = (update.before, self._broadcast_hashes.index(digest))
        sent = update.payload.arrays()
        reply = Reply(
            client=update.client,
            num_examples=update.num_examples,
            broadcast=self._index_of_state[id(update.before)][1],
            sha256=hash_state(sent),
            kind=update.payload.kind,
            metrics=dict(update.metrics),
            records=update.records,
            members=update.members,
            message=update.message,
            remarks=update.remarks,
        )
        self._write_state(reply.key_prefix, sent)
        self._replies[update.client, update.message] = reply

    def finish(self, failures: Mapping[int, str], config: Mapping[str, object]) -> None:
        header = Header(
            version=FORMAT_VERSION,
            round=self._number,
            broadcasts=self._broadcast_hashes,
            replies=[self._replies[answer] for answer in sorted(self._replies)],
            failures=dict(sorted(failures.items())),
            config=dict(config),
        )
        seal, self.sha256 = seal_header(header.to_json())
        head = json.dumps({"__metadata__": {"fedsim": seal}, **self._entries}, separators=(",", ":")).encode()
        size = len(head) + -len(head) % 8
        if size > _MAX_HEADER_BYTES:
            raise RunError(
                f"round {self._number}: {len(self._entries)} tensors are more than one file can name; "
                "record fewer clients ([recording] clients)"
            )
        if size > self._header_space:
            self._grow_header(size)
        self._file.seek(0)
        write_all(self._file, memoryview(self._header_space.to_bytes(8, "little") + head.ljust(self._header_space)))

    def _reserve_header(self, update: Update) -> None:
        bytes_per_update = sum(len(name) + _BYTES_PER_TENSOR for name in (*update.before, *update.payload.arrays()))
        space = _BYTES_PER_ROUND + self._expected * (_BYTES_PER_REPLY + bytes_per_update)
        self._header_space = min(space + -space % 8, _MAX_HEADER_BYTES)
        self._file.seek(8 + self._header_space)

    def _write_state(self, prefix: str, state: State) -> None:
        """Write `state`, widest types first: readers need values at a multiple of their width."""
        positions = {name: position for position, name in enumerate(state)}
        for name, tensor in sorted(state.items(), key=lambda item: (-item[1].element_size(), item[0])):
            if tensor.dtype not in RECORDABLE:
                raise RunError(
                    f"round {self._number}: {prefix} sent '{name}' as {tensor.dtype}, which cannot be recorded"
                )
            if padding := -self._data_end % tensor.element_size():
                self._write_tensor(f"padding/{self._data_end}", "U8", [padding], memoryview(bytes(padding)))
            key = f"{prefix}/{positions[name]:04d}/{name}"
            self._write_tensor(key, RECORDABLE[tensor.dtype], list(tensor.shape), tensor_bytes(tensor))

    def _write_tensor(self, key: str, dtype: str, shape: list[int], data: memoryview) -> None:
        write_all(self._file, data)
        start, end = self._data_end, self._data_end + len(data)
        self._entries[key] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        self._data_end = end

    def _grow_header(self, space: int) -> None:
        """Enlarge the space for the header: move the tensors, from the last chunk to the first."""
        for start in reversed(range(0, self._data_end, _CHUNK_BYTES)):
            self._file.seek(8 + self._header_space + start)
            chunk = self._file.read(min(_CHUNK_BYTES, self._data_end - start))
            self._file.seek(8 + space + start)
            write_all(self._file, memoryview(chunk))
        self._header_space = space
