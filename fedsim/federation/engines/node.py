"""A node's side of the cohort: play the clients that a message of `CohortGrid` names.

A client that does not finish in time is interrupted, so that those after it can be asked. That is
not possible where it is stuck outside of Python, nor where a node plays clients outside of its main
thread.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType
from typing import Any, TypeVar

from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.app.metadata import Metadata
from flwr.clientapp import ClientApp

from fedsim.base.errors import describe_error, ends_training, error_reason
from fedsim.federation.engines.arrays import fill_record, make_lazy
from fedsim.federation.engines.client_state import STATE_PREFIX, add_state, read_states
from fedsim.federation.engines.cohort import DEVICE_FAILED, ORDER_RECORD, TOO_LATE, error_reply

_Result = TypeVar("_Result")
_ALARM_INTERVAL = 1.0
"""Seconds between two alarms, because an exception that is raised in a destructor is lost."""

Replies = Mapping[int, Mapping[str, Any]]
"""The records of each client's reply, by client."""


def play_cohort(
    app: ClientApp,
    message: Message,
    context: Context,
    train_group: Callable[[Message, Mapping[int, RecordDict]], Replies] | None = None,
) -> Message:
    """Let `app` answer for every logical client that a cohort message names.

    A client that raises, exits or answers with an error gets an error reply; the others are not
    affected. Only a reply changes a client's state. Once the message's time is up, no further
    client begins. While others wait, a client may use half of the time that remains, or twice the
    average time of a client so far if that is more. Then it is interrupted.

    Args:
        train_group: trains a group at once, if given. It is called with the message to the first
            client and the `Context.state` of each client of the group. Clients for which it returns
            the records of a reply are not asked one by one.
    """
    order: dict[str, Any] = dict(message.content[ORDER_RECORD])
    earlier_states = read_states(message.content)
    shared = _read_shared_records(message)
    clients, group_size = order["clients"], order["together"]
    # Time on the way counts, also that of waiting until this node is free.
    delay = max(0.0, time.time() - message.metadata.created_at)
    budget = _TimeBudget(order["seconds"] - delay)
    answers: dict[str, Any] = {}

    def play_client(client: int, state: RecordDict) -> Mapping[str, Any]:
        client_context = Context(
            run_id=context.run_id,
            node_id=client,
            node_config={"partition-id": client, "num-partitions": order["num-partitions"]},
            state=state,
            run_config=context.run_config,
        )
        client_message = _make_client_message(message, shared, client, order["message-type"])
        return _call_app(app, client_message, client_context)

    for start in range(0, len(clients), group_size):
        group = clients[start : start + group_size]
        states = {client: RecordDict(dict(earlier_states.get(client, {}))) for client in group}

        # Train the whole group at once where that is possible.
        group_replies: Replies = {}
        if train_group:
            first = _make_client_message(message, shared, group[0], order["message-type"])
            group_replies = budget.run(partial(train_group, first, states), others_wait=True) or {}
            budget.finished += len(group_replies)

        # Ask the remaining clients one by one.
        for position, client in enumerate(group, start):
            reply = group_replies.get(client)
            if reply is None:
                # Afresh, because `train_group` may have changed the state.
                states[client] = RecordDict(dict(earlier_states.get(client, {})))
                play = partial(play_client, client, states[client])
                reply = budget.run(play, others_wait=position + 1 < len(clients))
                budget.finished += reply is not None
            records = _attach_state(reply, states[client])
            answers.update({f"{client}/{name}": record for name, record in records.items()})
    return Message(fill_record(RecordDict(), answers), reply_to=message)


def _read_shared_records(message: Message) -> dict[str, Any]:
    """Return the records that each client gets; .npy files of the broadcast are parsed once for all of them."""
    shared: dict[str, Any] = {}
    for key, record in message.content.items():
        if key == ORDER_RECORD or key.startswith(STATE_PREFIX):
            continue
        shared[key] = record
        if isinstance(record, ArrayRecord):  # in this process the server may hold the record itself
            shared[key] = fill_record(ArrayRecord(), record)
            make_lazy(shared[key])
    return shared


