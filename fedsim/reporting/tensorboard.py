"""What a run measured by round, as event files for TensorBoard, which draws their curves side by side.

Each curve has a folder of its own, because TensorBoard lays over one another what has the same tag in several folders:
`server` and `clients` (accuracy, loss, proved epsilon, exposure), and one an attack with its scores, beside which the
folder `ATTACK, floor` has what the best guess scores.
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

from fedsim.auditing.variants import named
from fedsim.errors import ConfigError, RunError
from fedsim.experiments.config import AttackFile
from fedsim.experiments.run_folder import RunFolder, exposures, measurements
from fedsim.reporting.curves import epsilons
from fedsim.reporting.evidence import scored

Point = tuple[str, str, int, float]
"""The folder of a curve, its tag, a round, and a value."""


def is_wanted(*specs: AttackFile) -> bool:
    """Whether one of these files asks for event files."""
    return any(spec.report is not None and spec.report.tensorboard for spec in specs)


def check_installed(*specs: AttackFile) -> None:
    """Raise ConfigError where event files are wanted and the package that writes them is not there."""
    if is_wanted(*specs) and find_spec("tensorboard") is None:
        raise ConfigError(
            "report.tensorboard: the package 'tensorboard' is not installed; run `pip install tensorboard`, or leave "
            "the key out"
        )


def write_events(folder: RunFolder) -> None:
    """Write the event files of a run in the place of those that were there.

    Raises:
        RunError: a table of the run is damaged, or the folder cannot be written.
    """
    from torch.utils.tensorboard import SummaryWriter  # takes seconds to import, and a package that may be missing

    points = defaultdict[str, list[Point]](list)
    for point in [*_measured(measurements(folder)), *_exposed(exposures(folder)), *_leaked(scored(folder))]:
        points[_as_folder(point[0])].append(point)
    try:
        for old in folder.tensorboard.glob("*/events.out.tfevents.*"):
            old.unlink()
        for name, several in points.items():
            with SummaryWriter(str(folder.tensorboard / name)) as writer:
                for _, tag, number, value in several:
                    writer.add_scalar(tag, value, number)
    except OSError as error:
        raise RunError(
            f"{folder.tensorboard}: cannot be written ({error.strerror}); make room and try again"
        ) from error


def _measured(rows: Iterable[Mapping[str, str]]) -> Iterator[Point]:
    """Accuracy, loss and proved epsilon of the server, and the mean of clients."""
    values = defaultdict[tuple[str, str, int], list[float]](list)
    for row in rows:
        who = "server" if row["client"] == "server" else "clients"
        for name in ("accuracy", "loss", *epsilons(row)):
            if row.get(name):
                values[who, name, int(row["round"])].append(float(row[name]))
    return _means(values)


def _exposed(rows: Iterable[Mapping[str, str]]) -> Iterator[Point]:
    """Mean over clients of each value that they measured of all their examples together."""
    values = defaultdict[tuple[str, str, int], list[float]](list)
    for row in rows:
        if row["quantity"] and not row["example"]:
            tag = f"exposure/{row['measure']} {row['quantity']}"
            values["clients", tag, int(row["round"])].append(float(row["value"]))
    return _means(values)


def _leaked(rows: Iterable[Mapping[str, Any]]) -> Iterator[Point]:
    """Mean over victims and starts of the scores of each attack, and of what the best guess scores."""
    values = defaultdict[tuple[str, str, int], list[float]](list)
    for row in named(rows):
        number = int(str(row["round"]).rpartition("-")[2])  # an attack on several rounds stands at the last one
        for what, column in (("", "value"), (", floor", "floor")):
            values[f"{row['attack']}{what}", f"score/{row['metric']}", number].append(float(row[column]))
    return _means(values)


def _means(values: Mapping[tuple[str, str, int], Iterable[float]]) -> Iterator[Point]:
    """The mean of each, without what is undefined; in the order of rounds."""
    for (who, tag, number), several in sorted(values.items(), key=lambda item: item[0][2]):
        if finite := [value for value in several if math.isfinite(value)]:
            yield who, tag, number, fmean(finite)


def _as_folder(name: str) -> str:
    """A folder for a curve; titles of attacks come out of a table that anybody may have written."""
    safe = re.sub(r"[^\w .,=+()-]|^\W+", "_", name)[:200]
    return safe if safe and safe == name else f"{safe}_{sha256(name.encode()).hexdigest()[:8]}"
