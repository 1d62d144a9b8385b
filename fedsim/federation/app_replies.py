"""Replies of a Flower app's clients: those that a defense or a sum would misread, and the order of all."""

from __future__ import annotations

import concurrent.futures
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from flwr.server import server as legacy_server
from numpy.typing import NDArray

from fedsim.base.errors import RunError


def packed_values(content: RecordDict) -> Iterator[str]:
    """Yield the names of what may hold tensors outside of the records of arrays."""
    for records in (content.metric_records, content.config_records):
        for record, values in records.items():
            yield from (f"'{record}.{key}'" for key, value in values.items() if isinstance(value, list | bytes))


def refuse_deltas(call: ClientAppCallable) -> ClientAppCallable:
    """Let a client fail that seems to send w_T - w_t, of which a defense or a sum would subtract w_t once more."""

    def call_and_check(message: Message, context: Context) -> Message:
        reply = call(message, context)
        if reply.has_error() or message.metadata.message_type.split(".")[0] != MessageType.TRAIN:
            return reply
        sent, answered = (_float_arrays(content) for content in (message.content, reply.content))
        if not answered or sent.keys() != answered.keys():
            return reply
        broadcast, replied = _norm(sent.values()), _norm(answered.values())
        moved = _norm(answered[name] - sent[name] for name in sent if answered[name].shape == sent[name].shape)
        if broadcast > 0 and moved > 0.8 * broadcast and replied < 0.5 * broadcast:
            raise RunError(
                f"the arrays of a client have norm {replied:.3g}, those that it was sent {broadcast:.3g}, and "
                f"their difference {moved:.3g}; they look like w_T - w_t or a gradient, and defenses and sums read "
                "them as w_T; leave [[defense]] and [secure_aggregation] out"
            )
        return reply

    return call_and_check


def _float_arrays(content: RecordDict) -> dict[str, NDArray[Any]]:
    """Return the real numbers in the records of arrays of a message, by the name of each array."""
    arrays = {name: array.numpy() for record in content.array_records.values() for name, array in record.items()}
    return {name: array for name, array in arrays.items() if array.dtype.kind == "f"}


def _norm(arrays: Iterable[NDArray[Any]]) -> float:
    return math.sqrt(sum(float(np.square(array.astype(np.float64)).sum()) for array in arrays))


class _NumberedFuture(concurrent.futures.Future[Any]):
    """Future that knows which one it is, and is done at once."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class _OrderedExecutor:
    """Takes the place of a pool of threads: it does what is submitted at once, and in that order."""

    def __init__(self, max_workers: int | None = None) -> None:
        del max_workers
        self._num_submitted = 0

    def __enter__(self) -> _OrderedExecutor:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def submit(self, function: Callable[..., Any], *arguments: Any, **settings: Any) -> _NumberedFuture:
        """Call the function; the future has its result."""
        future, self._num_submitted = _NumberedFuture(self._num_submitted), self._num_submitted + 1
        try:
            future.set_result(function(*arguments, **settings))
        except Exception as error:
            future.set_exception(error)
        return future


def _wait_in_order(
    fs: Iterable[_NumberedFuture], timeout: float | None = None
) -> tuple[list[_NumberedFuture], set[Any]]:
    """Return these futures, all of which are done, in their order."""
    del timeout
    return sorted(fs, key=lambda future: future.number), set()


@contextmanager
def order_legacy_clients() -> Iterator[None]:
    """Let the server of Flower's legacy API ask one client after the other, and aggregate in that order.

    It asks in threads, and keeps what they answer in a set, so that sums would be rounded otherwise in each run.
    """
    ordered = SimpleNamespace(
        ThreadPoolExecutor=_OrderedExecutor, wait=_wait_in_order, Future=concurrent.futures.Future
    )
    with patch.object(legacy_server, "concurrent", SimpleNamespace(futures=ordered)):
        yield
