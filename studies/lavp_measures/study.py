"""What each measure says of the images of studies/lavp."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from studies.lavp.study import EPOCHS, example, experiment_of, study_images, trained_network
from studies.messages import measure_message
from studies.running import Row

ESTIMATED = {"exact": 0, "probes": 4, "steps": 40}
MEASURES: dict[str, dict[str, Any]] = {
    "gradient-norm": {"name": "gradient-norm"},
    "jacobian-norm": {"name": "jacobian-norm", "probes": 50},
    "sensitivity": {"name": "sensitivity"},
    "lipschitz": {"name": "lipschitz", "noises": 200},
    "angular-lipschitz": {"name": "angular-lipschitz", "noises": 200},
    "lavp": {"name": "lavp"},
    "lavp-10": {"name": "lavp", "steps": 10},
    "lavp-1000": {"name": "lavp", "steps": 1000},
    "expected-error-l2": {"name": "expected-error", "distance": "l2"},
    "expected-error-cosine": {"name": "expected-error", "distance": "cosine"},
    "spectrum-l2": {"name": "spectrum", "distance": "l2", **ESTIMATED},
    "spectrum-cosine": {"name": "spectrum", "distance": "cosine", **ESTIMATED},
}
"""Tables of the measures by label; fewer noises and probes than by default, for two cores."""
IMAGE = "image"
"""Label of what is no measure: how far one colour is from an image."""


def cells() -> Iterator[Row]:
    """Yield all images of each network and measure."""
    for data, models in EPOCHS.items():
        for model, label in product(models, (*MEASURES, IMAGE)):
            for image in study_images(data, model):
                yield {"data": data, "model": model, "image": image, "label": label}


def is_row_of(row: Mapping[str, str], cell: Row) -> bool:
    """Return whether a row is of one of the values of a measure."""
    names = ("data", "model", "image")
    return row["measure"].split(".")[0] == cell["label"] and all(row[name] == str(cell[name]) for name in names)


def measure(data: str, model: str, image: int, label: str) -> list[Row]:
    """Return a row for each value of one measure."""
    pixels, inputs, labels = example(data, model, image)
    if label == IMAGE:
        return colour_errors(pixels, experiment_of(data, model).data.moments()[0])
    tables = {label: MEASURES[label]}
    return measure_message(tables, trained_network(data, model), experiment_of(data, model).loss, inputs, labels)


def colour_errors(pixels: Tensor, mean: Sequence[float]) -> list[Row]:
    """Return the MSE of an image's own mean colour, and of that of the data set, in its place."""
    colours = {"own-mean": pixels.mean((2, 3), keepdim=True), "data-mean": torch.tensor(mean).reshape(1, -1, 1, 1)}
    rows = list[Row]()
    for name, colour in colours.items():
        rows.append({"measure": f"{IMAGE}.{name}", "value": float((pixels - colour).square().mean())})
    return rows
