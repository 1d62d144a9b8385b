"""Skeleton, a gradient inversion for fedsim.

Check it with `fedsim check fedsim.skeletons.inversion_attack:Skeleton`, and compare it with another
attack with `fedsim run skeleton.toml`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

import fedsim
from fedsim import inversion


class SkeletonUpdate(inversion.UpdateModel):
    """Where the gradient of the dummy data is computed: here at w_0, the weights of the server."""

    def gradient(
        self, problem: inversion.InversionProblem, values: Mapping[str, Tensor], dummy: Tensor, labels: Tensor
    ) -> list[Tensor]:
        """Return what the distance compares; one tensor for each of the model's parameters."""
        # `problem.returned_weights` is w_T. `values` holds variables that are optimised together
        # with the dummy data, where `variables` returns some.
        return problem.gradient(problem.before, dummy, labels)


class SkeletonDistance(inversion.Distance):
    """How far two updates are apart: here the mean difference of both at length 1."""

    def target(self, problem: inversion.InversionProblem) -> list[Tensor]:
        """Return w_0 - w_T, or the gradient that was sent, at length 1; computed once."""
        norm = inversion.global_norm(problem.direction)
        return [delta / norm for delta in problem.direction]

    def __call__(self, gradient: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
        """Return one number, smaller the closer they are."""
        norm = inversion.global_norm(gradient)
        total = norm.new_zeros(())
        for part, goal in zip(gradient, target, strict=True):
            total = total + (part / norm - goal).abs().sum()
        return total


class SkeletonPrior(inversion.Prior):
    """What data look like: here neighbours have similar values."""

    def __call__(self, problem: inversion.InversionProblem, dummy: Tensor, consensus: Tensor) -> Tensor:
        """Return one number, smaller the more plausible the dummy data are."""
        return (dummy[..., 1:] - dummy[..., :-1]).square().mean()


@dataclass(frozen=True, kw_only=True)
class Skeleton(inversion.GradientInversion):
    """Match the update by normalised differences, and prefer images whose neighbours agree.

    Args:
        iterations: steps of Adam.
        step_size: Adam's, in standard deviations of the inputs.
        smoothness: weight of the prior.

    References:
        Authors: Title, Venue, Year, Equation. Differs: say where you depart from it, and why.
    """

    # The fields are the settings; restarts, patience and others are inherited.
    iterations: int = 300
    step_size: float = 0.1
    smoothness: float = 0.01

    # What the report cites.
    paper: ClassVar[fedsim.Paper] = fedsim.Paper(title="Skeleton", authors="Nobody yet", venue="unpublished", year=2026)

    def _recipe(self, problem: inversion.InversionProblem) -> inversion.Recipe:
        # Each of these may be one of `fedsim.inversion`, such as Cosine() or TotalVariation().
        return inversion.Recipe(
            update_model=SkeletonUpdate(),
            distance=SkeletonDistance(),
            priors=[(self.smoothness, SkeletonPrior())],
            step_size=self.step_size,
        )
