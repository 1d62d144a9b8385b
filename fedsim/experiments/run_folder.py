"""A run is a folder; this module names the files in it, and writes, reads and checks them."""

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

from fedsim.errors import ConfigError, RunError, one_line
from fedsim.experiments import lock
from fedsim.experiments.config import Config, check
from fedsim.experiments.reading import read_toml
from fedsim.experiments.settings import MAY_CHANGE, REBUILT, code_of, differing, settings_of, versions
from fedsim.experiments.trust import check_trust
from fedsim.files import hash_file, remove_leftovers, write_text
from fedsim.plugins.objects import is_gone
from fedsim.recording import manifest

_MADE = (
    "experiment.toml", "versions.json", manifest.NAME, manifest.GUARD, lock.NAME, "log.txt", "metrics.csv",
    "ledger.csv", "exposure.csv", "exposure/exposure.csv", "exposure/*.png", "scores.csv", "image-scores.csv",
    "refused.csv", "empirical-epsilon.csv", "checkpoint.safetensors", "report.html", "geometry.csv",
    "geometry-ratios.png", "geometry-cosines.png", "transcript/round-*.safetensors", "messages/exchange-*.safetensors",
    "findings/*/*.safetensors", "findings/*/*.png", "tensorboard/*/events.out.tfevents.*",
    "states/*.safetensors", "states/manifest.json", "optima/*/client-*.safetensors", "deployment/*",
)  # fmt: skip
"""Every file that fedsim leaves in a run folder, besides half-written ones."""


