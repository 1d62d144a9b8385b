"""Measures how exposed clients are, writes each result down as it comes, and draws them."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedsim.base.errors import ConfigError, RunError
from fedsim.base.files import write_bytes, write_remedy
from fedsim.base.progress import track
from fedsim.exposure.of_clients import COLUMNS, MeasureSchedule
from fedsim.federation.experiment import Experiment
from fedsim.federation.exposure_moments import TrainingMoment, measure_moments
from fedsim.modalities import find_modality
from fedsim.report.exposure import Who, draw_clients, draw_examples, mean_quantities

TABLE = "exposure.csv"
_PICTURES = ("clients-*.png", "examples-*.png")


def check_free(folder: Path, *, overwrite: bool) -> None:
    """Raise ConfigError where `folder` is a run, or holds a table that may not be overwritten."""
    if (folder / "experiment.toml").exists():
        raise ConfigError(f"{folder}: is a run, whose own files stay as it wrote them; choose another --out")
    if (folder / TABLE).exists() and not overwrite:
        raise ConfigError(f"{folder / TABLE}: is there already; choose another --out, or pass --overwrite")


def write_exposure(
    folder: Path, experiment: Experiment, moments: Sequence[TrainingMoment], schedules: Sequence[MeasureSchedule]
) -> tuple[list[dict[str, Any]], list[Path]]:
    """Measure clients at `moments`, into a table and pictures in `folder`; rows are there as soon as a measure is done.

    Returns:
        The rows, and the pictures: of clients at each state, and where examples are images that were measured one by
        one, of these for each state and measure.
    """
    if not schedules:
        raise ConfigError("expose: no measure applies to this experiment, so there is nothing to say; name a --measure")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / TABLE).exists():
            for pattern in _PICTURES:
                for old in list(folder.glob(pattern)):
                    old.unlink()
        total = sum(len(moment.clients) for moment in moments)
        measured = track(measure_moments(experiment, moments, schedules), "clients", total)
        rows = list(_write_rows(folder / TABLE, measured))
        return rows, list(_draw_states(folder, experiment, rows))
    except OSError as error:
        raise RunError(
            f"{folder}: cannot be written ({error.strerror}); {write_remedy(error)} or choose another --out"
        ) from error


def _write_rows(path: Path, parts: Iterable[Iterable[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yield the rows of `parts`, each once it is in the file."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        for row in chain.from_iterable(parts):
            writer.writerow(row)
            file.flush()
            yield row


def _draw_states(folder: Path, experiment: Experiment, rows: Sequence[dict[str, Any]]) -> Iterator[Path]:
    """Draw the pictures of each state, and yield their paths as they are written."""
    for state, state_rows in groupby(rows, key=lambda row: row["state"]):
        rows_at_state = list(state_rows)
        if clients := [item for item in mean_quantities(rows_at_state) if item.values]:
            path = folder / f"clients-{state}.png"
            write_bytes(path, draw_clients(clients))
            yield path
        examples = [item for item in mean_quantities(rows_at_state, of_examples=True) if item.values]
        if find_modality(experiment.dataset.task.modality).shown_as == "images":
            for measure, of_measure in groupby(examples, key=lambda item: item.measure):
                path = folder / f"examples-{state}-{measure}.png"
                write_bytes(path, draw_examples(list(of_measure), partial(_image, experiment)))
                yield path


def _image(experiment: Experiment, who: Who) -> Tensor:
    """Return an example of a client, `channel height width` in [0, 1]."""
    client, example = who
    index = int(experiment.data.indices(client)[0][int(example)])
    dataset = experiment.dataset
    return dataset.to_unit_range(dataset.train.inputs(torch.tensor([index])))[0]
