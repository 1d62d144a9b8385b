"""One restart of an attack that matches gradients: from its random start over the objective's slopes to a finding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from adversaries.engine.descent import Curves, Trial, steps_of
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
Evaluate = Callable[[dict[str, Tensor], Around, Moving], list[Tensor]]
"""`(values, around, moving) -> [objective, distance, L_sim, slope of each that moves]`."""


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


class Restart:
    """One restart: the values that are optimised, and their optimizer.

    Attributes:
        scene: what it is matched in.
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
        self._taken = 0
        self._jump()
        self._variables = recipe.place.variables(scene)
        if recipe.joint_labels is not None:
            logits = torch.randn((shape[0], *classes), generator=rng).to(like)
            self._variables["label_logits"] = Variable(logits, recipe.joint_labels, -math.inf, math.inf)
        self._own = {name: variable.start.clone() for name, variable in self._variables.items()}
        groups = [{"params": [self.dummy], "lr": recipe.step_size}]
        groups += [{"params": [self._own[name]], "lr": v.step_size} for name, v in self._variables.items()]
        self._optimizer = _optimizer(recipe, groups)

    def values(self) -> dict[str, Tensor]:
        """What is optimised, the dummy data first."""
        return {"dummy": self.dummy, **self._own}

    def trial(self, evaluate: Evaluate, consensus: Tensor) -> Trial:
        """The trial that moves its values; `consensus` holds the mean of all restarts before each step."""
        recipe, iterations = self._recipe, self._iterations

        def slopes(iteration: int) -> Curves:
            values = self.values()
            due = (name for name in self._own if iteration % self._variables[name].every == 0)
            moving = ("dummy", *due)
            around = consensus.new_tensor(recipe.emphasis(iteration, iterations)), consensus
            objective, distance, l_sim, *found = evaluate(values, around, moving)
            for name, slope in zip(moving, found, strict=True):  # the others keep the slope they had
                values[name].grad = slope.sign() if recipe.signed and name == "dummy" else slope
            own = {name: value.mean() for name, value in self._own.items() if name != "label_logits"}
            besides = {} if recipe.distance == Cosine() else {"distance": distance}
            return {"objective": objective, "l_sim": l_sim, **besides, **own}

        return Trial(
            step=steps_of(
                self._optimizer,
                slopes,
                factor=lambda iteration: recipe.schedule(iteration, iterations),
                project=self._project,
            ),
            point=lambda: self.dummy,
            shown=self.scene.units.to_unit_range,
        )

    def _project(self) -> None:
        """What follows a step: noise, then all values back into their ranges."""
        if self._recipe.noise:
            noise = torch.randn(self.dummy.shape, generator=self._rng).to(self.dummy)
            self.dummy.add_(noise, alpha=self._recipe.noise * float(self._optimizer.param_groups[0]["lr"]))
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


def _optimizer(recipe: Recipe, groups: list[dict[str, object]]) -> Optimizer | torch.optim.Optimizer:
    if recipe.optimizer == "adam":
        return Adam(groups, recipe.step_size)
    if recipe.optimizer == "sgd":
        return SGD(groups, recipe.step_size)
    params = [tensor for group in groups for tensor in group["params"]]  # type: ignore[attr-defined]
    return torch.optim.LBFGS(params, lr=recipe.step_size)
