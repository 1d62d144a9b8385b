"""Store of cells: a run folder for each federation and cell, with a marker when finished.

A cell's recording consists of hard links to its federation's files (copies where the file system
has no links), which is safe because fedsim replaces files in one step and never changes them. The
marker is written last, next to the run folder. It holds the cell's rows of the table, and the
hashes of all files from which they are computed, so that a damaged cell is noticed.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from fedsim.base.content_hashes import cached_file_hash
from fedsim.base.errors import FedsimError, RunError, first_line
from fedsim.base.files import parse_json, write_bytes, write_remedy, write_text
from fedsim.federation import lock
from fedsim.federation.config import Config
from fedsim.federation.open_run import OpenRun
from fedsim.federation.settings import flat_settings
from fedsim.recording.manifest import LOCK_FILE, MANIFEST_FILE, run_name
from fedsim.recording.seals import require_seal, seal_text, signing_key

log = logging.getLogger(__name__)
FEDERATIONS, CELLS = "federations", "attacks"
_UNSHARED_FILES = (lock.NAME, LOCK_FILE, MANIFEST_FILE, "log.txt")
"""Files of a run folder that are neither shared nor hashed."""
_REPORT_FILES = ("*.png", "*.html", "*.tmp", "tensorboard/*", "dossier.*")
"""Further such files, which `fedsim report` rewrites."""


@dataclass(frozen=True, kw_only=True)
class Marker:
    """Result of a finished federation or cell.

    Attributes:
        files: SHA-256 of each file of the run that has to stay as it is.
        rows: rows of `sweep.csv`, without the columns of the grid point; none for a federation.
        failures: a sentence for each failure, such as that of an attack.
        crashed: whether a failure may not occur again: a program's error, or a process that died.
        memory: most bytes that its process used; 0 where the system does not report it.
    """

    files: Mapping[str, str]
    rows: Sequence[Mapping[str, str]]
    failures: Sequence[str]
    crashed: bool
    seconds: float
    memory: int


_MARKER = TypeAdapter(Marker)


@dataclass(frozen=True)
class StoreEntry:
    """Entry of the store for a federation or a cell."""

    folder: OpenRun

    @property
    def marker_path(self) -> Path:
        """Return the path of the marker, next to the run folder."""
        return self.folder.path.with_name(f"{self.folder.path.name}.json")

    def read_intact(self) -> Marker | None:
        """Return the marker of an intact result; None where it is not finished or damaged.

        A damaged result is reported in the log.

        Raises:
            RunError: the marker exists and cannot be read.
        """
        marker = self.read_marker()
        if marker is not None and (damage := next(self._find_damage(marker), None)):
            log.warning("%s: %s, so this cell is made again", self.folder.path, damage)
            return None
        return marker

    def read_marker(self) -> Marker | None:
        """Read the marker without checking the run; None where it is missing or damaged."""
        try:
            content = parse_json(self.marker_path.read_bytes())
            require_seal(content["seal"], self._sealed_text(content["marker"]))
            return _MARKER.validate_python(content["marker"])
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RunError(f"{self.marker_path}: cannot be read ({error.strerror}); fix that, or remove it") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            log.warning("%s: is damaged (%s), so this cell is made again", self.marker_path, first_line(error))
            return None

    def write_marker(self, **known: Any) -> None:
        """Write the marker, after all other files.

        Args:
            **known: attributes of the `Marker` other than `files`.
        """
        files = {name: cached_file_hash(self.folder.path / name) for name in self.list_files}
        marker = asdict(Marker(files=files, **known))
        signature = seal_text(self._sealed_text(marker), signing_key())
        write_text(self.marker_path, json.dumps({"seal": signature, "marker": marker}, indent=1) + "\n")

    def _sealed_text(self, marker: Mapping[str, Any]) -> str:
        """Return the text to seal, with names that only this entry's marker has."""
        return json.dumps([self.folder.path.parent.name, self.folder.path.name, marker], sort_keys=True)

    def remove_marker(self) -> None:
        """Remove the marker, before anything in the run folder changes."""
        self.marker_path.unlink(missing_ok=True)

    @property
    def list_files(self) -> list[str]:
        """Return the names of the run's files that are shared and hashed."""
        names: list[str] = []
        for parent, _, file_names in os.walk(self.folder.path):
            names += [Path(parent, name).relative_to(self.folder.path).as_posix() for name in file_names]
        ignored = (*_UNSHARED_FILES, *_REPORT_FILES)
        return [name for name in sorted(names) if not any(fnmatchcase(name, pattern) for pattern in ignored)]

    def clear(self) -> None:
        """Empty the locked run folder, where a run was interrupted or damaged.

        Raises:
            ConfigError: it holds files that are of no run.
        """
        self.remove_marker()
        manifest = self.folder.manifest
        try:
            manifest.read_again()
        except FedsimError:
            manifest.path.unlink()
        if not manifest.path.exists():
            manifest.start()  # without one it does not count as a run folder
        self.folder.prepare(resume=False, overwrite=True)

    def _find_damage(self, marker: Marker) -> Iterator[str]:
        """Yield a sentence for each change that the run's manifest does not explain."""
        try:
            noted = self.folder.manifest.read_again()
        except FedsimError as error:
            yield str(error)
            return
        if noted is None:
            yield f"{MANIFEST_FILE} is missing"
            return
        if signing_key() is not None and not noted.signed:
            yield f"{MANIFEST_FILE} is not signed"
            return
        if not self.folder.report.is_file():
            yield f"{self.folder.report.name} is missing"
        for name, digest in marker.files.items():
            try:
                present_digest = cached_file_hash(self.folder.path / name)
            except OSError as error:
                yield f"{name} cannot be read ({error.strerror})"
                continue
            if present_digest != digest and not noted.allows(name, present_digest):
                yield f"{name} is not what was written"


