"""Whether the dummy data can be moved at all, and the layer that is to blame where they cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from adversaries.scene import Scene
from fedsim.errors import AttackError, first_line
from fedsim.randomness import generator

Call = tuple[str, nn.Module, tuple[Tensor, ...], Tensor]
"""A layer's name, the layer, its inputs and its output."""


@torch.no_grad()
def check_inputs(scene: Scene, dummy: Tensor) -> Tensor:
    """Check that the model takes data of this shape, and return its outputs.

    Raises:
        AttackError: it does not.
    """
    try:
        return scene.outputs(scene.before, dummy)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        raise AttackError(
            f"{scene.where}: the model does not take inputs of shape {tuple(dummy.shape)} ({first_line(error)}); "
            "check input_shape, and that the model is that of the federation"
        ) from error


def check_slope(
    scene: Scene, values: Mapping[str, Tensor], labels: Tensor, distance_of: Callable[[dict[str, Tensor]], Tensor]
) -> None:
    """Differentiate the distance twice, and check that its slope in the dummy data is finite and not zero.

    The backward pass goes to all leaves, because it raises where a function can be differentiated only once;
    `torch.autograd.grad` would skip that function and return a part of the slope.

    Args:
        values: what is optimised, where it starts; `dummy` are the dummy data.
        labels: of the dummy data.
        distance_of: the distance at given values, without priors.

    Raises:
        AttackError: the slope is exactly zero, not finite, or cannot be computed; names the layer, where one
            is to blame.
    """
    leaves = {name: value.detach().clone().requires_grad_(True) for name, value in values.items()}
    dummy = values["dummy"].detach()
    try:
        distance = distance_of(leaves)
        if distance.requires_grad:
            distance.backward()  # type: ignore[no-untyped-call]
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError) as error:
        raise AttackError(f"{scene.where}: {_why_not(scene, dummy, labels, error)}") from error
    if not distance.isfinite():
        return
    slope = leaves["dummy"].grad
    if slope is None or not slope.any():
        raise AttackError(f"{scene.where}: {_why_flat(scene, dummy)}")
    if not slope.isfinite().all():
        blamed = next((call for call in _calls(scene, dummy) if _second_derivative(call) == "infinite"), None)
        whose = f"layer {_named(blamed)} has no finite second derivative there" if blamed else "no layer is to blame"
        raise AttackError(
            f"{scene.where}: the slope of the distance in the dummy data is NaN or infinite: {whose}; attack another "
            "model"
        )


def _why_not(scene: Scene, dummy: Tensor, labels: Tensor, error: Exception) -> str:
    outputs = scene.outputs(scene.before, dummy)
    try:
        scene.loss(outputs, labels)
    except (RuntimeError, ValueError, IndexError) as failure:
        return (
            f"the loss does not take outputs of shape {tuple(outputs.shape)} with the labels ({first_line(failure)}); "
            "check the loss and the labels"
        )
    for call in _calls(scene, dummy):
        if _second_derivative(call) == "none":
            return (
                f"layer {_named(call)} cannot be differentiated twice ({first_line(error)}), as matching gradients "
                "must; attack a model without it"
            )
    return f"the objective cannot be differentiated ({first_line(error)}); attack another model"


def _why_flat(scene: Scene, dummy: Tensor) -> str:
    start = dummy.detach().requires_grad_(True)
    for call in _calls(scene, start):
        output = call[3]
        if (
            not output.requires_grad
            or not torch.autograd.grad(output, start, _probe(output), retain_graph=True, materialize_grads=True)[
                0
            ].any()
        ):
            return (
                f"the output of layer {_named(call)} does not change with the dummy data (its slope is exactly zero), "
                "so that gradients say nothing about them; attack a model without it, or one in which it is not dead"
            )
    return (
        "the slope of the distance in the dummy data is exactly zero, though the model's outputs depend on them: "
        "its gradients do not, or they are too far from the update for this distance; choose another attack"
    )


def _calls(scene: Scene, dummy: Tensor) -> list[Call]:
    """The layers that turn tensors into a tensor, in the order in which they end."""
    calls: list[Call] = []

    def noting(name: str) -> Callable[[nn.Module, tuple[object, ...], object], None]:
        def note(module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
            tensors = tuple(x for x in inputs if isinstance(x, Tensor) and x.is_floating_point())
            if len(tensors) == len(inputs) and isinstance(output, Tensor) and output.is_floating_point():
                calls.append((name, module, tensors, output))

        return note

    hooks = [module.register_forward_hook(noting(name)) for name, module in scene.model.named_modules()]
    try:
        scene.outputs(scene.before, dummy)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _second_derivative(call: Call) -> str:
    """Of a layer by itself: `none`, `infinite` or `fine`."""
    _, module, inputs, _ = call
    starts = [x.detach().requires_grad_(True) for x in inputs]
    own = {name: p.detach().requires_grad_(True) for name, p in module.named_parameters()}
    try:
        output = functional_call(module, own, tuple(starts))
        probe = _probe(output).requires_grad_(True)
        first = torch.autograd.grad(output, [*starts, *own.values()], probe, create_graph=True, materialize_grads=True)
        smooth = [slope.square().sum() for slope in first if slope.requires_grad]
        if smooth:
            torch.stack(smooth).sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError:
        return "none"
    return "fine" if all(x.grad is None or bool(x.grad.isfinite().all()) for x in starts) else "infinite"


def _probe(output: Tensor) -> Tensor:
    """Random weights of a layer's outputs; a sum with equal ones would be constant behind a softmax."""
    return torch.randn(output.shape, generator=generator("probe")).to(output)


def _named(call: Call) -> str:
    name, module, *_ = call
    return f"'{name}' ({type(module).__name__})" if name else f"({type(module).__name__})"
