"""Check of what clients reply, before the server's strategy or the recording sees it.

A device that fails ends the run: a round without the clients on it would be another than the experiment says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from flwr.app import ArrayRecord, Error, Message, MetricRecord, RecordDict
from torch import Tensor, nn

from fedsim.base.errors import PayloadError, RunError, ends_training, first_line, one_line
from fedsim.federation.engines.arrays import LazyArray, read_state
from fedsim.federation.engines.client_state import ClientStateStore
from fedsim.federation.engines.cohort import DEVICE_FAILED
from fedsim.recording.payloads import Payload, State
from fedsim.recording.wire_format import describe_misfit
from strategies.message_content import describe_wrong_records, single_record
from strategies.secure_sum import SecureSum

_INVALID_REPLY = 2
"""Code of the error that stands for a reply which is no valid answer."""
_REMEDY = "fix the cause or free its memory, and resume the run, which keeps finished rounds"


def check_replies(
    replies: Iterable[Message],
    messages: Iterable[Message],
    model: nn.Module,
    memory: ClientStateStore,
    protocol: SecureSum | None = None,
) -> Iterator[Message]:
    """Yield `replies`, with an error reply in place of each that is no valid answer.

    A reply that the client would not have sent under `protocol` is no valid answer either. The new
    state of a client is accepted with its reply, also if it chose to send nothing; all others keep
    their old one.
    """
    message_to = {message.metadata.dst_node_id: message for message in messages}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    requests: dict[int, _Request] = {}  # by id of the content, which nearly all messages share
    for reply in replies:
        client = reply.metadata.src_node_id
        message = message_to[client]
        if id(message.content) not in requests:
            requests[id(message.content)] = _Request.read(message.content, parameters)
        fault = None if reply.has_error() else requests[id(message.content)].find_fault(reply.content)
        if fault is None and protocol is not None and not reply.has_error():
            fault = protocol.refusal_reason(reply.content, message.content)
        if fault is None and (not reply.has_error() or memory.has_pending(client)):
            memory.commit(client)
        if fault is not None:
            reply = Message(Error(code=_INVALID_REPLY, reason=one_line(fault)), reply_to=message)
        yield reply


@dataclass(frozen=True)
class _Request:
    """What one message asks for.

    Attributes:
        before: w_t.
        expected: the tensors of a decoded reply, by their names, as w_t has them.
        plain_arrays: type and shape of each array of a reply that is not encoded.
    """

    before: State
    expected: Mapping[str, Tensor]
    plain_arrays: Mapping[str, tuple[str, tuple[int, ...]]]

    @classmethod
    def read(cls, content: RecordDict, parameters: set[str]) -> _Request:
        """Read the content of a message; `parameters` are those of the model."""
        before = read_state(single_record(content, ArrayRecord))
        sends_gradient = any(record.get("sends") == "gradient" for record in content.config_records.values())
        expected: dict[str, Tensor] = {}
        for name, tensor in before.items():
            expected[f"gradient/{name}" if sends_gradient and name in parameters else name] = tensor
        plain_arrays: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, tensor in expected.items():
            plain_arrays[name] = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        return cls(before, expected, plain_arrays)

    def find_fault(self, reply: RecordDict) -> str | None:
        """Return why `reply` is no valid answer, or None."""
        if fault := describe_wrong_records(reply):
            return fault
        metrics, arrays = single_record(reply, MetricRecord), single_record(reply, ArrayRecord)
        count = metrics.get("num-examples")
        if not isinstance(count, int | float) or not 0 < count < math.inf:
            return f"it reported {count} examples, expected a number above 0"
        if self._matches_request(arrays):
            return None  # nearly always, and then no values have to be read
        if unreadable := [name for name, array in arrays.items() if not isinstance(array, LazyArray)]:
            return f"it sent '{unreadable[0]}' as {arrays[unreadable[0]].stype}, expected a NumPy array"
        try:
            decoded = Payload.from_arrays(read_state(arrays), self.before).decode(self.before)
        except PayloadError as error:
            return str(error)
        if missing := [name for name in self.expected if name not in decoded]:
            return f"it sent no '{missing[0]}', expected {len(self.expected)} tensors"
        if extra := [name for name in decoded if name not in self.expected]:
            return f"it sent '{extra[0]}', which was not asked for"
        return describe_misfit(self.expected, decoded)

    def _matches_request(self, arrays: ArrayRecord) -> bool:
        """Return whether `arrays` are those of a reply that is not encoded, by types and shapes."""
        for name, array in arrays.items():
            if not isinstance(array, LazyArray) or self.plain_arrays.get(name) != (array.dtype, array.shape):
                return False
        return len(arrays) == len(self.plain_arrays)


def check_devices(replies: Iterable[Message], number: int) -> Iterator[Message]:
    """Yield the replies of a round.

    Raises:
        RunError: the device of a client was lost, or its memory did not last.
    """
    for reply in replies:
        if reply.has_error() and (reply.error.reason or "").startswith(DEVICE_FAILED):
            raise RunError(f"round {number}, client {reply.metadata.src_node_id}: {reply.error.reason}; {_REMEDY}")
        yield reply


@contextmanager
def name_failed_device(number: int) -> Iterator[None]:
    """Raise RunError where the device of the server itself fails in a round, as in its evaluation."""
    try:
        yield
    except RuntimeError as error:
        if not ends_training(error):
            raise
        raise RunError(f"round {number}: the server's device failed ({first_line(error)}); {_REMEDY}") from error
