"""Writes down what passes between a server and its clients."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from flwr.app import Message

from fedsim.errors import RunError, one_line, what_it_said
from fedsim.files import refuse_link
from fedsim.recording.header import COUNTS, MOST, RECORDING, RUN
from fedsim.recording.messages import FOLDER, write_messages
from fedsim.recording.recorder import Recorder
from fedsim.wire.messages import Update
from strategies.exchange import Asked, Content, Exchange, name_of
from strategies.secure_aggregation import MaskedSum

flower = logging.getLogger("flwr")
"""Flower's own log, which everybody who runs an app reads."""
_STRIDE = 1_000_003
"""From an id that is taken to one that is not."""


class Observer:
    """Records the updates of each round, and beside them all other messages.

    `asks` and `write` never raise: what cannot be read or written is said in Flower's log, and the federation goes on.

    Args:
        recorder: where the updates go.
        count: the metric in which clients report N, if it is another one than Flower's.
    """

    def __init__(self, recorder: Recorder, count: str = COUNTS[0]) -> None:
        self.recorder = recorder
        self._count = count
        self._names: dict[int, int] = {}  # of clients, by their nodes
        self._nodes: dict[int, int] = {}  # by client, whose name it is
        self._exchanges = 0
        self._rounds: set[int] = set()
        self._differing = ""
        self._remarks = set[str]()
        self._masked = MaskedSum()

    def asks(self, messages: Sequence[Message]) -> Exchange | None:
        """What the server sends now; None if that is nothing, or cannot be read."""
        if not messages:
            return None
        try:
            exchange = Exchange(messages, self._count)
        except Exception as error:  # a stranger's bytes
            flower.error("fedsim: messages are not recorded: %s", one_line(what_it_said(error)))
            return None
        if exchange.unreadable:
            flower.warning("fedsim: %s", exchange.unreadable)
        return exchange

    def takes(self, exchange: Exchange, reply: Message) -> bool:
        """Whether `reply` answers one of the messages of `exchange`, which notes it then."""
        try:
            return exchange.takes(reply)
        except Exception as error:  # a stranger's bytes
            flower.error("fedsim: a reply is not recorded: %s", one_line(what_it_said(error)))
            return True

    def write(self, exchange: Exchange) -> None:
        """Write down an exchange with the replies that it has."""
        self._exchanges += 1
        try:
            self._write(exchange)
        except Exception as error:  # a full disk, a stranger's bytes
            flower.error(
                "fedsim: messages %d, %s, are not recorded: %s",
                self._exchanges,
                one_line(exchange.kind),
                one_line(what_it_said(error)),
            )

    def record(self, number: int, exchange: Exchange, replies: Iterable[Message]) -> None:
        """Record updates alone, as they come if `replies` is no sequence, so that not all need be in memory.

        Raises:
            RunError: they cannot be written.
        """
        failures: dict[int, str] = {}
        if number in self._rounds:
            number = max(self._rounds) + 1
            flower.warning("fedsim: a round is trained twice; the second time is recorded as round %d", number)
        self._rounds.add(number)
        if isinstance(replies, Sequence):
            replies = sorted(replies, key=lambda reply: reply.metadata.src_node_id)
        found = self._found(number, exchange, _answers(exchange, replies), failures)
        updates: Iterable[Update] = (update for update in found if update is not None)
        if isinstance(replies, Sequence):
            updates = list(updates)  # they are all here: record them by client, not as they came
        kept = sum(self.recorder.plan.keeps_client(asked.node) for asked in exchange.asked)
        self.recorder.write(number, updates, failures, self._facts(number, exchange), expected=kept)

    def _write(self, exchange: Exchange) -> None:
        number = self._number(exchange)
        failures: dict[int, str] = {}
        updates = list[Update]()
        if exchange.trains and self.recorder.plan.keeps_round(number):
            found = list(self._found(number, exchange, exchange.replies, failures))
            updates = [update for update in found if update is not None]
            failures |= {self._names.get(node, node): "no reply" for node in exchange.silent_nodes}
            if updates or (failures and not found):  # some sent an update, or all of them failed
                if exchange.round and exchange.round != number:
                    flower.warning(
                        "fedsim: round %d is trained once more; this time it is recorded as round %d",
                        exchange.round,
                        number,
                    )
                self.recorder.write(number, updates, failures, self._facts(number, exchange))
                self._rounds.add(number)
        for asked, said in exchange.replies:
            self._name(asked.node, said)
        said_by = {
            self._names.get(asked.node, asked.node) for asked, said in exchange.replies if not isinstance(said, str)
        }
        recorded = {update.client for update in updates}
        if said_by != recorded or not exchange.is_plain:
            everything = exchange.messages(self._exchanges, number if updates else 0, self._names, recorded)
            self.recorder.note(write_messages(self.recorder.folder.parent / FOLDER, everything))
        for node in sorted(exchange.doubled):
            flower.warning("fedsim: node %d answered more than once; its first answer is recorded", node)
        self._write_sum(exchange)

    def _write_sum(self, exchange: Exchange) -> None:
        try:
            total = self._masked.of(exchange, self._number(exchange), self._names)
        except Exception as error:  # shares are missing, or a stranger's bytes
            flower.error("fedsim: the sum of a group is not recorded: %s", one_line(what_it_said(error)))
            return
        if total is not None:
            self.recorder.write(total.round, [total], {}, total.config)
            self._rounds.add(total.round)

    def _number(self, exchange: Exchange) -> int:
        """The round as the messages say it; counted on where they do not, or where it is recorded already."""
        told = exchange.round
        return told if told and told not in self._rounds else max(self._rounds, default=0) + 1

    def _found(
        self, number: int, exchange: Exchange, replies: Iterable[tuple[Asked, Content | str]], failures: dict[int, str]
    ) -> Iterator[Update | None]:
        """What each of `replies` is an update of, or None where a client sent none; `failures` gets the others."""
        config = self._facts(number, exchange)
        for asked, said in replies:
            client = self._name(asked.node, said)
            found = said if isinstance(said, str) else exchange.update(number, asked, client, said, config)
            if isinstance(found, str):
                failures[client] = found
                if not isinstance(said, str):  # what the strategy makes of it is for the strategy to say
                    flower.warning("fedsim: round %d, client %d: %s; recorded as a failure", number, client, found)
            else:
                if found is not None:
                    self._say_remarks(found)
                yield found

    def _say_remarks(self, update: Update) -> None:
        """Say once in Flower's log what is odd about the tensors that clients send; the recording says it each time."""
        for remark in update.remarks:
            if remark not in self._remarks:
                self._remarks.add(remark)
                flower.warning("fedsim: round %d, client %d: %s", update.round, update.client, remark)

    def _name(self, node: int, said: Content | str) -> int:
        """What the client of `node` is called in the recording."""
        if isinstance(said, str):
            return self._names.get(node, node)
        client = name_of(said, self._names.get(node, node))
        if self._nodes.setdefault(client, node) != node:
            called, client = client, node
            while self._nodes.setdefault(client, node) != node:  # another node says that this is what it is called
                client = (client + _STRIDE) % MOST
            flower.warning(
                "fedsim: node %d calls itself client %d, as node %d does; it is called %d here",
                node,
                called,
                self._nodes[called],
                client,
            )
        self._names[node] = client
        return client

    def _facts(self, number: int, exchange: Exchange) -> dict[str, object]:
        """What clients were told alike; says the first time what else they were told."""
        facts, differing = exchange.facts
        if differing and differing != self._differing:
            flower.warning(
                "fedsim: round %d: clients are not all sent the same %s; it is not recorded", number, differing
            )
            self._differing = differing
        return facts


def _answers(exchange: Exchange, replies: Iterable[Message]) -> Iterator[tuple[Asked, Content | str]]:
    """Pair each reply, as it comes, with the message that it answers; replies to none of them are left out."""
    answered = set[int]()
    for reply in replies:
        if (place := exchange.place_of(reply, answered)) is not None:
            answered.add(place)
            yield exchange.asked[place], exchange.said(reply)


def in_folder(folder: Path | str) -> Recorder:
    """A recorder for a new run, in a folder of its own within `folder`: `run-1`, or the next that is not there yet.

    Raises:
        RunError: the folder cannot be written.
    """
    folder = Path(folder).resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        refuse_link(folder)
        for number in itertools.count(1 + len(list(folder.glob(RUN.format("*"))))):
            try:
                (run := folder / RUN.format(number)).mkdir()
                break
            except FileExistsError:
                continue
    except OSError as error:
        raise RunError(f"{folder}: cannot be written ({error.strerror}); choose another folder") from error
    return Recorder(run / RECORDING)
