"""A run is a folder; this names what lies where."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import tomli_w

from fedsim.config import Config, check, read_toml
from fedsim.errors import ConfigError, RunError
from fedsim.files import in_one_step, remove_leftovers

_VERSIONED = ("fedsim-curious", "torch", "flwr", "ray", "safetensors", "torchmetrics", "numpy", "scipy")


_INFLUENCES = ("data", "partition", "model", "training", "federation", "strategy", "defense", "states")
"""The tables of an experiment that a training follows from."""


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
        """What the curious server recorded."""
        return self.path / "transcript"

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
    def report(self) -> Path:
        """One self-contained page."""
        return self.path / "report.html"

    @property
    def checkpoint(self) -> Path:
        """The global model and the strategy's state after the last complete round."""
        return self.path / "checkpoint.safetensors"

    @property
    def log(self) -> Path:
        """What the program said."""
        return self.path / "log.txt"

    def prepare(self, *, resume: bool, overwrite: bool) -> None:
        """Make the folder, or refuse one that holds another run.

        Raises:
            ConfigError: the folder holds a run and neither `resume` nor `overwrite` is set, or
                there is nothing to resume.
            RunError: the folder cannot be written.
        """
        used = False
        if resume:
            if not self.experiment.is_file():
                raise ConfigError(f"{self.path}: holds no run to resume; expected {self.experiment.name} in it")
        elif self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path}: is a file; choose another --out")
        elif used := self.path.exists() and any(self.path.iterdir()):
            if not overwrite:
                raise ConfigError(
                    f"{self.path}: is not empty; choose another --out, continue with --resume, or pass --overwrite"
                )
            if not (self.experiment.is_file() or self.transcript.is_dir()):
                raise ConfigError(f"{self.path}: is not a run folder, so --overwrite does not touch it")
        try:
            if used:
                shutil.rmtree(self.path)
            self.path.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.path)
        except OSError as error:
            reason = error.strerror or error
            raise RunError(f"{self.path}: cannot be written ({reason}); choose another --out") from error

    def write_experiment(self, config: Config) -> None:
        """Save the resolved experiment and the versions that run it."""
        tables = config.model_dump(mode="json", exclude_none=True)
        write_text(self.experiment, tomli_w.dumps({k: v for k, v in tables.items() if v != []}))
        write_text(self.path / "versions.json", json.dumps(_versions(), indent=2) + "\n")

    def read_experiment(self) -> Config | None:
        """The experiment that made this run, or None for a recording made elsewhere."""
        if not self.experiment.is_file():
            return None
        return check(Config, read_toml(self.experiment), str(self.experiment))


def made_with(config: Config) -> dict[str, Any]:
    """What the states of a training follow from: the settings that have an influence on them, and the versions."""
    launch = {"engine", "timeout", "actors", "address", "gpus_per_actor", "supernodes", "port", "evaluate_every"}
    tables = config.model_dump(mode="json", exclude_none=True, exclude={"federation": launch})
    tables = {key: tables[key] for key in _INFLUENCES}
    tables["states"].pop("epochs", None)  # more of them leave those before as they are
    return {"experiment": tables, "versions": _versions()}


def _versions() -> dict[str, str]:
    return {name: _version(name) for name in _VERSIONED}


def write_text(path: Path, text: str) -> None:
    """Write a whole file in one step.

    Raises:
        RunError: the disk is full or the folder cannot be written.
    """
    try:
        with in_one_step(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); make room and try again") from error


def write_rows(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a CSV file in one step; missing values are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file; none where there is no such file."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
