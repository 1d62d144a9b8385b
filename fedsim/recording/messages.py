"""Recorded messages that are no updates, or hold more than an update, such as texts.

There is one file for each set of messages that was sent at once, with its replies: queries,
evaluations, stages of secure aggregation. Plain values are in a JSON header, bytes and arrays
beside it as tensors; nothing needs pickle.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from fedsim.base.errors import RunError, TranscriptError
from fedsim.recording.sealed_files import read_sealed_file, write_sealed_file

MESSAGES_FOLDER = "messages"
"""Folder of these files in a run folder, beside the recording of updates."""
_FILE = "exchange-{:06d}.safetensors"
_NAME = re.compile(r"exchange-(\d{6,})\.safetensors")
_FORMAT = 1

Records = Mapping[str, Mapping[str, Any]]
"""Record to its values by key. Bytes are uint8 arrays."""


@dataclass(frozen=True, kw_only=True)
class RecordedMessage:
    """Message of the server or of a client, as it is recorded.

    Attributes:
        node: Flower's id of the client's node.
        client: the client's id in the recording; the id of its node, if it reported no partition
            id.
        config: its ConfigRecords.
        metrics: its MetricRecords.
        arrays: its ArrayRecords; each tensor as an array, or as a text with its type and shape.
        error: the reason, where a reply is an error or cannot be read.
    """

    node: int
    client: int
    config: Records = field(default_factory=dict)
    metrics: Records = field(default_factory=dict)
    arrays: Records = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class RecordedExchange:
    """Messages that a server sent at once, and their replies.

    Attributes:
        number: counted from 1 in the order in which they were sent.
        kind: type of the messages, such as `train`, `evaluate` or `query.stage`.
        round: the round that the messages name; 0 where they name none.
        recorded_as: the round in which the updates among the replies are recorded; 0 for none.
        sent: messages of the server.
        replies: messages of the clients, in ascending order of clients.
    """

    number: int
    kind: str
    round: int
    recorded_as: int
    sent: Sequence[RecordedMessage]
    replies: Sequence[RecordedMessage]


_MESSAGES = TypeAdapter(RecordedExchange)


def write_messages(folder: Path, messages: RecordedExchange) -> Path:
    """Write one file into `folder`, which is made where it is missing, and return its path.

    Raises:
        RunError: the folder cannot be written.
    """
    arrays: dict[str, NDArray[Any]] = {}
    fields = vars(messages) | {
        "sent": [vars(message) for message in messages.sent],
        "replies": [vars(reply) for reply in messages.replies],
    }
    header = {"format": _FORMAT, **_extract_arrays(fields, arrays)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{folder}: cannot be made ({error.strerror}); choose another folder") from error
    path = folder / _FILE.format(messages.number)
    write_sealed_file(path, header, arrays)
    return path


def read_messages(folder: Path) -> Iterator[RecordedExchange]:
    """Yield the messages in `folder`, in the order in which the server sent them.

    A folder that does not exist has none.

    Raises:
        TranscriptError: a file is damaged.
    """
    numbered_paths: list[tuple[int, Path]] = []
    for path in folder.glob("*"):
        if name := _NAME.fullmatch(path.name):
            numbered_paths.append((int(name[1]), path))
    for _, path in sorted(numbered_paths):
        try:
            header, arrays = read_sealed_file(path)
            if header.pop("format") != _FORMAT:
                raise ValueError("it has another format")
            yield _MESSAGES.validate_python(_insert_arrays(header, arrays))
        except ValidationError as error:
            first_error = error.errors()[0]
            where = ".".join(map(str, first_error["loc"]))
            raise TranscriptError(f"{path}: is damaged ({where}: {first_error['msg']}); leave it out") from error
        except (RunError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise TranscriptError(f"{path}: is damaged ({error}); leave it out") from error


_REFERENCE_KEY = "\0beside"
"""Key of a table that stands for an array; no app has such a key."""


def _extract_arrays(value: Any, arrays: dict[str, NDArray[Any]]) -> Any:
    """Return `value` for JSON: bytes and arrays move to `arrays`, and references replace them."""
    if isinstance(value, Mapping):
        return {str(key): _extract_arrays(item, arrays) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_extract_arrays(item, arrays) for item in value]
    if isinstance(value, bytes):
        value = np.frombuffer(value, np.uint8)
    if isinstance(value, np.ndarray):
        name = f"{len(arrays)}"
        arrays[name] = value
        return {_REFERENCE_KEY: name}
    return value


def _insert_arrays(value: Any, arrays: Mapping[str, NDArray[Any]]) -> Any:
    """Return `value` with the arrays in place of the references to them."""
    if isinstance(value, dict):
        if set(value) == {_REFERENCE_KEY}:
            return arrays[value[_REFERENCE_KEY]]
        return {key: _insert_arrays(item, arrays) for key, item in value.items()}
    if isinstance(value, list):
        return [_insert_arrays(item, arrays) for item in value]
    return value
