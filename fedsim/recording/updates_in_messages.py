"""Recording of updates that apps send in other messages, as answers to queries, or as bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.base.errors import ConfigError, TranscriptError, TrustError, first_line
from fedsim.recording.header import EXAMPLE_COUNT_KEYS, RECORDING_FOLDER, is_number, parse_count
from fedsim.recording.messages import MESSAGES_FOLDER, RecordedExchange, RecordedMessage, read_messages
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State, Update

_SOURCE_KEY = "recorded-from"
"""Key in the config of a round's header of the messages that its updates were read from."""


def record_updates(
    run: Path, kind: str, record: str, broadcast_record: str = "", broadcast_kind: str = "", *, trust: bool
) -> None:
    """Record the answers to messages of one kind as the updates of a run that has none.

    Each set of messages that was sent at once becomes a round.

    Args:
        kind: kind of the messages, such as `query.weights`.
        record: the record that holds w_t and the answer; empty where messages have one record.
        broadcast_record: the record that holds w_t where it is another one.
        broadcast_kind: kind of the messages that hold what clients were sent where it is another one; of
            these, what each was sent last counts, and nothing before the first.
        trust: read pickles, which may hold only arrays.
    """
    exchanges, kinds, last_sent = list[RecordedExchange](), set[str](), dict[int, RecordedMessage]()
    for exchange in read_messages(run / MESSAGES_FOLDER):
        kinds.add(exchange.kind)
        if exchange.kind == broadcast_kind:
            last_sent |= {message.node: message for message in exchange.sent}
        if exchange.kind == kind:
            exchanges.append(replace(exchange, sent=list(last_sent.values())) if broadcast_kind else exchange)
    for wanted in (kind, *([broadcast_kind] if broadcast_kind else [])):
        if wanted not in kinds:
            raise TranscriptError(
                f"{run}: no message is of kind '{wanted}', but of {', '.join(sorted(kinds)) or 'none'}"
            )
    # Read all rounds before the first is written, so that an error leaves no partial recording.
    records = (broadcast_record or record, record)
    rounds = [
        list(_read_updates(number, exchange, records, trust, may_lack_broadcast=bool(broadcast_kind)))
        for number, exchange in enumerate(exchanges, 1)
    ]
    recorder = Recorder(run / RECORDING_FOLDER)
    for number, (exchange, updates) in enumerate(zip(exchanges, rounds, strict=True), 1):
        failures = {reply.client: reply.error for reply in exchange.replies if reply.error}
        source = _describe_source(kind, record, broadcast_record, broadcast_kind)
        recorder.write(number, updates, failures, {_SOURCE_KEY: source})


def check_source(
    transcript: Transcript, kind: str, record: str, broadcast_record: str = "", broadcast_kind: str = ""
) -> None:
    """Raise ConfigError unless the updates of a transcript were recorded from these messages."""
    source = transcript.header(transcript.rounds[0]).config.get(_SOURCE_KEY)
    if source != (wanted := _describe_source(kind, record, broadcast_record, broadcast_kind)):
        present = f"those of {source}" if source else "updates of its own"
        raise ConfigError(
            f"[app] messages: {transcript.folder} holds {present}, not those of {wanted}; "
            + ("remove that folder to have these read" if source else "leave the key out")
        )


def _describe_source(kind: str, record: str, broadcast_record: str, broadcast_kind: str) -> str:
    broadcast = f", w_t in '{broadcast_record}'" if broadcast_record else ""
    broadcast += f" of messages '{broadcast_kind}'" if broadcast_kind else ""
    return f"messages '{kind}', record '{record}'{broadcast}"


