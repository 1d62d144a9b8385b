"""The folder of a run: names of its files, and how they are written, read and checked."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import tomli_w

from fedsim.base.errors import ConfigError, RunError, one_line
from fedsim.base.files import hash_file, remove_leftovers, write_text
from fedsim.federation import lock
from fedsim.federation.config import Config, validate_tables
from fedsim.federation.reading import read_toml
from fedsim.federation.settings import (
    MAY_CHANGE,
    REBUILT,
    changed_settings,
    flat_settings,
    hash_experiment_code,
    versions,
)
from fedsim.federation.trust import check_trust
from fedsim.plugins.inline import is_lost_object
from fedsim.recording import manifest

_RUN_FILES = (
    "experiment.toml", "versions.json", manifest.MANIFEST_FILE, manifest.LOCK_FILE, lock.NAME, "log.txt", "metrics.csv",
    "ledger.csv", "exposure.csv", "exposure/exposure.csv", "exposure/*.png", "scores.csv", "image-scores.csv",
    "refused.csv", "empirical-epsilon.csv", "checkpoint.safetensors", "report.html", "geometry.csv",
    "geometry-ratios.png", "geometry-cosines.png", "transcript/round-*.safetensors", "messages/exchange-*.safetensors",
    "findings/*/*.safetensors", "findings/*/*.png", "tensorboard/*/events.out.tfevents.*",
    "states/*.safetensors", "states/manifest.json", "optima/*/client-*.safetensors", "deployment/*",
)  # fmt: skip
"""Patterns of all files that fedsim leaves in a run folder, apart from half-written ones."""


@dataclass(frozen=True)
class RunFolder:
    """Folder into which everything of one run is written."""

    path: Path

    @property
    def experiment(self) -> Path:
        """Return the path of the resolved experiment file."""
        return self.path / "experiment.toml"

    @property
    def transcript(self) -> Path:
        """Return the folder of the curious server's recording.

        It is the run folder itself where an app recorded its rounds directly in it.
        """
        folder = self.path / "transcript"
        if not folder.is_dir() and any(self.path.glob("round-*.safetensors")):
            return self.path
        return folder

    @property
    def findings(self) -> Path:
        """Return the folder of the attacks' findings, one safetensors file each."""
        return self.path / "findings"

    @property
    def scores(self) -> Path:
        """Return the path of the scores, a row per attack, victim, round, repeat and metric."""
        return self.path / "scores.csv"

    @property
    def images(self) -> Path:
        """Return the path of the scores of single images."""
        return self.path / "image-scores.csv"

    @property
    def refusals(self) -> Path:
        """Return the path of the attacks that could not be made, each with the reason."""
        return self.path / "refused.csv"

    @property
    def states(self) -> Path:
        """Return the folder of trained models that the experiment saves."""
        return self.path / "states"

    @property
    def optima(self) -> Path:
        """Return the folder of clients' optimal local models, which the evaluator computes."""
        return self.path / "optima"

    @property
    def metrics(self) -> Path:
        """Return the path of accuracy and loss per round, of the server and of each client."""
        return self.path / "metrics.csv"

    @property
    def epsilons(self) -> Path:
        """Return the path of proved and measured epsilon, by client with canaries and defense."""
        return self.path / "empirical-epsilon.csv"

    @property
    def ledger(self) -> Path:
        """Return the path of the privacy ledger: each client's rounds and proved privacy loss."""
        return self.path / "ledger.csv"

    @property
    def exposure(self) -> Path:
        """Return the path of the exposure that clients measured before they sent."""
        return self.path / "exposure.csv"

    @property
    def geometry(self) -> Path:
        """Return the path of how well one gradient can match each recorded update."""
        return self.path / "geometry.csv"

    @property
    def report(self) -> Path:
        """Return the path of the report, one self-contained page."""
        return self.path / "report.html"

    @property
    def tensorboard(self) -> Path:
        """Return the folder of event files for TensorBoard, with a folder for each curve."""
        return self.path / "tensorboard"

    @property
    def checkpoint(self) -> Path:
        """Return the path of model and strategy after the last complete round."""
        return self.path / manifest.SEALED_FILE

    @property
    def log(self) -> Path:
        """Return the path of the log."""
        return self.path / "log.txt"

    @property
    def manifest(self) -> Path:
        """Return the path of the manifest, see `fedsim.recording.manifest`."""
        return self.path / manifest.MANIFEST_FILE

    @contextmanager
    def hold_lock(self) -> Iterator[None]:
        """Keep other processes from writing here; see `fedsim.federation.lock`.

        Raises:
            ConfigError: another process writes here, or the path is that of a file.
            RunError: the folder cannot be written, or see `check_kinds`.
        """
        if os.path.lexists(self.path) and not self.path.is_dir():
            raise ConfigError(f"{self.path}: is a file; choose another --out")
        with lock.lock_folder(self.path):
            self.check_kinds()
            yield

    def prepare(self, *, resume: bool, overwrite: bool) -> None:
        """Create the folder, or refuse one with another run; best called while it is `locked`.

        Raises:
            ConfigError: the folder holds a run and neither `resume` nor `overwrite` is set, or
                there is nothing to resume.
            RunError: the folder cannot be written.
        """
        if resume and not self.experiment.is_file():
            raise ConfigError(f"{self.path}: holds no run to resume; expected {self.experiment.name} in it")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not resume:
                self._clear(overwrite)
            remove_leftovers(self.path)
        except OSError as error:
            raise RunError(f"{self.path}: cannot be written ({error.strerror}); choose another --out") from error
        if not resume:
            manifest.start(self.path)

    def _clear(self, overwrite: bool) -> None:
        """Remove an earlier run, and no other files."""
        names = {entry.name for entry in os.scandir(self.path)} - {
            lock.NAME,
            manifest.LOCK_FILE,
            self.log.name,
        }
        if not names:
            return
        if not overwrite:
            raise ConfigError(
                f"{self.path}: is not empty; choose another --out, continue with --resume, or pass --overwrite"
            )
        if self.path.is_symlink():
            raise RunError(f"{self.path}: is a symbolic link, into which nothing is written; name the folder itself")
        if manifest.read(self.path) is None:  # the first file that fedsim writes
            raise ConfigError(f"{self.path}: is not a run folder, so --overwrite does not touch it")
        for path in list_files(self.path):
            if not is_run_file(path.relative_to(self.path).as_posix()):
                raise ConfigError(
                    f"{path}: is not of a run, so --overwrite does not touch the folder; move it elsewhere"
                )
        for name in sorted(
            names, key=lambda name: name == manifest.MANIFEST_FILE
        ):  # it marks a run folder, so it goes last
            path = self.path / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def check_kinds(self) -> None:
        """Check that all paths that fedsim reads or writes here are files and folders.

        Raises:
            RunError: a path is a link, through which other files would be overwritten, a pipe or a
                device, at which reading would wait for ever, or a folder that may not be read.
        """
        for path in list_files(self.path, {pattern.partition("/")[0] for pattern in _RUN_FILES}):
            if path.is_symlink():
                raise RunError(f"{path}: is a symbolic link, which fedsim does not follow in a run folder; remove it")
            if not path.is_file():
                raise RunError(f"{path}: is neither a file nor a folder; remove it")
        for name in _RUN_FILES:
            if (self.path / name).is_dir():
                raise RunError(f"{self.path / name}: is a folder, expected a file; remove it")

    def write_experiment(self, config: Config) -> None:
        """Save the resolved experiment and the versions that run it."""
        self._write_experiment(config)
        file = self.path / "versions.json"
        write_text(file, json.dumps(versions(), indent=2) + "\n")
        with manifest.edit_manifest(self.path) as noted:
            noted.seed = config.federation.seed
            noted.settings, noted.code = flat_settings(config), hash_experiment_code(config)
            noted.files[file.name] = hash_file(file)

    def read_experiment(self, *, trust: bool = False) -> Config | None:
        """Read the experiment that made this run; None for a recording made elsewhere.

        Args:
            trust: accept `module:callable`, which runs code that the author of the folder has
                chosen.

        Raises:
            ConfigError: it names such code and is not trusted, is invalid, is not the one that the
                run was made with, or used an object of another Python program.
        """
        if not os.path.lexists(self.experiment):
            return None
        if self.experiment.is_symlink() or not self.experiment.is_file():
            kind = "a symbolic link" if self.experiment.is_symlink() else "no file"
            raise ConfigError(f"{self.experiment}: is {kind}, so nobody knows what was run; remove it")
        config = validate_tables(Config, read_toml(self.experiment), str(self.experiment))
        check_trust(config, self.experiment, trust)
        self._check_rebuildable(config)
        self.check_same(config)
        self.check_code(config, REBUILT)
        if (noted := manifest.read(self.path)) is not None:
            config._data = noted.data
        return config

    def note_data(self, sha256: str) -> None:
        """Note the hash of the run's data, or compare it with the hash that was noted at the start.

        Raises:
            DataError: it is another one.
        """
        from fedsim.federation.federated_data import check_same_data  # imports torch

        noted = manifest.read(self.path)
        if noted is not None and noted.data:
            check_same_data(noted.data, sha256)
        else:
            with manifest.edit_manifest(self.path) as changed:
                changed.data = sha256

    def check_code(self, config: Config, parts: Collection[str] | None = None) -> None:
        """Raise ConfigError where the code of another package's plug-in changed since the run.

        Args:
            parts: tables whose plug-ins are checked, all by default.
        """
        noted = manifest.read(self.path)
        before: dict[str, str] = {}
        if noted is not None:
            before = {where: code for where, code in noted.code.items() if parts is None or where in parts}
        now = hash_experiment_code(config) if before else {}
        for where, digest in before.items():
            if now.get(where) != digest:
                raise ConfigError(
                    f"{self.experiment}: {where}: the code of the plug-in changed after the run "
                    "was made, so the run cannot be rebuilt; put the code back, or begin another "
                    "run"
                )

    def _check_rebuildable(self, config: Config) -> None:
        """Raise ConfigError where a part of the federation was another program's Python object."""
        parts = {name: getattr(config, name).name for name in ("data", "partition", "model", "strategy")}
        parts |= {f"defense.{number}": table.name for number, table in enumerate(config.defense)}
        for where, name in parts.items():
            if is_lost_object(name):
                raise ConfigError(
                    f"{self.experiment}: {where}: '{name}' was an object of the Python program "
                    "that made this run, so the run cannot be rebuilt from its file; what is "
                    "recorded, found and scored can be read"
                )

    def check_same(self, config: Config) -> None:
        """Raise ConfigError where settings changed since the run; see `find_changed_setting`."""
        if change := self.find_changed_setting(config):
            key, before, now = change
            raise ConfigError(
                f"{self.experiment}: {key}: the run was made with {before}, but now it says {now}; "
                "put it back, or begin another run"
            )

    def find_changed_setting(self, config: Config) -> tuple[str, str, str] | None:
        """Return the key of a setting that changed since the run, with its old and new value.

        Attacks, the launch of the run and the number of remaining rounds may change.
        """
        noted = manifest.read(self.path)
        if noted is None or noted.settings is None:
            return None
        for key, (before, now) in changed_settings(noted.settings, flat_settings(config)).items():
            if key == "federation.rounds" and now >= max(map(int, noted.rounds), default=0):
                continue
            if not key.startswith(MAY_CHANGE):
                return key, _format_setting(before), _format_setting(now)
        return None

    def check_key(self) -> None:
        """Raise ConfigError where the run is signed and there is no key, or the other way round."""
        if (noted := manifest.read(self.path)) is not None:
            manifest.check_key(self.path, noted)

    def check_resumable(self) -> None:
        """Raise RunError where a file that a run resumes from is not as the run wrote it."""
        if not self.manifest.is_file():
            return
        for path in (self.checkpoint, self.metrics, self.ledger, self.exposure):
            if path.is_file() and not manifest.matches_manifest(self.path, path):
                raise RunError(
                    f"{path}: is not what this run wrote, so going on from it would give another "
                    "run; put it back, or begin again with --overwrite"
                )

    def note(self, *paths: Path) -> None:
        """Note the present hashes of files of the run; see `fedsim.recording.manifest`."""
        manifest.note(self.path, *paths)

    def announce(self, path: Path, digest: str) -> None:
        """Note the hash that a file of the run is about to have."""
        manifest.announce(self.path, path, digest)

    def write_table(self, path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
        """Write a CSV file of the run in one step, and note it."""
        text = as_csv(columns, rows)
        self.announce(path, hashlib.sha256(text.encode()).hexdigest())
        write_text(path, text)

    def settle_manifest(self) -> None:
        """Drop old hashes of announced files from the manifest, now that the files are written."""
        with manifest.edit_manifest(self.path):
            pass

    def note_experiment(self, config: Config) -> None:
        """Note that the run continues with `config`."""
        settings = flat_settings(config)
        noted = manifest.read(self.path)
        if noted is not None and changed_settings(noted.settings or {}, settings):
            with manifest.edit_manifest(self.path) as changed:
                changed.seed, changed.settings = config.federation.seed, settings
        in_file = validate_tables(Config, read_toml(self.experiment), str(self.experiment))
        if changed_settings(flat_settings(in_file), settings):
            self._write_experiment(config)

    def _write_experiment(self, config: Config) -> None:
        tables = config.model_dump(mode="json", exclude_none=True)
        write_text(self.experiment, tomli_w.dumps({k: v for k, v in tables.items() if v != []}))


def default_folder(file: Path) -> RunFolder:
    """Return `runs/NAME` for the experiment file `NAME.toml`."""
    return RunFolder(Path("runs") / file.stem)


def _format_setting(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)


def is_run_file(name: str) -> bool:
    """Tell whether fedsim writes a file of this name into a run folder.

    >>> is_run_file("findings/sme/round-1.safetensors"), is_run_file("notes.txt")
    (True, False)
    """
    half_written = (".*.tmp", "*/.*.tmp", "*.tmp??????")
    return any(fnmatchcase(name, pattern) for pattern in (*half_written, *_RUN_FILES))


def list_files(folder: Path, only: set[str] | None = None) -> Iterator[Path]:
    """Yield all paths below `folder` that are no folders; links to folders count as files.

    Args:
        only: names at the top of `folder` to which the search is limited.

    Raises:
        RunError: a folder may not be read.
    """
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise RunError(f"{folder}: cannot be read ({error.strerror}); mend its permissions") from error
    for entry in entries:
        if only is not None and entry.name not in only:
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from list_files(Path(entry.path))
        else:
            yield Path(entry.path)


def as_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the text of a CSV file; missing values are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def read_rows(path: Path, texts: Iterable[str] = (), numbers: Iterable[str] = ()) -> list[dict[str, str]]:
    """Read the rows of a CSV file; none where there is no such file.

    Args:
        texts: columns that have to exist.
        numbers: columns that have to hold a number or nothing.

    Raises:
        RunError: it cannot be read, or such a column is wrong.
    """
    if not path.is_file():
        return []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        for line, row in enumerate(rows, 2):
            if missing := [name for name in texts if not isinstance(row.get(name), str)]:
                raise ValueError(f"line {line} lacks {missing[0]}")
            for name in numbers:
                float(row.get(name) or 0)
        return rows
    except (OSError, ValueError, csv.Error) as error:
        raise RunError(f"{path}: cannot be read ({error}); remove it, and attack or resume the run") from error


def read_metrics(folder: RunFolder) -> list[dict[str, str]]:
    """Read the rows of `metrics.csv`.

    Raises:
        RunError: they are not as a run writes them.
    """
    rows = read_rows(folder.metrics, ("round", "client"), ("accuracy", "loss", "num_examples", "seconds"))
    if invalid := [row["round"] for row in rows if not row["round"].isdecimal()]:
        raise RunError(f"{folder.metrics}: has a round {one_line(invalid[0])!r}; remove it, and resume the run")
    return rows


def read_refusals(folder: RunFolder) -> dict[str, str]:
    """Read `refused.csv`: by title, the sentence why an attack was not made.

    Raises:
        RunError: the rows are not as an audit writes them.
    """
    return {row["attack"]: row["why"] for row in read_rows(folder.refusals, ("attack", "why"))}


def read_ledger(folder: RunFolder) -> list[dict[str, str]]:
    """Read the rows of `ledger.csv`, none where no defense proves a guarantee.

    Raises:
        RunError: they are not as a run writes them.
    """
    from fedsim.privacy.ledger import (
        NUMERIC_COLUMNS,
    )  # imports torch, which would delay errors about the experiment file

    rows = read_rows(folder.ledger, ("round", "client", "defense", "counts", *NUMERIC_COLUMNS), NUMERIC_COLUMNS)
    _check_counts(folder.ledger, rows, ("round", "client", "counts"))
    return rows


def read_exposures(folder: RunFolder) -> list[dict[str, str]]:
    """Read the rows of `exposure.csv`, none where clients measure nothing.

    Raises:
        RunError: they are not as a run writes them.
    """
    from fedsim.exposure.of_clients import COLUMNS  # imports torch, likewise

    rows = read_rows(folder.exposure, COLUMNS, ("value",))
    _check_counts(folder.exposure, rows, ("round", "client"))
    return rows


def _check_counts(path: Path, rows: Iterable[Mapping[str, str]], columns: Sequence[str]) -> None:
    for row in rows:
        if invalid := [row[name] for name in columns if not row[name].isdecimal()]:
            raise RunError(f"{path}: has {one_line(invalid[0])!r} in place of a count; put the file back")
