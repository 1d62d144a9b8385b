"""What a curious server wrote down: one safetensors file a round, in a folder.

Nothing in a recording needs pickle. A file holds the broadcast state once, every client's returned
state, or gradient, under its id, and one JSON header (version, round, clients, N, reported metrics, protocol
facts, failures) with a SHA-256 of each state and of itself. It is written under a temporary name and
renamed, so a killed run leaves whole rounds only. Reading is lazy and verified: a damaged round is
named, the others stay readable.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedsim.errors import RunError, TranscriptError, one_line
from fedsim.files import check_readable, in_one_step, refuse_link, remove_leftovers, write_all
from fedsim.recording import manifest
from fedsim.wire.messages import State, Update

FORMAT = 2
"""Format 1 knows no gradients; a round without them is still written in it, to the byte."""
RECORDABLE = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.complex64: "C64",
    torch.bool: "BOOL",
}
# Room for the header of a round's file, generously.
_BYTES_PER_ROUND, _BYTES_PER_REPLY, _BYTES_PER_TENSOR = 4096, 512, 128
_LARGEST_HEADER = 100_000_000  # the library refuses to read larger ones
_PIECE = 1 << 24
RECORDING = "transcript"
"""What the folder of a recording is called in a run folder."""
MOST = (1 << 64) - 1
"""The largest id of a client; Flower's ids of nodes have 64 bits."""
DIFFERING = "differs-by-client"
"""What a header calls the facts that the server did not send all clients alike, so that it does not tell them."""
_FILE = "round-{:06d}.safetensors"
_NAME = re.compile(r"round-(\d{6,})\.safetensors")


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the header says of one client's update.

    Attributes:
        client: its id.
        num_examples: N, as it reported it.
        broadcast: which of the round's broadcast states it got.
        sha256: of the weights that it sent, or of what came beside a gradient.
        metrics: what else it reported.
        gradient: SHA-256 of the gradient that it sent; None where it sent weights.
    """

    client: int
    num_examples: int
    broadcast: int
    sha256: str
    metrics: Mapping[str, float]
    gradient: str | None = None


@dataclass(frozen=True, kw_only=True)
class Header:
    """What one round's file says before any tensor is read.

    Attributes:
        version: format of the file.
        round: server round, counted from 1.
        broadcasts: SHA-256 of each distinct state that was sent; nearly always one.
        replies: one entry for each recorded client, by ascending client id.
        failures: client id to the reason why no update came back, see `errors.one_line`.
        config: what the server sent along with the state, as far as it sent all clients the same; `DIFFERING` names
            what else it sent.
    """

    version: int
    round: int
    broadcasts: Sequence[str]
    replies: Sequence[Reply]
    failures: Mapping[int, str]
    config: Mapping[str, object]

    def plain(self) -> dict[str, Any]:
        """Everything in it for JSON; a reply of weights says nothing of gradients, as in format 1."""
        told = asdict(self)
        told["replies"] = [
            {key: value for key, value in reply.items() if key != "gradient" or value is not None}
            for reply in told["replies"]
        ]
        return told


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

        A sequence is written by ascending client. What a generator yields is written as it comes,
        so that it need not hold more than one update.
        Updates whose `before` is the same state share its copy on disk.

        Args:
            failures: client to reason; read when `updates` has come to its end.
            config: protocol facts.
            expected: about how many updates will be kept, for those who cannot count them.

        Raises:
            RunError: the disk is full or the folder cannot be written, or two updates are of one
                client; earlier rounds stay.
        """
        if not self.plan.keeps_round(number):
            for update in updates:
                del update
            return
        path = self.folder / _FILE.format(number)
        if isinstance(updates, Sequence):
            updates = sorted(updates, key=lambda update: update.client)
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
    """`updates`, whose own trouble is not that of the disk."""
    try:
        yield from updates
    except OSError as error:
        raise RunError(f"round {number}: the replies did not arrive ({error}); resume the run") from error


