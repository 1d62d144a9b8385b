"""The side of a node: it plays the clients that a message of `CohortGrid` names, one after the other or together.

A client that does not finish in time is interrupted, so that those after it can be asked. That is not possible where
it is stuck outside of Python, nor where a node plays clients outside of its main thread.
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

from flwr.app import Context, Message, RecordDict
from flwr.app.metadata import Metadata
from flwr.clientapp import ClientApp

from fedsim.engines.cohort import ORDER, TOO_LATE, error_reply
from fedsim.engines.memory import MEMORY, states_in, with_state
from fedsim.errors import what_it_said

_Result = TypeVar("_Result")
_RING_AGAIN = 1.0

Replies = Mapping[int, Mapping[str, Any]]
"""The records of each client's reply, by client."""


def play_cohort(
    app: ClientApp,
    message: Message,
    context: Context,
    ahead: Callable[[Message, Mapping[int, RecordDict]], Replies] | None = None,
) -> Message:
    """Let `app` answer for every logical client that a cohort message names.

    A client that raises, exits or answers with an error gets an error reply; the others are not affected. What it keeps
    is changed by what it answers alone. Once the
    message's time is up, no further client begins. While others wait, a client may use half of the time that is left,
    or twice the average time of a client so far if that is more. Then it is interrupted.

    Args:
        ahead: called with the message to one client and the `Context.state` of each client that can train together
            with it. Clients for which it returns the records of a reply are not asked one by one.
    """
    order: dict[str, Any] = dict(message.content[ORDER])
    kept = states_in(message.content)
    shared = {key: r for key, r in message.content.items() if key != ORDER and not key.startswith(MEMORY)}
    clients, together = order["clients"], order["together"]
    on_its_way = max(0.0, time.time() - message.metadata.created_at)  # or waiting for this node to be free
    clock = _Clock(order["seconds"] - on_its_way)
    answers = RecordDict()

    def alone(client: int, state: RecordDict) -> Mapping[str, Any]:
        own = Context(
            run_id=context.run_id,
            node_id=client,
            node_config={"partition-id": client, "num-partitions": order["num-partitions"]},
            state=state,
            run_config=context.run_config,
        )
        return _answer(app, _logical(message, shared, client, order["message-type"]), own)

    for start in range(0, len(clients), together):
        group = clients[start : start + together]
        states = {client: RecordDict(dict(kept.get(client, {}))) for client in group}
        done: Replies = {}
        if ahead:
            first = _logical(message, shared, group[0], order["message-type"])
            done = clock.run(partial(ahead, first, states), waiting=True) or {}
            clock.answered += len(done)
        for place, client in enumerate(group, start):
            reply = done.get(client)
            if reply is None:
                states[client] = RecordDict(dict(kept.get(client, {})))  # `ahead` may have changed the other one
                reply = clock.run(partial(alone, client, states[client]), waiting=place + 1 < len(clients))
                clock.answered += reply is not None
            answers.update({f"{client}/{name}": r for name, r in _remembering(reply, states[client]).items()})
    return Message(answers, reply_to=message)


class _Clock:
    """Shares out the time that there is for a message.

    Args:
        seconds: the time.

    Attributes:
        answered: how many clients came to an end.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._spent = 0.0
        self.answered = 0

    def run(self, work: Callable[[], _Result], *, waiting: bool) -> _Result | None:
        """What `work` returns; None if there was too little time for it.

        Args:
            waiting: whether others have to wait for it.
        """
        began = time.monotonic()
        left = self._end - began
        usual = self._spent / self.answered if self.answered else 0.0
        if left < usual or left <= 0:  # it would not finish in time, and would delay the answers of the others
            return None
        try:
            result = _interrupted_after(min(left, max(left / 2, 2 * usual)) if waiting else left, work)
        except _TimeUp:
            return None
        self._spent += time.monotonic() - began
        return result


class _TimeUp(BaseException):
    """Ends what takes too long; not an Exception, which a client might catch."""


def _interrupted_after(seconds: float, work: Callable[[], _Result]) -> _Result:
    """What `work` returns, or a _TimeUp; Python can be interrupted in its main thread only."""
    if not math.isfinite(seconds) or threading.current_thread() is not threading.main_thread():
        return work()

    def ring(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise _TimeUp

    began, handler = time.monotonic(), signal.signal(signal.SIGALRM, ring)
    others, interval = 0.0, 0.0
    try:
        try:
            # It rings again and again, because an exception that is raised in a destructor is lost.
            others, interval = signal.setitimer(signal.ITIMER_REAL, min(seconds, threading.TIMEOUT_MAX), _RING_AGAIN)
            return work()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, handler or signal.SIG_DFL)
        if others:  # somebody else had set it
            signal.setitimer(signal.ITIMER_REAL, max(others - (time.monotonic() - began), 0.001), interval)


def _answer(app: ClientApp, message: Message, context: Context) -> Mapping[str, Any]:
    try:
        reply = app(message, context)
        if reply.has_error():  # it came to an end of its own accord, and keeps what it has by now
            return with_state(error_reply(reply.error.reason or "no reason given"), context.state)
    except (KeyboardInterrupt, _TimeUp):
        raise
    except BaseException as error:  # one that exits as well
        return error_reply(what_it_said(error))
    return reply.content


def _remembering(reply: Mapping[str, Any] | None, state: RecordDict) -> Mapping[str, Any]:
    """What a client answers, with what it keeps; one that was interrupted or raised an error keeps what it had."""
    if reply is None:
        return error_reply(TOO_LATE)
    try:
        return reply if "error" in reply else with_state(reply, state)
    except ValueError as error:
        return error_reply(str(error))


def _logical(physical: Message, records: Mapping[str, Any], client: int, message_type: str) -> Message:
    """The message to one client, as an engine would have delivered it."""
    address = _addressed(physical.metadata, client, message_type)
    return Message(content=RecordDict(dict(records)), metadata=address)  # type: ignore[call-overload, no-any-return]


def _addressed(physical: Metadata, client: int, message_type: str) -> Metadata:
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
