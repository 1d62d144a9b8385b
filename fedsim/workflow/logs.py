"""What goes into `log.txt` and to a callback while a run is worked on; afterwards logging is as it was before."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fedsim.files import append_text
from fedsim.progress import LOGGER, heard

Progress = Callable[[str, int, int], None]
"""Called as `progress(what, done, total)`."""


@contextmanager
def kept(path: Path) -> Iterator[None]:
    """Append what fedsim logs to the file `path`, from the moment its folder exists.

    The host program's own handlers get what they got before.
    """
    logger = logging.getLogger("fedsim")
    level, propagate = logger.level, logger.propagate
    file = _LogFile(path)
    file.addFilter(Once())
    added: list[logging.Handler] = [file]
    if propagate:  # or else a line that the host program has no interest in would reach its handlers
        added.append(_Upwards(logger.getEffectiveLevel()))
    logger.setLevel(min(logger.getEffectiveLevel(), logging.INFO))
    logger.propagate = False
    for handler in added:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for handler in added:
            logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


@contextmanager
def told(progress: Progress | None) -> Iterator[None]:
    """Call `progress` with each step that `fedsim.progress` tells of."""
    if progress is None:
        yield
        return
    logger, listener = logging.getLogger(LOGGER), _Listener(progress)
    level, propagate = logger.level, logger.propagate
    logger.addHandler(listener)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)
        logger.propagate = propagate


class Once(logging.Filter):
    """Lets what is said about data and their partition through once: they are read in several places of a run."""

    def __init__(self) -> None:
        super().__init__()
        self._told: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to show `record`."""
        if not record.name.startswith(("fedsim.datasets", "fedsim.partitions")):
            return True
        message = record.getMessage()
        new = message not in self._told
        self._told.add(message)
        return new


class _LogFile(logging.Handler):
    """Appends to a file, from the moment its folder exists."""

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
        """Tell one step."""
        if (step := heard(record.getMessage())) is not None:
            self._progress(*step)
