"""Public examples of a recording made elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import fedsim
from fedsim.audit.evaluation.foreign_recording import ForeignRecording, drop_held_examples
from fedsim.audit.evaluation.truth import Truth
from fedsim.base.errors import ConfigError, DataError
from fedsim.interfaces.modality import PublicExamples
from tests.support.experiments import make_attack_file

IMAGES, LABELS = torch.rand(6, 1, 3, 3, generator=torch.Generator().manual_seed(0)), torch.arange(6)


def test_what_a_client_holds_is_no_public_example(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever its label in the public file; what nobody holds stays as it is."""
    public = PublicExamples(data=IMAGES, labels=LABELS)
    held = Truth(data=IMAGES[[1, 4]], labels=torch.tensor([3, 3]))
    left = drop_held_examples(public, [Truth(data=IMAGES[:1] + 0.1, labels=LABELS[:1]), held])
    assert left.labels.tolist() == [0, 2, 3, 5]
    assert torch.equal(left.data, IMAGES[[0, 2, 3, 5]])
    assert "truth.public: 2 of 6 examples are not auxiliary records" in caplog.text
    with pytest.raises(ConfigError, match="each of its 6 examples is equal to one of a client's"):
        drop_held_examples(public, [Truth(data=IMAGES, labels=LABELS)])


def test_rounding_hides_no_image_that_a_client_holds() -> None:
    """One file is of images as they are, the other of those that were standardised on their way to the model."""
    images = torch.randint(256, (50, 1, 8, 8), generator=torch.Generator().manual_seed(1)) / 255
    mean, deviation = 0.1307, 0.3081
    low, high = -mean / deviation, (1 - mean) / deviation
    standardised = ((images - mean) / deviation - low) / (high - low)
    assert not torch.equal(standardised, images)
    public = PublicExamples(data=images, labels=torch.arange(50))
    left = drop_held_examples(public, [Truth(data=standardised[:20], labels=torch.zeros(20, dtype=torch.int64))])
    assert left.labels.tolist() == list(range(20, 50))


def test_a_copy_that_would_count_as_an_exact_claim_is_no_auxiliary_record() -> None:
    """Noise of .005 is as that of a re-encoded file, at 46 dB; a claim of 40 dB is scored as exact."""
    images = torch.rand(30, 1, 8, 8, generator=torch.Generator().manual_seed(1)) * 0.9 + 0.05
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(2))
    public = PublicExamples(data=images + 0.005 * noise, labels=torch.arange(30))
    held = [Truth(data=images[start : start + 5], labels=torch.zeros(5, dtype=torch.int64)) for start in (0, 10)]
    assert drop_held_examples(public, held).labels.tolist() == [*range(5, 10), *range(15, 30)]


def test_auxiliary_records_of_a_sorted_file_are_of_all_classes(tmp_path: Path) -> None:
    """The first ones of a file that is in the order of its classes are of a class or two."""
    images, labels = torch.rand(400, 1, 2, 2), torch.arange(400) // 40
    file = fedsim.write_truth(tmp_path, lambda _: None, [], public=(images, labels))
    facts = {"auxiliary": True, "value_range": [0.0, 2.0]}
    adversary = make_attack_file("map", auxiliary=100, knowledge=facts).adversary
    records = ForeignRecording({"public": Path(file["public"])}).public_records(adversary)["auxiliary"]
    assert len(records.inputs) == 100
    assert records.labels.unique().tolist() == list(range(10))
    own = [labels[(2 * images == record).flatten(1).all(1)].tolist() for record in records.inputs]
    assert own == [[label] for label in records.labels.tolist()]


@pytest.mark.parametrize(
    ("images", "labels", "told"),
    [
        (IMAGES / 0, LABELS, "client public: an input is NaN or infinite; correct it"),
        (IMAGES, LABELS - 1, "a label is -1, and classes are counted from 0; number them so"),
    ],
)
def test_examples_that_nobody_can_be_fed_with_are_one_sentence(
    tmp_path: Path, images: Tensor, labels: Tensor, told: str
) -> None:
    with pytest.raises(DataError, match=told):
        fedsim.write_truth(tmp_path, lambda _: None, [], public=(images, labels))
