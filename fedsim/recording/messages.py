"""What else a server saw: the messages that are no updates, and what came with updates beside arrays and numbers.

One file for each set of messages that was sent and its replies: queries, evaluations, the stages of secure aggregation.
Plain values stand in a JSON header, bytes and arrays of clients beside it as tensors; nothing needs pickle.
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

from fedsim.errors import RunError, TranscriptError
from fedsim.recording.sealed import read_sealed, write_sealed

FOLDER = "messages"
"""What the folder of these files is called, beside that of the updates."""
_FILE = "exchange-{:06d}.safetensors"
_NAME = re.compile(r"exchange-(\d{6,})\.safetensors")
_FORMAT = 1

Records = Mapping[str, Mapping[str, Any]]
"""By record: its values by their keys. Bytes are uint8 arrays."""


@dataclass(frozen=True, kw_only=True)
class Sent:
    """One message, of the server or of a client.

    Attributes:
        node: Flower's id of the client's node.
        client: what the client is called in the recording; the node, if it reported no partition id.
        config: its ConfigRecords.
        metrics: its MetricRecords.
        arrays: its ArrayRecords; of each tensor what is kept of it: the array, or a text with its type and shape.
        error: the reason, where a reply is an error or cannot be read.
    """

    node: int
    client: int
    config: Records = field(default_factory=dict)
    metrics: Records = field(default_factory=dict)
    arrays: Records = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Messages:
    """A set of messages that a server sent at once, and what came back.

    Attributes:
        number: counted from 1 in the order in which they were sent.
        kind: type of the messages, such as `train`, `evaluate` or `query.stage`.
        round: in which round, as the messages say; 0 where they do not.
        recorded_as: the round in which the updates among the replies are recorded; 0 where there are none.
        sent: what the server sent.
        replies: what came back, in ascending order of clients.
    """

    number: int
    kind: str
    round: int
    recorded_as: int
    sent: Sequence[Sent]
    replies: Sequence[Sent]


_MESSAGES = TypeAdapter(Messages)


def write_messages(folder: Path, messages: Messages) -> Path:
    """Write one file into `folder`, which is made where it is missing; its path.

    Raises:
        RunError: the folder cannot be written.
    """
    beside: dict[str, NDArray[Any]] = {}
    fields = vars(messages) | {key: list(map(vars, getattr(messages, key))) for key in ("sent", "replies")}
    header = {"format": _FORMAT, **_plain(fields, beside)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{folder}: cannot be made ({error.strerror}); choose another folder") from error
    path = folder / _FILE.format(messages.number)
    write_sealed(path, header, beside)
    return path


def read_messages(folder: Path) -> Iterator[Messages]:
    """What `write_messages` wrote into `folder`, in the order in which the server sent it; nothing if it is not there.

    Raises:
        TranscriptError: a file is damaged.
    """
    found = sorted((int(name[1]), path) for path in folder.glob("*") if (name := _NAME.fullmatch(path.name)))
    for _, path in found:
        try:
            header, beside = read_sealed(path)
            if header.pop("format") != _FORMAT:
                raise ValueError("it has another format")
            yield _MESSAGES.validate_python(_whole(header, beside))
        except ValidationError as error:
            where, why = ".".join(map(str, error.errors()[0]["loc"])), error.errors()[0]["msg"]
            raise TranscriptError(f"{path}: is damaged ({where}: {why}); leave it out") from error
        except (RunError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise TranscriptError(f"{path}: is damaged ({error}); leave it out") from error


def _plain(value: Any, beside: dict[str, NDArray[Any]]) -> Any:
    """`value` for JSON; bytes and arrays go `beside`, each once, and a reference stays."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item, beside) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, beside) for item in value]
    if isinstance(value, bytes):
        value = np.frombuffer(value, np.uint8)
    if isinstance(value, np.ndarray):
        beside[name := f"{len(beside)}"] = value
        return {_BESIDE: name}
    return value


_BESIDE = "\0beside"
"""Key of a reference; no app has such a name."""


def _whole(value: Any, beside: Mapping[str, NDArray[Any]]) -> Any:
    if isinstance(value, dict):
        return beside[value[_BESIDE]] if set(value) == {_BESIDE} else {k: _whole(v, beside) for k, v in value.items()}
    return [_whole(item, beside) for item in value] if isinstance(value, list) else value
