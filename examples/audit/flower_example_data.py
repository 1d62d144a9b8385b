"""Small data in the place of those that Flower's apps download; nothing else in an app is changed."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

CLIENTS, HELD = 10, 5
TRAINED_ON = HELD * 4 // 5
"""Of what a client holds; the apps keep a fifth to test on."""
IMAGES = {"uoft-cs/cifar10": ("img", 3, 32), "ylecun/mnist": ("image", 1, 28)}
IMAGES["zalando-datasets/fashion_mnist"] = ("image", 1, 28)
IMAGES["nelorth/oxford-flowers"] = ("image", 3, 32)
IMAGES |= {"cifar10": IMAGES["uoft-cs/cifar10"]}
"""Of each data set, what its images are called, their channels and size."""
ROWS = 40
"""Of a table of trees or of a vertical federation."""


def replace_downloads() -> None:
    """Data of our own in the place of downloads, and nothing in the place of Weights & Biases."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "FLWR_TELEMETRY_ENABLED": "0"}
    import datasets
    import flwr_datasets
    import torchvision

    torchvision.models.vit_b_16 = make_vision_transformer

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
    metrics: Any = types.ModuleType("evaluate")  # it would download the code of a metric
    metrics.load = lambda name: types.SimpleNamespace(add_batch=lambda **named: None, compute=lambda: {"accuracy": 0.0})
    sys.modules.setdefault("evaluate", metrics)


def make_vision_transformer(weights: Any = None) -> Any:
    """Return a small transformer with random weights, always the same, in the place of a large trained one."""
    import torch
    from torchvision.models import VisionTransformer

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return VisionTransformer(image_size=224, patch_size=56, num_layers=1, num_heads=2, hidden_dim=32, mlp_dim=32)


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
    if "census" in name and "catboost" in sys.modules:
        return Dataset.from_dict(census(rng))
    if "imdb" in name:
        return Dataset.from_dict({"text": [f"word{k} word{k + 1}" for k in range(HELD)], "label": np.arange(HELD) % 2})
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


def census(rng: Any) -> dict[str, list[Any]]:
    """Return rows about people who do not exist, for trees that tell numbers from names."""
    names = ["workclass", "education", "marital.status", "occupation", "relationship", "race", "sex", "native.country"]
    columns: dict[str, list[Any]] = {name: rng.choice(["one", "other"], ROWS).tolist() for name in names}
    columns["age"] = rng.integers(18, 80, ROWS).tolist()
    return columns | {"income": ["<=50K" if age < 45 else ">50K" for age in columns["age"]]}


def write_files(app: str, clients: int) -> None:
    """Write into the current folder what an app reads from files or a database instead of a data set by name."""
    if app == "fedbn":
        _write_pickles(Path("data/MNIST"))
    if app == "quickstart-huggingface":
        _write_language_model(Path("made"))
    if app == "federated-analytics":
        for partition in range(clients):
            _write_database(Path(f"people-{partition}.db"), partition)


def _write_pickles(folder: Path) -> None:
    """Write ten parts of digits as the authors of FedBN share theirs."""
    import pickle

    import numpy as np

    (folder / "partitions").mkdir(parents=True, exist_ok=True)
    for part in range(CLIENTS + 1):
        rows = make_examples("ylecun/mnist", part)
        arrays = np.stack([np.asarray(image) for image in rows["image"]]), np.asarray(rows["label"])
        file = folder / ("test.pkl" if part == CLIENTS else f"partitions/train_part{part}.pkl")
        file.write_bytes(pickle.dumps(arrays))


def _write_language_model(folder: Path) -> None:
    """Write a tiny language model with random weights, and its words."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    folder.mkdir(exist_ok=True)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{number}" for number in range(HELD + 1))]
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertForSequenceClassification(BertConfig(vocab_size=len(words), **sizes)).save_pretrained(folder)


def _write_database(path: Path, partition: int) -> None:
    """Write a table of measurements of people who do not exist."""
    import sqlite3

    columns = ["age", "bmi", "systolic_bp", "diastolic_bp", "ldl_cholesterol", "hba1c"]
    rng = np_generator(partition)
    with sqlite3.connect(path) as connection:
        connection.execute(
            f"create table if not exists person_measurements ({', '.join(f'{c} real' for c in columns)})"
        )
        rows = rng.uniform(20, 90, (HELD, len(columns))).tolist()
        connection.executemany(f"insert into person_measurements values ({', '.join('?' * len(columns))})", rows)


def np_generator(seed: int) -> Any:
    """Return a generator of NumPy."""
    import numpy as np

    return np.random.default_rng(seed)
