"""What each measure says of the images of studies/lavp."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from torch import Tensor

from fedsim.data import Dataset
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
"""Label of what is no measure: how far one colour, or the mean image of the data set, is from an image."""
MORE_OF, MORE_IMAGES = ("cifar10", "lenet"), 100
MORE_MEASURES = ("gradient-norm", "lavp-10", "expected-error-cosine", IMAGE)
"""What studies/lavp_prior reads of further images."""


def cells() -> Iterator[Row]:
    """Yield all images of each network and measure."""
    for data, models in EPOCHS.items():
        for model, label in product(models, (*MEASURES, IMAGE)):
            for image in measured_images(data, model) if label in MORE_MEASURES else study_images(data, model):
                yield {"data": data, "model": model, "image": image, "label": label}


def measured_images(data: str, model: str) -> list[int]:
    """Return places in the test set: those of the study, and more for one network."""
    return study_images(data, model, MORE_IMAGES if (data, model) == MORE_OF else None)


def is_row_of(row: Mapping[str, str], cell: Row) -> bool:
    """Return whether a row is of one of the values of a measure."""
    names = ("data", "model", "image")
    return row["measure"].split(".")[0] == cell["label"] and all(row[name] == str(cell[name]) for name in names)


def measure(data: str, model: str, image: int, label: str) -> list[Row]:
    """Return a row for each value of one measure."""
    pixels, inputs, labels = example(data, model, image)
    if label == IMAGE:
        return colour_errors(pixels, experiment_of(data, model).dataset)
    tables = {label: MEASURES[label]}
    return measure_message(tables, trained_network(data, model), experiment_of(data, model).loss, inputs, labels)


def colour_errors(pixels: Tensor, dataset: Dataset) -> list[Row]:
    """Return the MSE of the image's own mean colour, and of the data set's mean colour and mean image, in its place."""
    claims = {
        "own-mean": pixels.mean((2, 3), keepdim=True),
        "data-mean": dataset.moments[0].reshape(1, -1, 1, 1),
        "mean-image": dataset.train.inputs().mean(0, keepdim=True),
    }
    rows = list[Row]()
    for name, claim in claims.items():
        rows.append({"measure": f"{IMAGE}.{name}", "value": float((pixels - claim).square().mean())})
    return rows
