"""Download of data sets, when the user asks for it; nothing else in fedsim uses the network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from fedsim.base.errors import DataError


@dataclass(frozen=True)
class _TorchvisionSource:
    """Official files of a data set that torchvision can download.

    Attributes:
        dataset: name of torchvision's class.
        files: names of the files.
        url: their origin.
        home: their folder within the data folder.
        root: the folder to give to torchvision, within the data folder.
        settings: keywords of torchvision's class, which is called once with each.
    """

    dataset: str
    files: str
    url: str
    home: str
    root: str = "."
    settings: tuple[Mapping[str, Any], ...] = ({},)


_IDX = "train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz and t10k-labels-idx1-ubyte.gz"
_KRIZHEVSKY = "https://www.cs.toronto.edu/~kriz/"
_SOURCES: Mapping[str, _TorchvisionSource] = {
    "mnist": _TorchvisionSource("MNIST", _IDX, "https://ossci-datasets.s3.amazonaws.com/mnist/", "MNIST/raw"),
    "fashion-mnist": _TorchvisionSource(
        "FashionMNIST", _IDX, "https://github.com/zalandoresearch/fashion-mnist", "FashionMNIST/raw"
    ),
    "emnist": _TorchvisionSource(
        "EMNIST",
        "the .gz files in gzip.zip",
        "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
        "EMNIST/raw",
        settings=({"split": "letters"},),  # one archive holds all splits
    ),
    "cifar10": _TorchvisionSource("CIFAR10", "cifar-10-python.tar.gz, unpacked,", _KRIZHEVSKY, "cifar-10-batches-py"),
    "cifar100": _TorchvisionSource("CIFAR100", "cifar-100-python.tar.gz, unpacked,", _KRIZHEVSKY, "cifar-100-python"),
    "svhn": _TorchvisionSource(
        "SVHN",
        "train_32x32.mat and test_32x32.mat",
        "http://ufldl.stanford.edu/housenumbers/",
        "SVHN",
        root="SVHN",
        settings=({"split": "train"}, {"split": "test"}),
    ),
}

_MANUAL_STEPS: Mapping[str, str] = {
    "adult": "get adult.data and adult.test from https://archive.ics.uci.edu/dataset/2/adult and put them into adult",
    "att-faces": "get the AT&T database of faces (on Kaggle: kasikrit/att-database-of-faces) and put its folders s1 "
    "to s40 into att_faces",
    "csv": "it reads your own table; set data.path",
    "digits": "it comes with scikit-learn and needs no file",
    "femnist": "make it with LEAF's data/femnist/preprocess.sh, https://github.com/TalwalkarLab/leaf",
    "flight-prices": "get Clean_Dataset.csv of 'Flight Price Prediction' from Kaggle and put it into flight-prices",
    "handwriting": "it comes with fedsim and needs no file",
    "image-folder": "it reads your own images; set data.path",
    "leaf": "make it with LEAF's preprocess.sh, https://github.com/TalwalkarLab/leaf",
    "leaf-synthetic": "it is synthetic and needs no file",
    "npz": "it reads your own arrays; set data.path",
    "reuters-r8": "get r8-train-all-terms.txt and r8-test-all-terms.txt from "
    "https://ana.cachopo.org/datasets-for-single-label-text-categorization and put them into r8",
    "shapes": "it is synthetic and needs no file",
    "waves": "it is synthetic and needs no file",
}


def describe_source(name: str) -> str:
    """Say how to get the built-in data set `name`."""
    return f"`fedsim data {name} --download` fetches it" if name in _SOURCES else _MANUAL_STEPS[name]


def download(name: str, folder: Path) -> None:
    """Download the official files of a data set into the data folder, by torchvision.

    With `mnist` come QMNIST's label files, which tell who wrote each digit. Existing files are left
    as they are; new ones are checked against their official MD5 sums.
    """
    official = _SOURCES.get(name)
    if official is None:
        remedy = _MANUAL_STEPS.get(name, f"what can be: {', '.join(sorted(_SOURCES))}")
        raise DataError(f"data: '{name}' cannot be downloaded; {remedy}")

    import torchvision  # takes seconds, and few need it

    root = folder / official.root
    try:
        root.mkdir(parents=True, exist_ok=True)
        for settings in official.settings:
            getattr(torchvision.datasets, official.dataset)(root, download=True, **settings)
        if name == "mnist":
            _download_writers(folder)
    except (OSError, RuntimeError, HTTPException) as error:
        raise DataError(
            f"data: '{name}' could not be downloaded ({_last_line(error)}); on a machine with a network get "
            f"{official.files} from {official.url} and put them into {folder / official.home}"
        ) from error


def _download_writers(folder: Path) -> None:
    from torchvision.datasets import QMNIST
    from torchvision.datasets.utils import download_url

    for part in ("train", "test"):
        _, (url, md5) = QMNIST.resources[part]  # only the labels: the images are MNIST's
        download_url(url, folder / "QMNIST" / "raw", md5=md5)


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
