"""Recording of all messages between a server and its clients, the updates of each round first."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from flwr.app import Message

from fedsim.base.errors import RunError, error_reason, one_line
from fedsim.base.files import check_no_link
from fedsim.recording.header import EXAMPLE_COUNT_KEYS, MAX_CLIENT_ID, RECORDING_FOLDER, RUN_FOLDER
from fedsim.recording.messages import MESSAGES_FOLDER, write_messages
from fedsim.recording.recorder import Recorder
from fedsim.recording.wire_format import Update
from strategies.exchange import Exchange, ServerMessage
from strategies.message_content import MessageContent, client_name, read_reply
from strategies.secure_aggregation import MaskedSum

flower_log = logging.getLogger("flwr")
"""Flower's own log, which everybody who runs an app reads."""
_ID_STRIDE = 1_000_003
"""Step from a client id that is taken to the next one to try."""


class Observer:
    """Recorder of the updates of each round, and of all other messages.

    `open_exchange` and `write_exchange` never raise: messages that cannot be read or written are
    reported in Flower's log, and the federation goes on.

    Args:
        recorder: the recorder of the updates.
        count: the metric in which clients report N, if it is not Flower's.
        partitions: by node, the client that it plays, where that is known, whatever it reports; others are called by
            what they report.

    Attributes:
        losses: what could not be read or written, in the words of the log.
    """

    def __init__(
        self,
        recorder: Recorder,
        count: str = EXAMPLE_COUNT_KEYS[0],
        partitions: Mapping[int, int] | None = None,
    ) -> None:
        self.recorder = recorder
        self._count_key = count
        self._partitions = partitions or {}
        self._client_of_node: dict[int, int] = dict(self._partitions)
        self._node_of_client: dict[int, int] = {client: node for node, client in self._client_of_node.items()}
        self._num_exchanges = 0
        self._recorded_rounds: set[int] = set()
        self._logged_differing = ""
        self._logged_remarks = set[str]()
        self._masked_sum = MaskedSum()
        self.losses: list[str] = []

    def open_exchange(self, messages: Sequence[Message]) -> Exchange | None:
        """Copy messages before they are sent; None if there are none, or they cannot be read."""
        if not messages:
            return None
        try:
            exchange = Exchange(messages, self._count_key)
        except Exception as error:  # messages of any app may hold anything
            self.log_loss(f"messages are not recorded: {one_line(error_reason(error))}")
            return None
        if exchange.unreadable_reason:
            flower_log.warning("fedsim: %s", exchange.unreadable_reason)
        return exchange

    def add_reply(self, exchange: Exchange, reply: Message) -> int | None:
        """Copy `reply`; return the index of the message of `exchange` that it answers, None for none."""
        index = exchange.index_of(reply)
        if index is None:
            return None
        try:
            exchange.add_reply(index, reply)
        except Exception as error:  # replies of any app may hold anything
            self.log_loss(f"a reply is not recorded: {one_line(error_reason(error))}")
        return index

    def number_exchange(self, exchange: Exchange) -> None:
        """Give an exchange the next number, unless it has one."""
        if not exchange.number:
            self._num_exchanges += 1
            exchange.number = self._num_exchanges

    def write_exchange(self, exchange: Exchange) -> None:
        """Write an exchange with the replies that it has so far."""
        self.number_exchange(exchange)
        try:
            self._write_exchange(exchange)
        except Exception as error:  # a full disk, or messages that hold anything
            kind, reason = one_line(exchange.kind), one_line(error_reason(error))
            self.log_loss(f"messages {exchange.number}, {kind}, are not recorded: {reason}")

    def log_loss(self, text: str) -> None:
        """Note that something is not recorded, and log it as an error."""
        self.losses.append(text)
        flower_log.error("fedsim: %s", text)

    def record_updates(self, number: int, exchange: Exchange, replies: Iterable[tuple[Message, int | None]]) -> None:
        """Record the updates in `replies` as round `number`.

        Replies that are no sequence are recorded as they come, so that memory need not hold all of
        them.

        Args:
            exchange: the messages that they answer.
            replies: see `Exchange.match_replies`.

        Raises:
            RunError: the updates cannot be written.
        """
        failures: dict[int, str] = {}
        if number in self._recorded_rounds:
            number = max(self._recorded_rounds) + 1
            flower_log.warning("fedsim: a round is trained twice; the second time is recorded as round %d", number)
        self._recorded_rounds.add(number)
        if isinstance(replies, Sequence):
            replies = sorted(replies, key=lambda pair: pair[0].metadata.src_node_id)
        answers = (
            (exchange.server_messages[index], read_reply(reply)) for reply, index in replies if index is not None
        )
        results = self._read_updates(number, exchange, answers, failures)
        updates: Iterable[Update] = (update for update in results if update is not None)
        if isinstance(replies, Sequence):
            updates = list(updates)  # a sequence is written by client, not as it came
        expected = sum(self.recorder.plan.keeps_client(message.node) for message in exchange.server_messages)
        self.recorder.write(number, updates, failures, self._common_facts(number, exchange), expected=expected)

    def _write_exchange(self, exchange: Exchange) -> None:
        number = self._round_number(exchange)
        updates = self._write_updates(number, exchange)
        for message, reply in exchange.replies:
            self._client_name(message.node, reply)

        # Write all messages where the updates do not hold everything that was sent.
        repliers = set[int]()
        for message, reply in exchange.replies:
            if not isinstance(reply, str):
                repliers.add(self._client_of_node.get(message.node, message.node))
        recorded = {update.client for update in updates}
        if repliers != recorded or exchange.is_one_way or not exchange.fits_in_updates:
            recorded_as = number if updates else 0
            messages = exchange.to_recording(exchange.number, recorded_as, self._client_of_node, recorded)
            self.recorder.note(write_messages(self.recorder.folder.parent / MESSAGES_FOLDER, messages))
        for node in sorted(exchange.repeat_repliers):
            flower_log.warning("fedsim: node %d answered more than once; its first answer is recorded", node)
        self._write_masked_sum(exchange)

    def _write_updates(self, number: int, exchange: Exchange) -> list[Update]:
        """Write the updates of an exchange, if the plan keeps them, as round `number`."""
        if not exchange.is_training or not self.recorder.plan.keeps_round(number):
            return []
        failures: dict[int, str] = {}
        answers = list(self._read_updates(number, exchange, exchange.replies, failures))
        updates = [update for update in answers if update is not None]
        members = {client for update in updates for client in update.members}  # they answered, in a sum
        silent = {self._client_of_node.get(node, node) for node in exchange.silent_nodes}
        failures |= dict.fromkeys(sorted(silent - members), "no reply")
        if updates or (failures and not answers):  # a client sent an update, or all of them failed
            if exchange.round and exchange.round != number:
                flower_log.warning(
                    "fedsim: round %d is trained once more; this time it is recorded as round %d",
                    exchange.round,
                    number,
                )
            self.recorder.write(number, updates, failures, self._common_facts(number, exchange))
            self._recorded_rounds.add(number)
        return updates

    def _write_masked_sum(self, exchange: Exchange) -> None:
        try:
            total = self._masked_sum.follow_stage(exchange, self._round_number(exchange), self._client_of_node)
        except Exception as error:  # shares are missing, or a message holds anything else
            flower_log.error("fedsim: the sum of a group is not recorded: %s", one_line(error_reason(error)))
            return
        if total is not None:
            self.recorder.write(total.round, [total], {}, total.config)
            self._recorded_rounds.add(total.round)

    def _round_number(self, exchange: Exchange) -> int:
        """Return the round that the messages name, or the next free one if it is recorded."""
        number = exchange.round
        if number and number not in self._recorded_rounds:
            return number
        return max(self._recorded_rounds, default=0) + 1

    def _read_updates(
        self,
        number: int,
        exchange: Exchange,
        replies: Iterable[tuple[ServerMessage, MessageContent | str]],
        failures: dict[int, str],
    ) -> Iterator[Update | None]:
        """Yield the update in each reply, or None; put failed clients into `failures`."""
        config = self._common_facts(number, exchange)
        for message, reply in replies:
            client = self._client_name(message.node, reply)
            if isinstance(reply, str):
                failures[client] = reply
                continue
            update = exchange.update(number, message, client, reply, config)
            if isinstance(update, str):
                failures[client] = update
                flower_log.warning("fedsim: round %d, client %d: %s; recorded as a failure", number, client, update)
                continue
            if update is not None:
                self._log_remarks(update)
            yield update

    def _log_remarks(self, update: Update) -> None:
        """Log each remark on the tensors of updates once; the recording has it with each update."""
        for remark in update.remarks:
            if remark not in self._logged_remarks:
                self._logged_remarks.add(remark)
                flower_log.warning("fedsim: round %d, client %d: %s", update.round, update.client, remark)

    def _client_name(self, node: int, reply: MessageContent | str) -> int:
        """Return the id of the client of `node` in the recording, which no other node has."""
        if isinstance(reply, str) or node in self._partitions:
            return self._client_of_node.get(node, node)
        client = client_name(reply, self._client_of_node.get(node, node))
        if self._node_of_client.setdefault(client, node) != node:
            reported, client = client, node
            while self._node_of_client.setdefault(client, node) != node:  # another node's id, too
                client = (client + _ID_STRIDE) % MAX_CLIENT_ID
            flower_log.warning(
                "fedsim: node %d calls itself client %d, as node %d does; it is called %d here",
                node,
                reported,
                self._node_of_client[reported],
                client,
            )
        self._client_of_node[node] = client
        return client

    def _common_facts(self, number: int, exchange: Exchange) -> dict[str, object]:
        """Return the facts that all clients were sent alike; log the names of others once."""
        facts, differing = exchange.facts
        if differing and differing != self._logged_differing:
            flower_log.warning(
                "fedsim: round %d: clients are not all sent the same %s; it is not recorded", number, differing
            )
            self._logged_differing = differing
        return facts


def new_run_recorder(folder: Path | str) -> Recorder:
    """Return a recorder for a new run in `folder`: in `run-1`, or the next sub-folder that is free.

    Raises:
        RunError: the folder cannot be written.
    """
    folder = Path(folder).resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_no_link(folder)
        for number in itertools.count(1 + len(list(folder.glob(RUN_FOLDER.format("*"))))):
            try:
                (run := folder / RUN_FOLDER.format(number)).mkdir()
                break
            except FileExistsError:
                continue
    except OSError as error:
        raise RunError(f"{folder}: cannot be written ({error.strerror}); choose another folder") from error
    return Recorder(run / RECORDING_FOLDER)
