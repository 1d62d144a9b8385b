"""Comparison of runs that were made by hand: their settings, scores paired by victim, and accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim.api.runs import Report
from fedsim.audit.finding_files import read_facts
from fedsim.base.errors import ConfigError, FedsimError, RunError, name_rounds
from fedsim.federation.open_run import OpenRun
from fedsim.federation.run_folder import RunFolder, is_of_shared_model, read_metrics
from fedsim.federation.settings import flat_settings, flatten_tables
from fedsim.plugins.code_hashes import UNREADABLE
from fedsim.recording.recording_folder import find_run
from fedsim.report.attack_traits import read_scores
from fedsim.report.comparison_page import Pictures, RunColumn, write_comparison_page
from fedsim.report.differences import (
    Difference,
    differences,
    explain_other_clients,
    incomparable_attacks,
    unshared_attacks,
)

if TYPE_CHECKING:
    import pandas as pd  # at run time where a frame is made, as it takes a third of a second

SERVER = "server"
UNKNOWN = "unknown"
"""Stands for each setting of a recording made elsewhere."""


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """Run that is compared.

    Attributes:
        name: what distinguishes it from the others, the last parts of its path.
        folder: the run folder.
        settings: by `table.key`; None for a recording made elsewhere.
        code: by name of a plug-in of another package, hashes of the code that it had in the run.
        scores: the rows of its `scores.csv`.
        quality: by round, what the server measured of the model: its accuracy, or its loss where that is all there is.
        measured: which of the two, and whether of models that clients have of their own; empty where nothing was
            measured.
    """

    name: str
    folder: OpenRun
    settings: Mapping[str, Any] | None
    code: Mapping[str, frozenset[str]]
    scores: Sequence[Mapping[str, str]]
    quality: Mapping[int, float]
    measured: str


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs side by side, each compared with the first.

    Attributes:
        sides: the runs that could be read.
        found: by the name of each run but the first, how its scores differ from the first one's.
        failures: a sentence for each run that could not be read.
    """

    sides: Sequence[ComparedRun]
    found: Mapping[str, Sequence[Difference]]
    failures: Sequence[str] = field(default=())

    def __repr__(self) -> str:
        return f"Comparison({', '.join(repr(side.name) for side in self.sides)})"

    @property
    def settings(self) -> pd.DataFrame:
        """Settings that are not the same in all runs, a row by `table.key` and a column for each run.

        Runs whose settings are not known do not count.
        """
        import pandas as pd

        names = [side.name for side in self.sides]
        return pd.DataFrame.from_dict(self.differing_settings, orient="index", columns=names, dtype=object)

    @property
    def differing_settings(self) -> Mapping[str, Sequence[Any]]:
        """Settings as in `settings`, as lists by `table.key`.

        A value is None where the run does not set it, and `UNKNOWN` for a recording made elsewhere.
        """
        flat = [None if side.settings is None else flatten_tables(side.settings) for side in self.sides]
        known = [settings for settings in flat if settings is not None]
        differing = {}
        for key in sorted(set().union(*known)):
            if any(settings.get(key) != known[0].get(key) for settings in known):
                differing[key] = [UNKNOWN if settings is None else settings.get(key) for settings in flat]
        return differing

    @property
    def about_settings(self) -> list[str]:
        """Sentences on `differing_settings` and on code.

        They say whose settings are not known, whether all that are known are the same, and which plug-ins of the same
        name have other code than in the first run.
        """
        unknown = [side.name for side in self.sides if side.settings is None]
        sentences = [f"{name} was recorded elsewhere, so its settings are not known." for name in unknown]
        if len(self.sides) - len(unknown) > 1 and not self.differing_settings:
            sentences.append("All other runs have the same settings." if unknown else "All settings are the same.")
        first, *others = self.sides
        for side in others:
            for name in sorted(first.code.keys() & side.code.keys()):
                if first.code[name] != side.code[name] or UNREADABLE in side.code[name]:
                    known = "may not be" if UNREADABLE in first.code[name] | side.code[name] else "is not"
                    sentences.append(f"The code of {name} {known} the same in {side.name} as in {first.name}.")
        return sentences

    def unshared_attacks(self, name: str) -> tuple[list[str], list[str]]:
        """Return the attacks that only the first run scored, and those that only the run `name` did."""
        return unshared_attacks(self.sides[0].scores, self._side(name).scores)

    def incomparable_attacks(self, name: str) -> list[str]:
        """Return sentences on the attacks that the first run and the run `name` made in ways that are not compared."""
        return incomparable_attacks(self.sides[0].scores, self._side(name).scores)

    def _side(self, name: str) -> ComparedRun:
        return next(side for side in self.sides if side.name == name)

    @property
    def scores(self) -> pd.DataFrame:
        """Row for each run but the first, attack and metric; means, and the difference with its interval."""
        import pandas as pd

        rows = []
        for name, run_differences in self.found.items():
            for item in run_differences:
                rows.append(
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
                )
        return pd.DataFrame(rows)

    @property
    def quality(self) -> pd.DataFrame:
        """Accuracy, or loss, of the model: a row for each round, a column for each run."""
        import pandas as pd

        return pd.DataFrame({side.name: pd.Series(side.quality, dtype=float) for side in self.sides}).sort_index()

    def report(self, path: str | Path) -> Report:
        """Write the comparison as one page, with pictures where the runs' reports drew some.

        Args:
            path: the file, such as `comparison.html`.

        Raises:
            RunError: the file cannot be written, or a picture cannot be read.
        """
        columns = [
            RunColumn(name=side.name, quality=side.quality, measured=side.measured, pictures=_pictures(side.folder))
            for side in self.sides
        ]
        written = write_comparison_page(
            Path(path),
            columns,
            (self.differing_settings, self.about_settings),
            self.found,
            {name: (*self.unshared_attacks(name), self.incomparable_attacks(name)) for name in self.found},
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
    paths = [find_run(Path(run)) for run in runs]
    seen = set[Path]()
    for path in paths:
        if path.resolve() in seen:
            raise ConfigError(f"compare: {path} is named twice; name each run once")
        seen.add(path.resolve())
    sides, failures = [], []
    for path, name in zip(paths, _names(paths), strict=True):
        try:
            sides.append(_read_run(path, name))
        except FedsimError as error:
            failures.append(f"not compared: {error}")
    if len(sides) < 2:
        raise ConfigError(f"compare: fewer than two of these runs can be read: {'; '.join(failures)}")
    first, *further_runs = sides
    score_differences = {}
    for compared in further_runs:
        why_not_paired = explain_other_clients(first.settings, compared.settings)
        score_differences[compared.name] = differences(first.scores, compared.scores, why_not_paired)
    return Comparison(sides=sides, found=score_differences, failures=failures)


def _read_run(path: Path, name: str) -> ComparedRun:
    folder = OpenRun(path)
    folder.check_exists()
    folder.check_holds_run()
    folder.check_kinds()
    for table in (folder.scores, folder.metrics):
        if table.is_file() and not folder.manifest.vouches_for(table):
            raise RunError(f"{table}: is not what this run wrote; `fedsim attack {path}` writes scores again")
    measured, quality = _quality(folder)
    return ComparedRun(
        name=name,
        folder=folder,
        settings=_settings(folder),
        code=_read_code(folder),
        scores=read_scores(folder),
        quality=quality,
        measured=measured,
    )


def _settings(folder: OpenRun) -> Mapping[str, Any] | None:
    """Return the settings of the run's file, without importing code that it names."""
    if not folder.experiment.is_file():
        return None
    folder.check_same(folder.config)
    return flat_settings(folder.config)


def _read_code(folder: OpenRun) -> dict[str, frozenset[str]]:
    """Return the hashes of the code of each plug-in of another package, by its name, as the run noted them."""
    code: dict[str, set[str]] = {}
    noted = folder.manifest.contents
    if noted is not None and noted.settings is not None:
        for where, code_hash in noted.code.items():
            code.setdefault(str(noted.settings.get(f"{where}.name", where)), set()).add(code_hash)
    for file in sorted(folder.findings.glob("*/*.safetensors")):
        if folder.manifest.vouches_for(file):
            about = read_facts(file)
            if about["code"]:
                code.setdefault(str(about["attack"]), set()).add(str(about["code"]))
    return {name: frozenset(hashes) for name, hashes in code.items()}


def _quality(folder: RunFolder) -> tuple[str, dict[int, float]]:
    rows = [row for row in read_metrics(folder) if row["client"] == SERVER]
    for name in ("accuracy", "loss"):
        if values := {int(row["round"]): float(row[name]) for row in rows if row.get(name)}:
            return (name if all(map(is_of_shared_model, rows)) else f"{name} of the clients' own models"), values
    return "", {}


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the last parts of each path, as many as distinguish the paths."""
    parts = [path.resolve().parts for path in paths]
    longest = max(map(len, parts))
    for count in range(1, longest + 1):
        names = ["/".join(path_parts[-count:]) for path_parts in parts]
        if len(set(names)) == len(names):
            break
    return names


def _pictures(folder: OpenRun) -> Pictures:
    """Return by attack and update the picture that the run's report drew of each finding that the run noted."""
    pictures: dict[str, dict[str, bytes]] = {}
    for file in sorted(folder.findings.glob("*/*.safetensors")):
        picture = file.with_suffix(".png")
        if not picture.is_file() or not folder.manifest.vouches_for(file):
            continue
        about = read_facts(file)
        update = f"{name_rounds(about['round'])}, client {about['victim']}"
        if about["repeat"]:
            update += f", start {about['repeat']}"
        try:
            pictures.setdefault(str(about["attack"]), {})[update] = picture.read_bytes()
        except OSError as error:
            raise RunError(
                f"{picture}: cannot be read ({error.strerror}); `fedsim report {folder.path}` draws it again"
            ) from error
    return pictures
