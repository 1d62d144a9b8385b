"""Train the optimal local model theta_c* = argmin L_c of a client, as only the evaluator can."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsim.base.errors import DataError, RunError
from fedsim.base.task import Loss, squared_error
from fedsim.recording.wire_format import State, match_any_names, non_finite_names
from fedsim.training.local_optimum import ITERATIONS, train_to_convergence
from fedsim.training.model_state import load_state, running_statistics
from fedsim.training.modes import forward, normalise_by_batch
from fedsim.training.optimizers import LBFGS

OPTIMUM_METHOD = f"gradient-descent-in-its-valley-{ITERATIONS}"
"""Name of the method, and of the folder of optima in a run; it changes with the result."""
_CONVEX_ITERATIONS, _GRADIENT_TOLERANCE = 2000, 1e-7


def local_optimum(
    model: nn.Module, start: State, inputs: Tensor, labels: Tensor, loss: Loss = cross_entropy
) -> dict[str, Tensor]:
    """Compute the weights that minimise a client's own loss, from `start`; the same at each call.

    - One linear layer with squared error is solved in float64: the solution of least norm.
    - One linear layer with another loss is convex: L-BFGS in float64, until no entry of the
      gradient is above 1e-7, or for 2000 iterations: classes that a plane separates have no best
      weights, only ever larger ones.
    - Any other network is trained by gradient descent from `start` to convergence, see
      `train_to_convergence`. There is no other rule to stop by: a network that can tell all its
      examples apart has no best weights either. The loss falls and the weights grow for as long as
      one trains, and there are many weights with a small loss, far from each other.

    So theta_c* is one of many minima, the one that the client's own method leads to; comparing the
    answers of two models (`fedsim.audit.evaluation.zest`) says more than a distance of their parameters.

    BatchNorm layers normalise by the batch, whatever statistics `start` holds. Where it holds some,
    those of the result are computed from all of the client's examples. Dropout layers do not drop.

    Args:
        model: lends its architecture; it is copied.
        start: w_0 of the federation.
        inputs: `example ...`, the client's training data in model units.
        labels: `example`, class indices or targets.

    Returns:
        A state with the names that `start` has for this model, in its types.
    """
    if not len(inputs):
        raise DataError("local optimum: the client holds no examples; attack one that does")
    initial = match_state(model, start)
    if initial is None:
        raise DataError("local optimum: the first state is of another architecture than the model; check the model")
    network = copy.deepcopy(model)
    load_state(network, initial)
    layer = _only_layer(network)
    if layer is None:
        network, _ = train_to_convergence(network, inputs, labels, loss)
        if running_statistics(network) & set(initial):
            _set_statistics(network, inputs)
    elif loss is squared_error:
        _solve_least_squares(layer, inputs.flatten(1), labels)
    else:
        _minimise_convex_loss(network, inputs, labels, loss)
    # Keep the tensors that `start` has, in its types.
    state: dict[str, Tensor] = {}
    for name, tensor in network.state_dict().items():
        if name in initial:
            state[name] = tensor.to(initial[name].dtype)
    diverged = non_finite_names(state)
    if diverged:
        raise RunError(f"the optimal local model diverged: {diverged[0]} is NaN or infinite; standardise the inputs")
    return {name: state[name].detach().clone() for name in initial}


def match_state(model: nn.Module, state: State) -> State | None:
    """Return `state` under the names of `model`; None where it does not fit.

    It may hold BatchNorm's running statistics or not. Integer buffers are not part of states.
    """
    tensors = model.state_dict().items()
    shapes = {name: tensor.shape for name, tensor in tensors if tensor.is_floating_point()}
    statistics = running_statistics(model)
    shapes_without_statistics = {n: shape for n, shape in shapes.items() if n not in statistics}
    return match_any_names(state, (shapes, shapes_without_statistics))


def _only_layer(model: nn.Module) -> nn.Linear | None:
    """Return the layer of a linear model; None for any other model."""
    ignored = (nn.Sequential, nn.Flatten, nn.Identity)
    layers = [layer for layer in model.modules() if not isinstance(layer, ignored)]
    return layers[0] if len(layers) == 1 and isinstance(layers[0], nn.Linear) else None


@torch.no_grad()
def _solve_least_squares(layer: nn.Linear, inputs: Tensor, labels: Tensor) -> None:
    """Set a layer to the least-squares solution of least norm over weights and bias."""
    has_bias = layer.bias is not None
    design = torch.cat([inputs, torch.ones(len(inputs), 1)], 1) if has_bias else inputs
    # This driver takes a matrix of less than full rank.
    targets = labels.double().reshape(len(labels), -1)
    solution = torch.linalg.lstsq(design.double(), targets, driver="gelsd").solution
    layer.double()
    layer.weight.copy_(solution[: inputs.shape[1]].T)
    if has_bias:
        layer.bias.copy_(solution[-1])


def _minimise_convex_loss(model: nn.Module, inputs: Tensor, labels: Tensor, loss: Loss) -> None:
    """Train `model` to the minimum of a convex loss."""
    model.double()
    inputs = inputs.double()
    labels = labels.double() if labels.is_floating_point() else labels
    parameters = list(model.parameters())
    optimizer = LBFGS(
        parameters, max_iter=_CONVEX_ITERATIONS, history_size=20, tolerance_grad=_GRADIENT_TOLERANCE,
        tolerance_change=0.0, line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> float:
        optimizer.zero_grad()
        objective = loss(model(inputs), labels)
        objective.backward()
        return objective.item()

    optimizer.step(closure)  # type: ignore[no-untyped-call]


@torch.no_grad()
def _set_statistics(model: nn.Module, inputs: Tensor) -> None:
    """Set the running statistics of BatchNorm layers to those of `inputs`."""
    for layer in normalise_by_batch(model):
        layer.momentum = 1.0  # so that only the next batch counts
    forward(model, inputs)