@dataclass(frozen=True)
class RunFolder:
    """Where everything of one run is written."""

    path: Path

    @property
    def experiment(self) -> Path:
        """The resolved experiment file."""
        return self.path / "experiment.toml"

    @property
    def transcript(self) -> Path:
        """What the curious server recorded; the folder itself where an app recorded its rounds directly in it."""
        inner = self.path / "transcript"
        return self.path if not inner.is_dir() and any(self.path.glob("round-*.safetensors")) else inner

    @property
    def findings(self) -> Path:
        """What the attacks claim, one safetensors file each."""
        return self.path / "findings"

    @property
    def scores(self) -> Path:
        """One tidy row per attack, victim, round, repeat and metric."""
        return self.path / "scores.csv"

    @property
    def images(self) -> Path:
        """The same for every single image."""
        return self.path / "image-scores.csv"

    @property
    def refused(self) -> Path:
        """Attacks that an attack file names and that could not be made, each with the reason."""
        return self.path / "refused.csv"

    @property
    def states(self) -> Path:
        """Trained models that the experiment wants kept."""
        return self.path / "states"

    @property
    def optima(self) -> Path:
        """Each client's optimal local model, once the evaluator needed it."""
        return self.path / "optima"

    @property
    def metrics(self) -> Path:
        """Accuracy and loss per round, of the server and of each client."""
        return self.path / "metrics.csv"

    @property
    def epsilons(self) -> Path:
        """Proved and measured epsilon of each client with canaries, and each defense that they measure."""
        return self.path / "empirical-epsilon.csv"

    @property
    def ledger(self) -> Path:
        """What each client did in each round, and the privacy loss that is proved of it so far."""
        return self.path / "ledger.csv"

    @property
    def exposure(self) -> Path:
        """How exposed each client measured itself to be before it sent; no message says so."""
        return self.path / "exposure.csv"

    @property
    def geometry(self) -> Path:
        """How well one gradient can match each recorded update."""
        return self.path / "geometry.csv"

    @property
    def report(self) -> Path:
        """One self-contained page."""
        return self.path / "report.html"

    @property
    def tensorboard(self) -> Path:
        """Event files for TensorBoard, a folder for each curve, where the experiment wants them."""
        return self.path / "tensorboard"

    @property
    def checkpoint(self) -> Path:
        """The global model and the strategy's state after the last complete round."""
        return self.path / manifest.SEALED

    @property
    def log(self) -> Path:
        """What the program said."""
        return self.path / "log.txt"

    @property
    def manifest(self) -> Path:
        """What the run is made of; see `fedsim.recording.manifest`."""
        return self.path / manifest.NAME

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes from writing here; see `fedsim.experiments.lock`.

        Raises:
            ConfigError: another process writes here, or the path is that of a file.
            RunError: the folder cannot be written, or see `check_kinds`.
        """
        if os.path.lexists(self.path) and not self.path.is_dir():
            raise ConfigError(f"{self.path}: is a file; choose another --out")
        with lock.held(self.path):
            self.check_kinds()
            yield

    def prepare(self, *, resume: bool, overwrite: bool) -> None:
        """Make the folder, or refuse one that holds another run; best called while it is `held`.

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
        """Remove an earlier run, and nothing else."""
        names = {entry.name for entry in os.scandir(self.path)} - {lock.NAME, manifest.GUARD, self.log.name}
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
        for path in files_below(self.path):
            if not is_made(path.relative_to(self.path).as_posix()):
                raise ConfigError(
                    f"{path}: is not of a run, so --overwrite does not touch the folder; move it elsewhere"
                )
        for name in sorted(names, key=lambda name: name == manifest.NAME):  # it marks a run folder, so it goes last
            path = self.path / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def check_kinds(self) -> None:
        """Make sure that what fedsim reads or writes here are files and folders.

        Raises:
            RunError: something is a link, through which other files would be overwritten, a pipe or a device, at which
                reading would wait for ever, or a folder that may not be read.
        """
        for path in files_below(self.path, {pattern.partition("/")[0] for pattern in _MADE}):
            if path.is_symlink():
                raise RunError(f"{path}: is a symbolic link, which fedsim does not follow in a run folder; remove it")
            if not path.is_file():
                raise RunError(f"{path}: is neither a file nor a folder; remove it")
        for name in _MADE:
            if (self.path / name).is_dir():
                raise RunError(f"{self.path / name}: is a folder, expected a file; remove it")

    def write_experiment(self, config: Config) -> None:
        """Save the resolved experiment and the versions that run it."""
        self._write_experiment(config)
        file = self.path / "versions.json"
        write_text(file, json.dumps(versions(), indent=2) + "\n")
        with manifest.changing(self.path) as noted:
            noted.seed = config.federation.seed
            noted.settings, noted.code = settings_of(config), code_of(config)
            noted.files[file.name] = hash_file(file)

    def read_experiment(self, *, trust: bool = False) -> Config | None:
        """The experiment that made this run, or None for a recording made elsewhere.

        Args:
            trust: accept `module:callable`, which runs code that the author of the folder has chosen.

        Raises:
            ConfigError: it names such code and is not trusted, does not hold, is not what the run was made with, or
                was made with an object of another Python program.
        """
        if not os.path.lexists(self.experiment):
            return None
        if self.experiment.is_symlink() or not self.experiment.is_file():
            kind = "a symbolic link" if self.experiment.is_symlink() else "no file"
            raise ConfigError(f"{self.experiment}: is {kind}, so nobody knows what was run; remove it")
        config = check(Config, read_toml(self.experiment), str(self.experiment))
        check_trust(config, self.experiment, trust)
        self._check_rebuildable(config)
        self.check_same(config)
        self.check_code(config, REBUILT)
        if (noted := manifest.read(self.path)) is not None:
            config._data = noted.data
        return config

    def note_data(self, sha256: str) -> None:
        """Note the hash of the data that the run is made with, or hold it against what was noted when it was begun.

        Raises:
            DataError: it is another one.
        """
        from fedsim.experiments.federated_data import check_same_data  # which takes torch

        noted = manifest.read(self.path)
        if noted is not None and noted.data:
            check_same_data(noted.data, sha256)
        else:
            with manifest.changing(self.path) as changed:
                changed.data = sha256

    def check_code(self, config: Config, parts: Collection[str] | None = None) -> None:
        """Raise ConfigError where the code of a plug-in of another package is not that with which the run was made.

        Args:
            parts: which tables to look at, all by default.
        """
        noted = manifest.read(self.path)
        before = {} if noted is None else {k: v for k, v in noted.code.items() if parts is None or k in parts}
        now = code_of(config) if before else {}
        for where, digest in before.items():
            if now.get(where) != digest:
                raise ConfigError(
                    f"{self.experiment}: {where}: the code of the plug-in changed after the run was made, so the run "
                    "cannot be rebuilt; put the code back, or begin another run"
                )

    def _check_rebuildable(self, config: Config) -> None:
        """Raise ConfigError where a part of the federation was an object of a Python program, and not of this one."""
        parts = {name: getattr(config, name).name for name in ("data", "partition", "model", "strategy")}
        parts |= {f"defense.{place}": table.name for place, table in enumerate(config.defense)}
        for where, name in parts.items():
            if is_gone(name):
                raise ConfigError(
                    f"{self.experiment}: {where}: '{name}' was an object of the Python program that made this run, so "
                    "the run cannot be rebuilt from its file; what is recorded, found and scored can be read"
                )

    def check_same(self, config: Config) -> None:
        """Raise ConfigError where the run was made with other settings than `config` has; see `other_setting`."""
        if other := self.other_setting(config):
            key, before, now = other
            raise ConfigError(
                f"{self.experiment}: {key}: the run was made with {before}, but now it says {now}; "
                "put it back, or begin another run"
            )

    def other_setting(self, config: Config) -> tuple[str, str, str] | None:
        """A setting of `config` with which the run was not made: its key, what it was, and what it is in `config`.

        Who attacks, how the run is launched and how many rounds are still to come may be changed.
        """
        noted = manifest.read(self.path)
        if noted is None or noted.settings is None:
            return None
        for key, (before, now) in differing(noted.settings, settings_of(config)).items():
            if key == "federation.rounds" and now >= max(map(int, noted.rounds), default=0):
                continue
            if not key.startswith(MAY_CHANGE):
                return key, _told(before), _told(now)
        return None

    def check_key(self) -> None:
        """Raise ConfigError where the run is signed and there is no key to sign it again, or the other way round."""
        if (noted := manifest.read(self.path)) is not None:
            manifest.check_key(self.path, noted)

    def check_resumable(self) -> None:
        """Raise RunError where what a run resumes from is not what it wrote last."""
        if not self.manifest.is_file():
            return
        for path in (self.checkpoint, self.metrics, self.ledger, self.exposure):
            if path.is_file() and not manifest.is_noted(self.path, path):
                raise RunError(
                    f"{path}: is not what this run wrote, so going on from it would give another run; "
                    "put it back, or begin again with --overwrite"
                )

    def note(self, *paths: Path) -> None:
        """Note what these files of the run are now; see `fedsim.recording.manifest`."""
        manifest.note(self.path, *paths)

    def announce(self, path: Path, digest: str) -> None:
        """Note the hash that a file of the run is about to have."""
        manifest.announce(self.path, path, digest)

    def write_table(self, path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
        """Write a CSV file of the run in one step, and note it."""
        text = as_csv(columns, rows)
        self.announce(path, hashlib.sha256(text.encode()).hexdigest())
        write_text(path, text)

    def settle(self) -> None:
        """Of what was announced and has been written, let the manifest forget what was there before."""
        with manifest.changing(self.path):
            pass

    def note_experiment(self, config: Config) -> None:
        """Note that the run goes on with `config`."""
        noted = manifest.read(self.path)
        if noted is not None and differing(noted.settings or {}, settings_of(config)):
            with manifest.changing(self.path) as changed:
                changed.seed, changed.settings = config.federation.seed, settings_of(config)
        if differing(settings_of(check(Config, read_toml(self.experiment), str(self.experiment))), settings_of(config)):
            self._write_experiment(config)

    def _write_experiment(self, config: Config) -> None:
        tables = config.model_dump(mode="json", exclude_none=True)
        write_text(self.experiment, tomli_w.dumps({k: v for k, v in tables.items() if v != []}))


def default_folder(file: Path) -> RunFolder:
    """`runs/NAME` for the experiment file `NAME.toml`."""
    return RunFolder(Path("runs") / file.stem)


def _told(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)


def is_made(name: str) -> bool:
    """Whether fedsim writes a file of this name into a run folder."""
    half_written = fnmatchcase(name, ".*.tmp") or fnmatchcase(name, "*/.*.tmp") or fnmatchcase(name, "*.tmp??????")
    return half_written or any(fnmatchcase(name, pattern) for pattern in _MADE)


def files_below(folder: Path, only: set[str] | None = None) -> Iterator[Path]:
    """Everything below `folder` that is no folder, links to folders too; at its top, `only` what has these names.

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
            yield from files_below(Path(entry.path))
        else:
            yield Path(entry.path)


def as_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """The text of a CSV file; missing values are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def read_rows(path: Path, texts: Iterable[str] = (), numbers: Iterable[str] = ()) -> list[dict[str, str]]:
    """The rows of a CSV file; none where there is no such file.

    Args:
        texts: columns that have to be there.
        numbers: columns that have to hold a number or nothing.

    Raises:
        RunError: it cannot be read, or does not hold that.
    """
    if not path.is_file():
        return []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        for place, row in enumerate(rows, 2):
            if missing := [name for name in texts if not isinstance(row.get(name), str)]:
                raise ValueError(f"line {place} lacks {missing[0]}")
            for name in numbers:
                float(row.get(name) or 0)
        return rows
    except (OSError, ValueError, csv.Error) as error:
        raise RunError(f"{path}: cannot be read ({error}); remove it, and attack or resume the run") from error


def measurements(folder: RunFolder) -> list[dict[str, str]]:
    """The rows of `metrics.csv`.

    Raises:
        RunError: they are not such as a run writes.
    """
    rows = read_rows(folder.metrics, ("round", "client"), ("accuracy", "loss", "num_examples", "seconds"))
    if odd := [row["round"] for row in rows if not row["round"].isdecimal()]:
        raise RunError(f"{folder.metrics}: has a round {one_line(odd[0])!r}; remove it, and resume the run")
    return rows


def refusals(folder: RunFolder) -> dict[str, str]:
    """The rows of `refused.csv`: by title, the sentence why an attack was not made.

    Raises:
        RunError: they are not such as an audit writes.
    """
    return {row["attack"]: row["why"] for row in read_rows(folder.refused, ("attack", "why"))}


def spendings(folder: RunFolder) -> list[dict[str, str]]:
    """The rows of `ledger.csv`, none where no defense proves anything.

    Raises:
        RunError: they are not such as a run writes.
    """
    from fedsim.privacy.ledger import NUMBERS  # with torch, which nobody shall wait for who made a mistake in a file

    rows = read_rows(folder.ledger, ("round", "client", "defense", "counts", *NUMBERS), NUMBERS)
    for row in rows:
        if odd := [row[name] for name in ("round", "client", "counts") if not row[name].isdecimal()]:
            raise RunError(f"{folder.ledger}: has {one_line(odd[0])!r} in place of a count; put the file back")
    return rows


def exposures(folder: RunFolder) -> list[dict[str, str]]:
    """The rows of `exposure.csv`, none where clients measure nothing.

    Raises:
        RunError: they are not such as a run writes.
    """
    from fedsim.exposure.of_clients import COLUMNS  # with torch, likewise

    rows = read_rows(folder.exposure, COLUMNS, ("value",))
    for row in rows:
        if odd := [row[name] for name in ("round", "client") if not row[name].isdecimal()]:
            raise RunError(f"{folder.exposure}: has {one_line(odd[0])!r} in place of a count; put the file back")
    return rows
