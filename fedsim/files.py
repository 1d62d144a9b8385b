"""Files that appear whole or not at all, and never through a link that somebody laid."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, Protocol

from fedsim.errors import DataError, RunError

_PIECE = 1 << 18
_MOST_DIGITS = 39
_MARK = ".of-a-process-that-lives"


class _Raw(Protocol):
    def write(self, data: memoryview, /) -> int | None: ...


def cache_folder() -> Path:
    """Where parsed data sets, trained states and descriptions of plug-ins are kept.

    Raises:
        DataError: nothing names a folder, and the user has no home.
    """
    try:
        if named := os.environ.get("FEDSIM_CACHE"):
            return Path(named).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedsim"
    except RuntimeError as error:
        raise DataError("cache: this user has no home folder; set FEDSIM_CACHE to a folder") from error


@contextmanager
def in_one_step(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """A new file beside `path`, which becomes `path` on leaving; on an error nothing is left of it.

    Its name is drawn at random and it is made for us alone: a link that is there is not followed.

    Args:
        durable: wait until the disk has it, so that a power cut does not leave an empty file either.

    Raises:
        RunError: `path` is a link.
    """
    refuse_link(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
    try:
        yield temporary
        if durable:
            _sync(temporary)
        temporary.replace(path)
        if durable:
            _sync(path.parent)
    except BaseException:
        with suppress(OSError):  # it may be what the disk refuses
            temporary.unlink()
        raise


def refuse_link(path: Path) -> None:
    """Raise RunError where `path` is a symbolic link."""
    if path.is_symlink():
        raise RunError(f"{path}: is a symbolic link, through which fedsim does not write; remove it")


def write_text(path: Path, text: str) -> None:
    """Write a whole file in one step.

    Raises:
        RunError: the disk is full or the folder cannot be written.
    """
    with _written(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_bytes(path: Path, content: bytes) -> None:
    """The same for bytes."""
    with _written(path) as temporary:
        temporary.write_bytes(content)


@contextmanager
def _written(path: Path) -> Iterator[Path]:
    try:
        with in_one_step(path) as temporary:
            yield temporary
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); make room and try again") from error


def append_text(path: Path, text: str) -> None:
    """Add `text` to the end of a file, which is made where it is missing.

    Raises:
        OSError: it cannot be written, or is a link, or a pipe that nobody reads.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(path, flags, 0o666), "a", encoding="utf-8") as file:  # noqa: PTH123
        file.write(text)


def check_readable(path: Path) -> None:
    """Raise OSError unless `path` is a file that may be read; safetensors would call it missing, or wait at a pipe."""
    if not path.is_file():
        raise OSError(errno.EINVAL, "it is no file")
    path.open("rb").close()


def parse_json(text: str | bytes) -> Any:
    """JSON out of a file that may be anybody's: an integer that no message holds is refused before it is computed with.

    Raises:
        ValueError: it is no JSON, or an integer has more digits than one of 128 bits, which generators have.
    """
    return json.loads(text, parse_int=_integer)


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > _MOST_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def hash_file(path: Path) -> str:
    """SHA-256 of what is in a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process left half written in `folder`: our temporary files and safetensors' own."""
    for leftover in (*folder.glob(".*.tmp"), *folder.glob(".tmp??????")):
        leftover.unlink()


@contextmanager
def fresh_folder() -> Iterator[Path]:
    """A temporary folder while it is needed; those that killed processes of ours left behind are removed first.

    In each is a file that its process holds locked for as long as it lives, so one that is in use is not touched,
    whoever uses it, nor is one that has no such file.
    """
    for mark in Path(gettempdir()).glob(f"fedsim-*/{_MARK}"):
        with suppress(OSError), _locked(mark, os.O_RDONLY):
            if mark.stat().st_uid == os.geteuid():
                shutil.rmtree(mark.parent, ignore_errors=True)
    with TemporaryDirectory(prefix="fedsim-", ignore_cleanup_errors=True) as name, ExitStack() as stack:
        new = Path(name) / f"{_MARK}.new"
        with suppress(OSError):  # there are no locks: nobody removes what a killed process leaves
            stack.enter_context(_locked(new, os.O_CREAT | os.O_EXCL | os.O_RDWR))
            new.rename(new.with_name(_MARK))
        yield Path(name)


@contextmanager
def _locked(path: Path, flags: int) -> Iterator[None]:
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def write_all(file: _Raw, data: memoryview) -> None:
    """Write `data` to an unbuffered file in pieces that stay in the processor's cache, which is faster than at once."""
    while data:
        data = data[file.write(data[:_PIECE]) :]


def _sync(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
