"""What measures take for a client's update is the one that its local training sends."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsim.training.loop import local_update
from fedsim.training.message_function import ClientMessage
from fedsim.training.model_state import copy_state
from fedsim.training.settings import LocalTraining

LOSS: Any = nn.functional.cross_entropy


class Branching(nn.Module):
    """Two layers share their weight, and of a third one the loss knows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.second.weight = self.first.weight
        self.unused = nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.second(torch.tanh(self.first(inputs)))))
        return found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"momentum": 0.9},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "proximal_mu": 0.5},
        {"weight_decay": 0.1, "momentum": 0.5, "label_smoothing": 0.2},
    ],
    ids=str,
)
def test_it_is_what_local_training_sends(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, inputs, labels = Branching().double(), torch.randn(4, 5).double(), torch.tensor([0, 2, 1, 1])
    training = LocalTraining(local_steps=3, batch_size=2, learning_rate=0.1, **settings)
    order = [torch.tensor([3, 0]), torch.tensor([1, 2]), torch.tensor([2, 3])]
    sent = ClientMessage.create(model, LOSS, inputs, labels, training=training, order=order)
    before = copy_state(model)
    after, _ = local_update(deepcopy(model), before, inputs, labels, training, key=(0,), loss=LOSS, order=order)
    moved = torch.cat([(before[name] - after[name]).flatten() / 0.1 for name in sent.names])
    torch.testing.assert_close(sent.vector, moved)
    torch.testing.assert_close(sent.call_in_transform(inputs), moved)
