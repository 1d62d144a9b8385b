"""The floor: FedAvg as a loop in plain PyTorch, without messages, clients or a server."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from frameworks.clock import CLOCK
from frameworks.jobs import BATCH, LEARNING_RATE, Task


def run(task: Task) -> Mapping[str, Tensor]:
    """Return the final global model."""
    network = task.work.network()
    parameters = list(network.parameters())
    optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE)
    inputs, labels = task.work.data(task.clients)
    for _ in range(task.rounds):
        before = [p.detach().clone() for p in parameters]
        total = [torch.zeros_like(p) for p in before]
        for client in range(task.clients):
            with torch.no_grad():
                torch._foreach_copy_(parameters, before)
            for batch, targets in zip(inputs[client].split(BATCH), labels[client].split(BATCH), strict=True):
                optimizer.zero_grad()
                cross_entropy(network(batch), targets).backward()
                optimizer.step()
            with torch.no_grad():
                torch._foreach_add_(total, parameters)
        with torch.no_grad():
            torch._foreach_copy_(parameters, torch._foreach_div(total, task.clients))
        CLOCK.round_over()
    return network.state_dict()
