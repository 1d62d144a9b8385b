"""Log lines for `log.txt` and progress for a callback during work on a run; afterwards logging is as it was before."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedsim.files import append_text
from fedsim.progress import LOGGER, heard

Progress = Callable[[str, int, int], None]
"""Called as `progress(what, done, total)`."""
_lock = threading.RLock()
_listened: dict[str, tuple[tuple[int, bool], list[int]]] = {}
"""Name of a logger to its level and propagation before anybody listened, and the levels of those who do."""


@contextmanager
def kept(path: Path) -> Iterator[None]:
    """Append what fedsim logs to the file `path`, as soon as its folder exists.

    The handlers of the host program get the same lines as before.
    """
    logger = logging.getLogger("fedsim")
    file = _LogFile(path)
    file.addFilter(Once())
    handlers: list[logging.Handler] = [file]
    if logger.propagate:  # with their level, so that no line reaches the host program that did not before
        handlers.append(_Upwards(logger.getEffectiveLevel()))
    with listening(logger, handlers, min(logger.getEffectiveLevel(), logging.INFO)):
        yield


@contextmanager
def told(progress: Progress | None) -> Iterator[None]:
    """Call `progress` with each step that is reported to `fedsim.progress`."""
    if progress is None:
        yield
        return
    with listening(logging.getLogger(LOGGER), [_Listener(progress)], logging.DEBUG):
        yield


@contextmanager
def listening(logger: logging.Logger, handlers: Sequence[logging.Handler], level: int) -> Iterator[None]:
    """Add `handlers` to `logger` and let records from `level` on through, to its handlers alone; then undo all this.

    Of several at once, in threads of one program, each hears the records of all; the last one to end restores `logger`.
    """
    with _lock:
        before, levels = _listened.setdefault(logger.name, ((logger.level, logger.propagate), []))
        for handler in handlers:
            logger.addHandler(handler)
        levels.append(level)
        logger.setLevel(min(levels))
        logger.propagate = False
    try:
        yield
    finally:
        with _lock:
            for handler in handlers:
                logger.removeHandler(handler)
            levels.remove(level)
            logger.setLevel(min(levels, default=before[0]))
            if not levels:
                logger.propagate = before[1]
                del _listened[logger.name]


class Once(logging.Filter):
    """Lets lines through once that a run logs in several places: about data, their partition and refused attacks."""

    def __init__(self) -> None:
        super().__init__()
        self._told: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to show `record`."""
        if not record.name.startswith(("fedsim.datasets", "fedsim.partitions", "fedsim.auditing.refused")):
            return True
        message = record.getMessage()
        new = message not in self._told
        self._told.add(message)
        return new


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


class _Upwards(logging.Handler):
    """Hands records of at least `level` to the root logger."""

    def emit(self, record: logging.LogRecord) -> None:
        """Hand one record on."""
        logging.getLogger().handle(record)


class _Listener(logging.Handler):
    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        """Report one step."""
        if (step := heard(record.getMessage())) is not None:
            self._progress(*step)
