"""Clipped gradients of examples for several clients that train at once.

What a client of DP-SGD does with the gradients of its examples, and what
`fedsim.training.ghost_clipping` computes for one client, is computed for all of them by batched
products. A layer is a matrix that multiplies rows, one an example in a fully connected network and
one a position in a convolution, whose inputs are unfolded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn, unflatten
from torch.nn.functional import unfold

from fedsim.recording.wire_format import State
from fedsim.training.hooks import TrainingHooks
from fedsim.training.local_step import ClippedStep

_MAX_GRADIENT_NUMBERS = 1 << 26
"""Most numbers in the gradients of examples that are computed at once for their norms."""


@dataclass(frozen=True)
class ParameterCall:
    """Use of one parameter in a layer.

    Attributes:
        inputs: of the layer, `client example ...`; 1 for a bias, which is a weight of input 1.
        outputs: of the layer, likewise.
        convolution: the layer, if it is one, whose inputs are to be unfolded.
    """

    inputs: Tensor
    outputs: Tensor
    convolution: nn.Conv2d | None = None

    def rows(self, output_gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows that the parameter multiplies, and the gradients by what comes of them.

        The gradient of an example is the sum over its rows of the outer products of both.

        Args:
            output_gradient: in the shape of the outputs.

        Returns:
            Two tensors, `client example row value`.
        """
        if self.convolution is not None:  # `client example channel height width`
            gradients = output_gradient.flatten(3).mT
        else:
            gradients = output_gradient.flatten(2, -2) if output_gradient.ndim > 3 else output_gradient[:, :, None]
        if self.inputs.ndim == 0:
            return self.inputs.expand(*gradients.shape[:3], 1), gradients
        inputs = self.inputs.detach()
        if self.convolution is not None:
            layer = self.convolution
            patches = unfold(
                inputs.flatten(0, 1),
                layer.kernel_size,
                layer.dilation,
                layer.padding,  # type: ignore[arg-type]
                layer.stride,
            )
            return unflatten(patches.mT, 0, inputs.shape[:2]), gradients
        return inputs.flatten(2, -2) if inputs.ndim > 3 else inputs[:, :, None], gradients


def clipped_gradients(
    state: State,
    calls: Sequence[ParameterCall],
    example_losses: Tensor,
    is_example: Tensor,
    hooks: Sequence[TrainingHooks | None],
) -> dict[str, Tensor]:
    """Compute the gradients that clients' defenses make of clipped sums, `client ...` by parameter.

    Args:
        state: weights, `client ...` by parameter.
        calls: of each parameter, in the order of `state`.
        example_losses: `client slot`.
        is_example: `client slot`; a client's examples come first, then padding.
        hooks: by client; None for one that has taken all its steps.
    """
    # Gradients by the outputs of all layers.
    output_gradients = torch.autograd.grad((example_losses * is_example).sum(), [call.outputs for call in calls])
    rows = [call.rows(gradient) for call, gradient in zip(calls, output_gradients, strict=True)]
    # Norms, `parameter client slot`, become clipping factors.
    factors = torch.stack([_example_norms(inputs, gradients) for inputs, gradients in rows])
    batch_sizes = is_example.sum(1).tolist()
    for client, client_hooks in enumerate(hooks):
        size = batch_sizes[client]
        if client_hooks is not None and client_hooks.clipping_factors is not None and size:
            factors[:, client, :size] = client_hooks.clipping_factors(factors[:, client, :size])
    # Clipped sums, which each client's defense turns into its gradient.
    sums: dict[str, Tensor] = {}
    for (name, weights), (inputs, gradients), factor in zip(state.items(), rows, factors, strict=True):
        clipped = (gradients * factor[..., None, None]).flatten(1, 2)
        sums[name] = torch.bmm(clipped.mT, inputs.flatten(1, 2)).view_as(weights)
    for client, client_hooks in enumerate(hooks):
        if client_hooks is not None:
            total = {name: tensor[client] for name, tensor in sums.items()}
            with client_hooks.local_step(ClippedStep(state, client)):
                gradient_by_name = client_hooks.combine_sum(total, batch_sizes[client], total)
            for name, defended in gradient_by_name.items():
                sums[name][client] = defended
    return sums


def _example_norms(inputs: Tensor, gradients: Tensor) -> Tensor:
    """Return `client example`, the norm of each example's gradient by one parameter."""
    norms: Tensor
    if inputs.shape[2] == 1:  # the norm of an outer product is the product of the norms
        norms = inputs[:, :, 0].norm(dim=2) * gradients[:, :, 0].norm(dim=2)
        return norms
    chunk = max(1, _MAX_GRADIENT_NUMBERS // (inputs.shape[3] * gradients.shape[3]))
    pairs = zip(torch.split(inputs.flatten(0, 1), chunk), torch.split(gradients.flatten(0, 1), chunk), strict=True)
    chunk_norms = [torch.bmm(g.mT, x).flatten(1).norm(dim=1) for x, g in pairs]
    norms = unflatten(torch.cat(chunk_norms), 0, inputs.shape[:2])
    return norms
