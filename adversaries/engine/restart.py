"""The restarts of an attack that matches gradients: from a random start over the objective's slopes to a finding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from adversaries.engine.descent import Curves, Step, Trial, steps_of
from adversaries.engine.distances import Cosine, length
from adversaries.engine.places import Variable
from adversaries.engine.recipe import Recipe
from adversaries.scene import Scene
from fedsim.findings import Reconstruction
from fedsim.training.optimizers import SGD, Adam, Optimizer

Around = tuple[Tensor, Tensor]
"""What changes from iteration to iteration besides the values: the emphasis, and the restarts' consensus."""
Moving = tuple[str, ...]
"""Names of the values whose slopes are asked for."""
Evaluate = Callable[[int], list[Tensor]]
"""`iteration -> [objective, distance, L_sim, slope of each that moves]`, at the present values of a restart."""


def objective_of(
    recipe: Recipe, scene: Scene, given: Mapping[str, Tensor], around: Around, target: list[Tensor], moving: Moving
) -> list[Tensor]:
    """The objective and its slopes, by one double backward pass."""
    values = {name: value.detach().requires_grad_(name in moving) for name, value in given.items()}
    objective, distance, l_sim = terms_of(recipe, scene, values, around, target)
    slopes = torch.autograd.grad(objective, [values[name] for name in moving], materialize_grads=True)
    return [objective.detach(), distance, l_sim, *slopes]


