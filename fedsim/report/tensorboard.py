"""Event files for TensorBoard with what a run measured by round, which it draws side by side.

Each curve has a folder of its own, because TensorBoard lays over one another what has the same tag in several folders:
`server` and `clients` (accuracy, loss, proved epsilon, exposure), `own models of clients` where they have some, and one
for each attack with its scores. A further folder, `ATTACK, floor`, has the scores of the best guess.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from importlib.util import find_spec
from statistics import fmean
from typing import Any

from fedsim.audit.attacked_rounds import parse_rounds
from fedsim.audit.variants import name_variants
from fedsim.base.errors import ConfigError, RunError
from fedsim.base.files import write_remedy
from fedsim.federation.config import AttackFile
from fedsim.federation.run_folder import RunFolder, read_exposures, read_metrics
from fedsim.report.attack_traits import read_scores
from fedsim.report.curves import epsilon_columns

_OWN_MODELS = {"server": "own models of clients, weighted mean", "clients": "own models of clients"}
"""Curve of what the rows of a sender in `metrics.csv` say of the clients' own models."""
Point = tuple[str, str, int, float]
"""Name of a curve, its tag, a round, and a value."""


def wants_events(*specs: AttackFile) -> bool:
    """Return whether one of these files asks for event files."""
    return any(spec.report is not None and spec.report.tensorboard for spec in specs)


def check_installed(*specs: AttackFile) -> None:
    """Raise ConfigError where event files are wanted and the package that writes them is not there."""
    if wants_events(*specs) and find_spec("tensorboard") is None:
        raise ConfigError(
            "report.tensorboard: the package 'tensorboard' is not installed; run `pip install tensorboard`, or leave "
            "the key out"
        )


def write_events(folder: RunFolder) -> None:
    """Write the event files of a run in the place of those that were there."""
    from torch.utils.tensorboard import SummaryWriter  # takes seconds to import, and a package that may be missing

    points = [
        *_training_points(read_metrics(folder)),
        *_exposure_points(read_exposures(folder)),
        *_score_points(read_scores(folder)),
    ]
    points_by_folder = defaultdict[str, list[Point]](list)
    for point in points:
        points_by_folder[_as_folder(point[0])].append(point)
    try:
        for old in folder.tensorboard.glob("*/events.out.tfevents.*"):
            old.unlink()
        for name, folder_points in points_by_folder.items():
            with SummaryWriter(str(folder.tensorboard / name)) as writer:
                for _, tag, number, value in folder_points:
                    writer.add_scalar(tag, value, number)
    except OSError as error:
        raise RunError(
            f"{folder.tensorboard}: cannot be written ({error.strerror}); {write_remedy(error)} and try again"
        ) from error


def _training_points(rows: Iterable[Mapping[str, str]]) -> Iterator[Point]:
    """Return accuracy, loss and proved epsilon of the server, and the mean over clients.

    Accuracy and loss of the clients' own models have curves of their own, the mean weighted by examples among them.
    """
    values = defaultdict[tuple[str, str, int], list[float]](list)
    for row in rows:
        sender = "server" if row["client"] == "server" else "clients"
        for name in ("accuracy", "loss", *epsilon_columns(row)):
            if row.get(name):
                is_of_own_models = row.get("model") == "personal" and name in ("accuracy", "loss")
                curve = _OWN_MODELS[sender] if is_of_own_models else sender
                values[curve, name, int(row["round"])].append(float(row[name]))
    return _means(values)


def _exposure_points(rows: Iterable[Mapping[str, str]]) -> Iterator[Point]:
    """Return the mean over clients of each value that they measured of all their examples together."""
    values = defaultdict[tuple[str, str, int], list[float]](list)
    for row in rows:
        if row["quantity"] and not row["example"]:
            tag = f"exposure/{row['measure']} {row['quantity']}"
            values["clients", tag, int(row["round"])].append(float(row["value"]))
    return _means(values)


def _score_points(rows: Iterable[Mapping[str, Any]]) -> Iterator[Point]:
    """Return the mean over victims and starts of the scores of each attack, and of the best guess."""
    values = defaultdict[tuple[str, str, int], list[float]](list)
    for row in name_variants(rows):
        number = parse_rounds(str(row["round"]))[-1]  # an attack on several rounds stands at the last one
        tag = f"score/{row['metric']}"
        values[str(row["attack"]), tag, number].append(float(row["value"]))
        values[f"{row['attack']}, floor", tag, number].append(float(row["floor"]))
    return _means(values)


def _means(values: Mapping[tuple[str, str, int], Iterable[float]]) -> Iterator[Point]:
    """Yield the mean of the finite values of each curve and round, in the order of rounds."""
    for (name, tag, number), several in sorted(values.items(), key=lambda item: item[0][2]):
        if finite := [value for value in several if math.isfinite(value)]:
            yield name, tag, number, fmean(finite)


def _as_folder(name: str) -> str:
    """Return a folder name for a curve; titles of attacks come from a table that anybody may have written."""
    safe = re.sub(r"[^\w .,=+()-]|^\W+", "_", name)[:200]
    return safe if safe and safe == name else f"{safe}_{sha256(name.encode()).hexdigest()[:8]}"