class _TimeBudget:
    """Time for one cohort message, shared among its clients."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._spent = 0.0
        self.finished = 0

    def run(self, work: Callable[[], _Result], *, others_wait: bool) -> _Result | None:
        """Return what `work` returns, or None if there was too little time for it.

        Args:
            work: plays one client, or one group.
            others_wait: whether further clients wait for their turn.
        """
        began = time.monotonic()
        remaining = self._end - began
        average = self._spent / self.finished if self.finished else 0.0
        # Do not begin what would not finish in time, and would delay the answers of others.
        if remaining < average or remaining <= 0:
            return None
        limit = min(remaining, max(remaining / 2, 2 * average)) if others_wait else remaining
        try:
            result = _run_with_alarm(limit, work)
        except _TimeUp:
            return None
        self._spent += time.monotonic() - began
        return result


class _TimeUp(BaseException):
    """Interrupts a client that takes too long; not an Exception, which a client might catch."""


def _run_with_alarm(seconds: float, work: Callable[[], _Result]) -> _Result:
    """Call `work`, and raise _TimeUp in it at the limit, if this is the main thread."""
    if not math.isfinite(seconds) or threading.current_thread() is not threading.main_thread():
        return work()

    def raise_time_up(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise _TimeUp

    began, handler = time.monotonic(), signal.signal(signal.SIGALRM, raise_time_up)
    host_delay, host_interval = 0.0, 0.0
    try:
        try:
            host_delay, host_interval = signal.setitimer(
                signal.ITIMER_REAL, min(seconds, threading.TIMEOUT_MAX), _ALARM_INTERVAL
            )
            return work()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, handler or signal.SIG_DFL)
        if host_delay:  # the host program had set a timer: let it go on
            remaining = max(host_delay - (time.monotonic() - began), 0.001)
            signal.setitimer(signal.ITIMER_REAL, remaining, host_interval)


def _call_app(app: ClientApp, message: Message, context: Context) -> Mapping[str, Any]:
    try:
        reply = app(message, context)
        if reply.has_error():  # the client chose to end with an error, so its new state counts
            return add_state(error_reply(reply.error.reason or "no reason given"), context.state)
    except (KeyboardInterrupt, _TimeUp):
        raise
    except BaseException as error:  # also SystemExit
        return error_reply(failure_reason(error))
    return reply.content


def failure_reason(error: BaseException) -> str:
    """Return the reason of a client's failure; it begins with `DEVICE_FAILED` where its device is to blame."""
    if ends_training(error):
        return f"{DEVICE_FAILED} ({describe_error(error)})"
    return error_reason(error)


def _attach_state(reply: Mapping[str, Any] | None, state: RecordDict) -> Mapping[str, Any]:
    """Return a reply with the client's state; without one, its earlier state stays.

    A client that was interrupted, or raised an error, brings no state.
    """
    if reply is None:
        return error_reply(TOO_LATE)
    try:
        return reply if "error" in reply else add_state(reply, state)
    except ValueError as error:
        return error_reply(str(error))


def _make_client_message(physical: Message, records: Mapping[str, Any], client: int, message_type: str) -> Message:
    """Return the message to one client, as an engine would have delivered it."""
    metadata = _make_metadata(physical.metadata, client, message_type)
    return Message(content=fill_record(RecordDict(), records), metadata=metadata)  # type: ignore[call-overload, no-any-return]


def _make_metadata(physical: Metadata, client: int, message_type: str) -> Metadata:
    return Metadata(
        run_id=physical.run_id,
        message_id="",
        src_node_id=physical.src_node_id,
        dst_node_id=client,
        reply_to_message_id="",
        group_id=physical.group_id,
        created_at=physical.created_at,
        ttl=physical.ttl,
        message_type=message_type,
        src_task_id=physical.src_task_id,
        dst_task_id=physical.dst_task_id,
    )
