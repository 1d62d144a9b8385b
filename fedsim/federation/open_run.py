"""A run folder that a command has opened: what is in it is read and verified once, and handed down."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import tomli_w

from fedsim.base.errors import ConfigError, FedsimError, InstallationError, RunError
from fedsim.base.files import remove_leftovers, write_bytes, write_text
from fedsim.federation import lock
from fedsim.federation.config import Config
from fedsim.federation.experiment_file import read_toml
from fedsim.federation.run_folder import RunFolder, as_csv, is_run_file, list_files
from fedsim.federation.settings import (
    MAY_CHANGE,
    REBUILT,
    changed_settings,
    flat_settings,
    hash_experiment_code,
    versions,
)
from fedsim.federation.table_validation import validate_tables
from fedsim.federation.trust import check_trust
from fedsim.plugins.inline import is_lost_object
from fedsim.recording.manifest import LOCK_FILE, MANIFEST_FILE, ManifestFile

if TYPE_CHECKING:
    from fedsim.federation.experiment import Experiment
    from fedsim.federation.update_recipes import UpdateRecipes
    from fedsim.recording.header import Reply
    from fedsim.recording.payloads import State
    from fedsim.recording.transcript import Transcript


_VERSIONS_FILE = "versions.json"
_FIRST_FILES = (
    MANIFEST_FILE, _VERSIONS_FILE, f".{MANIFEST_FILE}.*.tmp", f".{_VERSIONS_FILE}.*.tmp", ".experiment.toml.*.tmp",
)  # fmt: skip
"""Patterns of what is in a run folder before its experiment is; a process killed there leaves nothing to resume."""


class OpenRun(RunFolder):
    """Run folder as one command sees it: manifest, settings and recording are read once.

    A command makes one, holds its lock if it writes, and hands it down. All that the command writes
    is noted through `manifest`, which is safe beside other processes that write there.
    """

    is_trusted: ClassVar[bool] = False
    """Whether code that the experiment names may run, to compute updates recorded by recipe."""

    @cached_property
    def manifest(self) -> ManifestFile:
        """Return the manifest, with the hashes of all that the run wrote."""
        return ManifestFile(self.path)

    @cached_property
    def config(self) -> Config:
        """Return the settings in the experiment file, which `read_experiment` checks as well."""
        return validate_tables(Config, read_toml(self.experiment), str(self.experiment))

    @cached_property
    def recording(self) -> Transcript:
        """Return the recorded messages, whose headers are read once."""
        from fedsim.recording.transcript import Transcript  # imports torch

        return Transcript(self.path, source=self.compute_update)

    def build_experiment(self, config: Config) -> Experiment:
        """Return the experiment that `config` describes, with data and network that were built here before."""
        from fedsim.federation.experiment import Experiment  # imports torch

        experiment = Experiment(config, vars(self).get("_last_experiment"))
        vars(self)["_last_experiment"] = experiment
        return experiment

    def compute_update(self, number: int, reply: Reply) -> State:
        """Return the arrays of an update that was recorded by recipe, computed again.

        Raises:
            TrustError: the experiment names code, and was not read with trust.
            FedsimError: they cannot be computed here, see `UpdateRecipes.compute_update`.
        """
        return self._update_recipes.compute_update(number, reply)

    @cached_property
    def _update_recipes(self) -> UpdateRecipes:
        try:
            from fedsim.federation.update_recipes import UpdateRecipes  # imports Flower
        except ImportError as error:
            raise InstallationError(
                f"updates recorded by recipe are computed again by Flower's clients ({error}); "
                "pip install 'fedsim-curious[federation]'"
            ) from error

        return UpdateRecipes(self)

    def trust_code(self) -> None:
        """Let updates be computed with whatever code the experiment names."""
        vars(self)["is_trusted"] = True

    def expire(self) -> None:
        """Have everything read again when it is asked for, because somebody else may have written."""
        self.manifest.expire()
        for name in ("config", "recording", "_update_recipes"):
            vars(self).pop(name, None)

    @contextmanager
    def hold_lock(self) -> Iterator[None]:
        """Keep all others from writing here, see `fedsim.federation.lock`."""
        if os.path.lexists(self.path) and not self.path.is_dir():
            raise ConfigError(f"{self.path}: is a file; choose another --out")
        try:
            os.fsencode(self.path).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{self.path}: its name is no UTF-8 text, and recordings (safetensors) have no files of other names; "
                "rename the folder"
            ) from error
        with lock.lock_folder(self.path, self) as is_new:
            self.check_kinds()
            if is_new:
                self.expire()
                self._remove_leftovers()
            yield

    def _remove_leftovers(self) -> None:
        """Remove what killed processes left half-written, while the folder is locked.

        An app of somebody else records without the lock, so what may be its own stays.
        """
        folders = [path for path in self.findings.glob("*") if path.is_dir()]
        if self.experiment.is_file() or self.app.is_file():
            folders += [self.path, self.transcript]
        for folder in folders:
            with suppress(OSError):  # they disturb nobody
                remove_leftovers(folder)

    def prepare(self, *, resume: bool, overwrite: bool) -> None:
        """Create the folder, or refuse one with another run; best called while it is locked.

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
            self.expire()
            self.manifest.start()

    def _clear(self, overwrite: bool) -> None:
        """Remove an earlier run, and no other files."""
        names = {entry.name for entry in os.scandir(self.path)} - {lock.NAME, LOCK_FILE, self.log.name}
        if not names:
            return
        was_begun = not self._holds_first_files(names)
        if was_begun and not overwrite:
            resume = ", continue with --resume," if self.experiment.is_file() else ""
            raise ConfigError(f"{self.path}: is not empty; choose another --out{resume} or pass --overwrite")
        if self.path.is_symlink():
            raise RunError(f"{self.path}: is a symbolic link, into which nothing is written; name the folder itself")
        if was_begun and self.manifest.contents is None:  # the first file that fedsim writes
            raise ConfigError(f"{self.path}: is not a run folder, so --overwrite does not touch it")
        for path in list_files(self.path):
            if not is_run_file(path.relative_to(self.path).as_posix()):
                raise ConfigError(
                    f"{path}: is not of a run, so --overwrite does not touch the folder; move it elsewhere"
                )
        for name in sorted(names, key=lambda name: name == MANIFEST_FILE):  # it marks a run folder, so it goes last
            path = self.path / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _holds_first_files(self, names: Iterable[str]) -> bool:
        """Return whether these are all files of a run that was killed before its experiment was written."""
        if not all(any(fnmatchcase(name, pattern) for pattern in _FIRST_FILES) for name in names):
            return False
        try:
            noted = self.manifest.contents
        except FedsimError:  # of somebody else
            return False
        if noted is None:  # it is written before all others
            return all(name.startswith(f".{MANIFEST_FILE}.") for name in names)
        return not noted.rounds and noted.files.keys() <= {_VERSIONS_FILE}

    def write_experiment(self, config: Config) -> None:
        """Save the resolved experiment and the versions that run it.

        The experiment is written last, because a folder that holds one can be resumed.
        """
        content = (json.dumps(versions(), indent=2) + "\n").encode()
        with self.manifest.edit() as noted:
            noted.seed = config.federation.seed
            noted.settings, noted.code = flat_settings(config), hash_experiment_code(config)
            noted.files[_VERSIONS_FILE] = hashlib.sha256(content).hexdigest()
        write_bytes(self.path / _VERSIONS_FILE, content)
        self._write_settings(config)

    def read_experiment(self, *, trust: bool = False) -> Config | None:
        """Return the experiment that made this run; None for a recording made elsewhere.

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
            raise ConfigError(f"{self.experiment}: is {kind}, so it is unknown what was run; remove it")
        config = self.config
        check_trust(config, self.experiment, trust)
        if trust:
            self.trust_code()
        self._check_rebuildable(config)
        self.check_same(config)
        self.check_code(config, REBUILT)
        if (noted := self.manifest.contents) is not None:
            config._data = noted.data
        return config

    def note_experiment(self, config: Config) -> None:
        """Note that the run continues with `config`."""
        settings = flat_settings(config)
        noted = self.manifest.contents
        if noted is not None and changed_settings(noted.settings or {}, settings):
            with self.manifest.edit() as changed:
                changed.seed, changed.settings = config.federation.seed, settings
        if changed_settings(flat_settings(self.config), settings):
            self._write_settings(config)

    def _write_settings(self, config: Config) -> None:
        tables = config.model_dump(mode="json", exclude_none=True)
        write_text(self.experiment, tomli_w.dumps({k: v for k, v in tables.items() if v != []}))
        vars(self).pop("config", None)

    def note_data(self, sha256: str) -> None:
        """Note the hash of the run's data, or compare it with the hash that was noted at the start."""
        from fedsim.federation.federated_data import check_same_data  # imports torch

        noted = self.manifest.contents
        if noted is not None and noted.data:
            check_same_data(noted.data, sha256)
        else:
            with self.manifest.edit() as changed:
                changed.data = sha256

    def check_code(self, config: Config, parts: Collection[str] | None = None) -> None:
        """Raise ConfigError where the code of another package's plug-in changed since the run.

        Args:
            parts: tables whose plug-ins are checked, all by default.
        """
        noted = self.manifest.contents
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
        for where, (group, name) in config.plugins.items():
            if group != "measures" and is_lost_object(name):
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
        noted = self.manifest.contents
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
        if (noted := self.manifest.contents) is not None:
            self.manifest.check_key(noted)

    def check_resumable(self) -> None:
        """Raise RunError where a file that a run resumes from is not as the run wrote it."""
        if not self.manifest.path.is_file():
            return
        for path in (self.checkpoint, self.metrics, self.ledger, self.exposure):
            if path.is_file() and not self.manifest.vouches_for(path):
                raise RunError(
                    f"{path}: is not what this run wrote, so going on from it would give another "
                    "run; put it back, or begin again with --overwrite"
                )

    def write_table(
        self, path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]], *, settle: bool = True
    ) -> None:
        """Write a CSV file of the run in one step, and note it.

        Args:
            settle: the table that was there before is of the run no longer. Who writes a table many
                times saves time without it, and calls `settle_manifest` at the end.
        """
        text = as_csv(columns, rows)
        self.manifest.announce(path, hashlib.sha256(text.encode()).hexdigest())
        write_text(path, text)
        if settle:
            self.settle_manifest()

    def settle_manifest(self) -> None:
        """Drop the hashes that announced files had before from the manifest."""
        if (noted := self.manifest.contents) is not None and noted.replaced:
            with self.manifest.edit():
                pass


def _format_setting(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)
