"""Models of a client's update: at which weights the gradients of the dummy data are computed.

They set inversion attacks apart from one another. An update model may have variables of its own,
which are optimised together with the dummy data.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.base.errors import AttackError
from fedsim.inversion.distances import global_norm
from fedsim.inversion.problem import InversionProblem
from fedsim.training.optimizers import sgd_direction
from fedsim.training.settings import known_steps

_MOST_SIMULATED_STEPS = 10
"""Steps of local training that a likelihood simulates at most, as its cost grows with them."""


@dataclass(frozen=True)
class OptimisedVariable:
    """Variable that is optimised together with the dummy data.

    Attributes:
        start: initial value.
        step_size: of its optimizer.
        low: smallest value; smaller ones are clamped.
        high: largest value; larger ones are clamped.
        gradient_interval: its gradient is computed every so many iterations; in between, its
            optimizer uses the last one again.
    """

    start: Tensor
    step_size: float
    low: float = 0.0
    high: float = 1.0
    gradient_interval: int = 1


class UpdateModel(ABC):
    """Base of the update models: frozen dataclasses that compute the update of dummy data.

    Class attributes:
        simulates: which departures from plain SGD it simulates, of `OPTIMIZER_FACTS`.
        splits_batches: whether it splits the dummy data into mini-batches in their order, so that
            the order of the labels matters.
    """

    simulates: ClassVar[frozenset[str]] = frozenset()
    splits_batches: ClassVar[bool] = False

    def variables(self, problem: InversionProblem) -> dict[str, OptimisedVariable]:
        """Return the variables that are optimised together with the dummy data, by name.

        The report shows a variable of one number as a curve.
        """
        return {}

    def penalty(self, problem: InversionProblem, values: Mapping[str, Tensor]) -> Tensor | None:
        """Return what is added to the objective for `values`, the variables by name; None adds nothing."""
        return None

    @abstractmethod
    def gradient(
        self, problem: InversionProblem, values: Mapping[str, Tensor], dummy: Tensor, labels: Tensor
    ) -> list[Tensor]:
        """Compute what is compared with the recorded update, in the order of the parameters.

        It is differentiable in the dummy data and in `values`, the variables by name.
        """


@dataclass(frozen=True)
class GradientAtBroadcast(UpdateModel):
    """Gradient at w_0: the update counts as one gradient (DLG, IG)."""

    def gradient(
        self, problem: InversionProblem, values: Mapping[str, Tensor], dummy: Tensor, labels: Tensor
    ) -> list[Tensor]:
        """Compute the gradient of the dummy data at w_0."""
        return problem.gradient(problem.before, dummy, labels)


@dataclass(frozen=True, kw_only=True)
class SurrogatePoint(UpdateModel):
    """Gradient at the surrogate model alpha w_0 + (1 - alpha) w_T (SME, Eq. 5).

    Attributes:
        alpha: initial position; 1 is the broadcast state.
        step_size: of alpha's optimizer; alpha stays in [0, 1].
        per_layer: use one alpha for each parameter tensor.
        gradient_interval: see `OptimisedVariable`.
    """

    alpha: float = 0.5
    step_size: float = 0.001
    per_layer: bool = False
    gradient_interval: int = 1

    def variables(self, problem: InversionProblem) -> dict[str, OptimisedVariable]:
        """Return alpha, one number or one for each parameter tensor."""
        start = torch.tensor(self.alpha).to(problem.before[0])
        if self.per_layer:
            start = start.repeat(len(problem.before))
        return {"alpha": OptimisedVariable(start, self.step_size, gradient_interval=self.gradient_interval)}

    def gradient(
        self, problem: InversionProblem, values: Mapping[str, Tensor], dummy: Tensor, labels: Tensor
    ) -> list[Tensor]:
        """Compute the gradient of the dummy data at the surrogate model.

        Raises:
            AttackError: a gradient was sent, so there is no w_T.
        """
        alpha = values["alpha"]
        alphas = alpha if self.per_layer else [alpha] * len(problem.before)
        surrogate = []
        for a, start, end in zip(alphas, problem.before, problem.returned_weights, strict=True):
            surrogate.append(a * start + (1 - a) * end)
        return problem.gradient(surrogate, dummy, labels)


@dataclass(frozen=True, kw_only=True)
class SurrogateCurve(UpdateModel):
    """Scaled gradient at alpha^2 w_0 + 2 alpha (1 - alpha) P + (1 - alpha)^2 w_T (NL-SME).

    That is a point of a quadratic Bezier curve. Its control point P has as many numbers as the
    model has weights. It is kept as its distance from the middle of w_0 and w_T, where the curve is
    SME's line, in units of each tensor's root mean square change: changes of weights differ a
    hundredfold between layers, and Adam's steps do not.

    Attributes:
        alpha: initial position; 1 is the broadcast state.
        step_size: of alpha's optimizer; alpha stays in [0, 1].
        bend_step_size: of the control point's.
        bend_weight: of the mean square of the control point's distance from the middle.
        scale_step_size: of the factors, one for each parameter tensor, that the gradient is
            multiplied by; they begin at 1 and stay in [0.1, 10]. 0 multiplies by nothing.
        scale_weight: of the mean square of their distance from 1.
    """

    alpha: float = 0.5
    step_size: float = 0.001
    bend_step_size: float = 0.01
    bend_weight: float = 0.01
    scale_step_size: float = 0.001
    scale_weight: float = 0.01

    def variables(self, problem: InversionProblem) -> dict[str, OptimisedVariable]:
        """Return alpha, one number, `bend`, one for each weight, and `scale`, one for each parameter tensor."""
        like = problem.before[0]
        num_weights = sum(tensor.numel() for tensor in problem.before)
        variables = {
            "alpha": OptimisedVariable(torch.tensor(self.alpha).to(like), self.step_size),
            "bend": OptimisedVariable(like.new_zeros(num_weights), self.bend_step_size, -math.inf, math.inf),
        }
        if self.scale_step_size:
            ones = like.new_ones(len(problem.before))
            variables["scale"] = OptimisedVariable(ones, self.scale_step_size, 0.1, 10.0)
        return variables

    def penalty(self, problem: InversionProblem, values: Mapping[str, Tensor]) -> Tensor:
        """Return the weighted mean squares of the control point's and the factors' distances from their starts."""
        penalty = self.bend_weight * values["bend"].square().mean()
        if self.scale_step_size:
            penalty = penalty + self.scale_weight * (values["scale"] - 1).square().mean()
        return penalty

    def gradient(
        self, problem: InversionProblem, values: Mapping[str, Tensor], dummy: Tensor, labels: Tensor
    ) -> list[Tensor]:
        """Compute the scaled gradient of the dummy data at the point of the curve.

        Raises:
            AttackError: a gradient was sent, so there is no w_T.
        """
        alpha = values["alpha"]
        sizes = [tensor.numel() for tensor in problem.before]
        curve_point = []
        for bend, start, end in zip(
            torch.split(values["bend"], sizes), problem.before, problem.returned_weights, strict=True
        ):
            typical_change = (start - end).square().mean().sqrt()
            control = (start + end) / 2 + typical_change * bend.reshape(start.shape)
            curve_point.append(alpha.square() * start + 2 * alpha * (1 - alpha) * control + (1 - alpha).square() * end)
        gradient = problem.gradient(curve_point, dummy, labels)
        if not self.scale_step_size:
            return gradient
        return [scale * g for scale, g in zip(values["scale"], gradient, strict=True)]


@dataclass(frozen=True, kw_only=True)
class UnrolledTraining(UpdateModel):
    """Mean step of simulated local training, whose steps are all differentiated (DLFA).

    The dummy data are `epoch x example`: each epoch has images of its own, in the order in which
    its mini-batches take them. The update of the simulation is the mean of its steps over the
    learning rate: of gradients, with momentum, weight decay and FedProx's proximal term if clients
    are known to use them.
    """

    simulates: ClassVar[frozenset[str]] = frozenset({"momentum", "weight_decay", "proximal_mu"})
    splits_batches: ClassVar[bool] = True

    def variables(self, problem: InversionProblem) -> dict[str, OptimisedVariable]:
        """Return no variables.

        Raises:
            AttackError: clients train by another optimizer than SGD.
        """
        if problem.sent_gradient is None:
            check_simulable(problem.optimizer, problem.where)
        return {}

    def gradient(
        self, problem: InversionProblem, values: Mapping[str, Tensor], dummy: Tensor, labels: Tensor
    ) -> list[Tensor]:
        """Simulate local training on the dummy data; return the mean of its T steps."""
        weights: Sequence[Tensor] = problem.before
        momentum: dict[int, Tensor] = {}
        total: list[Tensor] = []
        for batch, targets in self._split_batches(problem, dummy, labels):
            gradient = problem.gradient(weights, batch, targets)
            triples = enumerate(zip(gradient, weights, problem.before, strict=True))
            steps = [sgd_direction(g, w, start, problem, momentum, index) for index, (g, w, start) in triples]
            total = [t + step for t, step in zip(total, steps, strict=True)] if total else steps
            if problem.sent_gradient is None:  # a client that sends its gradient takes no step
                assert problem.learning_rate is not None
                weights = [w - problem.learning_rate * step for w, step in zip(weights, steps, strict=True)]
        return [t / problem.steps for t in total]

    def _split_batches(self, problem: InversionProblem, dummy: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return inputs and labels of each local step; T may end within an epoch."""
        assert problem.batch_size is not None
        batches: list[tuple[Tensor, Tensor]] = []
        for start in range(0, len(dummy), problem.num_examples):
            epoch = slice(start, start + problem.num_examples)
            inputs = torch.split(dummy[epoch], problem.batch_size)
            targets = torch.split(labels[epoch], problem.batch_size)
            batches += zip(inputs, targets, strict=True)
        return batches[: problem.steps]


