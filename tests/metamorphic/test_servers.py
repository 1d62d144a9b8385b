"""What a server makes of replies follows from what was sent, not from who sent it or in how many parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from fedsim.federation.engines.arrays import make_record, read_state
from fedsim.plugins import registry

pytestmark = pytest.mark.usefixtures("server_task")

SETTINGS: dict[str, dict[str, Any]] = {
    "fedsgd": {"learning_rate": 0.5},
    "bulyan": {"num_malicious_nodes": 1},
    "krum": {"num_malicious_nodes": 1},
    "multikrum": {"num_malicious_nodes": 1, "num_nodes_to_select": 3},
    "qfedavg": {"client_learning_rate": 0.1},
}
WEIGHTED_BY_N = ("fedadagrad", "fedadam", "fedavg", "fedavgm", "fedprox", "fedsgd", "fedyogi")
Reply = tuple[int, int, Tensor]
"""Client, N, and the tensor that it sends."""


class Nodes:
    """Grid that only names its nodes."""

    def __init__(self, count: int) -> None:
        self.count = count

    def get_node_ids(self) -> list[int]:
        return list(range(1, self.count + 1))


def next_model(name: str, replies: Sequence[Reply]) -> Tensor:
    """Return the model of a strategy after a round in which these clients answered."""
    strategy = registry.build("strategies", name, SETTINGS.get(name, {}), name)
    model = {"w": torch.linspace(-1, 1, 6)}
    beside = {"control/w": torch.full((6,), 0.1)} if name == "scaffold" else {}
    broadcast = make_record({**model, **beside})
    asked = list(strategy.configure_train(1, broadcast, ConfigRecord(), Nodes(len(replies))))
    answers = []
    for message, (_, num_examples, tensor) in zip(asked, replies, strict=True):
        state = {"gradient/w" if name == "fedsgd" else "w": tensor, **beside}
        metrics = MetricRecord({"num-examples": num_examples, "train_loss": 1.5, "loss": 1.5})
        answers.append(Message(RecordDict({"arrays": make_record(state), "metrics": metrics}), reply_to=message))
    # Replies come in any order; what counts is the id of their clients.
    for answer, (client, _, _) in zip(answers, replies, strict=True):
        vars(answer.metadata)["_src_node_id"] = client
    arrays, _ = strategy.aggregate_train(1, answers)
    assert isinstance(arrays, ArrayRecord)
    return read_state(arrays)["w"]


@pytest.fixture
def replies() -> list[Reply]:
    """Seven clients, whose N is even."""
    rng = torch.Generator().manual_seed(4)
    return [(client, 2 * client, torch.randn(6, generator=rng)) for client in range(1, 8)]


@pytest.mark.parametrize("name", registry.registered_names("strategies"))
def test_clients_that_change_their_names_change_no_model(name: str, replies: list[Reply]) -> None:
    renamed = [(8 - client, num_examples, tensor) for client, num_examples, tensor in replies]
    assert torch.allclose(next_model(name, replies), next_model(name, renamed), atol=1e-6)
    assert torch.allclose(next_model(name, replies), next_model(name, renamed[::-1]), atol=1e-6)


@pytest.mark.parametrize("name", WEIGHTED_BY_N)
def test_a_client_in_two_halves_counts_as_much_as_whole(name: str, replies: list[Reply]) -> None:
    halves = []
    for client, num_examples, tensor in replies:
        halves += [(2 * client, num_examples // 2, tensor), (2 * client + 1, num_examples // 2, tensor)]
    assert torch.allclose(next_model(name, replies), next_model(name, halves), atol=1e-6)
