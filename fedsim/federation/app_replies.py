"""Replies of a Flower app's clients, where a defense or a sum would misread them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.clientapp.typing import ClientAppCallable
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
