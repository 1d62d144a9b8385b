"""A device that fails ends the run: a round without the clients on it would be another than the experiment says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from flwr.app import Message

from fedsim.base.errors import RunError, ends_training, first_line
from fedsim.federation.engines.cohort import DEVICE_FAILED

_REMEDY = "fix the cause or free its memory, and resume the run, which keeps finished rounds"


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
