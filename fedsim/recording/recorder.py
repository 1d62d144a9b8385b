"""Writes what a curious server sees: one safetensors file a round, in a folder.

Nothing in a recording needs pickle. A file holds the broadcast state once, what every client sent, as it sent it, under
its id, and one header. It is written under a temporary name and renamed, so a killed run leaves whole rounds only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedsim.errors import RunError, TranscriptError
from fedsim.files import in_one_step, refuse_link, remove_leftovers, write_all
from fedsim.recording import manifest
from fedsim.recording.header import FILE, FORMAT, RECORDABLE, RECORDING, Header, Reply, bytes_of, hash_state, sealed
from fedsim.wire.messages import Update
from fedsim.wire.payloads import State

# Room for the header of a round's file, generously.
_BYTES_PER_ROUND, _BYTES_PER_REPLY, _BYTES_PER_TENSOR = 4096, 512, 128
_LARGEST_HEADER = 100_000_000  # the library refuses to read larger ones
_PIECE = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which messages to keep, so that a recording's size stays bounded.

    Attributes:
        rounds: keep only these rounds; None keeps all.
        clients: keep only these clients; None keeps all.
        every: keep every k-th of those rounds, beginning with the first.
    """

    rounds: Sequence[int] | None = None
    clients: Sequence[int] | None = None
    every: int = 1

    def keeps_round(self, number: int) -> bool:
        """Whether messages of round `number` are kept."""
        if self.rounds is not None:
            return number in sorted(self.rounds)[:: self.every]
        return (number - 1) % self.every == 0

    def keeps_client(self, client: int) -> bool:
        """Whether messages of `client` are kept."""
        return self.clients is None or client in self.clients


