"""One process at a time writes into a run folder."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import platform
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedsim.errors import ConfigError, FedsimError, RunError
from fedsim.files import refuse_link

NAME = "lock"
log = logging.getLogger(__name__)
_held: dict[Path, int] = {}
"""Folders that this process holds, with the open file of each lock."""


@contextmanager
def held(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold `folder`; within, the same process may hold it again.

    Where it is missing it is made, and removed again if nothing was written there.
    The system lets go of the lock when the process ends, however it ends; those that it started do not keep it.

    Args:
        wait: where another process holds it, wait until that has ended.

    Raises:
        ConfigError: another process holds it.
        RunError: the folder cannot be written.
    """
    try:
        made = [place for place in (folder, *folder.parents) if not place.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        place = folder.resolve()
        descriptor = None if place in _held else _acquired(place, wait)
    except FedsimError:
        raise
    except (OSError, ValueError) as error:  # a path may hold a NUL, which is a ValueError
        reason = getattr(error, "strerror", None) or error
        remedy = "mend its permissions, or copy it elsewhere" if folder.is_dir() else "choose another --out"
        raise RunError(f"{folder}: cannot be written ({reason}); {remedy}") from error
    if descriptor is None:
        yield
        return
    _held[place] = descriptor
    try:
        yield
    finally:
        del _held[place]
        with suppress(OSError):
            (place / NAME).unlink()
        os.close(descriptor)
        for missing in made:
            with suppress(OSError):  # what was written stays
                missing.rmdir()


def holder(folder: Path) -> str:
    """Who else holds `folder`, or nothing where nobody does."""
    if folder.resolve() in _held:  # within one process, too, a second descriptor would find it locked
        return ""
    try:
        descriptor = os.open(folder / NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _who(descriptor)
    except OSError:
        return ""
    finally:
        os.close(descriptor)
    return ""


def _acquired(folder: Path, wait: bool) -> int:
    path = folder / NAME
    while True:
        refuse_link(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise RunError(f"{path}: is no file, so the run cannot be locked; remove it")
            _lock(descriptor, folder, wait)
            if _is_still(path, descriptor):  # its last holder may have removed it meanwhile
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps({"process": os.getpid(), "host": platform.node()}).encode(), 0)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int, folder: Path, wait: bool) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError as error:
        raise ConfigError(f"{folder}: {_who(descriptor)} is writing to it; wait until it has ended") from error
    except OSError as error:
        log.warning(
            "%s: its file system knows no locks (%s), so take care that no other fedsim writes to it",
            folder,
            error.strerror,
        )


def _who(descriptor: int) -> str:
    try:
        about = json.loads(os.pread(descriptor, 1000, 0))
        return f"process {int(about['process'])} on {str(about['host'])[:100]!r}"
    except (OSError, ValueError, KeyError, TypeError):  # it has not written that yet
        return "another process"


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _let_go() -> None:
    """A child that was forked keeps no lock of its parent's."""
    for descriptor in _held.values():
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)