def terms_of(
    recipe: Recipe, scene: Scene, values: Mapping[str, Tensor], around: Around, target: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The objective, differentiable in `values`, the distance and L_sim."""
    emphasis, consensus = around
    dummy = values["dummy"]
    gradient = scene.defended(recipe.place.gradient(scene, values, dummy, labels_of(recipe, scene, values)))
    distance = recipe.distance(gradient, target)
    objective = emphasis * distance
    for weight, prior in recipe.priors:
        if weight:
            objective = objective + weight * prior(scene, dummy, consensus)
    if recipe.distance == Cosine():
        l_sim = distance
    else:
        with torch.no_grad():  # SME compares attacks of all distances by it (Table 2)
            l_sim = 1 - (1 - Cosine()(gradient, target)) / length(target)
    return objective, distance.detach(), l_sim.detach()


def labels_of(recipe: Recipe, scene: Scene, values: Mapping[str, Tensor]) -> Tensor:
    """Class indices, targets, or probabilities that are optimised with the data."""
    return scene.labels if recipe.joint_labels is None else values["label_logits"].softmax(1)


def set_slopes(recipe: Recipe, values: Mapping[str, Tensor], slopes: Mapping[str, Tensor]) -> None:
    """Leave slopes to the optimizer; values for which there is none keep the one that they had."""
    for name, slope in slopes.items():
        # Attention leaves transposed slopes, which L-BFGS does not take.
        values[name].grad = (slope.sign() if recipe.signed and name == "dummy" else slope).contiguous()


def curves_of(recipe: Recipe, objective: Tensor, distance: Tensor, l_sim: Tensor, own: Mapping[str, Tensor]) -> Curves:
    """What the report shows of an iteration."""
    besides = {} if recipe.distance == Cosine() else {"distance": distance}
    return {"objective": objective, "l_sim": l_sim, **besides, **own}


class Restart:
    """One restart: the values that are optimised, and how.

    Attributes:
        scene: what it is matched in.
        consensus: the mean of the dummy data of all restarts before each step, which those of a victim share.
    """

    def __init__(
        self,
        recipe: Recipe,
        scene: Scene,
        shape: tuple[int, ...],
        classes: tuple[int, ...],
        iterations: int,
        rng: torch.Generator,
    ) -> None:
        self._recipe, self.scene, self._iterations, self._rng = recipe, scene, iterations, rng
        like = scene.before[0]
        self.dummy = torch.randn(shape, generator=rng).to(like)
        if recipe.bounded:
            scene.units.clamp_(self.dummy)
        self.consensus = torch.zeros_like(self.dummy)
        self._taken = 0
        self._jump()
        self._variables = recipe.place.variables(scene)
        if recipe.joint_labels is not None:
            logits = torch.randn((shape[0], *classes), generator=rng).to(like)
            self._variables["label_logits"] = Variable(logits, recipe.joint_labels, -math.inf, math.inf)
        self._own = {name: variable.start.clone() for name, variable in self._variables.items()}

    def values(self) -> dict[str, Tensor]:
        """What is optimised, the dummy data first."""
        return {"dummy": self.dummy, **self._own}

    def moving(self, iteration: int) -> Moving:
        """Whose slopes are due."""
        return "dummy", *(name for name in self._own if iteration % self._variables[name].every == 0)

    def around(self, iteration: int) -> Around:
        """See `Around`."""
        return self.consensus.new_tensor(self._recipe.emphasis(iteration, self._iterations)), self.consensus

    def course(self) -> tuple[tuple[float, float], ...]:
        """Of each iteration, the factor of all step sizes and that of the distance."""
        recipe, whole = self._recipe, self._iterations
        return tuple(
            (recipe.schedule(iteration, whole), recipe.emphasis(iteration, whole)) for iteration in range(whole)
        )

    def factor(self, iteration: int) -> float:
        """Of all step sizes."""
        return self._recipe.schedule(iteration, self._iterations)

    def optimizer(self, values: Mapping[str, Tensor]) -> Optimizer | torch.optim.Optimizer:
        """One that moves its values, or those of several restarts."""
        recipe = self._recipe
        sizes = {"dummy": recipe.step_size} | {name: variable.step_size for name, variable in self._variables.items()}
        groups: list[dict[str, object]] = [{"params": [values[name]], "lr": size} for name, size in sizes.items()]
        if recipe.optimizer == "adam":
            return Adam(groups, recipe.step_size)
        if recipe.optimizer == "sgd":
            return SGD(groups, recipe.step_size)
        return torch.optim.LBFGS([values[name] for name in sizes], lr=recipe.step_size)

    def hold(self, values: Mapping[str, Tensor]) -> None:
        """Go on in these tensors, which hold its values."""
        self.dummy = values["dummy"]
        self._own = {name: values[name] for name in self._own}

    def stepping(self, evaluate: Evaluate) -> Step:
        """Steps of an optimizer of its own."""

        def slopes(iteration: int) -> Curves:
            values, moving = self.values(), self.moving(iteration)
            objective, distance, l_sim, *found = evaluate(iteration)
            set_slopes(self._recipe, values, dict(zip(moving, found, strict=True)))
            own = {name: value.mean() for name, value in self._own.items() if name != "label_logits"}
            return curves_of(self._recipe, objective, distance, l_sim, own)

        return steps_of(self.optimizer(self.values()), slopes, factor=self.factor, project=self.project)

    def trial(self, step: Step) -> Trial:
        """The trial that moves its values by these steps."""
        return Trial(step=step, point=lambda: self.dummy, shown=self.scene.units.to_unit_range)

    def project(self) -> None:
        """What follows a step: noise, then all values back into their ranges."""
        if self._recipe.noise:
            noise = torch.randn(self.dummy.shape, generator=self._rng).to(self.dummy)
            self.dummy.add_(noise, alpha=self._recipe.noise * self._recipe.step_size * self.factor(self._taken))
        if self._recipe.bounded:
            self.scene.units.clamp_(self.dummy)
        for name, variable in self._variables.items():
            self._own[name].clamp_(variable.low, variable.high)
        self._taken += 1
        self._jump()

    def _jump(self) -> None:
        if self._recipe.jump is not None:
            self._recipe.jump(self.scene, self.dummy, self._taken, self._iterations, self._rng)

    def finding(self, trial: Trial, merged: Callable[[Tensor, Scene], Tensor]) -> Reconstruction:
        """What was reconstructed."""
        data = [merged(images, self.scene) for images in trial.snapshots.values()]
        logits = self._own.get("label_logits")
        labels = self.scene.labels[: self.scene.num_examples] if logits is None else logits.argmax(1)
        return Reconstruction(
            data=data[-1],
            labels=labels.cpu(),
            trace=trial.trace(),
            snapshots=torch.stack(data),
            snapshot_iterations=torch.tensor(list(trial.snapshots)),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Matching:
    """An attack on one update, before its first iteration.

    Attributes:
        target: what gradients are compared with.
        restarts: at least one.
        computing: entered around each call of the network, as for another precision.
        turn: entered around what is done for this victim alone.
    """

    recipe: Recipe
    scene: Scene
    target: list[Tensor]
    restarts: Sequence[Restart]
    computing: Callable[[], AbstractContextManager[object]]
    turn: Callable[[], AbstractContextManager[object]] = nullcontext

    def alone(self, restart: Restart) -> Evaluate:
        """One restart by itself."""

        def evaluate(iteration: int) -> list[Tensor]:
            around, moving = restart.around(iteration), restart.moving(iteration)
            with self.computing():
                return objective_of(self.recipe, self.scene, restart.values(), around, self.target, moving)

        return evaluate

    @torch.no_grad()
    def agree(self, points: Sequence[Tensor]) -> None:
        """Set the consensus to the mean of these; one that has just diverged must not take the others with it."""
        consensus = self.restarts[0].consensus
        if len(points) == 1:
            consensus.copy_(points[0])
        else:
            torch.nanmean(torch.stack(list(points)), 0, out=consensus)
