"""What saves a CPU time in the gradients of batches, where trials show that a model allows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import avg_pool2d

from fedsim.base.randomness import generator
from fedsim.training.example_independence import find_mixing_layer
from fedsim.training.settings import LocalTraining

_TRIAL_EXAMPLES = 3
_ROUNDING = 1e-4
"""Largest difference of two gradients that counts as rounding, relative to their norm."""


@dataclass(frozen=True)
class ModelShortcuts:
    """Shortcuts that a model allows.

    Attributes:
        computes_equal_examples_once: each example has an output of its own, so equal ones have equal outputs.
        lays_channels_last: the layout of images with the channels last gives the same gradients.
        reuses_memory: ReLUs in place, and average pooling whose gradient is written once, give the same gradients.
    """

    computes_equal_examples_once: bool = False
    lays_channels_last: bool = False
    reuses_memory: bool = False

    def lay_out(self, inputs: Tensor) -> Tensor:
        """Return inputs in the layout that convolutions take fastest."""
        return inputs.contiguous(memory_format=torch.channels_last) if self.lays_channels_last else inputs


def find_shortcuts(model: nn.Module, settings: LocalTraining | None, inputs: Tensor) -> ModelShortcuts:
    """Try which shortcuts a model allows; the model is changed accordingly, but for its parameters' values.

    Args:
        model: in the modes in which it is used.
        settings: how it is trained; None where that is not known, and then there are no shortcuts.
        inputs: `example ...` in model units, of which the shape, the range and the device count.
    """
    if settings is None or inputs.device.type != "cpu":
        return ModelShortcuts()
    # Two random batches that share their last example.
    rng, low = generator("probe"), inputs.min()
    trials = torch.rand((2, _TRIAL_EXAMPLES, *inputs.shape[1:]), generator=rng)
    first, second = low + (inputs.max() - low) * trials
    second[-1] = first[-1]
    try:
        gradients = _sum_gradients(model, first)
        # Where all are zero, as those of a last layer that begins with zeros, no trial shows anything.
        if not any(bool(gradient.any()) for gradient in gradients):
            return ModelShortcuts()
        is_independent = find_mixing_layer(model, settings, first, second) is None
        lays_channels_last = first.ndim == 4 and _lay_channels_last(model, first, gradients)
        shortcuts = ModelShortcuts(is_independent, lays_channels_last)
        reuses_memory = _reuse_memory(model, shortcuts.lay_out(first), gradients)
    except Exception:  # a foreign model may refuse such batches
        return ModelShortcuts()
    return ModelShortcuts(is_independent, lays_channels_last, reuses_memory)


def _lay_channels_last(model: nn.Module, images: Tensor, gradients: Sequence[Tensor]) -> bool:
    """Lay out a model with the channels last, unless it then raises or gives other gradients."""
    model.to(memory_format=torch.channels_last)
    is_same = _give_gradients(model, images.contiguous(memory_format=torch.channels_last), gradients)
    if not is_same:
        model.to(memory_format=torch.contiguous_format)
    return is_same


def _reuse_memory(model: nn.Module, inputs: Tensor, gradients: Sequence[Tensor]) -> bool:
    """Write over what ReLUs are given and write gradients of pooling once, unless the model then gives other gradients.

    Large activations do not stay in a cache, so that each time they are written takes as long as part of a convolution.
    """
    relus = [module for module in model.modules() if type(module) is nn.ReLU and not module.inplace]
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    for parent in list(model.modules()):
        previous: tuple[str, nn.Module] | None = None  # the layer before, where one follows the other
        for name, module in list(parent.named_children()):
            if type(module) is nn.AvgPool2d and _tiles(module) and not _has_hooks(module):
                follows_relu = False
                if previous is not None and type(previous[1]) is nn.ReLU and not _has_hooks(previous[1]):
                    follows_relu = True
                    replaced.append((parent, *previous))
                    setattr(parent, previous[0], nn.Identity())
                replaced.append((parent, name, module))
                setattr(parent, name, _TilePooling(module.kernel_size, follows_relu=follows_relu))
            if type(parent) is nn.Sequential:
                previous = name, module
    for relu in relus:
        relu.inplace = True
    is_same = bool(relus or replaced) and _give_gradients(model, inputs, gradients)
    if not is_same:
        for relu in relus:
            relu.inplace = False
        for parent, name, module in replaced:
            setattr(parent, name, module)
    return is_same


def _has_hooks(module: nn.Module) -> bool:
    """Return whether a layer has hooks, which would stay with it when it is replaced."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def _tiles(pool: nn.AvgPool2d) -> bool:
    """Return whether each input of a pooling layer belongs to one window, of the layer's size."""
    is_square = isinstance(pool.kernel_size, int) and pool.stride == pool.kernel_size
    return is_square and not pool.padding and not pool.ceil_mode and pool.divisor_override is None


