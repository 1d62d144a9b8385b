"""Reader of a recording, lazy and verified: a damaged round is named, the others stay readable."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from pathlib import Path

from fedsim.base.errors import PayloadError, TranscriptError
from fedsim.base.files import replace_atomically
from fedsim.recording.control_variates import (
    fit_distance,
    holds_controls,
    read_app_controls,
    remove_app_controls,
    remove_controls,
    sum_changes,
)
from fedsim.recording.header import (
    RECORDING_FOLDER,
    ROUND_FILE,
    Header,
    Reply,
    damage_error,
    hash_state,
    names_example_count,
    read_header,
    straggler_reason,
    withhold_facts,
)
from fedsim.recording.known_terms import LINEAR_KEY, holds_move, pack_move, remove_linear_term, sum_moves, unpack_move
from fedsim.recording.message_format import MessageFormat
from fedsim.recording.payloads import Payload, State
from fedsim.recording.recorder import Recorder
from fedsim.recording.recording_folder import describe_exchanges, find_round_paths, find_run
from fedsim.recording.round_file import Index, RoundFile, RoundReader, count_bytes
from fedsim.recording.wire_format import Update

_DEFAULT_FORMAT = MessageFormat()
UpdateSource = Callable[[int, Reply], State]
"""Function that computes the arrays again that a reply in a round stands for by its hash alone.

It is of whoever has the clients' data, and raises a FedsimError that says why it cannot."""


