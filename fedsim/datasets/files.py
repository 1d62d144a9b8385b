"""Files of a data folder: found, or named with the way to get them; checked against known sums."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from fedsim.errors import DataError

SUMS = "SHA256SUMS"
"""A file in the data folder, as `sha256sum` writes it, that says how files in it have to be."""

_SUM = re.compile(r"([0-9a-fA-F]{64}) [ *](?:\./)?(.+)")


def data_folder(folder: Path | None, name: str) -> Path:
    """`folder`, if it is there; `name` is the data set that needs it.

    Raises:
        DataError: it is not.
    """
    if folder is None:
        raise DataError(f"data: '{name}' needs a data folder; give --data-dir DIR or set FEDSIM_DATA")
    if not os.path.isdir(folder):  # noqa: PTH112 - also where the name is longer than names can be
        raise DataError(f"data: the data folder {folder} does not exist; give --data-dir DIR or set FEDSIM_DATA")
    return folder


def find(folder: Path, names: Sequence[str], remedy: str) -> Path:
    """The first of `names`, paths within `folder`, that is a file.

    Args:
        remedy: how to get it, the end of a sentence.

    Raises:
        DataError: none of them is there.
    """
    for name in names:
        if (folder / name).is_file():
            return folder / name
    others = "".join(f" (or {name})" for name in names[1:])
    raise DataError(f"{folder / names[0]}{others}: no such file; {remedy}")


def by_download(name: str, folder: Path) -> str:
    """The end of a sentence: how the official files of the data set `name` get into the data folder."""
    return f"on a machine with a network, `fedsim data {name} --download --data-dir {folder}` fetches it"


def reason(error: BaseException) -> str:
    """What kind of error it is and what it says, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def is_listed(path: Path, folder: Path) -> bool:
    """Whether `folder / SUMS` says how the file `path` has to be.

    Raises:
        DataError: SUMS is not what `sha256sum` writes.
    """
    return _listed(path, folder) is not None


def verify(path: Path, folder: Path, md5: str | None = None) -> Path:
    """`path` again, if its bytes are what `folder / SUMS` or else `md5` says; unlisted files pass.

    A file that differs from the official one on purpose, a subset say, passes once SUMS lists it.

    Raises:
        DataError: they are not, or one of the two files cannot be read.
    """
    listed = _listed(path, folder)
    kind, expected = ("sha256", listed) if listed else ("md5", md5)
    if expected is None:
        return path
    try:
        with path.open("rb") as file:
            got = hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); mend its permissions or get it again") from error
    if got != expected:
        where = f"{folder / SUMS} lists" if listed else "the official file has"
        raise DataError(
            f"{path}: is damaged or another file, its {kind} is {got[:12]}... but {where} {expected[:12]}...; get it "
            f"again, or if it differs on purpose, write its sha256 into {folder / SUMS}"
        )
    return path


def _listed(path: Path, folder: Path) -> str | None:
    if not path.is_relative_to(folder) or not (folder / SUMS).is_file():
        return None
    sums = _sums(folder / SUMS, (folder / SUMS).stat().st_mtime_ns)
    return sums.get(path.relative_to(folder).as_posix())


@lru_cache(maxsize=4)
def _sums(path: Path, _time: int) -> Mapping[str, str]:
    """What `path` lists; kept, because hundreds of images ask, until its time changes."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: cannot be read ({reason(error)}); write it anew with sha256sum, or remove it"
        ) from error
    sums = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            if not (row := _SUM.fullmatch(line.rstrip())):
                raise DataError(
                    f"{path}: line {number} is not 'SHA256  FILE'; write it anew with sha256sum, or remove it"
                )
            sums[row[2]] = row[1].lower()
    return sums
