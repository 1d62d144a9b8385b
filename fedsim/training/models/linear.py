"""Linear models."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fedsim.base.task import Task
from fedsim.training.models import input_size


@dataclass(frozen=True, kw_only=True)
class Linear:
    """One linear layer on flattened inputs: logistic regression of classes, or linear regression.

    With a regression task and `bias = false` it is the federated least squares of LMRA, section
    3.1.

    Args:
        bias: whether the layer adds a constant.
    """

    bias: bool = True

    def build(self, task: Task) -> nn.Module:
        """Build the network; inputs of any shape are flattened."""
        return nn.Sequential(nn.Flatten(), nn.Linear(input_size(task, "linear"), task.outputs, bias=self.bias))
