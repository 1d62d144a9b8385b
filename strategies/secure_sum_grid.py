"""Secure aggregation between the server of a Flower app and its clients."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence

from flwr.app import ConfigRecord, Context, Error, Message, MessageType
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Strategy

from fedsim.base.errors import ConfigError, RunError
from fedsim.federation.privacy_tables import SecureAggregationTable
from fedsim.federation.secure_aggregation import SINGLE_UPDATE_STRATEGIES
from fedsim.recording.header import is_number
from fedsim.recording.recorder import Recorder
from strategies.curious_grid import CuriousGrid
from strategies.message_content import GROUP_RECORD, MEMBERS_KEY, describe_wrong_records
from strategies.secure_sum import SecureSum, reported_examples
from strategies.wrapped_grid import WrappedGrid

log = logging.getLogger("fedsim." + __name__)
_COUNT_KEY = "num-examples"
_REFUSED = 2
"""Code of the error of a client that would not take part in a sum."""


class SecureSumGrid(WrappedGrid):
    """Grid that passes on one reply a group in the place of those of its clients, see `SecureSum`.

    The most examples that any client of a round reports stands for N_max. Other messages pass unchanged.

    Args:
        grid: the Grid to the clients.
        table: settings of secure aggregation.
        seed: of the groups and of the rounding.
        partitions: by node, the client that it plays, by which members of groups are called.
    """

    def __init__(self, grid: Grid, table: SecureAggregationTable, seed: int, partitions: Mapping[int, int]) -> None:
        super().__init__(grid)
        self._table, self._seed, self._partitions = table, seed, partitions
        self._num_rounds = 0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages that are not summed.

        Raises:
            ConfigError: they train, and nobody knows which of them one sum is of.
        """
        messages = list(messages)
        if any(_is_training(message) for message in messages):
            raise ConfigError(
                "secure_aggregation: the server of this app sends training messages and fetches the replies one by "
                "one, so it is unknown which of them are summed; it works with servers that call "
                "Grid.send_and_receive, as Flower's strategies do"
            )
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to messages that are not summed."""
        return self.grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages; return their replies, or those to training messages as sums.

        Raises:
            ConfigError: the strategy needs the updates of single clients, or the replies cannot be summed.
            RunError: there are too few clients for a group.
        """
        messages = list(messages)
        replies = list(self.grid.send_and_receive(messages, timeout=timeout))
        if not any(_is_training(message) for message in messages):
            return replies
        _check_strategy()
        _check_nodes(messages)
        self._num_rounds += 1
        answers = [reply for reply in replies if not reply.has_error()]
        for reply in answers:
            _check_summable(reply)
        largest = max((reported_examples(reply.content) for reply in answers), default=1)
        protocol = SecureSum(
            table=self._table, largest=max(1, largest), seed=self._seed, client_by_node=self._partitions
        )
        message_to = {message.metadata.dst_node_id: message for message in messages}
        accepted: list[Message] = []
        for reply in replies:
            asked = message_to[reply.metadata.src_node_id]
            reason = None if reply.has_error() else protocol.refusal_reason(reply.content, asked.content)
            accepted.append(reply if reason is None else Message(Error(code=_REFUSED, reason=reason), reply_to=asked))
        sums = list(protocol.sum_groups(accepted, messages, self._num_rounds))
        return [self._name_members(reply) for reply in sums]

    def _name_members(self, reply: Message) -> Message:
        """Return a sum whose members are called as clients are in the recording."""
        if not reply.has_error():
            nodes = reply.content.config_records[GROUP_RECORD][MEMBERS_KEY]
            assert isinstance(nodes, list)
            members = sorted(self._partitions.get(int(node), int(node)) for node in nodes)
            reply.content[GROUP_RECORD] = ConfigRecord({MEMBERS_KEY: members})
        return reply


def _is_training(message: Message) -> bool:
    return message.metadata.message_type.split(".")[0] == MessageType.TRAIN


def _check_nodes(messages: Sequence[Message]) -> None:
    """Raise ConfigError where a client is sent several messages at once, or messages differ in kind."""
    nodes = {message.metadata.dst_node_id for message in messages}
    if len(nodes) < len(messages) or not all(map(_is_training, messages)):
        raise ConfigError(
            "secure_aggregation: the server of this app sends a client several messages at once, of which one sum "
            "cannot be; leave [secure_aggregation] out"
        )


def _check_summable(reply: Message) -> None:
    """Raise ConfigError where a reply has other records than those that are summed."""
    content = reply.content
    reason = describe_wrong_records(content)
    if reason is None and (set(content.array_records) != {"arrays"} or set(content.metric_records) != {"metrics"}):
        reason = "it calls its records otherwise than 'arrays' and 'metrics', as Flower's strategies do"
    if reason is None:
        (metrics,) = content.metric_records.values()
        if not is_number(metrics.get(_COUNT_KEY)) or reported_examples(content) < 1:
            reason = f"it reports no '{_COUNT_KEY}', by which clients are weighted"
    if reason is not None:
        raise ConfigError(
            f"secure_aggregation: the reply of node {reply.metadata.src_node_id} cannot be summed: {reason}; leave "
            "[secure_aggregation] out, or fix the app"
        )


def _check_strategy() -> None:
    """Raise ConfigError where the strategy that sends needs the updates of single clients."""
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Strategy):
            name = type(caller).__name__
            if name in SINGLE_UPDATE_STRATEGIES:
                raise ConfigError(
                    f"secure_aggregation: the strategy of this app, {name}, {SINGLE_UPDATE_STRATEGIES[name]}, and the "
                    "server would see sums over groups alone; leave [secure_aggregation] out"
                )
        frame = frame.f_back  # type: ignore[assignment]


def run_recorded(
    server_app: ServerApp,
    grid: Grid,
    context: Context,
    recorder: Recorder,
    *,
    partitions: Mapping[int, int],
    sums: SecureAggregationTable | None,
    seed: int,
) -> None:
    """Run a ServerApp over `grid`, and record what its server sees.

    Args:
        partitions: by node, the client that it plays, by which clients are called in the recording.
        sums: settings of secure aggregation; None where the server sees single updates.
        seed: of groups and rounding.

    Raises:
        RunError: something could not be recorded.
    """
    clients = grid if sums is None else SecureSumGrid(grid, sums, seed, partitions)
    with CuriousGrid(clients, recorder, decodes=True, partitions=partitions) as recording_grid:
        server_app(recording_grid, context)
    if losses := recording_grid.losses:
        raise RunError(
            f"not all that the app sent is recorded, of which the log has {len(losses)} errors; the first: {losses[0]}"
        )