@dataclass(frozen=True)
class Recorder:
    """Append rounds to the transcript in `folder`.

    Args:
        folder: where the round files go; made when missing.
        plan: what to keep.
        resume: accept a folder that already holds rounds; those are kept and may be rewritten.
        durable: a round has to be on the disk before `write` returns.

    Each round of a folder called `transcript` is noted in the manifest of the run folder around it.

    Raises:
        TranscriptError: the folder holds an earlier recording and `resume` is not set.
        RunError: the folder cannot be written.
    """

    folder: Path
    plan: Plan = field(default_factory=Plan)
    resume: bool = False
    durable: bool = False

    def __post_init__(self) -> None:
        refuse_link(self.folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.folder)
        except OSError as error:
            raise RunError(f"{self.folder}: cannot be written ({error.strerror}); choose another folder") from error
        if not self.resume and any(self.folder.glob("round-*.safetensors")):
            raise TranscriptError(
                f"{self.folder}: already holds a recording; choose another folder, resume it, or remove it"
            )
        if self._of_a_run and not self.resume and (noted := manifest.read(self.folder.parent)) and noted.rounds:
            manifest.start(self.folder.parent)  # its rounds were removed: this is another recording

    @property
    def _of_a_run(self) -> bool:
        return self.folder.name == RECORDING

    def note(self, path: Path) -> None:
        """Name a file beside the rounds in the manifest of the run."""
        if self._of_a_run:
            manifest.note(self.folder.parent, path)

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

        A sequence is written by ascending client and message. What a generator yields is written as it comes,
        so that it need not hold more than one update.
        Updates whose `before` is the same state share its copy on disk.

        Args:
            failures: client to reason; read after the last of `updates`.
            config: protocol facts.
            expected: about how many updates will be kept, where `updates` is no sequence.

        Raises:
            RunError: the disk is full or the folder cannot be written, or two updates are of one
                message to one client; earlier rounds stay.
        """
        if not self.plan.keeps_round(number):
            for update in updates:
                del update
            return
        path = self.folder / FILE.format(number)
        if isinstance(updates, Sequence):
            updates = sorted(updates, key=lambda update: (update.client, update.message))
            expected = sum(self.plan.keeps_client(update.client) for update in updates)
        try:
            with (
                in_one_step(path, durable=self.durable) as temporary,
                _RoundFile(temporary, number, expected or 1) as file,
            ):
                for update in _received(updates, number):
                    if self.plan.keeps_client(update.client):
                        file.add(update)
                file.finish(failures or {}, config or {})
            if self._of_a_run:
                with manifest.changing(self.folder.parent, durable=self.durable) as noted:
                    noted.add_round(number, file.sha256)
        except OSError as error:
            raise RunError(
                f"{path}: cannot be written ({error.strerror}); "
                "the rounds before it are kept, make room and resume the run"
            ) from error


def _received(updates: Iterable[Update], number: int) -> Iterator[Update]:
    """`updates`; an OSError that they raise is not reported as one of the disk."""
    try:
        yield from updates
    except OSError as error:
        raise RunError(f"round {number}: the replies did not arrive ({error}); resume the run") from error


class _RoundFile:
    """One round in the safetensors format, written straight from the tensors' memory as updates come.

    The format begins with a header that says where everything is, so room is left for it; should
    it not suffice, everything behind is moved. The library's own writer wants all tensors at once,
    copies each twice and holds the interpreter lock; files are read and checked by the library.
    """

    def __init__(self, path: Path, number: int, expected: int) -> None:
        self._file = path.open("w+b", buffering=0)
        self._number = number
        self._expected = expected
        self._room = 0
        self._end = 0
        self._entries: dict[str, object] = {}
        self._broadcasts: list[str] = []
        self._seen: dict[int, tuple[State, int]] = {}
        self._replies: dict[tuple[int, int], Reply] = {}  # by client and message
        self.sha256 = ""
        """Of the header, once it is written."""

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
        if not self._room:
            self._leave_room(update)
        if id(update.before) not in self._seen:
            digest = hash_state(update.before)
            if digest not in self._broadcasts:
                self._store(f"broadcast/{len(self._broadcasts)}", update.before)
                self._broadcasts.append(digest)
            # Keeping the state keeps its id from being given to another one.
            self._seen[id(update.before)] = (update.before, self._broadcasts.index(digest))
        sent = update.payload.arrays()
        reply = Reply(
            client=update.client,
            num_examples=update.num_examples,
            broadcast=self._seen[id(update.before)][1],
            sha256=hash_state(sent),
            kind=update.payload.kind,
            metrics=dict(update.metrics),
            records=update.records,
            members=update.members,
            message=update.message,
            remarks=update.remarks,
        )
        self._store(reply.key, sent)
        self._replies[update.client, update.message] = reply

    def finish(self, failures: Mapping[int, str], config: Mapping[str, object]) -> None:
        header = Header(
            version=FORMAT,
            round=self._number,
            broadcasts=self._broadcasts,
            replies=[self._replies[answer] for answer in sorted(self._replies)],
            failures=dict(sorted(failures.items())),
            config=dict(config),
        )
        seal, self.sha256 = sealed(header.plain())
        head = json.dumps({"__metadata__": {"fedsim": seal}, **self._entries}, separators=(",", ":")).encode()
        size = len(head) + -len(head) % 8
        if size > _LARGEST_HEADER:
            raise RunError(
                f"round {self._number}: {len(self._entries)} tensors are more than one file can name; "
                "record fewer clients ([recording] clients)"
            )
        if size > self._room:
            self._move(size)
        self._file.seek(0)
        write_all(self._file, memoryview(self._room.to_bytes(8, "little") + head.ljust(self._room)))

    def _leave_room(self, update: Update) -> None:
        state = sum(len(name) + _BYTES_PER_TENSOR for name in (*update.before, *update.payload.arrays()))
        self._room = _BYTES_PER_ROUND + self._expected * (_BYTES_PER_REPLY + state)
        self._room = min(self._room + -self._room % 8, _LARGEST_HEADER)
        self._file.seek(8 + self._room)

    def _store(self, prefix: str, state: State) -> None:
        """Write `state`, the widest types first; readers want values at a multiple of their width."""
        places = {name: place for place, name in enumerate(state)}
        for name, tensor in sorted(state.items(), key=lambda item: (-item[1].element_size(), item[0])):
            if tensor.dtype not in RECORDABLE:
                raise RunError(
                    f"round {self._number}: {prefix} sent '{name}' as {tensor.dtype}, which cannot be recorded"
                )
            if padding := -self._end % tensor.element_size():
                self._write(f"padding/{self._end}", "U8", [padding], memoryview(bytes(padding)))
            self._write(
                f"{prefix}/{places[name]:04d}/{name}", RECORDABLE[tensor.dtype], list(tensor.shape), bytes_of(tensor)
            )

    def _write(self, key: str, dtype: str, shape: list[int], data: memoryview) -> None:
        write_all(self._file, data)
        self._entries[key] = {"dtype": dtype, "shape": shape, "data_offsets": [self._end, self._end + len(data)]}
        self._end += len(data)

    def _move(self, room: int) -> None:
        """Make the header's room larger, from the last piece to the first."""
        for start in reversed(range(0, self._end, _PIECE)):
            self._file.seek(8 + self._room + start)
            piece = self._file.read(min(_PIECE, self._end - start))
            self._file.seek(8 + room + start)
            write_all(self._file, memoryview(piece))
        self._room = room
