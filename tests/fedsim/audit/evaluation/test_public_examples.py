"""Public examples of a recording made elsewhere."""

from __future__ import annotations

import pytest
import torch

from fedsim.audit.evaluation.foreign_recording import drop_held_examples
from fedsim.audit.evaluation.truth import Truth
from fedsim.base.errors import ConfigError
from fedsim.interfaces.modality import PublicExamples

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
