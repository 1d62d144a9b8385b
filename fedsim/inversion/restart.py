"""Restarts of an attack that matches gradients: random starts, the objective and its gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from fedsim.interfaces.findings import Reconstruction
from fedsim.inversion.descent import Curves, Step, Trial, make_optimizer_step
from fedsim.inversion.distances import Cosine, global_norm
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.recipe import Recipe
from fedsim.inversion.relu_jumps import SmoothReluJumps
from fedsim.inversion.update_models import OptimisedVariable
from fedsim.training.optimizers import LBFGS, SGD, Adam, Optimizer

IterationInputs = tuple[Tensor, Tensor]
"""The factor of the distance and the restarts' consensus, which change with the iteration."""
GradientNames = tuple[str, ...]
"""Names of the values whose gradients are computed in an iteration."""
UNKNOWN_PREFIX = "unknown/"
"""Beginning of the names of values that stand for parameters which never left the client."""
Evaluate = Callable[[int], list[Tensor]]
"""`iteration -> [objective, distance, L_sim, gradients of GradientNames]`, at the present
values of a restart."""


def objective_and_gradients(
    recipe: Recipe,
    problem: InversionProblem,
    start: Mapping[str, Tensor],
    iteration_inputs: IterationInputs,
    target: list[Tensor],
    names: GradientNames,
) -> list[Tensor]:
    """Compute the objective and its gradients by one double backward pass, or two where the recipe smooths.

    Returns:
        What `Evaluate` returns.
    """
    here = _evaluate_at(recipe, problem, start, iteration_inputs, target, names)
    if not recipe.smoothing:
        return here
    uphill = here[3]  # that of the dummy data
    size = uphill.square().mean().sqrt().clamp_min(torch.finfo(uphill.dtype).tiny)
    ahead = {**start, "dummy": start["dummy"].detach() + recipe.smoothing_radius / size * uphill}
    there = _evaluate_at(recipe, problem, ahead, iteration_inputs, target, names)
    return [*here[:3], *(torch.lerp(g, h, recipe.smoothing) for g, h in zip(here[3:], there[3:], strict=True))]


def _evaluate_at(
    recipe: Recipe,
    problem: InversionProblem,
    start: Mapping[str, Tensor],
    iteration_inputs: IterationInputs,
    target: list[Tensor],
    names: GradientNames,
) -> list[Tensor]:
    """Compute what `Evaluate` returns at these values."""
    values = {}
    for name, value in start.items():
        values[name] = value.detach().requires_grad_(name in names)
    objective, distance, l_sim = objective_terms(recipe, problem, values, iteration_inputs, target)
    inputs = [values[name] for name in names]
    gradients = torch.autograd.grad(objective, inputs, materialize_grads=True)
    return [objective.detach(), distance.detach(), l_sim, *gradients]


