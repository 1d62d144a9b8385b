"""Lock run folders, so that one process at a time writes into them."""

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

from fedsim.base.errors import ConfigError, FedsimError, RunError
from fedsim.base.files import check_no_link, write_remedy

NAME = "lock"
log = logging.getLogger(__name__)
_locks: dict[Path, tuple[int, object]] = {}
"""Folders that this process has locked, with the open file and the owner of each lock."""


@contextmanager
def lock_folder(folder: Path, owner: object = None, *, wait: bool = False) -> Iterator[bool]:
    """Lock `folder` within the context, and yield whether it was not locked before.

    A missing folder is created, and removed again if nothing was written there. The system releases
    the lock when the process ends, however it ends; processes that it started do not keep it.

    Args:
        owner: value that may lock the folder again within the context.
        wait: where another process has locked it, wait for that to end.

    Raises:
        ConfigError: another process, or another owner in this one, has locked it.
        RunError: the folder cannot be written.
    """
    try:
        new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        resolved = folder.resolve()
        descriptor = None if _is_owner(resolved, owner) else _acquire_lock(resolved, wait)
    except FedsimError:
        raise
    except (OSError, ValueError) as error:  # a path may hold a NUL, which is a ValueError
        reason = getattr(error, "strerror", None) or error
        remedy = "choose another --out"
        if folder.is_dir():
            remedy = f"{write_remedy(error)}, or copy it elsewhere"
        raise RunError(f"{folder}: cannot be written ({reason}); {remedy}") from error
    if descriptor is None:
        yield False
        return
    _locks[resolved] = descriptor, owner
    try:
        yield True
    finally:
        del _locks[resolved]
        with suppress(OSError):
            (resolved / NAME).unlink()
        os.close(descriptor)
        for new_folder in new_folders:
            with suppress(OSError):  # a folder with files stays
                new_folder.rmdir()


def describe_lock_holder(folder: Path) -> str:
    """Describe the other process that has locked `folder`; '' where there is none."""
    if folder.resolve() in _locks:  # a second descriptor of the same process would find it locked
        return ""
    try:
        descriptor = os.open(folder / NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _describe_owner(descriptor)
    except OSError:
        return ""
    finally:
        os.close(descriptor)
    return ""


def _is_owner(folder: Path, owner: object) -> bool:
    """Return whether `owner` has locked the folder already."""
    if folder not in _locks:
        return False
    if owner is None or _locks[folder][1] is not owner:
        raise ConfigError(f"{folder}: this process is writing to it already; wait until that has ended")
    return True


def _acquire_lock(folder: Path, wait: bool) -> int:
    path = folder / NAME
    while True:
        check_no_link(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise RunError(f"{path}: is not a file, so the run cannot be locked; remove it")
            _lock_file(descriptor, folder, wait)
            if _is_same_file(path, descriptor):  # its last owner may have removed it meanwhile
                os.ftruncate(descriptor, 0)
                os.pwrite(
                    descriptor,
                    json.dumps({"process": os.getpid(), "host": platform.node()}).encode(),
                    0,
                )
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock_file(descriptor: int, folder: Path, wait: bool) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError as error:
        raise ConfigError(
            f"{folder}: {_describe_owner(descriptor)} is writing to it; wait until it has ended"
        ) from error
    except OSError as error:
        log.warning(
            "%s: its file system knows no locks (%s), so take care that no other fedsim writes to it",
            folder,
            error.strerror,
        )


def _describe_owner(descriptor: int) -> str:
    try:
        owner = json.loads(os.pread(descriptor, 1000, 0))
        return f"process {int(owner['process'])} on {str(owner['host'])[:100]!r}"
    except (OSError, ValueError, KeyError, TypeError):  # the owner has not written it yet
        return "another process"


def _is_same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _release_locks() -> None:
    """Release all locks, in a forked child, which must not keep those of its parent."""
    for descriptor, _ in _locks.values():
        with suppress(OSError):
            os.close(descriptor)
    _locks.clear()


os.register_at_fork(after_in_child=_release_locks)