class _TilePooling(nn.Module):
    """Average pooling by squares that do not overlap, of a ReLU's values where `follows_relu`."""

    def __init__(self, side: Any, *, follows_relu: bool) -> None:
        super().__init__()
        self.side: int = side
        self.follows_relu = follows_relu

    def forward(self, images: Tensor) -> Tensor:
        """Return the mean of each square."""
        if images.ndim != 4 or images.shape[-2] % self.side or images.shape[-1] % self.side:
            return avg_pool2d(images.relu() if self.follows_relu else images, self.side)
        pool: Callable[[Tensor, int, bool], Tensor] = _AverageOfTiles.apply
        return pool(images, self.side, self.follows_relu)


class _AverageOfTiles(Function):
    """Average pooling whose gradient is written once; PyTorch writes it twice, and again for a ReLU or a layout.

    After a ReLU, one backward pass writes over the activations, so that there cannot be a second one.
    """

    @staticmethod
    def forward(ctx: Any, images: Tensor, side: int, follows_relu: bool) -> Tensor:
        """Return the mean of each square."""
        ctx.side, ctx.follows_relu = side, follows_relu
        if follows_relu:
            images.relu_()
            ctx.save_for_backward(images)
        return avg_pool2d(images, side)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of each mean, divided among the pixels of its square."""
        side = ctx.side
        means = gradients[0].permute(0, 2, 3, 1).contiguous() / side**2
        count, height, width, channels = means.shape
        tiles = means[:, :, None, :, None, :].expand(-1, -1, side, -1, side, -1)
        if ctx.follows_relu:
            (values,) = ctx.saved_tensors
            values = values.permute(0, 2, 3, 1).unflatten(2, (width, side)).unflatten(1, (height, side))
            tiles = torch.ops.aten.threshold_backward.grad_input(tiles, values, 0, grad_input=values)
        return tiles.reshape(count, height * side, width * side, channels).permute(0, 3, 1, 2), None, None


def _give_gradients(model: nn.Module, inputs: Tensor, gradients: Sequence[Tensor]) -> bool:
    """Return whether a model now gives these gradients of `_sum_gradients`."""
    try:
        return _agree(gradients, _sum_gradients(model, inputs))
    except Exception:  # such as of `view`, which takes one layout only; a foreign model may raise anything
        return False


def _sum_gradients(model: nn.Module, images: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of the sum of squares of the outputs."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.enable_grad():
        objective = model(images).square().sum()
    return torch.autograd.grad(objective, parameters, materialize_grads=True)


def _agree(gradients: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether gradients as a whole agree; that of a bias before BatchNorm is all rounding."""
    pairs = zip(gradients, others, strict=True)
    differences = [(gradient - other).norm() for gradient, other in pairs]
    norms = [gradient.norm() for gradient in gradients]
    return bool(torch.stack(differences).norm() <= _ROUNDING * torch.stack(norms).norm())
