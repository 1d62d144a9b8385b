"""A recording made elsewhere whose clients are sent BatchNorm's running statistics and return none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedsim.audit.plausibility import check_fit
from fedsim.interfaces.knowledge import Knowledge
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update
from tests.support.recordings import build_update


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def all_returned(update: Update) -> Update:
    return update


def weights_alone(update: Update) -> Update:
    after = {name: tensor for name, tensor in update.after.items() if "running" not in name}
    return dataclasses.replace(update, payload=Payload.from_dense(after, "weights"))


def gradient_alone(update: Update) -> Update:
    gradient = {name: tensor for name, tensor in update.before.items() if "running" not in name}
    return dataclasses.replace(update, payload=Payload.from_dense(gradient, "gradient"))


def gradient_with_statistics(update: Update) -> Update:
    statistics = {name: tensor for name, tensor in update.after.items() if "running" in name}
    gradient = gradient_alone(update)
    return dataclasses.replace(gradient, payload=gradient.payload | Payload.from_dense(statistics, "weights"))


def nothing_sent(update: Update) -> Update:
    before = {name: tensor for name, tensor in update.before.items() if "running" not in name}
    return dataclasses.replace(weights_alone(update), before=before)


@pytest.mark.parametrize(
    ("send", "warns"),
    [
        (all_returned, False),
        (weights_alone, True),
        (gradient_alone, True),
        (gradient_with_statistics, False),
        (nothing_sent, False),
    ],
)
def test_it_is_said_that_nothing_tells_how_clients_normalise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, send: Callable[[Update], Update], warns: bool
) -> None:
    state: dict[str, Tensor] = {name: t for name, t in network().state_dict().items() if t.is_floating_point()}
    after = {name: 1.01 * tensor for name, tensor in state.items()}
    Recorder(tmp_path).write(1, [send(build_update(state, after, num_examples=4))])
    check_fit(Transcript(tmp_path), Knowledge(model=network, input_shape=(1, 4, 4)))
    assert ("was sent 2.running_mean, 2.running_var and returned no running statistics" in caplog.text) == warns
