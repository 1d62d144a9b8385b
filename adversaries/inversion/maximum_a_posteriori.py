"""MAP: maximum a posteriori under what the defense is known to do, with a prior from public data."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedsim.base.constraints import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from fedsim.base.errors import AttackError
from fedsim.base.papers import cite
from fedsim.interfaces.attack import Knowledge, Paper, Progress
from fedsim.interfaces.findings import Reconstruction
from fedsim.inversion.descent import Step, iterate_descent
from fedsim.inversion.inversion_task import InversionTask
from fedsim.inversion.likelihoods import MessageLikelihood, draw_message, with_known_noise
from fedsim.inversion.matching import GradientInversion, best_restart
from fedsim.inversion.parametrisations import PublicComponents
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.public_fits import fit_components
from fedsim.inversion.recipe import MEAN_GRADIENT_FACTS, Recipe, cosine_schedule
from fedsim.inversion.restart import Restart, dummy_data, dummy_labels
from fedsim.inversion.update_models import (
    GradientAtBroadcast,
    UpdateModel,
    choose_training_model,
    simulate_known_training,
)
from fedsim.recording.wire_format import Update

_ANNEALED_SHARE = 0.5
"""Share of the iterations in which the likelihood rises to its full weight."""


def annealing_schedule(iteration: int, iterations: int) -> float:
    """Return a factor of the likelihood that rises from 1/100 to 1 in the first half.

    >>> [round(annealing_schedule(iteration, 8), 3) for iteration in (0, 2, 4, 7)]
    [0.01, 0.1, 1.0, 1.0]
    """
    remaining = max(0.0, 1 - iteration / (_ANNEALED_SHARE * iterations))
    return float(10 ** (-2 * remaining))


@dataclass(frozen=True, kw_only=True)
class MaximumAPosteriori(GradientInversion):
    """Find the data that are most probable given the message, the known defense and public data.

    1. Fit a prior to auxiliary records (`prior`).
    2. Collect what each known defense says of its noise (`Defense.message_noise`): Gaussian noise,
       rounding, numbers that were left out for being small or by a mask. A defense that says
       nothing is taken by its `adversary_view`, with noise as the message shows it, and a warning.
    3. Minimise the negative log-likelihood of the message plus that of the prior by Adam, from
       `restarts` starts, while the likelihood is annealed (`_recipe`).
    4. Draw `draws` times from the posterior around the best one: minimise again with noise of the
       likelihood added to the message, and a draw from the prior in place of its mean. Their mean
       squared distance from the claim, plus what the components leave out, is the error that the
       attack expects (`Reconstruction.spread`).

    Without the defenses (naive) the message counts as exact, but for the error of the model of
    local training, whose batches are not known.

    The expected error is about the actual one where the likelihood is wide, under noise and
    rounding. Where it is narrow, without a defense and under top-k or masks, descents end in local
    optima, of which draws around one of them know nothing: there it is too small by half or more.

    Args:
        iterations: steps of Adam for each start.
        step_size: Adam's, in standard deviations of the prior (`pca`) or of the inputs (`gmm`).
        prior: `pca` optimises coefficients of principal components around the means of classes,
            with a Gaussian prior; `gmm` optimises pixels, with a mixture of Gaussians of patches;
            `denoiser` noisy images, of which a denoiser of public images makes the claimed ones.
        prior_weight: factor of the prior's negative logarithm; 1 is Bayes' rule.
        local_training: `simulated` computes a few steps on all examples, where clients take several
            steps, and refuses other optimizers than SGD; `gradient` takes their mean for one
            gradient at w_0, which finds more under noise; `auto` does so where noise is known to be
            added, and simulates elsewhere, where clients train by SGD.
        model_error: error of the model of local training, as a share of each tensor's size.
        draws: from the posterior; 0 makes none, and expects no error.

    References:
        [Balunovic2022b], whose Bayes optimal adversary it approximates; [Zoran2011] for the prior
        of patches; [Bardsley2014] for the draws. Differs: the prior is fitted to public records,
        and defenses other than Gaussian noise have likelihoods, too. With the other priors
        draws are of the message alone, so that the expected error is too small.
    """

    iterations: PositiveInt = 200
    step_size: PositiveFloat = 0.1
    prior: Literal["pca", "gmm", "denoiser"] = "pca"
    prior_weight: NonNegativeFloat = 1.0
    local_training: Literal["auto", "simulated", "gradient"] = "auto"
    model_error: NonNegativeFloat = 0.1
    draws: NonNegativeInt = 4

    paper: ClassVar[Paper] = cite("Balunovic2022b")
    needs: ClassVar[frozenset[str]] = GradientInversion.needs | MEAN_GRADIENT_FACTS | {"auxiliary"}

    def _problem(self, update: Update, knowledge: Knowledge) -> InversionProblem:
        return with_known_noise(super()._problem(update, knowledge), self.title)

    def _recipe(self, problem: InversionProblem) -> Recipe:
        return Recipe(
            update_model=self._update_model(problem),
            distance=MessageLikelihood.from_problem(problem, self.model_error),
            step_size=self.step_size,
            schedule=cosine_schedule,
            distance_schedule=annealing_schedule,
        )

    def _update_model(self, problem: InversionProblem) -> UpdateModel:
        if self.local_training == "auto":
            return choose_training_model(problem)
        if self.local_training == "gradient":
            return GradientAtBroadcast()
        if problem.sent_gradient is None and problem.optimizer != "sgd":
            raise AttackError(
                f"{problem.where}: local_training = 'simulated' simulates SGD, and clients train by "
                f"{problem.optimizer}; set local_training = 'gradient'"
            )
        return simulate_known_training(problem)

    def _inversion_turns(
        self, task: InversionTask, steps: Sequence[Step] | None, progress: Progress
    ) -> Generator[None, None, Reconstruction]:
        """Run all restarts, then draw from the posterior around the best one."""
        restart, trial = best_restart((yield from self._descent_turns(task, steps, progress)))
        finding = restart.finding(trial, self._merge_epochs)
        squares = []
        for number in range(1, self.draws + 1):
            draw = yield from self._draw(task, restart.values(), number)
            if draw is not None:
                squares.append((draw - finding.data).square().flatten(1).mean(1))
        if not squares:
            return finding
        left_out = self._left_out_variance(task.problem)
        return replace(finding, spread=(torch.stack(squares).mean(0) + left_out).sqrt())

    def _draw(
        self, task: InversionTask, best: Mapping[str, Tensor], number: int
    ) -> Generator[None, None, Tensor | None]:
        """Return a draw of the data in [0, 1] around the best restart's values, or None if it diverged."""
        rng = torch.Generator().manual_seed(number)
        # Move the prior's mean, and add noise of the likelihood to the message.
        recipe = replace(task.recipe, distance_schedule=lambda iteration, iterations: 1.0)
        if isinstance(recipe.parametrisation, PublicComponents):
            recipe = replace(recipe, parametrisation=replace(recipe.parametrisation, draw=number))
        # Descend from the best point.
        iterations = max(1, self.iterations // 2)
        shape = tuple(dummy_data(recipe, task.problem, best["dummy"]).shape)
        classes = tuple(best["label_logits"].shape[1:]) if "label_logits" in best else ()
        restart = Restart(recipe, task.problem, shape, classes, iterations, rng)
        for name, value in restart.values().items():
            value.copy_(best[name].detach())
        target = draw_message(self._defended_gradient(task, restart), task.target, rng)
        drawing = replace(task, recipe=recipe, target=target, restarts=[restart])
        trial = restart.make_trial(restart.make_step(drawing.restart_evaluation(restart)))
        where = task.problem.where
        ends = yield from iterate_descent([trial], iterations, lambda *_: None, where=where)
        if not ends:
            return None
        data = dummy_data(recipe, task.problem, ends[0].point().detach())
        return task.problem.scaling.to_unit_range(data)

    def _defended_gradient(self, task: InversionTask, restart: Restart) -> list[Tensor]:
        """Return the gradient of the data of a restart, as the known defenses leave it."""
        recipe, problem, values = task.recipe, task.problem, restart.values()
        data, labels = dummy_data(recipe, problem, values["dummy"]), dummy_labels(recipe, problem, values)
        return problem.apply_defenses(recipe.update_model.gradient(problem, values, data, labels))

    def _left_out_variance(self, problem: InversionProblem) -> float:
        """Return the mean variance of a value in [0, 1] that the components leave out."""
        if self.prior != "pca":
            return 0.0
        scaling = problem.scaling
        unit = (scaling.high - scaling.low).float().mean().item()
        return fit_components(problem, self.components).residual / unit**2
