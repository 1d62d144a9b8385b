"""The sample of handwriting that comes with fedsim: whose it is, and that it is MNIST's, byte for byte."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch

from fedsim.base.errors import DataError
from fedsim.data import Dataset, handwriting
from fedsim.data.handwriting import SAMPLE, Handwriting
from fedsim.data.idx import Mnist
from fedsim.data.partitions.natural import Natural
from fedsim.federation.federated_data import FederatedData

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def sample() -> Dataset:
    return Handwriting().load(None)


@pytest.fixture(scope="module")
def originals() -> Path:
    folder = Path(os.environ.get("FEDSIM_DATA", "nowhere"))
    for name in ("MNIST/raw", "QMNIST/raw"):
        if not (folder / name).is_dir():
            pytest.skip(f"no {name} in FEDSIM_DATA")
    return folder


def writers(data: Dataset, part: str) -> list[int]:
    """Who wrote each digit."""
    groups = getattr(data, part).groups
    return [int(data.group_names[group]) for group in groups.tolist()]


def test_twelve_people_wrote_the_training_digits_and_four_others_the_test_digits(sample: Dataset) -> None:
    assert (len(sample.train), len(sample.test)) == (1389, 472)
    train, test = set(writers(sample, "train")), set(writers(sample, "test"))
    assert (len(train), len(test), len(train & test)) == (12, 4, 0)
    assert sum(number < 2100 for number in train) == 6
    assert sum(number < 2100 for number in test) == 2
    assert sample.task.input_shape == (1, 28, 28)
    inputs = sample.train.inputs()
    assert (inputs.min().item(), inputs.max().item()) == (0, 1)


def test_everybody_wrote_each_digit_several_times(sample: Dataset) -> None:
    for part in (sample.train, sample.test):
        assert part.groups is not None
        for group in part.groups.unique():
            assert part.labels[part.groups == group].bincount(minlength=10).min() >= 7


@pytest.mark.thorough
def test_it_is_the_writing_of_these_people_in_mnist(sample: Dataset, originals: Path) -> None:
    mnist = Mnist().load(originals)
    who = torch.tensor(writers(mnist, "train"))
    for part in ("train", "test"):
        examples, own = getattr(sample, part), torch.tensor(writers(sample, part))
        for writer in own.unique():
            assert torch.equal(examples.raw[own == writer], mnist.train.raw[who == writer])
            assert torch.equal(examples.labels[own == writer], mnist.train.labels[who == writer])


@pytest.mark.thorough
def test_the_script_makes_the_file_from_the_originals(originals: Path, tmp_path: Path) -> None:
    out = tmp_path / "made.jsonl"
    script = [sys.executable, "docs/handwriting_sample.py", "--data-dir", str(originals), "--out", str(out)]
    subprocess.run(script, cwd=ROOT, check=True, capture_output=True)
    if "ng" in zlib.ZLIB_RUNTIME_VERSION:  # packs the same pixels into other bytes
        made, kept = (handwriting._read_people(path)[0]["labels"] for path in (out, SAMPLE))
        assert made.tolist() == kept.tolist()
    else:
        assert out.read_bytes() == SAMPLE.read_bytes()


def test_each_of_twelve_natural_clients_is_one_person(sample: Dataset) -> None:
    data = FederatedData(dataset=sample, partition=Natural(), clients=12, seed=3)
    assert sample.train.groups is not None
    for client in range(12):
        assert sample.train.groups[torch.from_numpy(data.indices(client)[0])].unique().tolist() == [
            sample.train.groups.unique()[client]
        ]


def test_the_sample_is_small_and_its_terms_lie_beside_it(sample: Dataset) -> None:
    assert SAMPLE.stat().st_size < 500_000
    terms = SAMPLE.with_name("LICENSE.md").read_text(encoding="utf-8")
    for word in ("ShareAlike 3.0", "Copyright (c) Facebook", "NIST Special Database 19", SAMPLE.name):
        assert word in terms
    told = re.search(r"(\d+) handwritten digits", terms)
    assert told is not None
    assert int(told[1]) == len(sample.train) + len(sample.test)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"labels": "0', '"labels": "', 1),
        lambda text: text.replace("eNrt", "eNru", 1),
        lambda text: text.replace('"images"', '"pictures"'),
    ],
    ids=["cut off", "a label less", "pixels", "a key"],
)
def test_a_damaged_sample_is_one_sentence(damage: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(damage)
    path = tmp_path / "handwriting.jsonl"
    path.write_text(damage(SAMPLE.read_text(encoding="ascii")), encoding="ascii")
    monkeypatch.setattr(handwriting, "SAMPLE", path)
    with pytest.raises(DataError, match=r"handwriting.jsonl: is missing or damaged \(.+\); install fedsim again$"):
        Handwriting().load(None)
    path.unlink()
    with pytest.raises(DataError, match="No such file"):
        Handwriting().load(None)