class _RoundFile:
    """One round in the safetensors format, written straight from the tensors' memory as updates come.

    The format begins with a header that says where everything lies, so room is left for it; should
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
        self._replies: dict[int, Reply] = {}
        self.sha256 = ""
        """Of the header, once it is written."""

    def __enter__(self) -> _RoundFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def add(self, update: Update) -> None:
        if update.client < 0:
            raise RunError(f"round {self._number}: a reply says that it comes from client {update.client}, below 0")
        if update.client in self._replies:
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
        self._store(f"client/{update.client}", update.after)
        if update.gradient is not None:
            self._store(f"gradient/{update.client}", update.gradient)
        self._replies[update.client] = Reply(
            client=update.client,
            num_examples=update.num_examples,
            broadcast=self._seen[id(update.before)][1],
            sha256=hash_state(update.after),
            metrics=dict(update.metrics),
            gradient=None if update.gradient is None else hash_state(update.gradient),
        )

    def finish(self, failures: Mapping[int, str], config: Mapping[str, object]) -> None:
        header = Header(
            version=1 if all(reply.gradient is None for reply in self._replies.values()) else FORMAT,
            round=self._number,
            broadcasts=self._broadcasts,
            replies=[self._replies[client] for client in sorted(self._replies)],
            failures=dict(sorted(failures.items())),
            config=dict(config),
        )
        sealed, self.sha256 = _sealed(header.plain())
        head = json.dumps({"__metadata__": {"fedsim": sealed}, **self._entries}, separators=(",", ":")).encode()
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
        state = sum(len(name) + _BYTES_PER_TENSOR for name in (*update.before, *update.after, *(update.gradient or ())))
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
                f"{prefix}/{places[name]:04d}/{name}", RECORDABLE[tensor.dtype], list(tensor.shape), _bytes(tensor)
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


class Transcript:
    """A recording, read lazily and verified. Holds nothing that a server would not have received.

    Args:
        folder: the folder with the round files, or the run folder around it.
        rounds: see only these rounds; None sees all.
        facts: see the protocol facts that the server sent along with its state.

    Raises:
        TranscriptError: there is no recording in `folder`, or it lacks one of `rounds`.
    """

    def __init__(self, folder: Path, rounds: Iterable[int] | None = None, *, facts: bool = True) -> None:
        inner = folder / RECORDING
        self.folder = inner if inner.is_dir() else folder
        found = {int(name[1]): self.folder / name[0] for name in map(_NAME.fullmatch, _listed(self.folder)) if name}
        if not found:
            raise TranscriptError(f"{folder}: holds no recording; expected {_FILE.format(1)} or the like in it")
        wanted = sorted(found) if rounds is None else sorted(set(rounds))
        for number in wanted:
            if number not in found:
                raise TranscriptError(
                    f"{self.folder}: round {number} is not recorded; recorded: {', '.join(map(str, sorted(found)))}"
                )
        self._paths = {number: found[number] for number in wanted}
        self._headers: dict[int, Header] = {}
        self._hashes: dict[int, str] = {}
        self._facts = facts

    def __repr__(self) -> str:
        return f"Transcript({str(self.folder)!r}, rounds={self.rounds})"

    @property
    def rounds(self) -> list[int]:
        """The recorded rounds, ascending."""
        return list(self._paths)

    def only(self, rounds: Iterable[int]) -> Transcript:
        """The messages of `rounds` and nothing else: what an attack is handed.

        Protocol facts are left out; which of them the adversary has is for the threat model to say.
        """
        return Transcript(self.folder, rounds, facts=False)

    def copy_to(self, folder: Path) -> None:
        """Its rounds as files of their own in `folder`, whose headers say no more than its own do.

        Raises:
            TranscriptError: a round is damaged.
            OSError: the folder cannot be written.
        """
        folder.mkdir(parents=True)
        for number, path in self._paths.items():
            self.header(number)  # for what is written anew would hide that it was altered
            copied = folder / path.name
            shutil.copyfile(path, copied)
            if not self._facts:
                _withhold_facts(copied)

    def header(self, number: int) -> Header:
        """What round `number` holds, without reading a tensor.

        Raises:
            TranscriptError: the file is truncated or its header was altered.
        """
        if number not in self._headers:
            header, self._hashes[number] = _read_header(self._paths[number], number)
            self._headers[number] = header if self._facts else replace(header, config={})
        return self._headers[number]

    def sha256(self, number: int) -> str:
        """SHA-256 of the header of round `number`, which has those of all its states.

        Raises:
            TranscriptError: the file is truncated or its header was altered.
        """
        self.header(number)
        return self._hashes[number]

    def clients(self, number: int) -> list[int]:
        """Clients whose update of round `number` is recorded, ascending."""
        return [reply.client for reply in self.header(number).replies]

    def update(self, number: int, client: int) -> Update:
        """The update of `client` in round `number`, checked against its hashes.

        Raises:
            TranscriptError: the client is not in that round, or the bytes are not those recorded.
        """
        header = self.header(number)
        reply = next((reply for reply in header.replies if reply.client == client), None)
        if reply is None:
            why = header.failures.get(client)
            raise TranscriptError(
                f"round {number}: client {client} "
                + (f"failed there ({why})" if why else f"is not recorded; recorded: {self.clients(number)}")
            )
        return Update(
            round=number,
            client=client,
            before=self._state(number, f"broadcast/{reply.broadcast}", header.broadcasts[reply.broadcast]),
            after=self._state(number, f"client/{client}", reply.sha256),
            num_examples=reply.num_examples,
            metrics=reply.metrics,
            config=header.config,
            gradient=None if reply.gradient is None else self._state(number, f"gradient/{client}", reply.gradient),
        )

    def updates(self, client: int | None = None) -> Iterator[Update]:
        """All recorded updates by round and client, or those of one client."""
        for number in self.rounds:
            for present in self.clients(number):
                if client is None or client == present:
                    yield self.update(number, present)

    def hash(self) -> str:
        """One SHA-256 over everything recorded, every tensor verified on the way."""
        total = hashlib.sha256()
        for update in self.updates():
            del update
        for number in self.rounds:
            total.update(json.dumps(self.header(number).plain(), sort_keys=True).encode())
        return total.hexdigest()

    def _state(self, number: int, prefix: str, expected: str) -> State:
        path = self._paths[number]
        try:
            with safe_open(path, framework="pt") as file:
                names = [key for key in file.keys() if key.startswith(f"{prefix}/")]  # noqa: SIM118
                entries = sorted((_position(key, prefix), key) for key in names)
                state = {name: file.get_tensor(key) for (_, name), key in entries}
            digest = hash_state(state)
        except (OSError, SafetensorError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise _damaged(path, str(error)) from error
        if digest != expected:
            raise _damaged(path, f"the bytes of {prefix} are not those that were recorded")
        return state


def _listed(folder: Path) -> list[str]:
    """What lies in `folder`; nothing where there is none."""
    try:
        return [path.name for path in folder.iterdir()]  # `glob` finds nothing in a folder that may not be read
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise TranscriptError(f"{folder}: cannot be read ({error.strerror}); mend its permissions") from error


def hash_state(state: State) -> str:
    """SHA-256 over the names, types, shapes and bytes of `state`, in its own order."""
    digest = hashlib.sha256()
    for name, tensor in state.items():
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of `tensor`, in C order, without a copy where it lies so already."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _position(key: str, prefix: str) -> tuple[int, str]:
    position, name = key.removeprefix(f"{prefix}/").split("/", 1)
    return int(position), name


def _read_header(path: Path, number: int) -> tuple[Header, str]:
    """What a round's file says of itself, and the hash of that."""
    try:
        check_readable(path)
        with safe_open(path, framework="pt") as file:
            sealed = json.loads(file.metadata()["fedsim"])
        if hashlib.sha256(sealed["header"].encode()).hexdigest() != sealed["sha256"]:
            raise _damaged(path, "its header was altered")
        fields = json.loads(sealed["header"])
        if fields["version"] not in (1, FORMAT):
            raise TranscriptError(
                f"{path}: has format {_cut(fields['version'])}, this fedsim reads formats 1 and {FORMAT}"
            )
        _check_fields(fields)
        if fields["round"] != number:
            raise _damaged(path, f"it holds round {fields['round']}")
        replies = [Reply(**reply) for reply in fields.pop("replies")]
        failures = {int(client): one_line(why) for client, why in fields.pop("failures").items()}  # a stranger's words
        return Header(replies=replies, failures=failures, **fields), sealed["sha256"]
    except (OSError, SafetensorError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error


def _sealed(header: Mapping[str, Any]) -> tuple[str, str]:
    """A round's header as it is written, and its SHA-256."""
    text = json.dumps(header, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps({"header": text, "sha256": digest}), digest


def _withhold_facts(path: Path) -> None:
    """Leave the protocol facts out of a round's file; everything else stays where it is."""
    with path.open("r+b") as file:
        try:
            room = int.from_bytes(file.read(8), "little")
            head = json.loads(file.read(room))
            fields = json.loads(json.loads(head["__metadata__"]["fedsim"])["header"])
            head["__metadata__"]["fedsim"], _ = _sealed(fields | {"config": {}})
            text = json.dumps(head, separators=(",", ":")).encode()
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise _damaged(path, str(error)) from error
        if len(text) > room:
            raise _damaged(path, "its header is not written as ours are")
        file.seek(8)
        file.write(text.ljust(room))


def _check_fields(fields: Any) -> None:
    """Raise ValueError where a header is not as ours are; whoever sealed a file may have written anything into it."""
    kinds = {"version": int, "round": int, "broadcasts": list, "replies": list, "failures": dict, "config": dict}
    _check_kinds("the header", fields, kinds)
    if not all(isinstance(item, str) for item in (*fields["broadcasts"], *fields["failures"].values())):
        raise ValueError("a hash or a reason is no text")
    kinds = {"client": int, "num_examples": int, "broadcast": int, "sha256": str, "metrics": dict}
    for reply in fields["replies"]:
        further = {"gradient": str} if isinstance(reply, dict) and "gradient" in reply else {}
        _check_kinds("a reply", reply, kinds | further)
        numbers = (reply["client"], reply["num_examples"], reply["broadcast"])
        if not (0 <= numbers[0] <= MOST and numbers[1] >= 0 and 0 <= numbers[2] < len(fields["broadcasts"])):
            raise ValueError(f"client, N and broadcast are {numbers}")
        if not all(type(value) in (int, float) for value in reply["metrics"].values()):
            raise ValueError(f"a metric of client {numbers[0]} is no number")
    for clients in ([reply["client"] for reply in fields["replies"]], [int(client) for client in fields["failures"]]):
        if len(set(clients)) < len(clients) or min(clients, default=0) < 0:
            raise ValueError(f"its clients are {_cut(clients)}, expected each once and none below 0")


def _check_kinds(what: str, table: Any, kinds: Mapping[str, type]) -> None:
    if not isinstance(table, dict) or set(table) != set(kinds):
        raise ValueError(f"{what} is {_cut(table)}, expected {', '.join(kinds)}")
    for key, kind in kinds.items():
        if type(table[key]) is not kind:  # to Python, true is a number
            raise ValueError(f"{key} of {what} is {_cut(table[key])}")


def _cut(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:80]}…"


def _damaged(path: Path, why: str) -> TranscriptError:
    return TranscriptError(
        f"{path}: is damaged ({why}); the other rounds stay readable, leave this one out or record it again"
    )
