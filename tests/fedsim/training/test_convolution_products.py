"""Convolutions as unfolding and products are convolutions, for any weights and derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from fedsim.training import convolution_products
from fedsim.training.convolution_products import ConvolutionsAsProducts, convolve, products_are_faster, use_products

VICTIMS, EXAMPLES, CHANNELS = 3, 2, 4
SIZES, KERNEL = (7, 6, 5), (3, 2, 2)
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (2, {}),
    "of one axis": (1, {"padding": 1}),
    "of three axes": (3, {"padding": (1, 0, 2), "stride": (1, 2, 1)}),
    "with strides": (2, {"stride": (2, 3), "padding": (1, 2)}),
    "dilated": (2, {"dilation": (2, 3), "padding": 2}),
    "same": (2, {"padding": "same", "dilation": (2, 1)}),
    "valid": (2, {"padding": "valid"}),
    "in groups": (2, {"groups": 2, "padding": 1}),
    "depthwise": (2, {"groups": CHANNELS}),
}


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def draw_operands(axes: int, groups: int = 1) -> list[Tensor]:
    """Inputs, weights and biases of all victims."""
    torch.manual_seed(axes)
    inputs = draw(VICTIMS, EXAMPLES, CHANNELS, *SIZES[:axes])
    return [inputs, draw(VICTIMS, 8, CHANNELS // groups, *KERNEL[:axes]), draw(VICTIMS, 8)]


class OperationLog(TorchDispatchMode):
    """The names of the operations that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def gradient_penalty(
    convolution: Callable[..., Tensor], settings: dict[str, Any], operands: Sequence[Tensor], axes: Any
) -> list[Tensor]:
    """What a victim's objective is made of: each one's gradients of a loss, and their derivatives."""

    def penalty(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        def loss(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return convolution(inputs.tanh(), weight, bias, **settings).pow(3).sum()

        of_inputs, of_weight, of_bias = grad(loss, argnums=(0, 1, 2))(inputs, weight, bias)
        return of_inputs.pow(3).sum() + of_weight.square().sum() + of_bias.pow(4).sum()

    penalties = vmap(penalty, in_dims=axes)(*operands)
    return [penalties, *torch.autograd.grad(penalties.sum(), operands)]


def check_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for tensor, other in zip(found, expected, strict=True):
        torch.testing.assert_close(tensor, other, rtol=1e-9, atol=1e-9 * other.abs().max().item())


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("shared", [False, True], ids=["own weights", "shared weights"])
@pytest.mark.parametrize("name", SETTINGS)
def test_gradients_and_their_derivatives_are_those_of_convolutions(name: str, shared: bool) -> None:
    axes, settings = SETTINGS[name]
    convolution = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}[axes]
    operands = draw_operands(axes, settings.get("groups", 1))
    batched: tuple[int | None, ...] = (0, 0, 0)
    if shared:
        operands[1:] = [tensor[0].detach().requires_grad_() for tensor in operands[1:]]
        batched = (0, None, None)
    expected = gradient_penalty(convolution, settings, operands, batched)
    with ConvolutionsAsProducts(), OperationLog() as log:
        found = gradient_penalty(convolution, settings, operands, batched)
    check_close(found, expected)
    assert ("convolution" in log.names) == (name == "depthwise")


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("name", SETTINGS)
def test_weights_along_leading_axes_are_those_of_each(name: str) -> None:
    axes, settings = SETTINGS[name]
    convolution = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}[axes]
    operands = draw_operands(axes, settings.get("groups", 1))
    expected = [convolution(*own, **settings) for own in zip(*operands, strict=True)]
    check_close([convolve(*operands, **settings, leading_axes=1)], [torch.stack(expected)])
    twice = [torch.stack([tensor, 2 * tensor]) for tensor in operands]
    check_close([convolve(*twice, **settings, leading_axes=2)[0]], [torch.stack(expected)])


def test_a_convolution_without_bias_and_by_position_is_the_same() -> None:
    inputs, weights, _ = (tensor[0] for tensor in draw_operands(2, groups=2))
    with ConvolutionsAsProducts(), OperationLog() as log:
        found = torch.conv2d(inputs, weights, None, 2, 1, 1, 2)
    assert "convolution" not in log.names
    check_close([found], [torch.conv2d(inputs, weights, None, 2, 1, 1, 2)])


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_layers_of_any_padding_give_the_same(mode: Any) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 5, 3, padding=2, stride=2, padding_mode=mode)
    weights = {name: torch.stack([p.detach(), 2 * p.detach()]) for name, p in layer.named_parameters()}
    images = torch.randn(2, 4, 3, 8, 8)
    compute = vmap(lambda weights, images: functional_call(layer, weights, (images,)))
    expected = compute(weights, images)
    with ConvolutionsAsProducts(), OperationLog() as log:
        found = compute(weights, images)
    assert "bmm" in log.names
    assert "convolution" not in log.names
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("layer", [nn.ConvTranspose2d(3, 5, 3), nn.Conv2d(6, 6, 3, groups=6)])
def test_transposed_and_depthwise_convolutions_stay(layer: nn.Module) -> None:
    images = torch.randn(4, layer.in_channels, 8, 8)
    with ConvolutionsAsProducts(), OperationLog() as log:
        found = layer(images)
    assert log.names.count("convolution") == 1
    assert torch.equal(found, layer(images))


def test_a_single_image_without_a_batch_is_convolved_as_before() -> None:
    layer = nn.Conv2d(3, 5, 3)
    with ConvolutionsAsProducts():
        assert layer(torch.randn(3, 8, 8)).shape == (5, 6, 6)


def test_more_victims_take_no_more_operations() -> None:
    def count(victims: int) -> int:
        operands = [tensor[:1].expand(victims, *tensor.shape[1:]) for tensor in draw_operands(2)]
        with ConvolutionsAsProducts(), OperationLog() as log:
            gradient_penalty(torch.conv2d, {"padding": 1}, operands, (0, 0, 0))
        return len(log.names)

    assert count(3) == count(7)


def test_gradients_have_the_layout_of_what_they_are_of() -> None:
    inputs, weights, _ = draw_operands(2)
    outputs = convolve(inputs, weights, leading_axes=1)
    factors = torch.ones_like(outputs).requires_grad_()

    def penalty(inputs: Tensor, weight: Tensor, factors: Tensor) -> Tensor:
        of_weight = grad(lambda weight: (factors * convolve(inputs, weight)).sum())(weight)
        return of_weight.square().sum()

    penalties = vmap(penalty)(inputs, weights, factors)
    (of_outputs,) = torch.autograd.grad(penalties.sum(), factors)
    for tensor in (outputs, of_outputs):
        assert tensor.movedim(2, -1).is_contiguous()  # channels last


def test_the_device_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    assert products_are_faster(torch.device("cuda"))
    assert not products_are_faster(torch.device("cpu"))
    for pays in (True, False):
        monkeypatch.setattr(convolution_products, "products_are_faster", lambda device, pays=pays: pays)
        assert isinstance(use_products(torch.device("cpu")), ConvolutionsAsProducts) == pays
