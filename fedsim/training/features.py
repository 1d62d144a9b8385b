"""What the gradient of a model's last linear layer's weights is computed from, replaced."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.functional import linear

from fedsim.errors import RunError
from fedsim.training.modes import forward

Replace = Callable[[Tensor, Tensor], Tensor]
"""`(features, inputs) -> features`: the features themselves where nothing is to be replaced."""


def last_linear(model: nn.Module) -> tuple[str, nn.Linear] | None:
    """The linear layer whose weights are the last matrix of `model` that is trained, with its name.

    So it is found by the names and shapes of a gradient, too. None where that matrix is of another layer, or none.
    """
    matrices = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.ndim == 2]
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return next((found for found in layers if matrices and found[1].weight is matrices[-1]), None)


def outputs_with_features(model: nn.Module, inputs: Tensor, replace: Replace) -> Tensor:
    """The outputs of `model`, where the gradient of its last linear layer's weights is that of other features.

    The layer gives W x + b as before. In its gradient W is a constant beside x, and x' a constant beside W, so that the
    slope of W is computed from x', and those of everything else from x.

    Args:
        inputs: `example ...`, real numbers.
        replace: what x' is, given x, differentiable by the inputs that it is handed, and these.

    Raises:
        RunError: the model was fed with texts, or its last linear layer is not used once, as the last one, on features
            `example feature`.
    """
    found = last_linear(model)
    assert found is not None
    name, last = found
    if not inputs.is_floating_point():
        raise RunError("defense: features are to be replaced, but the inputs are integers and have no derivative")
    inputs, used = inputs.detach().requires_grad_(True), list[nn.Module]()

    def note(layer: nn.Module, given: tuple[Tensor], output: Tensor) -> Tensor:
        if last in used:
            raise RunError(f"defense: features of '{name}' are to be replaced, but a linear layer is used after it")
        used.append(layer)
        if layer is not last:
            return output
        if given[0].ndim != 2:
            raise RunError(
                f"defense: features of '{name}' are to be replaced, expected `example feature`, but it is given a "
                f"tensor of shape {tuple(given[0].shape)}"
            )
        return _from(last, given[0], replace(given[0], inputs), output)

    hooks = [layer.register_forward_hook(note) for layer in model.modules() if isinstance(layer, nn.Linear)]
    try:
        outputs = forward(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    if last not in used:
        raise RunError(f"defense: features of '{name}' are to be replaced, but the model does not use this layer")
    return outputs


def _from(layer: nn.Linear, features: Tensor, replaced: Tensor, output: Tensor) -> Tensor:
    """`output`, with the slope of the weights computed from `replaced`."""
    if replaced is features:
        return output
    by_weights = linear(replaced.detach(), layer.weight)
    return linear(features, layer.weight.detach(), layer.bias) + (by_weights - by_weights.detach())
