"""The length of a batch's gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedsim.errors import ConfigError
from fedsim.measure import Measure
from fedsim.task import Loss
from fedsim.training.modes import forward


@dataclass(frozen=True, kw_only=True)
class GradientNorm(Measure):
    """L2 norm of the gradient of a batch's mean loss, all trained parameters together.

    One value a batch, in units of the loss over those of the weights; a larger value means that the batch moves the
    model further, not that it is easier to reconstruct. It is undefined where the gradient is exactly zero: such a
    gradient holds nothing to read, and a norm of 0 beside small ones would say otherwise.
    """

    def _of(self, model: nn.Module, loss: Loss, inputs: Tensor, labels: Tensor) -> Tensor:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not parameters:
            raise ConfigError("measure: the model has no parameter to train, so there is no gradient")
        gradients = torch.autograd.grad(loss(forward(model, inputs), labels), parameters, materialize_grads=True)
        norm = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum().sqrt()
        return torch.where(norm == 0, torch.nan, norm)
