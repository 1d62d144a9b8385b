"""The floor: FedAvg as a loop in plain PyTorch, without messages, clients or a server."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from frameworks.clock import CLOCK
from frameworks.jobs import BATCH, LEARNING_RATE, Task


class BareLoop:
    """FedAvg over all clients of a task, round by round."""

    def __init__(self, task: Task) -> None:
        self.network = task.work.network()
        self._parameters = list(self.network.parameters())
        self._optimizer = torch.optim.SGD(self._parameters, lr=LEARNING_RATE)
        self._inputs, self._labels = task.work.data(task.clients)

    def run_round(self) -> None:
        """Train all clients, and put the mean into the network."""
        before = [p.detach().clone() for p in self._parameters]
        total = [torch.zeros_like(p) for p in before]
        for inputs, labels in zip(self._inputs, self._labels, strict=True):
            with torch.no_grad():
                torch._foreach_copy_(self._parameters, before)
            for batch, targets in zip(inputs.split(BATCH), labels.split(BATCH), strict=True):
                self._optimizer.zero_grad()
                cross_entropy(self.network(batch), targets).backward()
                self._optimizer.step()
            with torch.no_grad():
                torch._foreach_add_(total, self._parameters)
        with torch.no_grad():
            torch._foreach_copy_(self._parameters, torch._foreach_div(total, len(self._inputs)))


def run(task: Task) -> Mapping[str, Tensor]:
    """Return the final global model."""
    loop = BareLoop(task)
    for _ in range(task.rounds):
        loop.run_round()
        CLOCK.round_over()
    return loop.network.state_dict()