def objective_terms(
    recipe: Recipe,
    problem: InversionProblem,
    values: Mapping[str, Tensor],
    iteration_inputs: IterationInputs,
    target: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute objective and distance, differentiable in `values`, and L_sim."""
    distance_factor, consensus = iteration_inputs
    problem = guess_unknown_parts(problem, values)
    dummy, labels = dummy_data(recipe, problem, values["dummy"]), dummy_labels(recipe, problem, values)
    with SmoothReluJumps(recipe.relu_width) if recipe.relu_width else nullcontext():
        gradient = problem.apply_defenses(recipe.update_model.gradient(problem, values, dummy, labels))
    distance = recipe.distance(gradient, target)
    objective = distance_factor * distance
    for weight, prior in recipe.priors:
        if weight:
            objective = objective + weight * prior(problem, dummy, dummy_data(recipe, problem, consensus))
    if recipe.parametrisation is not None:
        objective = objective + recipe.parametrisation.penalty(problem, values["dummy"])
    if (penalty := recipe.update_model.penalty(problem, values)) is not None:
        objective = objective + penalty
    if recipe.distance == Cosine():
        l_sim = distance
    else:
        with torch.no_grad():  # SME compares attacks of all distances by it (Table 2)
            direction = target[: len(gradient)]  # what follows it, if anything, is of other use
            l_sim = 1 - (1 - Cosine()(gradient, direction)) / global_norm(direction)
    return objective, distance, l_sim.detach()


def guess_unknown_parts(problem: InversionProblem, values: Mapping[str, Tensor]) -> InversionProblem:
    """Return the problem with the present guesses of the parts that never left the client."""
    guesses: dict[str, Tensor] = {}
    for name, value in values.items():
        if name.startswith(UNKNOWN_PREFIX):
            guesses[name.removeprefix(UNKNOWN_PREFIX)] = value
    return replace(problem, unknown_parts=guesses) if guesses else problem


def draw_unknown_parts(
    problem: InversionProblem, step_size: float, rng: torch.Generator
) -> dict[str, OptimisedVariable]:
    """Return variables for the parameters that never left the client, by the names of their values.

    Matrices are drawn, with the deviation of fresh ones; biases and scales begin as in a fresh
    network. So nothing of the client is in them.
    """
    parameters = dict(problem.model.named_parameters())
    variables: dict[str, OptimisedVariable] = {}
    for name in problem.unknown_names:
        start = parameters[name].detach().to(problem.before[0])
        if start.ndim > 1:
            deviation = start.std() if start.numel() > 1 else 1.0
            start = torch.randn(start.shape, generator=rng).to(start) * deviation
        variables[f"{UNKNOWN_PREFIX}{name}"] = OptimisedVariable(start, step_size, -math.inf, math.inf)
    return variables


def is_curve(name: str) -> bool:
    """Return whether the report shows the mean of the value of this name as a curve."""
    return name not in ("dummy", "label_logits", "bend") and not name.startswith(UNKNOWN_PREFIX)


def dummy_data(recipe: Recipe, problem: InversionProblem, dummy: Tensor) -> Tensor:
    """Return the dummy data, made by the recipe's parametrisation if it has one."""
    return dummy if recipe.parametrisation is None else recipe.parametrisation.dummy_data(problem, dummy)


def dummy_labels(recipe: Recipe, problem: InversionProblem, values: Mapping[str, Tensor]) -> Tensor:
    """Return class indices or targets, or what stands for them and is optimised with the data.

    These are probabilities of classes or of labels, which logits give, or the numbers themselves.
    """
    if recipe.label_step_size is None:
        return problem.labels
    logits = values["label_logits"]
    if problem.goal == "numbers":
        return logits
    return logits.sigmoid() if problem.goal == "labels" else logits.softmax(1)


def claimed_labels(problem: InversionProblem, logits: Tensor) -> Tensor:
    """Return what is claimed for optimised labels: the likeliest class, each label or not, or the numbers."""
    if problem.goal == "numbers":
        return logits
    return (logits > 0).to(logits) if problem.goal == "labels" else logits.argmax(1)


def set_gradients(recipe: Recipe, values: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    """Set the `grad` of each value; a value without a new gradient keeps its last one."""
    for name, gradient in gradients.items():
        if recipe.signed and name == "dummy":
            gradient = gradient.sign()
        # Attention gives transposed gradients, which L-BFGS does not take.
        values[name].grad = gradient.contiguous()


def report_curves(
    recipe: Recipe,
    objective: Tensor,
    distance: Tensor,
    l_sim: Tensor,
    variables: Mapping[str, Tensor],
) -> Curves:
    """Return the curves that the report shows of an iteration."""
    distance_curve = {} if recipe.distance == Cosine() else {"distance": distance}
    return {"objective": objective, "l_sim": l_sim, **distance_curve, **variables}


class Restart:
    """One random start: the values that are optimised, and how.

    Attributes:
        problem: the inversion problem.
        dummy: the dummy data, `example ...`, standardised, or what the recipe's parametrisation
            makes them of.
        consensus: the mean of the dummy data of all restarts before each step; the restarts of a
            victim share this tensor.
    """

    def __init__(
        self,
        recipe: Recipe,
        problem: InversionProblem,
        shape: tuple[int, ...],
        classes: tuple[int, ...],
        iterations: int,
        rng: torch.Generator,
    ) -> None:
        self._recipe, self.problem, self._iterations, self._rng = recipe, problem, iterations, rng
        like = problem.before[0]
        if recipe.parametrisation is not None:
            self.dummy = recipe.parametrisation.start(problem, shape, rng)
        else:
            self.dummy = torch.randn(shape, generator=rng).to(like)
        if recipe.bounded and recipe.parametrisation is None:
            problem.scaling.clamp_(self.dummy)
        self.consensus = torch.zeros_like(self.dummy)
        self._steps_taken = 0
        self._take_discrete_step()
        self._variables = recipe.update_model.variables(problem)
        if recipe.label_step_size is not None:
            logits = torch.randn((shape[0], *classes), generator=rng).to(like)
            label_variable = OptimisedVariable(logits, recipe.label_step_size, -math.inf, math.inf)
            self._variables["label_logits"] = label_variable
        if recipe.unknown_step_size is not None:
            self._variables |= draw_unknown_parts(problem, recipe.unknown_step_size, rng)
        self._variable_values = {name: variable.start.clone() for name, variable in self._variables.items()}

    def values(self) -> dict[str, Tensor]:
        """Return all that is optimised by name, `dummy` first."""
        return {"dummy": self.dummy, **self._variable_values}

    def gradient_names(self, iteration: int) -> GradientNames:
        """Return the names of the values whose gradients are computed in this iteration."""
        names = ["dummy"]
        for name, variable in self._variables.items():
            if iteration % variable.gradient_interval == 0:
                names.append(name)
        return tuple(names)

    def iteration_inputs(self, iteration: int) -> IterationInputs:
        """Return the factor of the distance in this iteration and the consensus."""
        factor = self._recipe.distance_schedule(iteration, self._iterations)
        return self.consensus.new_tensor(factor), self.consensus

    def schedule_values(self) -> tuple[tuple[float, float], ...]:
        """Return for each iteration the factors of all step sizes and of the distance."""
        recipe, iterations = self._recipe, self._iterations
        factors = []
        for iteration in range(iterations):
            step_factor = recipe.schedule(iteration, iterations)
            factors.append((step_factor, recipe.distance_schedule(iteration, iterations)))
        return tuple(factors)

    def step_size_factor(self, iteration: int) -> float:
        """Return the factor of all step sizes."""
        return self._recipe.schedule(iteration, self._iterations)

    def make_optimizer(self, values: Mapping[str, Tensor]) -> Optimizer | torch.optim.Optimizer:
        """Return an optimizer of `values`, which may be those of several restarts."""
        recipe = self._recipe
        sizes = {"dummy": recipe.step_size}
        for name, variable in self._variables.items():
            sizes[name] = variable.step_size
        groups: list[dict[str, object]] = []
        for name, size in sizes.items():
            groups.append({"params": [values[name]], "lr": size})
        if recipe.optimizer == "adam":
            return Adam(groups, recipe.step_size)
        if recipe.optimizer == "sgd":
            return SGD(groups, recipe.step_size)
        return LBFGS([values[name] for name in sizes], lr=recipe.step_size)

    def store_values_in(self, values: Mapping[str, Tensor]) -> None:
        """Keep the values in these tensors from now on; they must hold the present values."""
        self.dummy = values["dummy"]
        self._variable_values = {name: values[name] for name in self._variable_values}

    def make_step(self, evaluate: Evaluate) -> Step:
        """Return steps of an optimizer of this restart alone."""

        def compute_gradients(iteration: int) -> Curves:
            values, names = self.values(), self.gradient_names(iteration)
            objective, distance, l_sim, *gradients = evaluate(iteration)
            set_gradients(self._recipe, values, dict(zip(names, gradients, strict=True)))
            means = {}
            for name, value in self._variable_values.items():
                if is_curve(name):
                    means[name] = value.mean()
            return report_curves(self._recipe, objective, distance, l_sim, means)

        optimizer = self.make_optimizer(self.values())
        return make_optimizer_step(optimizer, compute_gradients, factor=self.step_size_factor, project=self.project)

    def make_trial(self, step: Step) -> Trial:
        """Return the trial that changes this restart's values by `step`."""

        def to_unit_range(dummy: Tensor) -> Tensor:
            return self.problem.scaling.to_unit_range(dummy_data(self._recipe, self.problem, dummy))

        return Trial(step=step, point=lambda: self.dummy, to_snapshot=to_unit_range)

    def project(self) -> None:
        """Finish a step: add noise, clamp all values to their ranges, take a discrete step."""
        if self._recipe.noise:
            noise = torch.randn(self.dummy.shape, generator=self._rng).to(self.dummy)
            deviation = self._recipe.noise * self._recipe.step_size
            self.dummy.add_(noise, alpha=deviation * self.step_size_factor(self._steps_taken))
        if self._recipe.bounded and self._recipe.parametrisation is None:
            self.problem.scaling.clamp_(self.dummy)
        for name, variable in self._variables.items():
            self._variable_values[name].clamp_(variable.low, variable.high)
        self._steps_taken += 1
        self._take_discrete_step()

    def _take_discrete_step(self) -> None:
        if self._recipe.discrete_step is not None:
            self._recipe.discrete_step(self.problem, self.dummy, self._steps_taken, self._iterations, self._rng)

    def finding(self, trial: Trial, merge_epochs: Callable[[Tensor, InversionProblem], Tensor]) -> Reconstruction:
        """Return what was reconstructed.

        Args:
            trial: of this restart, at its end.
            merge_epochs: makes one image an example of `Recipe.epochs` of them.
        """
        data = [merge_epochs(images, self.problem) for images in trial.snapshots.values()]
        logits = self._variable_values.get("label_logits")
        labels = self.problem.labels[: self.problem.num_examples]
        if logits is not None:
            labels = claimed_labels(self.problem, logits)
        return Reconstruction(
            data=data[-1],
            labels=labels.cpu(),
            trace=trial.trace(),
            snapshots=torch.stack(data),
            snapshot_iterations=torch.tensor(list(trial.snapshots)),
        )
