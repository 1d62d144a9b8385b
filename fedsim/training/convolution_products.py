"""Convolutions as unfolding and matrix products, for weights that differ by victim or client.

A batched convolution whose weights differ has one group for each of them, and cuDNN runs a kernel
for each group. Unfolded inputs and a batched matrix product give the same outputs by one kernel for
all of them, and so do both backward passes, which autograd derives from the same operations. Images
are laid out with the channels last: outputs, pooling and gradients are then matrices without copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, unflatten
from torch.autograd import Function
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

_CONVOLUTIONS: frozenset[Callable[..., Any]] = frozenset({torch.conv1d, torch.conv2d, torch.conv3d})


def _unfold_backward_of_victims(
    info: Any,
    in_dims: Sequence[int | None],
    gradient: Tensor,
    input_sizes: Sequence[int],
    axis: int,
    size: int,
    step: int,
) -> tuple[Tensor, int]:
    """Compute the derivative of `Tensor.unfold` for all victims at once inside `vmap`."""
    assert in_dims[0] is not None
    gradients, sizes = gradient.movedim(in_dims[0], 0), [info.batch_size, *input_sizes]
    axis = axis + 1 if axis >= 0 else axis
    return torch.ops.aten.unfold_backward(gradients, sizes, axis, size, step), 0


# PyTorch itself computes it for one victim after the other.
torch.library.register_vmap("aten::unfold_backward", _unfold_backward_of_victims)


def products_are_faster(device: torch.device) -> bool:
    """Return whether unfolding and products take less time than a convolution in groups.

    A CPU takes twice as long by products, because it waits for the memory of the unfolded inputs.
    """
    return device.type != "cpu"


def use_products(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which convolutions are computed as products, where that saves time."""
    return ConvolutionsAsProducts() if products_are_faster(device) else nullcontext()


class ConvolutionsAsProducts(TorchFunctionMode):
    """Context in which convolutions are unfolding and products, also inside `vmap` and `grad`.

    Transposed and depthwise convolutions stay as they are: the groups of a depthwise convolution
    are one kernel, however many victims there are.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `convolve` in place of a convolution that it can compute, `func` otherwise."""
        settings = kwargs or {}
        if func in _CONVOLUTIONS and _is_batched_and_mixes_channels(*args, **settings):
            return convolve(*args, **settings)
        return func(*args, **settings)


def _is_batched_and_mixes_channels(
    input: Tensor,
    weight: Tensor,
    *settings: Any,
    groups: int = 1,
    **other_settings: Any,
) -> bool:
    if len(settings) == 5:  # bias, stride, padding, dilation, groups
        groups = settings[-1]
    is_depthwise = groups > 1 and weight.shape[1] == 1
    return input.ndim == weight.ndim and not is_depthwise


def convolve(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    leading_axes: int = 0,
) -> Tensor:
    """Compute what `torch.conv1d`, `conv2d` and `conv3d` do, also for several weights at once.

    >>> images, weights = torch.rand(7, 2, 3, 8, 8), torch.rand(7, 5, 3, 3, 3)
    >>> convolve(images, weights, padding="same", leading_axes=1).shape  # each client's weights
    torch.Size([7, 2, 5, 8, 8])

    Args:
        input: `leading ... example channel position ...`.
        weight: `leading ... channel input_channel offset ...`.
        bias: `leading ... channel`.
        stride: distance of neighbouring positions, one number or one for each axis.
        padding: number of zeros at both ends of an axis, or `same` or `valid`.
        dilation: distance of neighbouring offsets.
        groups: groups of channels; each sees the input channels of the same group.
        leading_axes: number of leading axes, along which each input has weights of its own.
    """
    axes = input.ndim - leading_axes - 2
    if groups > 1:
        # Each group is one more of those that have weights of their own.
        inputs = unflatten(input, -axes - 1, (groups, -1)).movedim(-axes - 2, -axes - 3)
        weights = unflatten(weight, -axes - 2, (groups, -1))
        biases = None if bias is None else unflatten(bias, -1, (groups, -1))
        outputs = convolve(inputs, weights, biases, stride, padding, dilation, leading_axes=leading_axes + 1)
        return outputs.movedim(-axes - 3, -axes - 2).flatten(-axes - 2, -axes - 1)
    kernel = weight.shape[leading_axes + 2 :]
    strides, dilations = _repeat_for_axes(stride, axes), _repeat_for_axes(dilation, axes)
    # Pad positions; channels are last from here on.
    windows = pad(input.movedim(-axes - 1, -1), _padding_of_ends(padding, kernel, dilations))
    # View the inputs of each position, `leading ... example position ... channel offset ...`.
    for axis, (size, step, distance) in enumerate(zip(kernel, strides, dilations, strict=True)):
        windows = windows.unfold(leading_axes + 1 + axis, distance * (size - 1) + 1, step)[..., ::distance]
    positions = windows.shape[leading_axes : leading_axes + 1 + axes]
    # Multiply, `leading ... (example position) (offset channel)` by the weights.
    columns = windows.movedim(-axes - 1, -1).flatten(leading_axes + 1 + axes).flatten(leading_axes, -2)
    outputs = _Product.apply(columns, weight.movedim(leading_axes + 1, -1).flatten(leading_axes + 1).mT)
    if bias is not None:
        outputs = outputs + bias[..., None, :]
    return unflatten(outputs, -2, positions).movedim(-1, -axes - 1)


class _Product(Function):
    """Product of two matrices whose gradients are laid out like the matrices themselves.

    A gradient of `torch.bmm` may come transposed, which slows down what is computed with it.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(first: Tensor, second: Tensor) -> Tensor:
        return first @ second

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (first, second), (of_first, of_second) = ctx.saved_tensors, ctx.needs_input_grad
        return (
            _Product.apply(gradient, second.mT) if of_first else None,
            _TransposedProduct.apply(first, gradient) if of_second else None,
        )


class _TransposedProduct(_Product):
    """Product of the transpose of the first matrix and the second, likewise."""

    @staticmethod
    def forward(first: Tensor, second: Tensor) -> Tensor:
        return first.mT @ second

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (first, second), (of_first, of_second) = ctx.saved_tensors, ctx.needs_input_grad
        return (
            _Product.apply(second, gradient.mT) if of_first else None,
            _Product.apply(first, gradient) if of_second else None,
        )


def _repeat_for_axes(value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * axes if len(values) == 1 else values


def _padding_of_ends(padding: int | str | Sequence[int], kernel: Sequence[int], dilations: Sequence[int]) -> list[int]:
    """Return the numbers of zeros as `pad` takes them: of the channels, then of the last axis first."""
    if padding == "same":
        totals = [distance * (size - 1) for size, distance in zip(kernel, dilations, strict=True)]
    elif isinstance(padding, str):
        totals = [0] * len(kernel)
    else:
        totals = [2 * zeros for zeros in _repeat_for_axes(padding, len(kernel))]
    ends = [0, 0]
    for total in reversed(totals):
        ends += [total // 2, total - total // 2]
    return ends
