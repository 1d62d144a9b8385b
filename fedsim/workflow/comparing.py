"""Runs that were made by hand, side by side: their settings, scores paired by victim, and accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from fedsim.errors import ConfigError, FedsimError, RunError
from fedsim.experiments.config import Config, check
from fedsim.experiments.reading import read_toml
from fedsim.experiments.run_folder import RunFolder, measurements
from fedsim.experiments.settings import settings_of
from fedsim.recording.finding_files import read_about
from fedsim.recording.manifest import is_noted
from fedsim.recording.transcript import the_run
from fedsim.reporting.comparison_page import Column, Pictures, write_comparison_page
from fedsim.reporting.differences import Difference, alone, differences, same_clients, unlike
from fedsim.reporting.evidence import scored
from fedsim.workflow.runs import Report

SERVER = "server"
UNKNOWN = "unknown"
"""Stands for each setting of a recording made elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the runs.

    Attributes:
        name: what tells it from the others, the last parts of its path.
        path: the run folder.
        settings: by `table.key`; None for a recording made elsewhere.
        scores: the rows of its `scores.csv`.
        quality: by round, what the server measured of the model: its accuracy, or its loss where that is all there is.
        measured: which of the two; empty where the server measured nothing.
    """

    name: str
    path: Path
    settings: Mapping[str, Any] | None
    scores: Sequence[Mapping[str, str]]
    quality: Mapping[int, float]
    measured: str


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs side by side; each is compared with the first.

    Attributes:
        sides: the runs that could be read.
        found: by the name of each run but the first, how its scores differ from the first one's.
        failures: a sentence for each run that could not be read.
    """

    sides: Sequence[Side]
    found: Mapping[str, Sequence[Difference]]
    failures: Sequence[str] = field(default=())

    @property
    def settings(self) -> pd.DataFrame:
        """The settings that are not the same in all runs that tell theirs: a row by `table.key`, a column a run."""
        names = [side.name for side in self.sides]
        return pd.DataFrame.from_dict(self.differing, orient="index", columns=names, dtype=object)

    @property
    def differing(self) -> Mapping[str, Sequence[Any]]:
        """The same by `table.key`, a value for each run: None if it is not set, `UNKNOWN` for a foreign recording."""
        known = [side.settings for side in self.sides if side.settings is not None]
        differ = [key for key in sorted(set().union(*known)) if any(one.get(key) != known[0].get(key) for one in known)]
        return {
            key: [UNKNOWN if side.settings is None else side.settings.get(key) for side in self.sides] for key in differ
        }

    @property
    def about_settings(self) -> list[str]:
        """Sentences beside `differing`: whose settings are not known, and whether all that are known are the same."""
        unknown = [side.name for side in self.sides if side.settings is None]
        told = [f"{name} was recorded elsewhere, so its settings are not known." for name in unknown]
        if len(self.sides) - len(unknown) > 1 and not self.differing:
            told.append("All other runs have the same settings." if unknown else "All settings are the same.")
        return told

    def alone(self, name: str) -> tuple[list[str], list[str]]:
        """The attacks that only the first run scored, and those that only the run `name` did."""
        return alone(self.sides[0].scores, self._side(name).scores)

    def unlike(self, name: str) -> list[str]:
        """Sentences: the attacks that the first run and the run `name` made in ways that are not compared."""
        return unlike(self.sides[0].scores, self._side(name).scores)

    def _side(self, name: str) -> Side:
        return next(side for side in self.sides if side.name == name)

    @property
    def scores(self) -> pd.DataFrame:
        """A row for each run but the first, attack and metric; means, and the difference with its interval."""
        return pd.DataFrame(
            [
                {
                    "run": name,
                    "attack": item.attack,
                    "metric": item.base.metric,
                    "first": item.first,
                    "value": item.value,
                    "difference": item.mean,
                    "low": item.low,
                    "high": item.high,
                    "count": item.count,
                    "unit": item.unit,
                    "paired": item.paired,
                    "verdict": item.verdict,
                    "remark": item.remark,
                }
                for name, found in self.found.items()
                for item in found
            ]
        )

    @property
    def quality(self) -> pd.DataFrame:
        """Accuracy, or loss, of the model by round: a row a round, a column a run."""
        return pd.DataFrame({side.name: pd.Series(side.quality, dtype=float) for side in self.sides}).sort_index()

    def report(self, path: str | Path) -> Report:
        """Write the comparison as one page, with pictures where the runs' reports drew some.

        Args:
            path: the file, such as `comparison.html`.

        Raises:
            RunError: the file cannot be written, or a picture cannot be read.
        """
        columns = [
            Column(name=side.name, quality=side.quality, measured=side.measured, pictures=_pictures(side.path))
            for side in self.sides
        ]
        written = write_comparison_page(
            Path(path),
            columns,
            (self.differing, self.about_settings),
            self.found,
            {name: (*self.alone(name), self.unlike(name)) for name in self.found},
            self.failures,
        )
        return Report(written, tuple(self.failures))