class Transcript:
    """Recording, read lazily and verified. It holds nothing that a server would not have received.

    Args:
        folder: the folder with the round files, the run folder around it, or see `find_run`.
        rounds: show only these rounds; None shows all.
        facts: show the protocol facts that the server sent along with its state.
        message_format: format of the messages, in which updates are read.
        source: computes updates of which a round by recipe holds the hash alone; without one,
            reading them is an error.

    Raises:
        TranscriptError: there is no recording in `folder`, or it lacks one of `rounds`.
    """

    def __init__(
        self,
        folder: Path | str,
        rounds: Iterable[int] | None = None,
        *,
        facts: bool = True,
        message_format: MessageFormat = _DEFAULT_FORMAT,
        source: UpdateSource | None = None,
    ) -> None:
        run = find_run(Path(folder))
        self.folder = run / RECORDING_FOLDER if (run / RECORDING_FOLDER).is_dir() else run
        recorded_paths = find_round_paths(self.folder)
        if not recorded_paths:
            raise TranscriptError(
                f"{folder}: holds no recording{describe_exchanges(run)}; expected {ROUND_FILE.format(1)} "
                "or the like in it; rounds in which an app only evaluates are not recorded"
            )
        visible_rounds = sorted(recorded_paths) if rounds is None else sorted(set(rounds))
        for number in visible_rounds:
            if number not in recorded_paths:
                recorded = ", ".join(map(str, sorted(recorded_paths)))
                raise TranscriptError(f"{self.folder}: round {number} is not recorded; recorded: {recorded}")
        self._paths = {number: recorded_paths[number] for number in visible_rounds}
        self._headers: dict[int, Header] = {}
        self._hashes: dict[int, str] = {}
        self._replies: dict[int, dict[tuple[int, int], Reply]] = {}  # round to client and message
        self._reader = RoundReader()
        self._shows_facts = facts
        self._shows_counts = True
        self._links: frozenset[int] | None = None  # clients whose messages alone are shown; None for all
        self.message_format = message_format
        self._source = source

    def __repr__(self) -> str:
        return f"Transcript({str(self.folder)!r}, rounds={self.rounds})"

    # What somebody sees of it.

    def restrict_to(self, rounds: Iterable[int]) -> Transcript:
        """Return a transcript of only the messages of `rounds`, as an attack receives it.

        Protocol facts are left out, because the threat model states which of them the adversary
        knows.
        """
        transcript = Transcript(
            self.folder, rounds, facts=False, message_format=self.message_format, source=self._source
        )
        transcript._shows_counts = self._shows_counts
        transcript._links = self._links
        return transcript

    def without_example_counts(self) -> Transcript:
        """Return the same recording for who is not told N: it is 0 in all headers and updates."""
        transcript = copy(self)
        transcript.message_format = self.message_format.model_copy(update={"num_examples": None})
        transcript._shows_counts = False
        transcript._replies = {}
        return transcript

    def restrict_to_links(self, clients: Iterable[int]) -> Transcript:
        """Return the same recording for who hears the messages to and from these clients alone."""
        transcript = copy(self)
        transcript._links = frozenset(clients)
        transcript._replies = {}
        return transcript

    def in_format(self, message_format: MessageFormat) -> Transcript:
        """Return the same recording, read in another message format; headers are not read again."""
        transcript = copy(self)
        transcript.message_format = message_format
        return transcript

    # Rounds and their headers.

    @property
    def rounds(self) -> list[int]:
        """Return the recorded rounds, ascending."""
        return list(self._paths)

    def header(self, number: int) -> Header:
        """Return the header of round `number`, without reading a tensor.

        Raises:
            TranscriptError: the file is truncated or its header was altered.
        """
        header = self._recorded_header(number)
        if not self._shows_counts:
            header = replace(header, replies=[_without_count(reply) for reply in header.replies])
        if self._links is not None:
            replies = [reply for reply in header.replies if reply.client in self._links]
            failures = {client: reason for client, reason in header.failures.items() if client in self._links}
            header = replace(header, replies=replies, failures=failures)
        return header if self._shows_facts else replace(header, config={}, recipe={})

    def explain_absence(self, number: int) -> str:
        """Say why there is no round `number`, as the end of a sentence that begins with it."""
        return f"is not recorded; recorded: {', '.join(map(str, self._paths))}"

    def _recorded_header(self, number: int) -> Header:
        if number not in self._paths:
            raise TranscriptError(f"{self.folder}: round {number} {self.explain_absence(number)}")
        if number not in self._headers:
            self._headers[number], self._hashes[number] = read_header(self._paths[number], number)
        return self._headers[number]

    def sha256(self, number: int) -> str:
        """Return the SHA-256 of the header of round `number`, which has the hashes of its states.

        Raises:
            TranscriptError: the file is truncated or its header was altered.
        """
        self.header(number)
        return self._hashes[number]

    def clients(self, number: int) -> list[int]:
        """Return the clients of which an update of round `number` is recorded, ascending."""
        return list(dict.fromkeys(reply.client for reply in self.header(number).replies))

    def messages(self, number: int, client: int) -> list[int]:
        """Return the numbers of the messages that updates of `client` in round `number` answer.

        Nearly always this is [1].
        """
        replies = self._replies_of_round(number)
        if (client, 2) not in replies:  # saves going through all replies of a large round
            return [1] if (client, 1) in replies else []
        return [message for replying_client, message in replies if replying_client == client]

    def _replies_of_round(self, number: int) -> Mapping[tuple[int, int], Reply]:
        if number not in self._replies:
            replies = self.header(number).replies
            self._replies[number] = {(reply.client, reply.message): reply for reply in replies}
        return self._replies[number]

    def _find_reply(self, round: int, client: int, message: int) -> Reply:
        reply = self._replies_of_round(round).get((client, message))
        if reply is None:
            reason = self.header(round).failures.get(client)
            raise TranscriptError(
                f"round {round}: client {client} "
                + (f"failed there ({reason})" if reason else f"is not recorded; recorded: {self.clients(round)}")
            )
        return reply

    def upload_sizes(self, number: int) -> dict[int, int]:
        """Return for each client the bytes of the arrays that it sent in round `number`.

        They are counted as by `Payload.nbytes`; no array is read.

        Raises:
            TranscriptError: the file is truncated or its header was altered.
        """
        replies = self.header(number).replies
        # Where the header says nothing of the size, the file has the arrays.
        prefixes = [reply.key_prefix for reply in replies if not reply.num_bytes]
        stored_sizes = count_bytes(self._paths[number], prefixes) if prefixes else {}
        sizes: dict[int, int] = {}
        for reply in replies:
            num_bytes = reply.num_bytes or stored_sizes[reply.key_prefix]
            sizes[reply.client] = sizes.get(reply.client, 0) + num_bytes
        return sizes

    # Updates.

    def updates(self, client: int | None = None) -> Iterator[Update]:
        """Yield all recorded updates by round and client, or those of one client."""
        for number in self.rounds:
            for recorded_client in self.clients(number):
                if client is None or client == recorded_client:
                    yield self.update(number, recorded_client)

    def update(self, round: int, client: int) -> Update:
        """Return the verified update of `client` in round `round`, in the message format.

        Raises:
            TranscriptError: the client is not in that round, it answered several messages and the
                format does not name one, the bytes are not those recorded, or they do not match the
                format.
        """
        messages = self.messages(round, client)
        message = self.message_format.message or (messages[0] if len(messages) == 1 else 0)
        if messages and message not in messages:
            which = f"of {len(messages)} messages to it" if not message else f"but not message {message}"
            raise TranscriptError(
                f"round {round}, client {client}: it answered {', '.join(map(str, messages))} {which}, and each answer "
                "is an update of its own; name one with [app] message"
            )
        update = self.recorded_update(round, client, message or 1)
        if self.message_format.controls:
            earlier_updates = self._earlier_updates(round, client, "control variate")
            update = remove_app_controls(update, earlier_updates, self.message_format)
        elif not update.records:
            update = self._remove_known_terms(update)
        return self.message_format.read(update)

    def recorded_update(self, round: int, client: int, message: int = 1) -> Update:
        """Return the verified update of `client` in round `round`, as it was recorded.

        Args:
            round: the server's round.
            client: its id.
            message: number of the message to this client that the update answers; see `messages`.

        Raises:
            TranscriptError: the client is not in that round, or the bytes are not those recorded.
            FedsimError: the update is kept by recipe, and cannot be computed again.
        """
        header, reply = self.header(round), self._find_reply(round, client, message)
        before = self._read_broadcast(round, reply.broadcast)
        arrays = self._read_arrays(round, reply)
        try:
            payload = Payload.from_dense(arrays, "weights") if reply.records else Payload.from_arrays(arrays, before)
        except PayloadError as error:
            raise damage_error(self._paths[round], f"of client {client}: {error}") from error
        if payload.kind != reply.kind:
            raise damage_error(self._paths[round], f"client {client} sent {payload.kind}, its header says {reply.kind}")
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

    def broadcast(self, round: int, client: int, message: int = 1) -> State:
        """Return the verified w_t that `client` was sent in round `round`, as it was recorded.

        No update is read, nor computed again. The arguments are those of `recorded_update`.

        Raises:
            TranscriptError: the client is not in that round, or the bytes are not those recorded.
        """
        return self._read_broadcast(round, self._find_reply(round, client, message).broadcast)

    def _read_broadcast(self, number: int, index: int) -> State:
        digest = self._recorded_header(number).broadcasts[index]
        return self._reader.read_state(self._paths[number], f"broadcast/{index}", digest)

    def _read_arrays(self, number: int, reply: Reply) -> State:
        """Return the verified arrays of a reply, computed again where the file holds their hash alone."""
        if self.holds_arrays(number, reply):
            return self._reader.read_state(self._paths[number], reply.key_prefix, reply.sha256)
        where = f"round {number}, client {reply.client}"
        if self._source is None:
            raise TranscriptError(
                f"{self._paths[number]}: {where}: the update was kept by recipe, so the file holds its hash "
                "alone; open the run with its experiment and data, or have it written out by "
                "`fedsim materialise RUN`"
            )
        arrays = self._source(number, reply)
        if hash_state(arrays) != reply.sha256:
            raise TranscriptError(f"{where}: what was computed again is not the recorded update")
        return arrays

    # Terms that clients added to their gradients, and that follow from earlier messages.

    def adds_known_terms(self, number: int) -> bool:
        """Return whether clients added terms to their gradients that follow from earlier messages.

        Such are control variates and FedDyn's linear term. A copy, from which they are removed
        already, says so by the moves that stand beside its replies.
        """
        if self.message_format.controls or self._sends_controls(number):
            return True
        if LINEAR_KEY in self._recorded_header(number).config:
            return True
        return any(holds_move(name for _, name, _ in entries) for entries in self._read_index(number).values())

    def _sends_controls(self, number: int) -> bool:
        """Return whether the server sent control variates in round `number`, without reading a tensor."""
        index = self._read_index(number)
        sent = (index.get(f"broadcast/{position}", []) for position in range(len(self.header(number).broadcasts)))
        return any(holds_controls(name for _, name, _ in entries) for entries in sent)

    def _remove_known_terms(self, update: Update) -> Update:
        """Return the update with the move of the client's gradients alone, where it added other terms."""
        unpacked_update = unpack_move(update)
        if unpacked_update.gradient_move is not None:  # in a copy, whose rounds may not be all
            return unpacked_update
        if holds_controls(update.before):
            earlier_updates = self._earlier_updates(update.round, update.client, "control variate")
            return remove_controls(update, sum_changes(earlier_updates))
        config = self._recorded_header(update.round).config
        if LINEAR_KEY in config and not update.members:
            earlier_updates = self._earlier_updates(update.round, update.client, "linear term")
            return remove_linear_term(update, sum_moves(earlier_updates), config)
        return update

    def _earlier_updates(self, round: int, client: int, term: str) -> Iterator[Update]:
        """Yield all that `client` sent before `round`, also in rounds that are not to be attacked.

        Raises:
            TranscriptError: not all rounds before are recorded, or the client failed in one of them,
                so that nobody but the client knows whether it trained.
        """
        everything = Transcript(self.folder, source=self._source)
        for number in range(1, round):
            if number not in everything.rounds:
                raise TranscriptError(
                    f"round {round}, client {client}: its {term} is the sum of what it sent from round 1 on, "
                    f"and round {number} is not recorded; record every round, or attack the first"
                )
            failure = everything.header(number).failures.get(client)
            if failure not in (None, straggler_reason(number)):
                raise TranscriptError(
                    f"round {round}, client {client}: its {term} is the sum of its moves from round 1 on, and whether "
                    f"it trained in round {number}, where it failed ({failure}), is not recorded; attack it up to "
                    "that round, or a client that did not fail"
                )
        for number in range(1, round):
            if client in everything.clients(number):
                yield everything.recorded_update(number, client)

    def fit_control_distance(self, number: int, client: int) -> float:
        """Return K eta of a client of an app, as its move is K eta times its mean step by its control variate.

        It is 0 where the client did not move.

        Raises:
            TranscriptError: the update cannot be read, or a round before it is not recorded.
        """
        earlier_updates = self._earlier_updates(number, client, "control variate")
        read = read_app_controls(self.recorded_update(number, client), earlier_updates, self.message_format)
        return fit_distance(read.moves, read.steps_by_reading[self.message_format.control_replies])

    # Files.

    def round_path(self, number: int) -> Path:
        """Return the path of the file of round `number`."""
        return self._paths[number]

    def holds_arrays(self, number: int, reply: Reply) -> bool:
        """Return whether the file of a round has the arrays of a reply, not their hash alone."""
        return not reply.num_bytes or reply.key_prefix in self._read_index(number)

    def count_left_out(self, number: int) -> int:
        """Return of how many updates of round `number` the file holds the hash alone.

        Raises:
            TranscriptError: the file is truncated or its header was altered.
        """
        replies, index = self._recorded_header(number).replies, self._read_index(number)
        return sum(bool(reply.num_bytes) and reply.key_prefix not in index for reply in replies)

    def _read_index(self, number: int) -> Index:
        """Return the tensors that the file of a round has, by the prefixes of their states."""
        return self._reader.read_index(self._paths[number])

    def copy_to(self, folder: Path) -> None:
        """Copy the visible rounds and facts, in the present message format, as files into `folder`.

        The copy holds all updates whole, so that nobody needs the clients' data to read them.

        Raises:
            TranscriptError: a round is damaged, or an update cannot be computed again.
            OSError: the folder cannot be written.
        """
        folder.mkdir(parents=True)
        for number, path in self._paths.items():
            is_changed = self.message_format.changes_updates or not self._shows_counts or self._links is not None
            if is_changed or self.adds_known_terms(number):
                header = self.header(number)
                updates = [pack_move(self.update(number, client)) for client in self.clients(number)]
                Recorder(folder, resume=True).write(number, updates, header.failures, header.config)
                continue
            self.header(number)  # verify it before, because rewriting would hide an alteration
            copied_path = folder / path.name
            if self._recorded_header(number).recipe:
                self.write_out(number, copied_path)
            else:
                shutil.copyfile(path, copied_path)
            if not self._shows_facts:
                withhold_facts(copied_path)

    def write_out(self, number: int, path: Path, clients: Container[int] | None = None) -> None:
        """Write a round into the file `path` with the updates of `clients`, which are computed again.

        The header, and so its hash, is that of the round as it was recorded.

        Args:
            number: the round.
            path: of the file, which may be that of the round itself.
            clients: those whose updates are written besides those that the file holds; None is all.

        Raises:
            TranscriptError: the round is damaged, or an update cannot be computed again.
            OSError: the file cannot be written.
        """
        header = self._recorded_header(number)

        def read_states() -> Iterator[tuple[str, State]]:
            for index in range(len(header.broadcasts)):
                yield f"broadcast/{index}", self._read_broadcast(number, index)
            for reply in header.replies:
                if clients is None or reply.client in clients or self.holds_arrays(number, reply):
                    yield reply.key_prefix, self._read_arrays(number, reply)

        with replace_atomically(path) as temporary, RoundFile(temporary, number, 0) as file:
            file.write_again(header, read_states())
            if file.sha256 != self._hashes[number]:
                raise damage_error(self._paths[number], "its header is not written as ours are")

    def verify(self, number: int) -> None:
        """Check each tensor that the file of round `number` holds.

        Raises:
            TranscriptError: the file is damaged, or was altered.
        """
        header, held_states = self._recorded_header(number), self._read_index(number)
        for reply in header.replies:
            if reply.key_prefix in held_states or not reply.num_bytes:
                self.recorded_update(number, reply.client, reply.message)
        if header.recipe:  # perhaps no update was read
            for index in range(len(header.broadcasts)):
                self._read_broadcast(number, index)

    def hash(self) -> str:
        """Return one SHA-256 over everything recorded, and verify each tensor that the files hold.

        It does not depend on how many updates of a round by recipe the file holds.
        """
        for number in self.rounds:
            self.verify(number)
        return self.hash_headers(self.rounds)

    def hash_headers(self, rounds: Iterable[int]) -> str:
        """Return the SHA-256 over the headers of `rounds`, which have the hashes of all states.

        Raises:
            TranscriptError: a file is truncated or its header was altered.
        """
        total = hashlib.sha256()
        for number in rounds:
            total.update(self.header(number).to_text().encode())
        return total.hexdigest()


def _without_count(reply: Reply) -> Reply:
    """Return a reply that does not say N, neither as such nor among its metrics, whatever they call it."""
    metrics = {name: value for name, value in reply.metrics.items() if not names_example_count(name)}
    if reply.num_examples:
        metrics = {name: value for name, value in metrics.items() if value != reply.num_examples}
    return replace(reply, num_examples=0, metrics=metrics)
