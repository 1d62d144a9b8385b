"""Files of a data folder: found, or named with the way to get them; checked against known sums."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from fedsim.errors import DataError

SUMS = "SHA256SUMS"
"""A file in the data folder, as `sha256sum` writes it, that says how files in it have to be."""


def data_folder(folder: Path | None, name: str) -> Path:
    """`folder`, if it is there; `name` is the data set that needs it.

    Raises:
        DataError: it is not.
    """
    if folder is None:
        raise DataError(f"data: '{name}' needs a data folder; give --data-dir DIR or set FEDSIM_DATA")
    if not folder.is_dir():
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


def verify(path: Path, folder: Path, md5: str | None = None) -> Path:
    """`path` again, if its bytes are what `folder / SUMS` or else `md5` says; unlisted files pass.

    A file that differs from the official one on purpose, a subset say, passes once SUMS lists it.

    Raises:
        DataError: they are not.
    """
    listed = _sums(folder).get(path.relative_to(folder).as_posix())
    kind, expected = ("sha256", listed) if listed else ("md5", md5)
    if expected is None:
        return path
    with path.open("rb") as file:
        got = hashlib.file_digest(file, kind).hexdigest()
    if got != expected:
        where = f"{folder / SUMS} lists" if listed else "the official file has"
        raise DataError(
            f"{path}: its {kind} is {got[:12]}..., but {where} {expected[:12]}...; get the file again, "
            f"or if it differs on purpose, write its sha256 into {folder / SUMS}"
        )
    return path


def _sums(folder: Path) -> dict[str, str]:
    path = folder / SUMS
    if not path.is_file():
        return {}
    rows = (line.split(maxsplit=1) for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    return {row[1].strip().removeprefix("*").removeprefix("./"): row[0].lower() for row in rows if len(row) == 2}
