"""Where cells are kept: a run folder for each federation and for each cell, and beside each the marker of its end.

A cell's recording is hard links to its federation's files (copies where the file system has no links), which is safe
because fedsim replaces files in one step and never changes them. The marker is written last. It holds the rows that the
cell brings to the table, and the hash of every file that they follow from, so a cell that was damaged is noticed.
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

from fedsim.content_hashes import hash_of
from fedsim.errors import FedsimError, RunError, first_line
from fedsim.experiments import lock
from fedsim.experiments.config import Config
from fedsim.experiments.run_folder import RunFolder
from fedsim.experiments.settings import settings_of
from fedsim.files import parse_json, write_bytes, write_text
from fedsim.recording import manifest
from fedsim.recording.seals import check_signed, key, seal

log = logging.getLogger(__name__)
FEDERATIONS, CELLS = "federations", "attacks"
_OWN = (lock.NAME, manifest.GUARD, manifest.NAME, "log.txt")
"""Files of a run folder that it neither shares nor has hashed."""
_DRAWN = ("*.png", "*.html", "*.tmp", "tensorboard/*")
"""Others, which `fedsim report` writes anew."""


@dataclass(frozen=True, kw_only=True)
class Marker:
    """What is known of a federation or of a cell that is finished.

    Attributes:
        files: SHA-256 of each file in the run folder that counts.
        rows: of `sweep.csv`, without the columns of the place; none of a federation.
        failures: a sentence for each attack that failed, and the like.
        crashed: whether something failed that may go well another time: a program's error, or a process that died.
        seconds: that it took.
        memory: the most that its process held, in bytes; 0 where the system does not say.
    """

    files: Mapping[str, str]
    rows: Sequence[Mapping[str, str]]
    failures: Sequence[str]
    crashed: bool
    seconds: float
    memory: int


_MARKER = TypeAdapter(Marker)


@dataclass(frozen=True)
class Place:
    """Where a federation or a cell is kept.

    Attributes:
        folder: its run.
    """

    folder: RunFolder

    @property
    def marker(self) -> Path:
        """Beside the run folder, which holds nothing but a run."""
        return self.folder.path.with_name(f"{self.folder.path.name}.json")

    def finished(self) -> Marker | None:
        """What is known of it, None where it is not finished; one that was damaged since is named in the log.

        Raises:
            RunError: the marker is there and cannot be read.
        """
        marker = self.read()
        if marker is not None and (damage := next(self._damaged(marker), None)):
            log.warning("%s: %s, so this cell is made again", self.folder.path, damage)
            return None
        return marker

    def read(self) -> Marker | None:
        """What the marker says, whatever became of the run; None where it is missing or damaged.

        Raises:
            RunError: it is there and cannot be read.
        """
        try:
            said = parse_json(self.marker.read_bytes())
            check_signed(said["seal"], self._sealed(said["marker"]))
            return _MARKER.validate_python(said["marker"])
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RunError(f"{self.marker}: cannot be read ({error.strerror}); mend that, or remove it") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            log.warning("%s: is damaged (%s), so this cell is made again", self.marker, first_line(error))
            return None

    def finish(self, **known: Any) -> None:
        """Write the marker, last of all.

        Args:
            **known: what a `Marker` has besides the hashes of files.

        Raises:
            RunError: the store cannot be written.
        """
        files = {name: hash_of(self.folder.path / name) for name in self.files}
        marker = asdict(Marker(files=files, **known))
        sealed = seal(self._sealed(marker), key())
        write_text(self.marker, json.dumps({"seal": sealed, "marker": marker}, indent=1) + "\n")

    def _sealed(self, marker: Mapping[str, Any]) -> str:
        """What is sealed of a marker: that of another cell, which has a seal, too, is not this one's."""
        return json.dumps([self.folder.path.parent.name, self.folder.path.name, marker], sort_keys=True)

    def forget(self) -> None:
        """Have it count as not finished, before anything in its folder changes."""
        self.marker.unlink(missing_ok=True)

    @property
    def files(self) -> list[str]:
        """The files of the run that count."""
        paths = (Path(parent, name) for parent, _, names in os.walk(self.folder.path) for name in names)
        names = sorted(path.relative_to(self.folder.path).as_posix() for path in paths)
        return [name for name in names if not any(fnmatchcase(name, pattern) for pattern in (*_OWN, *_DRAWN))]

    def clear(self) -> None:
        """Empty the run folder, which is held, of what was begun or damaged there.

        Raises:
            ConfigError: it holds something that is of no run.
            RunError: it cannot be written.
        """
        self.forget()
        path = self.folder.path
        try:
            manifest.read(path)
        except FedsimError:
            (path / manifest.NAME).unlink()
        if not self.folder.manifest.exists():
            manifest.start(path)  # or it would not count as a run folder
        self.folder.prepare(resume=False, overwrite=True)

    def _damaged(self, marker: Marker) -> Iterator[str]:
        """What is not as it was: other files than those that the run itself replaced since, which its manifest says."""
        try:
            noted = manifest.read(self.folder.path)
        except FedsimError as error:
            yield str(error)
            return
        if noted is None:
            yield f"{manifest.NAME} is missing"
            return
        if key() is not None and not noted.signed:
            yield f"{manifest.NAME} is not signed"
            return
        if not self.folder.report.is_file():
            yield f"{self.folder.report.name} is missing"
        for name, digest in marker.files.items():
            try:
                now = hash_of(self.folder.path / name)
            except OSError as error:
                yield f"{name} cannot be read ({error.strerror})"
                continue
            if now != digest and not noted.names(name, now):
                yield f"{name} is not what was written"


@dataclass(frozen=True)
class Store:
    """A folder of federations and cells, by their keys; sweeps share it."""

    path: Path

    def open(self) -> None:
        """Make the folder, where it is not there yet.

        Raises:
            RunError: it cannot be written.
        """
        for folder in (self.path / FEDERATIONS, self.path / CELLS):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                if not os.access(folder, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            except OSError as error:
                raise RunError(f"{folder}: cannot be written ({error.strerror}); choose another --cells") from error

    def federation(self, key: str) -> Place:
        """Where the federation with this key is kept."""
        return Place(RunFolder(self.path / FEDERATIONS / key))

    def cell(self, key: str) -> Place:
        """Where the cell with this key is kept."""
        return Place(RunFolder(self.path / CELLS / key))


def is_prepared(place: Place, config: Config, recording: Marker) -> bool:
    """Whether the run folder of a cell was made ready for attacks on this recording, and is still as it was then."""
    try:
        own = place.folder.read_experiment(trust=True)
        shared = {name: digest for name, digest in recording.files.items() if name != place.folder.experiment.name}
        return (
            own is not None
            and settings_of(own) == settings_of(config)
            and all(hash_of(place.folder.path / name) == digest for name, digest in shared.items())
        )
    except (FedsimError, OSError):
        return False


def prepare(place: Place, config: Config, federation: Place) -> None:
    """Make the run folder of a cell, which is held: the recording of `federation`, to be attacked as `config` says.

    Raises:
        FedsimError: the store cannot be written.
    """
    place.clear()
    source, target = federation.folder.path, place.folder.path
    try:
        for name in federation.files:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            _link(source / name, target / name)
        write_bytes(target / manifest.NAME, (source / manifest.NAME).read_bytes())
        with manifest.changing(target) as own:
            own.name = manifest.name_of_run(target)
    except OSError as error:
        raise RunError(f"{target}: cannot be written ({error.strerror}); make room and try again") from error
    place.folder.note_experiment(config)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