@dataclass(frozen=True)
class CellStore:
    """Folder of federations and cells by their keys, which sweeps share."""

    path: Path

    def create_folders(self) -> None:
        """Create the folders that do not exist yet."""
        for folder in (self.path / FEDERATIONS, self.path / CELLS):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                if not os.access(folder, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            except OSError as error:
                raise RunError(f"{folder}: cannot be written ({error.strerror}); choose another --cells") from error

    def federation(self, key: str) -> StoreEntry:
        """Return the entry of the federation with this key."""
        return StoreEntry(OpenRun(self.path / FEDERATIONS / key))

    def cell(self, key: str) -> StoreEntry:
        """Return the entry of the cell with this key."""
        return StoreEntry(OpenRun(self.path / CELLS / key))


def is_prepared(entry: StoreEntry, config: Config, recording: Marker) -> bool:
    """Return whether a cell's run folder was prepared for this recording, with this key or none, and is unchanged."""
    try:
        manifest = entry.folder.manifest.read_again()
        if manifest is None:
            return False
        entry.folder.manifest.check_key(manifest)
        experiment = entry.folder.read_experiment(trust=True)
        if experiment is None or flat_settings(experiment) != flat_settings(config):
            return False
        shared = {name: digest for name, digest in recording.files.items() if name != entry.folder.experiment.name}
        return all(cached_file_hash(entry.folder.path / name) == digest for name, digest in shared.items())
    except (FedsimError, OSError):
        return False


def prepare_cell(entry: StoreEntry, config: Config, federation: StoreEntry) -> None:
    """Prepare a cell's locked run folder: the recording of `federation`, the attacks of `config`."""
    entry.clear()
    source, target = federation.folder.path, entry.folder.path
    try:
        for name in federation.list_files:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            _link_or_copy(source / name, target / name)
        write_bytes(target / MANIFEST_FILE, (source / MANIFEST_FILE).read_bytes())
        with entry.folder.manifest.edit() as changed:
            changed.name = run_name(target)
    except OSError as error:
        raise RunError(
            f"{target}: cannot be written ({error.strerror}); {write_remedy(error)} and try again"
        ) from error
    entry.folder.note_experiment(config)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # on another file system, or on one without links
        shutil.copyfile(source, target)
