"""The local step that is under way, as the contexts of defenses' hooks see it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedsim.base.errors import RunError
from fedsim.base.task import Loss
from fedsim.recording.wire_format import State


@dataclass(kw_only=True)
class ModelStep:
    """Step of one client's local training.

    Attributes:
        model: holds the weights before the step.
        loss: of the task, with smoothed labels where the settings say so.
        sees_examples: whether a defense sees the gradients of single examples.
        batch: inputs and labels that are trained on; None until defenses have replaced the batch,
            and for an empty one.
    """

    model: nn.Module
    loss: Loss
    sees_examples: bool
    batch: tuple[Tensor, Tensor] | None = None

    def weights(self) -> State:
        """Return copies of the parameters, by name."""
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    def gradient_at(self, weights: State) -> State:
        """Compute the mean gradient of the batch at other `weights`; see `LocalContext`."""
        parameters = self._leaves(weights, "gradient_at")
        trained = {name: leaf for name, leaf in parameters.items() if leaf.requires_grad}
        loss = self._batch_loss(parameters, "gradient_at")
        gradients = torch.autograd.grad(loss, list(trained.values()), materialize_grads=True)
        return dict(zip(trained, gradients, strict=True))

    @torch.no_grad()
    def loss_at(self, weights: State) -> float:
        """Compute the mean loss of the batch at other `weights`; see `LocalContext`."""
        return self._batch_loss(self._leaves(weights, "loss_at"), "loss_at").item()

    def input_gradient(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Compute the gradient of the mean loss by `inputs`, at the weights before the step."""
        leaf = inputs.detach().clone().requires_grad_()
        with _leave_generators(inputs.device):
            loss = self.loss(self._outputs(self.weights(), leaf), labels)
        (gradient,) = torch.autograd.grad(loss, leaf)
        return gradient

    def _batch_loss(self, parameters: Mapping[str, Tensor], method: str) -> Tensor:
        """Compute the mean loss of the batch at `parameters`, for a method of the context."""
        if self.sees_examples:
            _refuse_second_gradient()
        if self.batch is None:
            raise RunError(f"context.{method}: there is no batch of examples yet; call it in 'on_gradient'")
        inputs, labels = self.batch
        with _leave_generators(inputs.device):
            return self.loss(self._outputs(parameters, inputs), labels)

    def _leaves(self, weights: State, method: str) -> dict[str, Tensor]:
        """Return all parameters as leaves to differentiate by, those in `weights` with its values."""
        leaves = {}
        for name, parameter in self.model.named_parameters():
            value = weights.get(name, parameter).detach().clone()
            leaves[name] = value.requires_grad_(parameter.requires_grad)
        if unknown := sorted(set(weights) - set(leaves)):
            raise RunError(
                f"context.{method}: '{unknown[0]}' is not a parameter of the model; expected names of context.weights"
            )
        return leaves

    def _outputs(self, parameters: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """Compute outputs with other parameters; running statistics stay as they are."""
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        outputs: Tensor = functional_call(self.model, {**parameters, **buffers}, (inputs,))
        return outputs


@dataclass(frozen=True)
class ClippedStep:
    """Step of one of several clients that train at once, whose defense clips gradients of examples.

    Attributes:
        state: weights of all these clients before the step, `client ...` by parameter.
        client: index of the client.
    """

    state: State
    client: int

    def weights(self) -> State:
        """Return copies of the parameters, by name."""
        return {name: tensor[self.client].detach().clone() for name, tensor in self.state.items()}

    def gradient_at(self, weights: State) -> State:
        """Refuse: the defense sees the gradients of single examples."""
        del weights
        _refuse_second_gradient()

    def loss_at(self, weights: State) -> float:
        """Refuse, likewise."""
        del weights
        _refuse_second_gradient()

    def input_gradient(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Refuse, likewise."""
        del inputs, labels
        _refuse_second_gradient()


def _refuse_second_gradient() -> NoReturn:
    raise RunError(
        "context: a defense here clips or noises the gradients of single examples, and another gradient of the batch "
        "would get round it; leave one of the two out"
    )


@contextmanager
def _leave_generators(device: torch.device) -> Iterator[None]:
    """Restore the global generators, so that dropout of later steps draws what it would have drawn."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        yield
