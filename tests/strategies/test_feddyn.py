"""FedDyn's server against Algorithm 1 by hand, with two of four clients in a round."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from fedsim.federation.engines.arrays import make_record, read_state
from strategies.checkpoint import Checkpoint
from strategies.feddyn import FedDyn

pytestmark = pytest.mark.usefixtures("server_task")


class Nodes:
    """Grid that only names its four nodes."""

    def get_node_ids(self) -> list[int]:
        return [1, 2, 3, 4]


def play_round(strategy: FedDyn, number: int, model: Tensor, replies: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the model after a round in which the first clients that are asked answer."""
    state = {"w": model, "2.running_mean": model}
    asked = list(strategy.configure_train(number, make_record(state), ConfigRecord(), Nodes()))
    answers = []
    for num_examples, (message, tensor) in enumerate(zip(asked, replies, strict=False), start=1):
        metrics = MetricRecord({"num-examples": num_examples, "train_loss": 1.0})
        sent = make_record({"w": tensor, "2.running_mean": tensor})
        answers.append(Message(RecordDict({"arrays": sent, "metrics": metrics}), reply_to=message))
    arrays, _ = strategy.aggregate_train(number, answers)
    assert isinstance(arrays, ArrayRecord)
    return dict(read_state(arrays))


def test_the_model_is_the_mean_less_the_state_for_two_rounds() -> None:
    strategy, alpha = FedDyn(), 0.3
    model, h = torch.tensor([1.0, -2.0]), torch.zeros(2)
    rounds = [
        (torch.tensor([2.0, 0.0]), torch.tensor([0.0, -1.0])),
        (torch.tensor([1.0, 1.0]), torch.tensor([3.0, 0.5])),
    ]
    for number, replies in enumerate(rounds, start=1):
        mean = (replies[0] + replies[1]) / 2
        h = h - alpha / 4 * ((replies[0] - model) + (replies[1] - model))
        after = play_round(strategy, number, model, replies)
        torch.testing.assert_close(after["w"], mean - h / alpha)
        torch.testing.assert_close(after["2.running_mean"], mean)
        model = after["w"]


def test_a_round_without_answers_changes_nothing() -> None:
    strategy = FedDyn()
    play_round(strategy, 1, torch.ones(2), [torch.zeros(2), torch.zeros(2)])
    state = {name: array.copy() for name, array in strategy.scaled_state.items()}
    list(strategy.configure_train(2, make_record({"w": torch.ones(2)}), ConfigRecord(), Nodes()))
    assert strategy.aggregate_train(2, []) == (None, None)
    assert all(np.array_equal(strategy.scaled_state[name], array) for name, array in state.items())


def test_the_state_is_in_a_checkpoint() -> None:
    strategy = FedDyn()
    play_round(strategy, 1, torch.ones(2), [torch.zeros(2), torch.zeros(2)])
    checkpoint = Checkpoint.capture(1, make_record({"w": torch.ones(2)}), strategy)
    assert not checkpoint.unsavable
    assert any(np.array_equal(array, [0.5, 0.5]) for array in checkpoint.tensors.values())
