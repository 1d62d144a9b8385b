"""Handwriting of people, each known by a number; comes with fedsim."""

from __future__ import annotations

import binascii
import json
import string
import zlib
from base64 import b64decode
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from fedsim.datasets import Dataset, Examples
from fedsim.errors import DataError
from fedsim.paper import Paper

SAMPLE = Path(__file__).with_name("samples") / "handwriting.jsonl"
"""One line a person; `docs/handwriting_sample.py` makes it, and LICENSE.md beside it has the terms."""


@dataclass(frozen=True, kw_only=True)
class Handwriting:
    """The digits that sixteen people wrote, 28 x 28, grey, white on black; comes with fedsim.

    A sample of MNIST's training digits (LeCun, Cortes, Burges), by writer as QMNIST knows them (Yadav, Bottou 2019).
    Natural groups are the people: twelve wrote the training digits, four others the test digits. Half of either are
    employees of the US Census Bureau (numbers below 2100), half are high-school students.

    References:
        LeCun et al.: Gradient-Based Learning Applied to Document Recognition, 1998.
        Yadav and Bottou: Cold Case: the Lost MNIST Digits, NeurIPS 2019.
    """

    paper: ClassVar[Paper] = Paper(
        title="Gradient-Based Learning Applied to Document Recognition",
        authors="LeCun, Bottou, Bengio, Haffner",
        venue="Proceedings of the IEEE",
        year=1998,
    )

    def load(self, folder: Path | None) -> Dataset:
        """See `DatasetPlugin`.

        Raises:
            DataError: fedsim is not installed as it should be.
        """
        people = _read(SAMPLE)
        names = [str(person["writer"]) for person in people]
        return Dataset(
            name="handwriting",
            train=_examples(people, names, "train"),
            test=_examples(people, names, "test"),
            num_classes=10,
            source="Y. LeCun, C. Cortes, C. Burges: The MNIST database, the training digits of 16 writers; "
            "writers: C. Yadav, L. Bottou: QMNIST (2019)",
            licence="CC BY-SA 3.0; QMNIST's labels: BSD style",
            class_names=tuple(string.digits),
            group_names=tuple(names),
        )


def _read(path: Path) -> list[dict[str, Any]]:
    """The people, `images` being `example 1 28 28` (uint8) and `labels` `example` (int64)."""
    try:
        people = [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]
        return [person | _unpacked(person) for person in people]
    except (OSError, ValueError, KeyError, binascii.Error, zlib.error) as error:
        raise DataError(f"{path}: is missing or damaged ({error}); install fedsim again") from error


def _unpacked(person: dict[str, Any]) -> dict[str, Any]:
    pixels = np.frombuffer(zlib.decompress(b64decode(person["images"])), np.uint8)
    labels = torch.tensor([int(digit) for digit in person["labels"]])
    return {"images": torch.from_numpy(pixels.reshape(len(labels), 1, 28, 28).copy()), "labels": labels}


def _examples(people: list[dict[str, Any]], names: list[str], part: str) -> Examples:
    own = [person for person in people if person["part"] == part]
    groups = [torch.full((len(person["labels"]),), names.index(str(person["writer"]))) for person in own]
    return Examples(
        raw=torch.cat([person["images"] for person in own]),
        labels=torch.cat([person["labels"] for person in own]),
        scale=1 / 255,
        groups=torch.cat(groups),
    )
