"""Updates that are sent otherwise than strategies do: as answers to a query, as lists of numbers, as bytes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.errors import ConfigError, TranscriptError, TrustError, first_line
from fedsim.recording.header import COUNTS, RECORDING, count_in
from fedsim.recording.messages import FOLDER, Messages, Sent, read_messages
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.wire.messages import State, Update
from fedsim.wire.payloads import Payload

_WHENCE = "recorded-from"
"""The fact in a round's header that says which messages its updates were read from."""


def record_updates(run: Path, kind: str, record: str, *, trust: bool) -> None:
    """Record the answers to messages of one kind as the updates of a run that has none, a round for each set of them.

    Args:
        run: its folder.
        kind: of the messages, such as `query.weights`.
        record: which of their records holds w_t and the answer; empty where there is one.
        trust: read pickles, of arrays alone.

    Raises:
        TranscriptError: no message is of this kind, or a record does not hold arrays.
        TrustError: it holds a pickle, and there is no trust.
    """
    found, kinds = list[Messages](), set[str]()
    for messages in read_messages(run / FOLDER):
        kinds.add(messages.kind)
        if messages.kind == kind:
            found.append(messages)
    if not found:
        raise TranscriptError(f"{run}: no message is of kind '{kind}', but of {', '.join(sorted(kinds)) or 'none'}")
    rounds = [list(_updates(number, messages, record, trust)) for number, messages in enumerate(found, 1)]
    recorder = Recorder(run / RECORDING)
    for number, (messages, updates) in enumerate(zip(found, rounds, strict=True), 1):
        failures = {said.client: said.error for said in messages.replies if said.error}
        recorder.write(number, updates, failures, {_WHENCE: _whence(kind, record)})


def check_whence(transcript: Transcript, kind: str, record: str) -> None:
    """Raise ConfigError where updates were recorded from other messages than these, or as updates."""
    was = transcript.header(transcript.rounds[0]).config.get(_WHENCE)
    if was != _whence(kind, record):
        held = f"those of {was}" if was else "updates of its own"
        raise ConfigError(
            f"[app] messages: {transcript.folder} holds {held}, not those of {_whence(kind, record)}; "
            + ("remove that folder to have these read" if was else "leave the key out")
        )


def _whence(kind: str, record: str) -> str:
    return f"messages '{kind}', record '{record}'"


def _updates(number: int, messages: Messages, record: str, trust: bool) -> Iterator[Update]:
    sent = {said.node: said for said in messages.sent}
    for said in messages.replies:
        if said.error or said.node not in sent:
            continue
        where = f"message {messages.number}, client {said.client}"
        metrics = {key: float(v) for values in said.metrics.values() for key, v in values.items() if _is_number(v)}
        counts = [metrics.pop(name) for name in COUNTS if name in metrics]
        yield Update(
            round=number,
            client=said.client,
            before=_arrays(sent[said.node], record, f"{where}: what the server sent", trust),
            payload=Payload.dense(_arrays(said, record, f"{where}: its answer", trust), "weights"),
            num_examples=count_in(next(iter(counts), 0)),
            metrics=metrics,
        )


def _is_number(value: Any) -> bool:
    whole = isinstance(value, int | float) and not isinstance(value, bool)
    return whole and (isinstance(value, float) or abs(value) < sys.float_info.max)


def _arrays(said: Sent, record: str, where: str, trust: bool) -> State:
    """The tensors of a record; of one without names they are called by their places."""
    held: dict[str, Mapping[str, Any]] = {**said.config, **said.arrays}
    if not record and len(said.arrays or said.config) == 1:
        record = next(iter(said.arrays or said.config))
    if record not in held:
        told = ", ".join(f"'{name}'" for name in held) or "none"
        raise TranscriptError(f"{where} has no record '{record}', but {told}; name one with [app] record")
    state: dict[str, Tensor] = {}
    for key, value in held[record].items():
        state |= _tensors(key, value, f"{where}, {record}.{key}", trust)
    if not state:
        raise TranscriptError(f"{where}, record '{record}': holds no arrays; name another one with [app] record")
    return state


def _tensors(key: str, value: Any, where: str, trust: bool) -> dict[str, Tensor]:
    if isinstance(value, list) and value and all(map(_is_number, value)):
        return {key: torch.tensor(value, dtype=torch.float32)}
    if not isinstance(value, np.ndarray):
        return {}  # a number or a text beside the weights
    if value.dtype == np.uint8 and value.ndim == 1:
        return _unpacked(key, value.tobytes(), where, trust)
    return {key: _tensor(value, where)}


def _unpacked(key: str, content: bytes, where: str, trust: bool) -> dict[str, Tensor]:
    """The tensors in bytes; those without names are called by their places."""
    from fedsim.plugins.packed_arrays import arrays_in  # which can unpickle, with trust

    try:
        found = arrays_in(content, trust=trust)
    except TrustError as error:
        raise TrustError(f"{where}: {error}") from error
    except Exception as error:  # a stranger's bytes
        raise TranscriptError(f"{where}: these bytes hold no arrays ({first_line(error)})") from error
    if isinstance(found, Mapping):
        named = {str(name): array for name, array in found.items()}
    elif isinstance(found, list | tuple):
        named = {str(place): array for place, array in enumerate(found)}
    else:
        named = {key: found}
    return {name: _tensor(array, where) for name, array in named.items()}


def _tensor(value: Any, where: str) -> Tensor:
    """An array in the byte order of this machine; a number is an array, too."""
    try:
        if isinstance(value, Tensor):
            return value
        array = np.array(value, order="C")
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
    except (TypeError, ValueError, RuntimeError) as error:
        raise TranscriptError(
            f"{where}: holds something beside arrays ({first_line(error)}), a text or a table"
        ) from error
