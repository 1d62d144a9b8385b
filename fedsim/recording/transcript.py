"""Reads what a curious server wrote down; lazily and verified: a damaged round is named, the others stay readable."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fedsim.errors import PayloadError, TranscriptError
from fedsim.recording.header import (
    FILE,
    RECORDABLE,
    RECORDING,
    RUN,
    Header,
    Reply,
    damaged,
    hash_state,
    read_header,
    withhold_facts,
)
from fedsim.recording.messages import FOLDER as MESSAGES
from fedsim.recording.reading import Reading
from fedsim.recording.recorder import Recorder
from fedsim.wire.messages import Update
from fedsim.wire.payloads import Payload, State

_AS_USUAL = Reading()
_BYTES = {word: dtype.itemsize for dtype, word in RECORDABLE.items()}
"""Of one number, by what a file calls its type."""
_NAME = re.compile(r"round-(\d{6,})\.safetensors")
Index = dict[str, list[tuple[int, str, str]]]
"""By what tensors are of, such as `client/3`: the place of each, its name, and its key in the file."""
_RUN = re.compile(RUN.format(r"(\d{1,18})"))


class Transcript:
    """A recording, read lazily and verified. Holds nothing that a server would not have received.

    Args:
        folder: the folder with the round files, the run folder around it, or see `the_run`.
        rounds: see only these rounds; None sees all.
        facts: see the protocol facts that the server sent along with its state.
        reading: what the messages mean.

    Raises:
        TranscriptError: there is no recording in `folder`, or it lacks one of `rounds`.
    """

    def __init__(
        self,
        folder: Path | str,
        rounds: Iterable[int] | None = None,
        *,
        facts: bool = True,
        reading: Reading = _AS_USUAL,
    ) -> None:
        run = the_run(Path(folder))
        self.folder = run / RECORDING if (run / RECORDING).is_dir() else run
        found = {int(name[1]): self.folder / name[0] for name in map(_NAME.fullmatch, _listed(self.folder)) if name}
        if not found:
            others = len([name for name in _listed(run / MESSAGES) if name.endswith(".safetensors")])
            but = f" of updates, but {others} other exchange{'s' * (others != 1)} of messages" if others else ""
            raise TranscriptError(f"{folder}: holds no recording{but}; expected {FILE.format(1)} or the like in it")
        wanted = sorted(found) if rounds is None else sorted(set(rounds))
        for number in wanted:
            if number not in found:
                raise TranscriptError(
                    f"{self.folder}: round {number} is not recorded; recorded: {', '.join(map(str, sorted(found)))}"
                )
        self._paths = {number: found[number] for number in wanted}
        self._headers: dict[int, Header] = {}
        self._hashes: dict[int, str] = {}
        self._replies: dict[int, dict[tuple[int, int], Reply]] = {}  # by round, then client and message
        self._open: tuple[tuple[int, ...], Any, Index] | None = None  # the file that was read last, as it was then
        self._verified = set[tuple[int, str]]()
        self._broadcast: tuple[tuple[int, str], State] | None = None  # the one that was read last
        self._facts = facts
        self.reading = reading

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
        return Transcript(self.folder, rounds, facts=False, reading=self.reading)

    def copy_to(self, folder: Path) -> None:
        """Its rounds as files of their own in `folder`, whose headers say no more than its own do.

        Raises:
            TranscriptError: a round is damaged.
            OSError: the folder cannot be written.
        """
        folder.mkdir(parents=True)
        for number, path in self._paths.items():
            if self.reading != _AS_USUAL:  # written as they are read
                header, updates = self.header(number), [self.update(number, client) for client in self.clients(number)]
                Recorder(folder, resume=True).write(number, updates, header.failures, header.config)
                continue
            self.header(number)  # checked first, because a header that is written anew would hide that it was altered
            copied = folder / path.name
            shutil.copyfile(path, copied)
            if not self._facts:
                withhold_facts(copied)

    def header(self, number: int) -> Header:
        """What round `number` holds, without reading a tensor.

        Raises:
            TranscriptError: the file is truncated or its header was altered.
        """
        if number not in self._headers:
            header, self._hashes[number] = read_header(self._paths[number], number)
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
        """Clients of whom an update of round `number` is recorded, ascending."""
        return list(dict.fromkeys(reply.client for reply in self.header(number).replies))

    def messages(self, number: int, client: int) -> list[int]:
        """Return which of the server's messages to `client` in round `number` an update answers, nearly always [1]."""
        answers = self._answers(number)
        if (client, 2) not in answers:
            return [message for message in (1,) if (client, message) in answers]
        return [message for answering, message in answers if answering == client]

    def _answers(self, number: int) -> Mapping[tuple[int, int], Reply]:
        if number not in self._replies:
            replies = self.header(number).replies
            self._replies[number] = {(reply.client, reply.message): reply for reply in replies}
        return self._replies[number]

    def sizes(self, number: int) -> dict[int, int]:
        """Bytes of the arrays that each client sent in round `number`, as `Payload.nbytes` counts them; none is read.

        Raises:
            TranscriptError: the file is truncated or its header was altered.
        """
        client_of = {reply.key: reply.client for reply in self.header(number).replies}
        sizes = dict.fromkeys(client_of.values(), 0)
        try:
            with safe_open(self._paths[number], framework="pt") as file:
                for key in file.keys():  # noqa: SIM118
                    if (who := "/".join(key.split("/", 2)[:2])) in client_of:
                        array = file.get_slice(key)
                        sizes[client_of[who]] += math.prod(array.get_shape()) * _BYTES[array.get_dtype()]
        except (OSError, SafetensorError, KeyError) as error:
            raise damaged(self._paths[number], str(error)) from error
        return sizes

    def update(self, round: int, client: int) -> Update:
        """The update of `client` in round `round`, checked against its hashes, as `reading` says that it is meant.

        Raises:
            TranscriptError: the client is not in that round, it answered several messages and `reading` does not say
                which is meant, the bytes are not those recorded, or it cannot be read so.
        """
        answered = self.messages(round, client)
        message = self.reading.message or (answered[0] if len(answered) == 1 else 0)
        if answered and message not in answered:
            which = f"of {len(answered)} messages to it" if not message else f"but not message {message}"
            raise TranscriptError(
                f"round {round}, client {client}: it answered {', '.join(map(str, answered))} {which}, and each answer "
                "is an update of its own; name one with [app] message"
            )
        return self.reading.of(self.recorded(round, client, message or 1))

    def recorded(self, round: int, client: int, message: int = 1) -> Update:
        """The update of `client` in round `round` as it was recorded, checked against its hashes.

        Args:
            round: of the server.
            client: its id.
            message: which of the server's messages to it in this round is meant; see `messages`.

        Raises:
            TranscriptError: the client is not in that round, or the bytes are not those recorded.
        """
        header = self.header(round)
        if (reply := self._answers(round).get((client, message))) is None:
            why = header.failures.get(client)
            raise TranscriptError(
                f"round {round}: client {client} "
                + (f"failed there ({why})" if why else f"is not recorded; recorded: {self.clients(round)}")
            )
        before = self._state(round, f"broadcast/{reply.broadcast}", header.broadcasts[reply.broadcast])
        arrays = self._state(round, reply.key, reply.sha256)
        try:
            payload = Payload.dense(arrays, "weights") if reply.records else Payload.from_arrays(arrays, before)
        except PayloadError as error:
            raise damaged(self._paths[round], f"of client {client}: {error}") from error
        if payload.kind != reply.kind:
            raise damaged(self._paths[round], f"client {client} sent {payload.kind}, its header says {reply.kind}")
        return Update(
            round=round,
            client=client,
            before=before,
            payload=payload,
            num_examples=reply.num_examples,
            metrics=reply.metrics,
            config=header.config,
            records=tuple(reply.records),
            members=tuple(reply.members),
            message=reply.message,
            remarks=tuple(reply.remarks),
        )

    def updates(self, client: int | None = None) -> Iterator[Update]:
        """All recorded updates by round and client, or those of one client."""
        for number in self.rounds:
            for present in self.clients(number):
                if client is None or client == present:
                    yield self.update(number, present)

    def hash(self) -> str:
        """One SHA-256 over everything recorded; each tensor is verified."""
        total = hashlib.sha256()
        for number in self.rounds:
            for reply in self.header(number).replies:
                self.recorded(number, reply.client, reply.message)
        for number in self.rounds:
            total.update(json.dumps(self.header(number).plain(), sort_keys=True).encode())
        return total.hexdigest()

    def _opened(self, path: Path) -> tuple[Any, Index]:
        """Return the file of a round and where its tensors are; parsing thousands of names takes long."""
        found = path.stat()
        now = (found.st_ino, found.st_size, found.st_mtime_ns)
        if self._open is None or self._open[0] != now:
            self._open = None
            file: Any = safe_open(path, framework="pt")
            self._open = now, file, _index_of(file.keys())
        return self._open[1:]

    def _state(self, number: int, prefix: str, expected: str) -> State:
        path, place = self._paths[number], (number, prefix)
        if self._broadcast is not None and self._broadcast[0] == place:  # which nearly all updates of a round share
            return {name: tensor.clone() for name, tensor in self._broadcast[1].items()}  # whoever has it may change it
        try:
            file, index = self._opened(path)
            state = {name: file.get_tensor(key) for _, name, key in index.get(prefix, [])}
            digest = expected if place in self._verified else hash_state(state)
        except (OSError, SafetensorError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise damaged(path, str(error)) from error
        if digest != expected:
            raise damaged(path, f"the bytes of {prefix} are not those that were recorded")
        if prefix.startswith("broadcast/"):
            self._verified.add(place)
            self._broadcast = place, {name: tensor.clone() for name, tensor in state.items()}
        return state


def the_run(folder: Path) -> Path:
    """The only run in a folder that an app records its runs in, as `run-1`; any other folder itself.

    Raises:
        TranscriptError: it holds several runs.
    """
    names = _listed(folder)
    if RECORDING in names or any(map(_NAME.fullmatch, names)):
        return folder
    runs = sorted((int(name[1]), name[0]) for name in map(_RUN.fullmatch, names) if name)
    recorded = [folder / name for _, name in runs if any(_listed(folder / name / n) for n in (RECORDING, MESSAGES))]
    if len(recorded) > 1:
        raise TranscriptError(f"{folder}: holds {len(recorded)} runs; name one of them, such as {recorded[-1]}")
    return recorded[0] if recorded else folder


def _listed(folder: Path) -> list[str]:
    """What is in `folder`; nothing where there is none."""
    try:
        return [path.name for path in folder.iterdir()]  # `glob` finds nothing in a folder that may not be read
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise TranscriptError(f"{folder}: cannot be read ({error.strerror}); mend its permissions") from error


def _index_of(keys: Iterable[str]) -> Index:
    """Sort the keys of a round's file by what they are of: the place of each tensor, its name, and the key."""
    index: dict[str, list[tuple[int, str, str]]] = {}
    for key in keys:
        kind, _, rest = key.partition("/")
        owner, _, rest = rest.partition("/")
        position, slash, name = rest.partition("/")
        if slash:  # other keys fill gaps
            index.setdefault(f"{kind}/{owner}", []).append((int(position), name, key))
    return {prefix: sorted(entries) for prefix, entries in index.items()}
