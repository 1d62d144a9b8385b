"""Small data in the place of those that Flower's apps download; nothing else in an app is changed."""

from __future__ import annotations

import os
import sys
import types
from typing import Any

CLIENTS, HELD = 10, 5
TRAINED_ON = HELD * 4 // 5
"""Of what a client holds; the apps keep a fifth to test on."""
IMAGES = {"uoft-cs/cifar10": ("img", 3, 32), "ylecun/mnist": ("image", 1, 28)}
IMAGES["zalando-datasets/fashion_mnist"] = ("image", 1, 28)
IMAGES |= {"cifar10": IMAGES["uoft-cs/cifar10"]}
"""Of each data set, what its images are called, their channels and size."""
ROWS = 40
"""Of a table of trees or of a vertical federation."""


def replace_downloads() -> None:
    """Data of our own in the place of downloads, and nothing in the place of Weights & Biases."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "FLWR_TELEMETRY_ENABLED": "0"}
    import datasets
    import flwr_datasets

    flwr_datasets.FederatedDataset = MadeFederatedDataset
    split, batch = datasets.Dataset.train_test_split, datasets.Dataset.batch
    datasets.Dataset.train_test_split = lambda self, *given, **named: split(self, *given, **{"seed": 42} | named)
    datasets.Dataset.batch = lambda self, size, **named: batch(self, size, **named | {"num_proc": None})
    datasets.load_dataset = load_dataset
    datasets.load_from_disk = lambda path: make_examples(
        *path.split("#")[:1], int(path.split("#")[1])
    ).train_test_split(0.2)
    wandb: Any = types.ModuleType("wandb")
    wandb.init = wandb.log = lambda *given, **named: None
    sys.modules.setdefault("wandb", wandb)


def load_dataset(path: str, split: str | None = None) -> Any:
    """Take the place of `datasets.load_dataset`."""
    return make_examples(path, 0) if split else {"train": make_examples(path, 0), "test": make_examples(path, 0)}


class MadeFederatedDataset:
    """Takes the place of `flwr_datasets.FederatedDataset`."""

    def __init__(self, dataset: str, **partitioners: Any) -> None:
        self.name = dataset

    def load_partition(self, partition_id: int, split: str | None = None) -> Any:
        """What a client holds."""
        return make_examples(self.name, partition_id)

    def load_split(self, split: str) -> Any:
        """What nobody holds."""
        return make_examples(self.name, CLIENTS)


def make_examples(name: str, partition: int) -> Any:
    """`HELD` examples under the names that the data set has for them."""
    import numpy as np
    from datasets import Dataset
    from PIL import Image
    from sklearn.datasets import load_digits

    rng = np.random.default_rng(partition)
    if name in IMAGES:
        key, channels, size = IMAGES[name]
        digits = load_digits()
        mine = slice(partition * HELD, (partition + 1) * HELD)
        images = [
            Image.fromarray((image * 15.9).astype(np.uint8)).resize((size, size)) for image in digits.images[mine]
        ]
        images = [image.convert("RGB") if channels == 3 else image for image in images]
        return Dataset.from_dict({key: images, "label": digits.target[mine]})
    if "iris" in name:
        names = "petal_length", "petal_width", "sepal_length", "sepal_width"
        columns: dict[str, Any] = {key: rng.normal(size=HELD) for key in names}
        lengths = {key: rng.uniform(2.0, 10.0, HELD) for key in ("SepalLengthCm", "SepalWidthCm")}
        return Dataset.from_dict(columns | lengths | {"species": np.arange(HELD) % 3})
    if "higgs" in name:
        inputs = rng.normal(size=(ROWS, 28)).clip(-4, 4)
        return Dataset.from_dict({"inputs": inputs, "label": (inputs[:, 0] > 0).astype(float)})
    if "titanic" in name:
        return Dataset.from_dict(passengers(partition, rng))
    columns = {f"column {k}": rng.normal(size=HELD) for k in range(14)}
    return Dataset.from_dict(columns | {"income": [["<=50K", ">50K"][k % 2] for k in range(HELD)]})


def passengers(partition: int, rng: Any) -> dict[str, list[Any]]:
    """Return the columns that one party of a vertical federation has, of passengers that do not exist."""
    columns: dict[str, list[Any]] = {
        "Age": rng.uniform(1, 80, ROWS).tolist(),
        "Sex": rng.choice(["male", "female"], ROWS).tolist(),
        "Fare": rng.uniform(5, 100, ROWS).tolist(),
        "Siblings/Spouses Aboard": rng.integers(0, 4, ROWS).tolist(),
        "Name": [f"Mr. Number {row}" for row in range(ROWS)],
        "Parents/Children Aboard": rng.integers(0, 3, ROWS).tolist(),
        "Pclass": rng.integers(1, 4, ROWS).tolist(),
    }
    parts = (("Age", "Sex"), ("Fare", "Siblings/Spouses Aboard", "Name"), ("Parents/Children Aboard", "Pclass"))
    chosen = {name: columns[name] for name in parts[partition]}
    return chosen | {"Survived": (np_generator(99).integers(0, 2, ROWS)).tolist()}


def np_generator(seed: int) -> Any:
    """Return a generator of NumPy."""
    import numpy as np

    return np.random.default_rng(seed)