def compare(*runs: str | Path) -> Comparison:
    """Compare runs with the first of them, from what their folders hold; nothing is attacked.

    Args:
        runs: two run folders or more.

    Raises:
        ConfigError: fewer than two are named, one is named twice, or fewer than two can be read.
    """
    if len(runs) < 2:
        raise ConfigError(f"compare: expected two runs or more, got {len(runs)}")
    paths = [the_run(Path(run)) for run in runs]
    if twice := [path for place, path in enumerate(paths) if path.resolve() in {p.resolve() for p in paths[:place]}]:
        raise ConfigError(f"compare: {twice[0]} is named twice; name each run once")
    sides, failures = [], []
    for path, name in zip(paths, _names(paths), strict=True):
        try:
            sides.append(_side(path, name))
        except FedsimError as error:
            failures.append(f"not compared: {error}")
    if len(sides) < 2:
        raise ConfigError(f"compare: fewer than two of these runs can be read: {'; '.join(failures)}")
    first, *others = sides
    found = {
        other.name: differences(first.scores, other.scores, same_clients(first.settings, other.settings))
        for other in others
    }
    return Comparison(sides=sides, found=found, failures=failures)


def _side(path: Path, name: str) -> Side:
    folder = RunFolder(path)
    if not path.is_dir():
        raise ConfigError(f"{path}: no such run folder")
    if not folder.experiment.is_file() and not folder.transcript.is_dir():
        raise ConfigError(f"{path}: holds no run; expected {folder.experiment.name} or transcript/ in it")
    folder.check_kinds()
    for table in (folder.scores, folder.metrics):
        if table.is_file() and not is_noted(path, table):
            raise RunError(f"{table}: is not what this run wrote; `fedsim attack {path}` writes scores anew")
    measured, quality = _quality(folder)
    return Side(
        name=name, path=path, settings=_settings(folder), scores=scored(folder), quality=quality, measured=measured
    )


def _settings(folder: RunFolder) -> Mapping[str, Any] | None:
    """Of the run's file, which has to be what the run was made with; no code that it names is imported."""
    if not folder.experiment.is_file():
        return None
    config = check(Config, read_toml(folder.experiment), str(folder.experiment))
    folder.check_same(config)
    return settings_of(config)


def _quality(folder: RunFolder) -> tuple[str, dict[int, float]]:
    rows = [row for row in measurements(folder) if row["client"] == SERVER]
    for name in ("accuracy", "loss"):
        if found := {int(row["round"]): float(row[name]) for row in rows if row.get(name)}:
            return name, found
    return "", {}


def _names(paths: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as tell them apart."""
    parts = [path.resolve().parts for path in paths]
    longest = max(map(len, parts))
    for count in range(1, longest + 1):
        names = ["/".join(own[-count:]) for own in parts]
        if len(set(names)) == len(names):
            break
    return names


def _pictures(path: Path) -> Pictures:
    """By attack and update, the picture that the run's report drew of each finding that the run noted."""
    found: dict[str, dict[str, bytes]] = {}
    for file in sorted(RunFolder(path).findings.glob("*/*.safetensors")):
        picture = file.with_suffix(".png")
        if not picture.is_file() or not is_noted(path, file):
            continue
        about = read_about(file)
        update = f"round {about['round']}, client {about['victim']}" + f", start {about['repeat']}" * bool(
            about["repeat"]
        )
        try:
            found.setdefault(str(about["attack"]), {})[update] = picture.read_bytes()
        except OSError as error:
            raise RunError(
                f"{picture}: cannot be read ({error.strerror}); `fedsim report {path}` draws it again"
            ) from error
    return found
