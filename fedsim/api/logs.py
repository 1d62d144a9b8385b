"""Write log lines to `log.txt` during work on a run; afterwards logging is restored."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedsim.base.files import append_text

_LOCK = threading.RLock()
_LISTENED: dict[str, tuple[tuple[int, bool], list[int]]] = {}
"""By name of a logger, its level and propagation before anybody listened, and the levels of those who do."""


@contextmanager
def log_to_file(path: Path) -> Iterator[None]:
    """Append what fedsim logs to the file `path`, as soon as its folder exists.

    The handlers of the host program get the same lines as before.
    """
    logger = logging.getLogger("fedsim")
    file = _LogFile(path)
    file.addFilter(OnceFilter())
    handlers: list[logging.Handler] = [file]
    if logger.propagate:  # with their level, so that no line reaches the host program that did not before
        handlers.append(_RootHandler(logger.getEffectiveLevel()))
    with listen(logger, handlers, min(logger.getEffectiveLevel(), logging.INFO)):
        yield


@contextmanager
def listen(logger: logging.Logger, handlers: Sequence[logging.Handler], level: int) -> Iterator[None]:
    """Add `handlers` to `logger` and pass records from `level` on to its handlers alone; then undo this.

    Of several threads of one program that listen, each gets the records of all; the last to end restores `logger`.
    """
    with _LOCK:
        old_settings, levels = _LISTENED.setdefault(logger.name, ((logger.level, logger.propagate), []))
        for handler in handlers:
            logger.addHandler(handler)
        levels.append(level)
        logger.setLevel(min(levels))
        logger.propagate = False
    try:
        yield
    finally:
        with _LOCK:
            for handler in handlers:
                logger.removeHandler(handler)
            levels.remove(level)
            logger.setLevel(min(levels, default=old_settings[0]))
            if not levels:
                logger.propagate = old_settings[1]
                del _LISTENED[logger.name]


class OnceFilter(logging.Filter):
    """Filter that drops repeated lines which a run logs in several places: on data, partition and refused attacks."""

    def __init__(self) -> None:
        super().__init__()
        self._shown_messages: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to show `record`."""
        if not record.name.startswith(("fedsim.data", "fedsim.audit.refused")):
            return True
        message = record.getMessage()
        is_new = message not in self._shown_messages
        self._shown_messages.add(message)
        return is_new


class _LogFile(logging.Handler):
    """Appends to a file, as soon as its folder exists."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Append one line, and the traceback where there is one."""
        if self._path.parent.is_dir():
            try:
                append_text(self._path, self.format(record) + "\n")
            except OSError:
                self.handleError(record)


class _RootHandler(logging.Handler):
    """Passes records of at least its level on to the root logger."""

    def emit(self, record: logging.LogRecord) -> None:
        """Pass one record on."""
        logging.getLogger().handle(record)
