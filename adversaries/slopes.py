"""Whether the dummy data can be moved at all, and the layer that is to blame where they cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from adversaries.scene import Scene
from fedsim.errors import AttackError
from fedsim.randomness import generator

Call = tuple[str, nn.Module, tuple[Tensor, ...], Tensor]
"""A layer's name, the layer, its inputs and its output."""


def check_slope(scene: Scene, dummy: Tensor, labels: Tensor, evaluate: Callable[[], Sequence[Tensor]]) -> None:
    """Evaluate once, as it is done in each iteration, and see that the dummy data have a slope.

    Args:
        dummy: where the dummy data start.
        labels: theirs.
        evaluate: gives the distance, without priors, and its slope in the dummy data.

    Raises:
        AttackError: the slope is exactly zero, not finite, or cannot be computed; names the layer, where one
            is to blame.
    """
    try:
        distance, slope = evaluate()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError) as error:
        raise AttackError(_why_not(scene, dummy, labels, error)) from error
    if not distance.isfinite() or not distance:
        return
    if not slope.isfinite().all():
        blamed = next((call for call in _calls(scene, dummy) if _second_derivative(call) == "infinite"), None)
        whose = (
            f"layer {_named(blamed)} has no finite second derivative there" if blamed else "no single layer is to blame"
        )
        raise AttackError(
            f"the slope of the distance in the dummy data is NaN or infinite: {whose}; attack another model"
        )
    if not slope.any():
        raise AttackError(_why_flat(scene, dummy))


def _why_not(scene: Scene, dummy: Tensor, labels: Tensor, error: Exception) -> str:
    try:
        outputs = scene.outputs(scene.before, dummy)
    except (RuntimeError, ValueError, IndexError) as failure:
        return (
            f"the model does not take inputs of shape {tuple(dummy.shape)} ({_line(failure)}); "
            "check input_shape, and that the model is that of the federation"
        )
    try:
        scene.loss(outputs, labels)
    except (RuntimeError, ValueError, IndexError) as failure:
        return (
            f"the loss does not take outputs of shape {tuple(outputs.shape)} with the labels ({_line(failure)}); "
            "check the loss and the labels"
        )
    for call in _calls(scene, dummy):
        if _second_derivative(call) == "none":
            return (
                f"layer {_named(call)} cannot be differentiated twice ({_line(error)}), as matching gradients must; "
                "attack a model without it"
            )
    return f"the objective cannot be differentiated ({_line(error)}); attack another model"


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
    sources = [*starts, *module.parameters()]
    try:
        output = module(*starts)
        first = torch.autograd.grad(
            output, sources, _probe(output).requires_grad_(True), create_graph=True, materialize_grads=True
        )
        smooth = [slope for slope in first if slope.requires_grad]
        second = torch.autograd.grad([s.square().sum() for s in smooth], starts, materialize_grads=True)
    except RuntimeError:
        return "none"
    return "fine" if all(s.isfinite().all() for s in second) else "infinite"


def _probe(output: Tensor) -> Tensor:
    """Random weights of a layer's outputs; a sum with equal ones would be constant behind a softmax."""
    return torch.randn(output.shape, generator=generator("probe")).to(output)


def _named(call: Call) -> str:
    name, module, *_ = call
    return f"'{name}' ({type(module).__name__})" if name else f"({type(module).__name__})"


def _line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
