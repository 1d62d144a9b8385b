"""Handwritten digits by writer; a sample that comes with fedsim."""

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

from fedsim.base.errors import DataError
from fedsim.base.papers import Paper, cite
from fedsim.data import Dataset, Examples

SAMPLE = Path(__file__).with_name("samples") / "handwriting.jsonl"
"""One line a person, made by `docs/handwriting_sample.py`; see LICENSE.md in its folder."""


@dataclass(frozen=True, kw_only=True)
class Handwriting:
    """The digits that sixteen people wrote, 28 x 28, grey, white on black; comes with fedsim.

    A sample of MNIST's training digits (LeCun, Cortes, Burges), by writer according to QMNIST
    [Yadav2019]. Natural groups are the people: twelve wrote the training digits, four others the
    test digits. Half of each are employees of the US Census Bureau (numbers below 2100), half are
    high-school students.

    References:
        [LeCun1998]; [Yadav2019].
    """

    paper: ClassVar[Paper] = cite("LeCun1998")

    def load(self, folder: Path | None) -> Dataset:
        """Read the sample in fedsim's own folder; the data folder is not used."""
        people = _read_people(SAMPLE)
        names = [str(person["writer"]) for person in people]
        return Dataset(
            name="handwriting",
            modality="image",
            train=_join_people(people, names, "train"),
            test=_join_people(people, names, "test"),
            num_classes=10,
            source="Y. LeCun, C. Cortes, C. Burges: The MNIST database, the training digits of 16 writers; "
            "writers: C. Yadav, L. Bottou: QMNIST (2019)",
            licence="CC BY-SA 3.0; QMNIST's labels: BSD style",
            class_names=tuple(string.digits),
            group_names=tuple(names),
        )


def _read_people(path: Path) -> list[dict[str, Any]]:
    """Return the people, with `images` `example 1 28 28` (uint8) and `labels` `example` (int64)."""
    try:
        people = [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]
        return [person | _unpack_digits(person) for person in people]
    except (OSError, ValueError, KeyError, binascii.Error, zlib.error) as error:
        raise DataError(f"{path}: is missing or damaged ({error}); install fedsim again") from error


def _unpack_digits(person: dict[str, Any]) -> dict[str, Any]:
    pixels = np.frombuffer(zlib.decompress(b64decode(person["images"])), np.uint8)
    labels = torch.tensor([int(digit) for digit in person["labels"]])
    return {"images": torch.from_numpy(pixels.reshape(len(labels), 1, 28, 28).copy()), "labels": labels}


def _join_people(people: list[dict[str, Any]], names: list[str], part: str) -> Examples:
    """Return the examples of all people of one part; their groups are indices into `names`."""
    members = [person for person in people if person["part"] == part]
    groups = [torch.full((len(person["labels"]),), names.index(str(person["writer"]))) for person in members]
    return Examples(
        raw=torch.cat([person["images"] for person in members]),
        labels=torch.cat([person["labels"] for person in members]),
        scale=1 / 255,
        groups=torch.cat(groups),
    )