def check_simulable(optimizer: str | None, where: str) -> None:
    """Raise AttackError where clients are known to train by another optimizer than SGD."""
    if optimizer not in (None, "sgd"):
        raise AttackError(
            f"{where}: this attack simulates local training by SGD, and clients train by {optimizer}; choose one that "
            "does not simulate it, as sme"
        )


@dataclass(frozen=True, kw_only=True)
class FullBatchTraining(UnrolledTraining):
    """Mean step of simulated local training in which each step takes all examples.

    It needs no guess of who is in which mini-batch. Where clients take B of N examples in a step, it is their training
    on average over the orders of the examples, to the first order in the learning rate.

    Attributes:
        most_steps: simulate at most so many steps; where clients of plain SGD take more, each of them stands for
            several, with a learning rate as much larger. None simulates all.
    """

    splits_batches: ClassVar[bool] = False

    most_steps: int | None = None

    def gradient(
        self, problem: InversionProblem, values: Mapping[str, Tensor], dummy: Tensor, labels: Tensor
    ) -> list[Tensor]:
        """Simulate local training on the dummy data; return the mean of its steps."""
        steps = known_steps(problem, problem.examples_per_client)
        assert steps is not None
        count = steps
        is_plain = not (problem.momentum or problem.weight_decay or problem.proximal_mu)
        if self.most_steps is not None and is_plain:
            count = min(steps, self.most_steps)
        rate = problem.learning_rate
        if rate is not None:
            rate *= steps / count
        simulated = replace(problem, local_steps=count, local_epochs=None, learning_rate=rate)
        return super().gradient(simulated, values, dummy, labels)

    def _split_batches(self, problem: InversionProblem, dummy: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return all inputs and labels for each local step."""
        return [(dummy, labels)] * problem.steps


def simulate_known_training(problem: InversionProblem) -> UpdateModel:
    """Return the update model of local training as far as it is known: a few simulated steps (`FullBatchTraining`).

    The gradient at w_0 stands for one step, for training by another optimizer than SGD, and for an unknown number of
    steps.
    """
    steps = known_steps(problem, problem.examples_per_client)
    if steps in (None, 1) or problem.sent_gradient is not None or problem.optimizer != "sgd":
        return GradientAtBroadcast()
    return FullBatchTraining(most_steps=_MOST_SIMULATED_STEPS)


def choose_training_model(problem: InversionProblem) -> UpdateModel:
    """Return the update model with which a likelihood finds most, see docs/studies/priors.md.

    The gradient at w_0 where noise is known to be added, beside which its error is small; else simulated training.
    """
    if problem.noise is not None and problem.noise.adds_noise:
        return GradientAtBroadcast()
    return simulate_known_training(problem)


@dataclass(frozen=True, kw_only=True)
class MidpointTraining(UpdateModel):
    """Simulated local training of a few long strides, each by the gradient at its midpoint.

    Local training with small steps follows the gradient flow, whatever the batches (SME, App. E).
    Two strides of the midpoint rule stay close to it where the line between w_0 and w_T no longer
    does, and their cost does not grow with T. All strides have the same length; their sum is the
    length of that line times a `stretch`, which is optimised. (Strides of equal time, eta T /
    strides each, overshoot where the loss is curved.) If the client is known to have taken one
    step, the update is the gradient at w_0.

    Attributes:
        strides: number of strides.
        step_size: of the stretch's optimizer; the stretch begins at 1 and stays in [0.5, 2].
    """

    strides: int = 2
    step_size: float = 0.001

    def variables(self, problem: InversionProblem) -> dict[str, OptimisedVariable]:
        """Return the stretch, one number; nothing if the client took one step."""
        if known_steps(problem, problem.num_examples) == 1:
            return {}
        return {"stretch": OptimisedVariable(problem.before[0].new_ones(()), self.step_size, 0.5, 2.0)}

    def gradient(
        self, problem: InversionProblem, values: Mapping[str, Tensor], dummy: Tensor, labels: Tensor
    ) -> list[Tensor]:
        """Return the sum of the strides, w_0 minus the weights after the last one."""
        if known_steps(problem, problem.num_examples) == 1:
            return problem.gradient(problem.before, dummy, labels)
        stride_length = values["stretch"] * global_norm(problem.direction) / self.strides
        weights: Sequence[Tensor] = problem.before
        total = [torch.zeros_like(w) for w in weights]
        for _ in range(self.strides):
            # Go half a stride by the gradient here.
            gradient = problem.gradient(weights, dummy, labels)
            half = stride_length / 2 / global_norm(gradient)
            midpoint = [w - half * g for w, g in zip(weights, gradient, strict=True)]
            # Go the whole stride by the gradient at the midpoint.
            gradient = problem.gradient(midpoint, dummy, labels)
            whole = stride_length / global_norm(gradient)
            stride = [whole * g for g in gradient]
            weights = [w - s for w, s in zip(weights, stride, strict=True)]
            total = [t + s for t, s in zip(total, stride, strict=True)]
        return total
