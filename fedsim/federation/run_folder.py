"""The folder of a run: names of its files, and the tables in it; `open_run` has how it is written and verified."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fedsim.base.errors import ConfigError, RunError, one_line
from fedsim.federation import lock
from fedsim.recording.manifest import LOCK_FILE, MANIFEST_FILE, SEALED_FILE

_RUN_FILES = (
    "experiment.toml", "app.toml", "versions.json", MANIFEST_FILE, LOCK_FILE, lock.NAME, "log.txt", "metrics.csv",
    "ledger.csv", "exposure.csv", "exposure/exposure.csv", "exposure/*.png", "scores.csv", "image-scores.csv",
    "score-inputs.json", "tested-examples.csv",
    "refused.csv", "failed.csv", "empirical-epsilon.csv", "checkpoint.safetensors", "report.html", "geometry.csv",
    "geometry-ratios.png", "geometry-cosines.png", "transcript/round-*.safetensors", "messages/exchange-*.safetensors",
    "colluders/round-*.safetensors",
    "findings/*/*.safetensors", "findings/*/*.png", "tensorboard/*/events.out.tfevents.*",
    "states/*.safetensors", "states/manifest.json", "optima/*/client-*.safetensors", "deployment/*",
    "dossier.html", "dossier.json", "dossier.junit.xml",
)  # fmt: skip
"""Patterns of all files that fedsim leaves in a run folder, apart from half-written ones."""
TESTED_COLUMNS = ("tested", "trained")
METRICS_COLUMNS = ("round", "client", "accuracy", "loss", "guess", "num_examples", "failed", "seconds")
"""Columns of `metrics.csv`; `guess` is what the best constant answer gets on the server's test examples."""
"""Columns of `tested-examples.csv`: on how many examples an app tests, and on how many of these its clients train."""
_MAX_DIGITS = 20
"""Most digits of a count: those of Flower's node ids, which have 64 bits."""


class _PathInRun:
    """A file or folder that has one name in all runs."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunFolder, owner: type[RunFolder]) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """Folder into which everything of one run is written."""

    path: Path

    experiment = _PathInRun("experiment.toml")
    """Resolved experiment file."""
    app = _PathInRun("app.toml")
    """How a Flower app was run; there is none where something else was."""

    @property
    def transcript(self) -> Path:
        """Return the folder of the curious server's recording.

        It is the run folder itself where an app recorded its rounds directly in it.
        """
        folder = self.path / "transcript"
        if not folder.is_dir() and any(self.path.glob("round-*.safetensors")):
            return self.path
        return folder

    colluders = _PathInRun("colluders")
    """What colluding clients added to secure sums, where that is kept."""
    findings = _PathInRun("findings")
    """Attacks' findings, one safetensors file each."""
    scores = _PathInRun("scores.csv")
    """Scores, a row per attack, victim, round, repeat and metric."""
    images = _PathInRun("image-scores.csv")
    """Scores of single images."""
    score_inputs = _PathInRun("score-inputs.json")
    """What scores follow from, a hash for each finding."""
    refusals = _PathInRun("refused.csv")
    """Attacks that could not be made, each with the reason."""
    failures = _PathInRun("failed.csv")
    """Attacks that failed on a victim, each with the error."""
    states = _PathInRun("states")
    """Trained models that the experiment saves."""
    optima = _PathInRun("optima")
    """Clients' optimal local models, which the evaluator computes."""
    metrics = _PathInRun("metrics.csv")
    """Accuracy and loss per round, of the server and of each client."""
    epsilons = _PathInRun("empirical-epsilon.csv")
    """Proved and measured epsilon, by client with canaries and defense."""
    ledger = _PathInRun("ledger.csv")
    """Privacy ledger: each client's rounds and proved privacy loss."""
    tested_examples = _PathInRun("tested-examples.csv")
    """How many examples an app tests on, where its clients train on them."""
    exposure = _PathInRun("exposure.csv")
    """Exposure that clients measured before they sent."""
    geometry = _PathInRun("geometry.csv")
    """How well one gradient can match each recorded update."""
    report = _PathInRun("report.html")
    """Report, one self-contained page."""
    tensorboard = _PathInRun("tensorboard")
    """Event files for TensorBoard, with a folder for each curve."""
    checkpoint = _PathInRun(SEALED_FILE)
    """Model and strategy after the last complete round."""
    log = _PathInRun("log.txt")
    """Log of the run."""

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

    def check_exists(self) -> None:
        """Raise ConfigError where there is no such folder; one that was moved is not an empty one."""
        if not self.path.is_dir():
            raise ConfigError(f"{self.path}: no such run folder")

    def check_holds_run(self) -> None:
        """Raise ConfigError where there is neither an experiment nor a recording in the folder."""
        if not self.experiment.is_file() and not self.transcript.is_dir():
            raise ConfigError(f"{self.path}: holds no run; expected {self.experiment.name} or transcript/ in it")


