"""What the measures of one client share."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from fedsim.exposure.angular_lipschitz import AngularLipschitz
from fedsim.exposure.expected_error import ExpectedError
from fedsim.exposure.lavp import Lavp
from fedsim.exposure.lipschitz import Lipschitz
from fedsim.exposure.measure import Measure
from fedsim.exposure.of_clients import MeasureSchedule, measure_client
from fedsim.exposure.spectrum import Spectrum
from fedsim.training.cohort import LocalData
from fedsim.training.message_function import ClientMessage
from fedsim.training.settings import LocalTraining

MEASURES: list[Measure] = [
    AngularLipschitz(noises=6),
    Lipschitz(noises=6),
    Lipschitz(noises=6, sigma=0.01),
    Lipschitz(noises=3),
    Spectrum(),
    Lavp(steps=3),
    ExpectedError(),
]
FEW_MEASURES: list[Measure] = [Lipschitz(noises=3), Lipschitz(noises=3, sigma=0.01), Lavp(steps=3), ExpectedError()]


def exposure_rows(measures: list[Measure]) -> list[dict[str, Any]]:
    """The rows of a client with three examples, whose update is that of two local steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    inputs = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    share = LocalData(inputs=inputs, labels=torch.tensor([0, 1, 2]), key=("one",))
    training = LocalTraining(local_steps=2, batch_size=2, learning_rate=0.1)
    schedules = [
        MeasureSchedule(title=str(place), measure=measure, per_example=True, interval=1, memory_budget=1 << 29)
        for place, measure in enumerate(measures)
    ]
    loss: Any = nn.functional.cross_entropy
    return list(measure_client(schedules, model, share, training, loss))


@pytest.mark.parametrize("measures", [FEW_MEASURES, pytest.param(MEASURES, marks=pytest.mark.thorough)])
def test_what_measures_share_changes_no_value(measures: list[Measure]) -> None:
    together = [row["value"] for row in exposure_rows(measures)]
    alone = [row["value"] for measure in measures for row in exposure_rows([measure])]
    assert together == alone
    assert all(math.isfinite(value) for value in together)


def test_noises_of_the_same_size_are_sent_once() -> None:
    with patch.object(
        ClientMessage, "perturbed_messages", autospec=True, side_effect=ClientMessage.perturbed_messages
    ) as around:
        exposure_rows([AngularLipschitz(noises=20), Lipschitz(noises=20)])
        both = around.call_count
        exposure_rows([Lipschitz(noises=20)])
    assert both == around.call_count - both == 4  # of all together, and of each of three
