"""What is sent as a function of one example: without the others where they only add a constant, with them otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fedsim.training.sent import Sent
from fedsim.training.settings import LocalTraining

LOSS: Any = nn.functional.cross_entropy


def sent(*layers: nn.Module, training: LocalTraining | None = None) -> Sent:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), *layers, nn.Tanh(), nn.Linear(6, 3)).double()
    return Sent.of(model, LOSS, torch.randn(4, 5, dtype=torch.double), torch.tensor([0, 2, 1, 1]), training=training)


@pytest.mark.parametrize(
    ("whole", "computed"),
    [
        (sent(), 1),
        (sent(nn.BatchNorm1d(6).eval()), 1),
        (sent(nn.BatchNorm1d(6)), 4),
        (sent(nn.Dropout()), 4),
        (sent(training=LocalTraining(local_steps=3, batch_size=2)), 4),
    ],
    ids=["plain", "batch norm in eval mode", "batch norm in train mode", "dropout", "update"],
)
def test_an_example_by_itself_is_what_it_is_among_the_others(whole: Sent, computed: int) -> None:
    alone, among = whole.alone(2), replace(whole, varying=(2,))
    assert len(alone.inputs) == computed
    other = torch.randn(1, 5, dtype=torch.double)
    torch.testing.assert_close(alone.unknown, among.unknown)
    torch.testing.assert_close(alone.vector, among.vector)
    torch.testing.assert_close(alone(other), among(other))
    torch.testing.assert_close(alone.double()(other), among(other))
    torch.testing.assert_close(alone.linear.push(other.flatten()), among.linear.push(other.flatten()))
    torch.testing.assert_close(alone.linear.pull(among.vector), among.linear.pull(among.vector))
    if whole.training is None:
        torch.testing.assert_close(alone.share, among.share)
