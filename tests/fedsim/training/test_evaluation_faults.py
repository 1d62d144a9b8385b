"""Networks whose evaluation is of one random pass, or of a batch in place of examples."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

import fedsim
from fedsim.training.evaluation_faults import describe_evaluation_faults


class AlwaysDropping(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(dropout(inputs.flatten(1), 0.5))


class Recurrent(nn.Module):
    """An LSTM over the lines of images, which takes the batch for time unless it is told otherwise."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(8, 16, batch_first=batch_first), nn.Linear(16, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.layer(inputs.flatten(0, 1))[0][:, -1])
        return outputs


class Squeezing(nn.Linear):
    """Loses the axis of examples where there is only one."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs.flatten(1).squeeze())


def normalising(tracks: bool) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64, track_running_stats=tracks), nn.Dropout(0.5))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_network_that_squeezes_single_examples_mixes_none(count: int) -> None:
    assert describe_evaluation_faults(Squeezing(64, 10), torch.rand(count, 1, 8, 8)) == ""


@pytest.mark.parametrize(
    ("build", "fault"),
    [
        (lambda: AlwaysDropping(64, 10), "its outputs change from pass to pass in evaluation, too"),
        (lambda: Recurrent(batch_first=False), "what it computes of an example in evaluation depends on the others"),
        (lambda: Recurrent(batch_first=True), ""),
        (lambda: normalising(tracks=True), ""),
        (lambda: normalising(tracks=False), ""),
    ],
)
def test_outputs_in_evaluation_follow_from_the_example(build: Callable[[], nn.Module], fault: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network, inputs = build(), torch.rand(6, 1, 8, 8)
    sentence = describe_evaluation_faults(network, inputs)
    assert sentence.startswith(fault)
    assert bool(sentence) == bool(fault)


def test_a_run_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    experiment = {
        "partition": {"name": "iid", "samples_per_client": 4},
        "model": AlwaysDropping(64, 10),
        "training": {"local_steps": 1},
        "federation": {"clients": 2},
    }
    with caplog.at_level(logging.WARNING):
        fedsim.run(experiment, tmp_path / "run")
    assert "its outputs change from pass to pass in evaluation, too" in caplog.text
