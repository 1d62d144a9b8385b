"""Make fedsim/data/samples/handwriting.jsonl from MNIST and QMNIST: digits of sixteen people, one line a person.

`python docs/handwriting_sample.py --data-dir DIR` writes it byte for byte as it is, if Python has zlib 1.2 or 1.3;
others pack the same pixels into other bytes. DIR holds `MNIST/raw` and `QMNIST/raw`, by default `FEDSIM_DATA`.

Of each of the two groups of people whose writing NIST collected, the first eight (by their number) count who wrote at
least 100 of MNIST's training digits. Six of them wrote the training digits of the sample, the last two its test digits.
"""

from __future__ import annotations

import argparse
import json
import os
import zlib
from base64 import b64encode
from pathlib import Path

import numpy as np

from fedsim.data import Examples
from fedsim.data.handwriting import SAMPLE
from fedsim.data.idx import Mnist

FIRST_STUDENT = 2100
"""NIST's numbers below it are employees of the Census Bureau (series hsf_0 to hsf_3), others students (hsf_4)."""


def main() -> None:
    """Read the command line and write the sample."""
    parser = argparse.ArgumentParser(description="Make the sample of handwriting from MNIST and QMNIST.")
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("FEDSIM_DATA"))
    parser.add_argument("--out", type=Path, default=SAMPLE)
    arguments = parser.parse_args()
    arguments.out.write_text(sample(arguments.data_dir), encoding="ascii")


def sample(folder: Path | None) -> str:
    """The whole file."""
    mnist = Mnist().load(folder)
    if mnist.train.groups is None:
        raise SystemExit("QMNIST/raw/qmnist-train-labels-idx2-int.gz is missing: it says who wrote what")
    writers = np.array([int(name) for name in mnist.group_names])[mnist.train.groups.numpy()]
    lines = []
    for group in (writers < FIRST_STUDENT, writers >= FIRST_STUDENT):
        for place, writer in enumerate(chosen(writers[group])):
            lines.append(line(mnist.train, writers == writer, int(writer), "train" if place < 6 else "test"))
    return "".join(f"{text}\n" for text in lines)


def chosen(writers: np.ndarray) -> np.ndarray:
    """The first eight people who wrote at least 100 digits."""
    people, counts = np.unique(writers, return_counts=True)
    return people[counts >= 100][:8]


def line(examples: Examples, own: np.ndarray, writer: int, part: str) -> str:
    """All digits of one person, in the order of MNIST."""
    labels = "".join(map(str, examples.labels[own].tolist()))
    images = b64encode(zlib.compress(examples.raw[own].numpy().tobytes(), 9)).decode()
    return json.dumps({"writer": writer, "part": part, "labels": labels, "images": images})


if __name__ == "__main__":
    main()
