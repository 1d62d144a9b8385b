"""Inversion of one update that is ready for its first iteration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsim.base.errors import first_line, is_device_failure
from fedsim.interfaces.attack import warn
from fedsim.inversion.differentiability import check_differentiability
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.recipe import Recipe
from fedsim.inversion.restart import (
    Evaluate,
    Restart,
    dummy_data,
    dummy_labels,
    guess_unknown_parts,
    objective_and_gradients,
    objective_terms,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class InversionTask:
    """Inversion of one update that is ready for its first iteration.

    Attributes:
        recipe: objective and optimizer.
        target: what gradients are compared with.
        restarts: at least one.
        half_precision: compute convolutions and linear layers in bfloat16.
        victim_context: entered around what is done for this victim alone.
    """

    recipe: Recipe
    problem: InversionProblem
    target: list[Tensor]
    restarts: Sequence[Restart]
    half_precision: bool = False
    victim_context: Callable[[], AbstractContextManager[object]] = nullcontext

    def precision_context(self) -> AbstractContextManager[object]:
        """Return the context that is entered around each call of the network."""
        if not self.half_precision:
            return nullcontext()
        return torch.autocast(self.problem.labels.device.type, torch.bfloat16)

    def with_enough_precision(self) -> InversionTask:
        """Return the task, in float32 and with a warning where half precision does not do for its loss or model."""
        self.check_gradient()  # what cannot be attacked in float32 either is not for want of precision
        evaluate = self.restart_evaluation(self.restarts[0])
        try:
            if all(bool(result.isfinite().all()) for result in evaluate(0)):
                return self
            cause = "values are not finite"
        except RuntimeError as error:
            if is_device_failure(error):
                raise
            cause = first_line(error)
        warn(f"{self.problem.where}: half precision does not do here ({cause}), so all is computed in float32")
        return replace(self, half_precision=False)

    def restart_evaluation(self, restart: Restart) -> Evaluate:
        """Return the function that evaluates one restart by itself."""

        def evaluate(iteration: int) -> list[Tensor]:
            iteration_inputs, names = restart.iteration_inputs(iteration), restart.gradient_names(iteration)
            with self.precision_context():
                return objective_and_gradients(
                    self.recipe,
                    self.problem,
                    restart.values(),
                    iteration_inputs,
                    self.target,
                    names,
                )

        return evaluate

    def start_terms(self, restart: Restart) -> list[Tensor]:
        """Return objective, distance and L_sim of one restart at its start, without their gradients."""
        inputs = restart.iteration_inputs(0)
        with self.precision_context():
            terms = objective_terms(self.recipe, self.problem, restart.values(), inputs, self.target)
        return [term.detach() for term in terms]

    def check_gradient(self) -> None:
        """Check that the distance's gradient in the dummy data is finite and not zero at the start."""
        recipe, problem, target = self.recipe, self.problem, self.target

        def distance_of(values: dict[str, Tensor]) -> Tensor:
            labels = dummy_labels(recipe, problem, values)
            guess = guess_unknown_parts(problem, values)
            gradient = recipe.update_model.gradient(guess, values, values["dummy"], labels)
            return recipe.distance(guess.apply_defenses(gradient), target)

        start = self.restarts[0].values()
        start["dummy"] = dummy_data(recipe, problem, start["dummy"]).detach()
        check_differentiability(problem, start, dummy_labels(recipe, problem, start), distance_of)

    @torch.no_grad()
    def update_consensus(self, points: Sequence[Tensor]) -> None:
        """Set the consensus to the mean of `points`, without those that have just diverged."""
        consensus = self.restarts[0].consensus
        if len(points) == 1:
            consensus.copy_(points[0])
        else:
            torch.nanmean(torch.stack(list(points)), 0, out=consensus)
