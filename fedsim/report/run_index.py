"""Index of the runs and sweeps below a folder, and its page `index.html`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from markupsafe import Markup

from fedsim.base.errors import ConfigError, FedsimError, RunError, error_reason, one_line
from fedsim.base.files import check_no_link, write_text
from fedsim.base.progress import track
from fedsim.report.html import render_page
from fedsim.report.index_entry import IndexEntry
from fedsim.report.indexed_run import describe_run, is_run
from fedsim.report.indexed_sweep import describe_sweep, is_sweep
from fedsim.sweeps.store import CELLS, FEDERATIONS

PAGE = "index.html"
_GENERATOR = '<meta name="generator" content="fedsim index">'
"""Mark that distinguishes our page from another index.html."""
_HEAD_LENGTH = 4096


@dataclass(frozen=True, kw_only=True)
class RunIndex:
    """Index of a folder.

    Attributes:
        num_skipped: folders in it that hold no run.
        num_stores: stores of sweeps, whose cells are no entries.
    """

    folder: Path
    entries: Sequence[IndexEntry]
    num_skipped: int
    num_stores: int


def index_folder(folder: Path) -> RunIndex:
    """Read all runs and sweeps below a folder."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; name the one that your runs are in")
    if is_run(folder) or is_sweep(folder):
        raise ConfigError(f"{folder}: is a single run or sweep; name the folder that it is in")
    search = _Search()
    search.look_into(folder)
    if not search.folders:
        raise ConfigError(f"{folder}: holds no runs; name the folder that your runs are in")
    entries = [_read_entry(path, folder) for path in track(search.folders, "reading", len(search.folders))]
    entries.sort(key=lambda entry: (math.isnan(entry.time), -entry.time, entry.name))
    return RunIndex(folder=folder, entries=entries, num_skipped=search.num_skipped, num_stores=search.num_stores)


@dataclass
class _Search:
    """Search for runs, with what it met."""

    folders: list[Path] = field(default_factory=list)
    num_skipped: int = 0
    num_stores: int = 0

    def look_into(self, folder: Path) -> bool:
        """Collect the runs below a folder, and return whether there are any; links are not followed."""
        has_runs, skipped_before = False, self.num_skipped
        for path in _list_folders(folder):
            if path.is_symlink():
                self.num_skipped += 1
            elif is_sweep(path) or is_run(path):
                self.folders.append(path)
                has_runs = True
            elif (path / FEDERATIONS).is_dir() and (path / CELLS).is_dir():
                self.num_stores += 1
                has_runs = True
            else:
                has_runs |= self.look_into(path)
        if not has_runs:  # it counts once, with all that is in it
            self.num_skipped = skipped_before + 1
        return has_runs


def _list_folders(folder: Path) -> Iterator[Path]:
    """Yield the folders in a folder by name, apart from hidden ones; none where it may not be read."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    except OSError:
        return
    for name in names:
        if not name.startswith("."):
            yield folder / name


def _read_entry(path: Path, top: Path) -> IndexEntry:
    entry = IndexEntry(name=path.relative_to(top).as_posix())
    try:
        if is_sweep(path):
            describe_sweep(path, entry)
        else:
            describe_run(path, entry)
    except FedsimError as error:
        entry.problems.append(str(error))
    except Exception as error:  # whatever a stranger's folder does to its reader
        entry.problems.append(one_line(error_reason(error)))
    return entry


def write_index_page(index: RunIndex) -> Path:
    """Write the page of an index into its folder, with links relative to it."""
    path = index.folder / PAGE
    check_no_link(path)
    if path.exists() and not _is_ours(path):
        raise RunError(f"{path}: was not written by `fedsim index`, so it stays as it is; move it elsewhere")
    html = render_page(
        "index.html.j2",
        scripts=["tables.js"],
        generator=Markup(_GENERATOR),
        name=index.folder.resolve().name,
        index=index,
        entries=index.entries,
    )
    write_text(path, html)
    return path


def _is_ours(path: Path) -> bool:
    try:
        if not path.is_file():  # at a pipe this would wait
            return False
        with path.open("rb") as file:
            return _GENERATOR.encode() in file.read(_HEAD_LENGTH)
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror}); move it elsewhere") from error
