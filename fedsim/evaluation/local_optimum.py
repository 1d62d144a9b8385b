"""The model that a client would have trained alone: theta_c* = argmin L_c, which only the evaluator can compute."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsim.errors import ConfigError, DataError, RunError
from fedsim.task import Loss, squared_error
from fedsim.training.alone import BATCH, ITERATIONS, train_alone
from fedsim.training.model_state import load_state, statistics_of
from fedsim.training.modes import forward, normalise_by_batch
from fedsim.wire.messages import State, by_any, non_finite

METHOD = f"gradient-descent-in-its-valley-{ITERATIONS}"
"""How optima are found, in a word; it names the folder in which a run keeps them, and changes with the result."""
_CONVEX_ITERATIONS, _LARGEST_SLOPE = 2000, 1e-7


def local_optimum(
    model: nn.Module,
    start: State,
    inputs: Tensor,
    labels: Tensor,
    loss: Loss = cross_entropy,
    *,
    iterations: int = ITERATIONS,
    batch_size: int = BATCH,
) -> dict[str, Tensor]:
    """The weights that minimise a client's own loss, trained to convergence from `start`; the same at each call.

    One linear layer with squared error is solved: the solution of least norm, in float64. One linear layer with
    another loss is convex: L-BFGS in float64, until no entry of the gradient is above 1e-7 (or 2000 iterations: classes
    that a plane separates have no best weights, only ever larger ones).

    Any other network is trained by gradient descent from `start` until it rests, see `fedsim.training.alone`. There is
    no other rule to stop by: a network that can tell all its examples apart has no best weights either, the loss falls
    and the weights grow for as long as one trains, and of the weights with a small loss there are many, far apart.
    So theta_c* is one of many minima, the one that the client's own method leads to; what two models answer
    (`fedsim.evaluation.zest`) says more than a distance of their parameters.

    BatchNorm layers normalise by the batch, whatever statistics `start` holds. Where it holds some, those of the
    result are the client's, of all its examples. Dropout layers do not drop.

    Args:
        model: lends its architecture; it is copied.
        start: w_0 of the federation.
        inputs: `example ...`, its training data in model units.
        labels: `example`, class indices or targets.
        loss: what it minimises.
        iterations: steps of gradient descent.
        batch_size: most examples in a step.

    Returns:
        A state of the names that `start` has for this model, in its types.

    Raises:
        ConfigError: `iterations` or `batch_size` is not positive.
        DataError: `start` is of another architecture, or there are no examples.
        RunError: training diverged.
    """
    for name, value in (("iterations", iterations), ("batch_size", batch_size)):
        if not value > 0:
            raise ConfigError(f"{name}: expected more than 0, got {value}")
    if not len(inputs):
        raise DataError("local optimum: the client holds no examples; attack one who does")
    begin = state_for(model, start)
    if begin is None:
        raise DataError("local optimum: the first state is of another architecture than the model; check the model")
    own = copy.deepcopy(model)
    load_state(own, begin)
    layer = _only_layer(own)
    if layer is None:
        own, _ = train_alone(own, inputs, labels, loss, iterations=iterations, batch_size=batch_size)
        if statistics_of(own) & set(begin):
            _take_statistics(own, inputs)
    elif loss is squared_error:
        _solve(layer, inputs.flatten(1), labels)
    else:
        _minimise(own, inputs, labels, loss)
    found = {name: tensor.to(begin[name].dtype) for name, tensor in own.state_dict().items() if name in begin}
    if broken := non_finite(found):
        raise RunError(f"the optimal local model diverged: {broken[0]} is NaN or infinite; standardise the inputs")
    return {name: found[name].detach().clone() for name in begin}


def state_for(model: nn.Module, state: State) -> State | None:
    """`state` under the names of `model`, with BatchNorm's running statistics or without; None where it does not fit.

    Integer buffers are no part of states.
    """
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    without = {name: shape for name, shape in shapes.items() if name not in statistics_of(model)}
    return by_any(state, (shapes, without))


def _only_layer(model: nn.Module) -> nn.Linear | None:
    """The layer of a linear model."""
    layers = [layer for layer in model.modules() if not isinstance(layer, (nn.Sequential, nn.Flatten, nn.Identity))]
    return layers[0] if len(layers) == 1 and isinstance(layers[0], nn.Linear) else None


@torch.no_grad()
def _solve(layer: nn.Linear, inputs: Tensor, labels: Tensor) -> None:
    """Least squares of least norm, the constant, if there is one, being a weight among the others."""
    biased = layer.bias is not None
    design = torch.cat([inputs, torch.ones(len(inputs), 1)], 1) if biased else inputs
    # The driver that takes a matrix of less than full rank.
    solution = torch.linalg.lstsq(design.double(), labels.double()[:, None], driver="gelsd").solution
    layer.double()
    layer.weight.copy_(solution[: inputs.shape[1]].T)
    if biased:
        layer.bias.copy_(solution[-1])


def _minimise(model: nn.Module, inputs: Tensor, labels: Tensor, loss: Loss) -> None:
    """A convex loss to its minimum."""
    model.double()
    inputs = inputs.double()
    labels = labels.double() if labels.is_floating_point() else labels
    parameters = list(model.parameters())
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=_CONVEX_ITERATIONS, history_size=20, tolerance_grad=_LARGEST_SLOPE,
        tolerance_change=0.0, line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> float:
        optimizer.zero_grad()
        objective = loss(model(inputs), labels)
        objective.backward()  # type: ignore[no-untyped-call]
        return objective.item()

    optimizer.step(closure)  # type: ignore[no-untyped-call]


@torch.no_grad()
def _take_statistics(model: nn.Module, inputs: Tensor) -> None:
    """Make the running statistics those of `inputs`."""
    for layer in normalise_by_batch(model):
        layer.momentum = 1.0  # the next batch alone
    forward(model, inputs)
