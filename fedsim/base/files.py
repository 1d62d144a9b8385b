"""Writing files atomically, and never through a symbolic link."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import IO, Any

from fedsim.base.errors import DataError, RunError

_CHUNK_SIZE = 1 << 18
"""Largest number of bytes that one call writes; with larger ones the CPU time of a round varied twofold."""
_MAX_PARTS = 1024
"""Largest number of parts that Linux writes in one call."""
_MAX_DIGITS = 39
_MAX_SETTINGS = 1 << 26
"""Most bytes of a file of settings."""
_LOCK_FILE = ".of-a-process-that-lives"


def cache_folder() -> Path:
    """Return the folder for parsed data sets, trained states and descriptions of plug-ins."""
    try:
        if configured := os.environ.get("FEDSIM_CACHE"):
            return Path(configured).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedsim"
    except RuntimeError as error:
        raise DataError("cache: this user has no home folder; set FEDSIM_CACHE to a folder") from error


@contextmanager
def replace_atomically(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a new temporary file that replaces `path` on success, and is removed on an error.

    Its name is random and it is created exclusively, so that no existing link is followed. It gets
    the permissions that the umask allows, whoever writes it.

    Args:
        durable: wait until it is on the disk, so that a power cut does not leave an empty file.
    """
    check_no_link(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    usual_mode = stat.S_IMODE(os.fstat(descriptor).st_mode)  # what the umask allows
    os.close(descriptor)
    try:
        yield temporary
        # safetensors replaces the file by one that nobody else may read, whatever the umask.
        if stat.S_IMODE(temporary.stat().st_mode) != usual_mode:
            temporary.chmod(usual_mode)
        if durable:
            _sync(temporary)
        temporary.replace(path)
        if durable:
            _sync(path.parent)
    except BaseException:
        with suppress(OSError):  # the disk that caused the error may refuse this as well
            temporary.unlink()
        raise


def check_no_link(path: Path) -> None:
    """Raise RunError where `path` is a symbolic link."""
    if path.is_symlink():
        raise RunError(f"{path}: is a symbolic link, through which fedsim does not write; remove it")


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with _replace_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_bytes(path: Path, content: bytes) -> None:
    """Write a binary file atomically."""
    with _replace_file(path) as temporary:
        temporary.write_bytes(content)


def write_remedy(error: Exception) -> str:
    """Say what to do so that a file can be written that could not be, as the middle of a sentence.

    >>> write_remedy(FileNotFoundError(errno.ENOENT, "No such file or directory"))
    'put its folder back'
    """
    number = getattr(error, "errno", None)  # safetensors' own errors have none
    if number in (errno.ENOENT, errno.ENOTDIR):  # removed or renamed meanwhile
        return "put its folder back"
    if number in (errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY):
        return "move what is there"
    if number == errno.ENAMETOOLONG:
        return "choose a shorter path"
    return "fix its permissions" if number in (errno.EACCES, errno.EPERM, errno.EROFS) else "make room"


@contextmanager
def _replace_file(path: Path) -> Iterator[Path]:
    try:
        with replace_atomically(path) as temporary:
            yield temporary
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); {write_remedy(error)} and try again") from error


def append_text(path: Path, text: str) -> None:
    """Append `text` to a file, which is created if it is missing."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(path, flags, 0o666), "a", encoding="utf-8") as file:  # noqa: PTH123
        file.write(text)


def read_settings(path: Path) -> str:
    """Return the text of a file of settings, which may be a pipe of the shell."""
    with path.open("rb") as file:
        content = file.read(_MAX_SETTINGS + 1)
    if len(content) > _MAX_SETTINGS:
        raise OSError(errno.EFBIG, f"it has more than {_MAX_SETTINGS >> 20} MB")
    return content.decode("utf-8-sig")


def check_readable(path: Path) -> None:
    """Raise OSError unless `path` is a readable file.

    Without this check safetensors would report it as missing, or wait for a pipe.
    """
    if not path.is_file():
        raise OSError(errno.EINVAL, "it is not a file")
    path.open("rb").close()


def parse_json(text: str | bytes) -> Any:
    """Parse JSON from an untrusted file; repeated keys, and huge integers, which are slow to parse, are refused."""
    return json.loads(text, parse_int=_parse_integer, object_pairs_hook=join_pairs)


def join_pairs(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict; a key that stands twice, of which a dict keeps the last, is refused."""
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for number, key in enumerate(keys) if key in keys[:number])
        raise ValueError(f"an object has the key '{repeated}' twice")
    return content


def _parse_integer(digits: str) -> int:
    if len(digits.lstrip("-")) > _MAX_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files (fedsim's, safetensors') that a killed process left in `folder`."""
    for leftover in (*folder.glob(".*.tmp"), *folder.glob(".tmp??????")):
        leftover.unlink()


@contextmanager
def temporary_folder(place: Path | None = None) -> Iterator[Path]:
    """Yield a temporary folder that no other user can enter, after removing those that killed fedsim processes left.

    Each folder has a file that its process keeps locked as long as it lives. So a folder in use is
    not removed, nor is one without such a file.

    Args:
        place: where to make it; by default where the system has temporary files.
    """
    place = place or Path(gettempdir())
    # Remove the folders of processes that no longer hold their lock.
    for lock_file in place.glob(f"fedsim-*/{_LOCK_FILE}"):
        with suppress(OSError), _lock(lock_file, os.O_RDONLY):
            if lock_file.stat().st_uid == os.geteuid():
                shutil.rmtree(lock_file.parent, ignore_errors=True)
    # Lock a new file before it gets its name, so that nobody sees it without its lock.
    with TemporaryDirectory(prefix="fedsim-", dir=place, ignore_cleanup_errors=True) as name, ExitStack() as stack:
        new_lock_file = Path(name) / f"{_LOCK_FILE}.new"
        with suppress(OSError):  # on file systems without locks, leftovers stay
            stack.enter_context(_lock(new_lock_file, os.O_CREAT | os.O_EXCL | os.O_RDWR))
            new_lock_file.rename(new_lock_file.with_name(_LOCK_FILE))
        yield Path(name)


@contextmanager
def _lock(path: Path, flags: int) -> Iterator[None]:
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def write_parts(file: IO[bytes], parts: Iterable[memoryview], position: int) -> None:
    """Write `parts` one after the other at `position` of an unbuffered file, many in one call of the system."""
    for pieces in _cut_parts(parts):
        while pieces:
            written = os.pwritev(file.fileno(), pieces, position)
            if not written:  # or it would be tried for ever
                raise OSError(errno.EIO, "the system writes nothing and names no error")
            position += written
            # Leave the pieces that are not written, or not whole.
            while pieces and written >= len(pieces[0]):
                written -= len(pieces.pop(0))
            if written:
                pieces[0] = pieces[0][written:]


def _cut_parts(parts: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Yield the parts in lists that one call can write, none longer than `_CHUNK_SIZE`."""
    pieces: list[memoryview] = []
    room = _CHUNK_SIZE
    for part in parts:
        while part:
            pieces.append(part[:room])
            part, room = part[room:], room - len(pieces[-1])
            if not room or len(pieces) == _MAX_PARTS:
                yield pieces
                pieces, room = [], _CHUNK_SIZE
    if pieces:
        yield pieces


def read_all(file: IO[bytes], memory: memoryview, position: int) -> None:
    """Fill `memory` with the bytes of an unbuffered file from `position` on."""
    while memory:
        count = os.preadv(file.fileno(), [memory], position)
        if not count:
            raise OSError(errno.EIO, "the file is shorter than what was written to it")
        position, memory = position + count, memory[count:]


def _sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