def default_folder(file: Path) -> Path:
    """Return `runs/NAME` for the experiment file `NAME.toml`."""
    return Path("runs") / file.stem


def is_run_file(name: str) -> bool:
    """Return whether fedsim writes a file of this name into a run folder.

    >>> is_run_file("findings/sme/round-1.safetensors"), is_run_file("notes.txt")
    (True, False)
    """
    half_written = (".*.tmp", "*/.*.tmp", "*.tmp??????")
    return any(fnmatchcase(name, pattern) for pattern in (*half_written, *_RUN_FILES))


def list_files(folder: Path, only: set[str] | None = None) -> Iterator[Path]:
    """Yield all paths below `folder` that are no folders; links to folders count as files.

    Args:
        only: names at the top of `folder` to which the search is limited.
    """
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise RunError(f"{folder}: cannot be read ({error.strerror}); fix its permissions") from error
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


def read_rows(
    path: Path, texts: Iterable[str] = (), numbers: Iterable[str] = (), counts: Iterable[str] = ()
) -> list[dict[str, str]]:
    """Read the rows of a CSV file; none where there is no such file.

    Args:
        texts: columns that have to exist.
        numbers: columns that have to hold a number or nothing.
        counts: columns that have to hold a whole number from 0 on, such as the id of a client.
    """
    if not path.is_file():
        return []
    texts, numbers, counts = tuple(texts), tuple(numbers), tuple(counts)
    needed = frozenset((*texts, *counts))
    rows = list[dict[str, str]]()
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.reader(file)
            columns = next(reader, [])
            # A DictReader takes twice as long for the tens of thousands of rows that a large run has.
            for line, values in enumerate(filter(None, reader), 2):
                row = dict(zip(columns, values, strict=False))
                if not needed.issubset(row):
                    raise ValueError(f"line {line} lacks {next(name for name in (*texts, *counts) if name not in row)}")
                for name in numbers:
                    float(row.get(name) or 0)
                for name in counts:
                    check_count(row[name])
                rows.append(row if len(row) == len(columns) else dict.fromkeys(columns) | row)  # type: ignore[arg-type]
        return rows
    except (OSError, ValueError, csv.Error) as error:
        reason = one_line(str(error))
        raise RunError(f"{path}: cannot be read ({reason}); remove it, and attack or resume the run") from error


def read_metrics(folder: RunFolder) -> list[dict[str, str]]:
    """Read the rows of `metrics.csv`."""
    numbers = ("accuracy", "loss", "guess", "num_examples", "seconds")
    return read_rows(folder.metrics, ("client",), numbers, ("round",))


def is_of_shared_model(row: Mapping[str, str]) -> bool:
    """Return whether a row of `metrics.csv` says what the server measured of a model that all clients share.

    The mean of models that clients have of their own, each on what it holds out, compares with no such figure.
    """
    return row["client"] == "server" and row.get("model") != "personal"


def read_refusals(folder: RunFolder) -> dict[str, str]:
    """Read `refused.csv`: by title, the sentence why an attack was not made."""
    return {row["attack"]: row["why"] for row in read_rows(folder.refusals, ("attack", "why"))}


def read_ledger(folder: RunFolder) -> list[dict[str, str]]:
    """Read the rows of `ledger.csv`, none where no defense proves a guarantee."""
    # This imports torch, which would delay errors about the experiment file.
    from fedsim.privacy.ledger import NUMERIC_COLUMNS

    counts = ("round", "client", "counts")
    return read_rows(folder.ledger, ("defense", "trusted", *NUMERIC_COLUMNS), NUMERIC_COLUMNS, counts)


def read_exposures(folder: RunFolder) -> list[dict[str, str]]:
    """Read the rows of `exposure.csv`, none where clients measure nothing."""
    from fedsim.exposure.of_clients import COLUMNS  # imports torch, likewise

    return read_rows(folder.exposure, COLUMNS, ("value",), ("round", "client"))


def check_count(text: str) -> None:
    """Raise ValueError unless `text` is a whole number from 0 on, such as a client's id or a round."""
    if not (text.isdecimal() and len(text) <= _MAX_DIGITS):
        raise ValueError(f"has {one_line(text)[: 2 * _MAX_DIGITS]!r} in place of a count")
