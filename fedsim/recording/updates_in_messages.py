"""Recording of updates that apps send in other messages, as answers to queries, or as bytes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.base.errors import ConfigError, TranscriptError, TrustError, first_line
from fedsim.recording.header import EXAMPLE_COUNT_KEYS, RECORDING_FOLDER, parse_count
from fedsim.recording.messages import MESSAGES_FOLDER, RecordedExchange, RecordedMessage, read_messages
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State, Update

_SOURCE_KEY = "recorded-from"
"""Key in the config of a round's header of the messages that its updates were read from."""


def record_updates(run: Path, kind: str, record: str, *, trust: bool) -> None:
    """Record the answers to messages of one kind as the updates of a run that has none.

    Each set of messages that was sent at once becomes a round.

    Args:
        run: its folder.
        kind: kind of the messages, such as `query.weights`.
        record: the record that holds w_t and the answer; empty where messages have one record.
        trust: read pickles, which may hold only arrays.

    Raises:
        TranscriptError: no message is of this kind, or a record does not hold arrays.
        TrustError: a record holds a pickle, and `trust` is not set.
    """
    exchanges, kinds = list[RecordedExchange](), set[str]()
    for exchange in read_messages(run / MESSAGES_FOLDER):
        kinds.add(exchange.kind)
        if exchange.kind == kind:
            exchanges.append(exchange)
    if not exchanges:
        raise TranscriptError(f"{run}: no message is of kind '{kind}', but of {', '.join(sorted(kinds)) or 'none'}")
    # Read all rounds before the first is written, so that an error leaves no partial recording.
    rounds = [list(_read_updates(number, exchange, record, trust)) for number, exchange in enumerate(exchanges, 1)]
    recorder = Recorder(run / RECORDING_FOLDER)
    for number, (exchange, updates) in enumerate(zip(exchanges, rounds, strict=True), 1):
        failures = {reply.client: reply.error for reply in exchange.replies if reply.error}
        recorder.write(number, updates, failures, {_SOURCE_KEY: _describe_source(kind, record)})


def check_source(transcript: Transcript, kind: str, record: str) -> None:
    """Raise ConfigError unless the updates of a transcript were recorded from these messages."""
    source = transcript.header(transcript.rounds[0]).config.get(_SOURCE_KEY)
    if source != _describe_source(kind, record):
        present = f"those of {source}" if source else "updates of its own"
        raise ConfigError(
            f"[app] messages: {transcript.folder} holds {present}, not those of {_describe_source(kind, record)}; "
            + ("remove that folder to have these read" if source else "leave the key out")
        )


def _describe_source(kind: str, record: str) -> str:
    return f"messages '{kind}', record '{record}'"


def _read_updates(number: int, exchange: RecordedExchange, record: str, trust: bool) -> Iterator[Update]:
    message_to = {message.node: message for message in exchange.sent}
    for reply in exchange.replies:
        if reply.error or reply.node not in message_to:
            continue
        where = f"message {exchange.number}, client {reply.client}"
        metrics: dict[str, float] = {}
        for values in reply.metrics.values():
            metrics |= {key: float(value) for key, value in values.items() if _is_number(value)}
        counts = [metrics.pop(name) for name in EXAMPLE_COUNT_KEYS if name in metrics]
        yield Update(
            round=number,
            client=reply.client,
            before=_read_record(message_to[reply.node], record, f"{where}: what the server sent", trust),
            payload=Payload.from_dense(_read_record(reply, record, f"{where}: its answer", trust), "weights"),
            num_examples=parse_count(next(iter(counts), 0)),
            metrics=metrics,
        )


def _is_number(value: Any) -> bool:
    """Return whether it is a number, and no bool, that a float can hold."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return isinstance(value, float) or abs(value) < sys.float_info.max


def _read_record(message: RecordedMessage, record: str, where: str, trust: bool) -> State:
    """Return the tensors of a record; arrays without names are called by their index."""
    records: dict[str, Mapping[str, Any]] = {**message.config, **message.arrays}
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
    if isinstance(value, list) and value and all(map(_is_number, value)):
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
            f"{where}: holds something beside arrays ({first_line(error)}), a text or a table"
        ) from error
