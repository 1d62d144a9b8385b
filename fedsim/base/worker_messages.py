"""Messages that a worker process sends: progress, log lines, and how each request ended.

They travel as JSON, so that reading what foreign code has sent runs none of it.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from fedsim.base import errors
from fedsim.base.errors import AttackCrash, FedsimError, describe_error


@dataclass(frozen=True)
class ProgressMessage:
    """Progress of the request that the worker works on."""

    iteration: int
    iterations: int
    values: Mapping[str, float]


@dataclass(frozen=True)
class LogMessage:
    """Line that code of the worker logged.

    The traceback stays separate from the sentence, because a screen leaves it out.
    """

    logger: str
    level: int
    time: float
    text: str
    traceback: str

    @classmethod
    def from_record(cls, record: logging.LogRecord) -> Self:
        """Make a message of a log record."""
        trace = record.exc_text or ""
        if record.exc_info:
            trace = logging.Formatter().formatException(record.exc_info)
        return cls(record.name, record.levelno, record.created, record.getMessage(), trace)

    def log_again(self) -> None:
        """Log the line in this process, whose handlers show and keep it."""
        fields = {
            "name": self.logger,
            "levelno": self.level,
            "levelname": logging.getLevelName(self.level),
            "created": self.time,
            "msecs": int(self.time % 1 * 1000),
            "msg": self.text,
            "exc_text": self.traceback or None,
        }
        logging.getLogger(self.logger).handle(logging.makeLogRecord(fields))


@dataclass(frozen=True)
class ResultMessage:
    """End of a request that was done; `result` is anything that JSON can hold."""

    result: Any


@dataclass(frozen=True)
class ErrorMessage:
    """End of a request that raised an error.

    The worker's process may know error classes that the reader cannot import.

    Attributes:
        kind: name of the error's nearest base class among ours.
        sentence: what it says.
        traceback: as text; empty where there is none.
    """

    kind: str
    sentence: str
    traceback: str = ""

    @classmethod
    def from_error(cls, error: BaseException) -> Self:
        """Describe an error."""
        our_classes = [base.__name__ for base in type(error).__mro__ if base.__module__ == errors.__name__]
        sentence = describe_error(error)
        if isinstance(error, FedsimError):
            sentence = str(error)
        kind = our_classes[0] if our_classes else AttackCrash.__name__
        return cls(kind, sentence, "".join(traceback.format_exception(error)))

    def to_error(self) -> FedsimError:
        """Make an error from the description."""
        error_class = getattr(errors, self.kind, None)
        error: FedsimError = AttackCrash(self.sentence)
        if isinstance(error_class, type) and issubclass(error_class, FedsimError):
            error = error_class(self.sentence)
        if self.traceback:
            error.__cause__ = _RemoteTraceback(f"\n{self.traceback}")
        return error


class _RemoteTraceback(Exception):
    """Traceback of another process, as text for the log."""


Message = ProgressMessage | LogMessage | ResultMessage | ErrorMessage
_CLASSES: Mapping[str, type[Message]] = {
    "progress": ProgressMessage,
    "log": LogMessage,
    "result": ResultMessage,
    "error": ErrorMessage,
}
_NAMES = {message_class: name for name, message_class in _CLASSES.items()}


def encode_message(message: Message) -> bytes:
    """Encode a message for `decode_message`.

    >>> encode_message(ProgressMessage(1, 2, {"objective": 0.5}))
    b'["progress", 1, 2, {"objective": 0.5}]'
    """
    return json.dumps([_NAMES[type(message)], *vars(message).values()]).encode()


def decode_message(content: bytes) -> Message:
    """Decode what `encode_message` has encoded."""
    name, *fields = json.loads(content)
    return _CLASSES[name](*fields)