def _read_updates(
    number: int, exchange: RecordedExchange, records: tuple[str, str], trust: bool, *, may_lack_broadcast: bool
) -> Iterator[Update]:
    """Yield the updates of one exchange; `records` are those of w_t and of the answer."""
    _, record = records
    message_to = {message.node: message for message in exchange.sent}
    for reply in exchange.replies:
        if reply.error or not (reply.node in message_to or may_lack_broadcast):
            continue
        where = f"message {exchange.number}, client {reply.client}"
        metrics: dict[str, float] = {}
        for values in reply.metrics.values():
            metrics |= {key: float(value) for key, value in values.items() if is_number(value)}
        counts = [metrics.pop(name) for name in EXAMPLE_COUNT_KEYS if name in metrics]
        if record in reply.metrics:  # they are the answer itself
            metrics = {}
        before: State = {}
        if reply.node in message_to:
            before = _read_broadcast(message_to[reply.node], records, f"{where}: what the server sent", trust)
        yield Update(
            round=number,
            client=reply.client,
            before=before,
            payload=Payload.from_dense(_read_record(reply, record, f"{where}: its answer", trust), "weights"),
            num_examples=parse_count(next(iter(counts), 0)),
            metrics=metrics,
        )


def _read_broadcast(message: RecordedMessage, records: tuple[str, str], where: str, trust: bool) -> State:
    """Return w_t; nothing where the server sent no arrays, as in a query about data.

    Its settings may be lists of numbers. They are w_t only in the record that holds w_t.
    """
    record, answer_record = records
    values = [value for sent in (*message.config.values(), *message.arrays.values()) for value in sent.values()]
    has_arrays = any(isinstance(value, np.ndarray) for value in values)
    is_query = not message.arrays and not has_arrays
    names_settings = record == answer_record and record and record not in message.config
    if is_query and (names_settings or not any(map(_are_numbers, values))):
        return {}
    return _read_record(message, record, where, trust)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_number, value))


def _read_record(message: RecordedMessage, record: str, where: str, trust: bool) -> State:
    """Return the tensors of a record; arrays without names are called by their index."""
    records: dict[str, Mapping[str, Any]] = {**message.config, **message.arrays}
    if record not in records and record in message.metrics:  # the numbers of an answer, exactly
        numbers = {key: value for key, value in message.metrics[record].items() if is_number(value)}
        return {key: torch.tensor(float(value), dtype=torch.float64) for key, value in numbers.items()}
    if not record and len(message.arrays or message.config) == 1:
        record = next(iter(message.arrays or message.config))
    if record not in records:
        quoted = ", ".join(f"'{name}'" for name in records) or "none"
        raise TranscriptError(f"{where} has no record '{record}', but {quoted}; name one with [app] record")
    state: dict[str, Tensor] = {}
    for key, value in records[record].items():
        state |= _read_tensors(key, value, f"{where}, {record}.{key}", trust)
    if not state:
        raise TranscriptError(f"{where}, record '{record}': holds no arrays; name another one with [app] record")
    return state


def _read_tensors(key: str, value: Any, where: str, trust: bool) -> dict[str, Tensor]:
    if _are_numbers(value):
        return {key: torch.tensor(value, dtype=torch.float32)}
    if not isinstance(value, np.ndarray):
        return {}  # a number or a text beside the weights
    if value.dtype == np.uint8 and value.ndim == 1:
        return _unpack_bytes(key, value.tobytes(), where, trust)
    return {key: _to_tensor(value, where)}


def _unpack_bytes(key: str, content: bytes, where: str, trust: bool) -> dict[str, Tensor]:
    """Return the tensors in bytes; arrays without names are called by their index."""
    from fedsim.plugins.packed_arrays import read_arrays  # unpickles if trusted

    try:
        arrays = read_arrays(content, trust=trust)
    except TrustError as error:
        raise TrustError(f"{where}: {error}") from error
    except Exception as error:  # bytes of unknown origin may raise anything
        raise TranscriptError(f"{where}: these bytes hold no arrays ({first_line(error)})") from error
    if isinstance(arrays, Mapping):
        named_arrays = {str(name): array for name, array in arrays.items()}
    elif isinstance(arrays, list | tuple):
        named_arrays = {str(index): array for index, array in enumerate(arrays)}
    else:
        named_arrays = {key: arrays}
    return {name: _to_tensor(array, where) for name, array in named_arrays.items()}


def _to_tensor(value: Any, where: str) -> Tensor:
    """Return an array, or a number, as a tensor in the byte order of this machine."""
    try:
        if isinstance(value, Tensor):
            return value
        array = np.array(value, order="C")
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
    except (TypeError, ValueError, RuntimeError) as error:
        raise TranscriptError(
            f"{where}: holds something other than arrays ({first_line(error)}), a text or a table"
        ) from error
