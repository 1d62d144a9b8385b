"""Gradient inversion: change dummy data until their update looks like the recorded one.

An attack is a `Recipe`: how the update of the dummy data is computed (`update_models`), how it is
compared with the recorded one (`distances`), which priors are added, and how the sum is minimised.
The files of the attacks have little else in them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedsim.base.constraints import NonNegativeFloat, NonNegativeInt, PositiveInt
from fedsim.base.errors import AttackError, ConfigError
from fedsim.interfaces.attack import FAILURES, Attack, Knowledge, Outcome, Progress, Target, VictimTask, warn
from fedsim.interfaces.findings import Finding, Reconstruction
from fedsim.inversion.batch_norm import copy_with_batch_statistics, used_batch_statistics
from fedsim.inversion.batched_call import BatchEntry
from fedsim.inversion.batched_restarts import batched_steps, batching_is_faster, fit_in_memory
from fedsim.inversion.compiled_objective import make_compiled_steps
from fedsim.inversion.descent import Step, Trial, divergence_error, iterate_descent, run_to_end
from fedsim.inversion.differentiability import find_output_shape
from fedsim.inversion.inversion_task import InversionTask
from fedsim.inversion.labels.problem_labels import find_labels
from fedsim.inversion.labels.updates import check_label_source
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.problem_builder import build_problem
from fedsim.inversion.public_fits import check_public_records, warn_of_missing_classes
from fedsim.inversion.public_priors import PriorName, add_public_prior
from fedsim.inversion.recipe import (
    INPUT_MOMENTS,
    MEAN_GRADIENT_FACTS,
    Recipe,
    match_mixtures,
    match_private_parts,
    optimise_vector_targets,
)
from fedsim.inversion.relu_jumps import has_relus
from fedsim.inversion.restart import Restart
from fedsim.inversion.round_robin import run_round_robin
from fedsim.inversion.shared_setup import ModelCopies, share_model
from fedsim.inversion.training_mismatch import OPTIMIZER_FACTS, warn_of_dropout, warn_unless_plain_sgd
from fedsim.inversion.update_models import check_simulable
from fedsim.recording.wire_format import Update
from fedsim.training.settings import known_steps

_SNAPSHOTS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Fractions of the iterations after which the dummy data are kept for the report."""

_SETTINGS_WITHOUT_USE = {"none": ("prior_weight", "components"), "denoiser": ("components",)}
"""Settings that do nothing, by the prior."""


@dataclass(frozen=True, kw_only=True)
class GradientInversion(Attack):
    """Base of the attacks that reconstruct a victim's data from one update by matching gradients.

    A subclass has its hyperparameters as fields and writes a `_recipe`. The base

    1. builds the inversion problem of the update (`_problem`),
    2. takes the labels that are granted, or counts them (`_labels`),
    3. draws dummy data for each restart and minimises the recipe's objective (`invert`),
    4. claims the restart that matches best (`_conclude`).

    Args:
        iterations: steps of the optimizer.
        restarts: random starts; the one with the smallest objective at its end is the finding.
        patience: stop when the objective has not fallen by 1 % in so many iterations; 0 never
            stops early.
        compile: trace and compile the double backward pass, once for each shape, which takes
            minutes even for small networks. Not for models whose control flow depends on values.
        precision: `bfloat16` computes convolutions and linear layers in it, on hardware that can.
        prior: what is known of examples from auxiliary records, beside the recipe's own terms: `pca` looks for
            coefficients of principal components around the means of classes, `gmm` adds a mixture of Gaussians of
            patches of images, `denoiser` looks for noisy images of which a trained denoiser makes the claimed ones.
        prior_weight: factor of the prior's negative logarithm, beside a distance of the size that the recipe's has.
        components: principal components, or Gaussians of the mixture.
        relu_width: above 0, the descent sees that ReLUs switch: a Gaussian density of this width, as a share of the
            root mean square of what enters a ReLU, stands for the derivative of its step (`SmoothReluJumps`).
    """

    iterations: PositiveInt = 1000
    restarts: PositiveInt = 1
    patience: NonNegativeInt = 0
    compile: bool = False
    precision: Literal["float32", "bfloat16"] = "float32"
    prior: PriorName = "none"
    prior_weight: NonNegativeFloat = 1e-4
    components: PositiveInt = 60
    relu_width: NonNegativeFloat = 0.0

    simulates_training: ClassVar[bool] = False
    """Whether it always simulates local training, and so needs clients that train by SGD."""
    needs: ClassVar[frozenset[str]] = frozenset({"model", "loss", "input_shape", "value_range"})
    uses: ClassVar[frozenset[str]] = (
        INPUT_MOMENTS | MEAN_GRADIENT_FACTS | OPTIMIZER_FACTS | {"labels", "defenses", "private_parts"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prior != "none" and self.subject == "texts":
            raise ConfigError(f"prior: '{self.prior}' is a prior of numbers, and this attack finds texts; leave it out")
        for name in _SETTINGS_WITHOUT_USE.get(self.prior, ()):
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise ConfigError(
                    f"{name}: does nothing where prior = '{self.prior}'; leave it out, or set another prior"
                )

    @property
    def required_facts(self) -> frozenset[str]:
        """Return the facts without which it cannot work: those of `needs`, and public records for a prior."""
        return self.needs | (frozenset() if self.prior == "none" else {"auxiliary"})

    def check_facts(self, knowledge: Knowledge, num_examples: int | None = None, granted: Collection[str] = ()) -> None:
        """Refuse what its prior cannot be fitted to, and an optimizer of clients that it cannot simulate."""
        if self.simulates_training:
            check_simulable(knowledge.optimizer, "optimizer")
        if self.prior != "none":
            check_public_records(knowledge.auxiliary, knowledge.input_shape, f"prior = '{self.prior}'")

    def check_message(self, update: Update, knowledge: Knowledge) -> None:
        """Refuse a network of which too much stays with the clients, and labels that its last layer does not tell."""
        problem, recipe = self._state_problem(update, knowledge)
        mixes = any(defense.mixes for defense in problem.defenses)  # labels are optimised
        if knowledge.labels is None and recipe.label_step_size is None and not mixes:
            check_label_source(update, knowledge, problem.model)

    # What a subclass may override.

    @abstractmethod
    def _recipe(self, problem: InversionProblem) -> Recipe:
        """Return the objective and the optimizer.

        It may read facts of the problem, and raise if they are withheld.
        """

    def _update(self, target: Target) -> Update:
        """Return the update that is attacked; its `num_examples` examples are looked for."""
        return target.read_update()

    def _problem(self, update: Update, knowledge: Knowledge) -> InversionProblem:
        """Build the inversion problem, without labels.

        A part of the model that never left the client is left out; see `Recipe.unknown_step_size`.
        """
        return build_problem(update, knowledge, body_alone=True)

    def _labels(self, problem: InversionProblem, update: Update, knowledge: Knowledge, rng: torch.Generator) -> Tensor:
        """Return the labels that are granted, or count them from the last layer."""
        return find_labels(problem, update, knowledge, rng)

    def _conclude(self, ends: Sequence[tuple[Restart, Trial]]) -> Reconstruction:
        """Return the finding from the restarts that did not diverge; here the best match."""
        restart, trial = best_restart(ends)
        return restart.finding(trial, self._merge_epochs)

    def _merge_epochs(self, data: Tensor, problem: InversionProblem) -> Tensor:
        """Merge the `epochs` images of each example into one; here there is one already."""
        return data

    # Running the attack on one victim.

    def _run(self, target: Target, progress: Progress) -> Finding:
        return self.invert(self._update(target), target.knowledge, target.rng, progress)

    def invert(self, update: Update, knowledge: Knowledge, rng: torch.Generator, progress: Progress) -> Reconstruction:
        """Minimise the recipe's objective over the dummy data and return the reconstruction.

        The result is the last iterate of the restart whose objective is smallest; nothing is chosen
        with hindsight. Curves hold each iteration's values before its step, as in SME's released
        code, so their last value is that of the last iterate but one.

        Args:
            update: is matched; its `num_examples` is how many examples are looked for.
            knowledge: what is granted of the data and the model of that update.
            rng: source of every random draw.
            progress: called after iterations.

        Raises:
            AttackError: the update cannot be matched, or all restarts diverged.
        """
        task = self._prepare_task(update, knowledge, rng)
        return run_to_end(self._inversion_turns(task, self._solo_batch(task), progress))

    def _best_restart(
        self, update: Update, knowledge: Knowledge, rng: torch.Generator, progress: Progress
    ) -> tuple[Restart, Trial]:
        """Run all restarts and return the one that matches best, at its end."""
        return best_restart(self._run_restarts(update, knowledge, rng, progress))

    def _run_restarts(
        self, update: Update, knowledge: Knowledge, rng: torch.Generator, progress: Progress
    ) -> list[tuple[Restart, Trial]]:
        """Run all restarts and return those that did not diverge, at their ends."""
        task = self._prepare_task(update, knowledge, rng)
        return run_to_end(self._descent_turns(task, self._solo_batch(task), progress))

    def _solo_batch(self, task: InversionTask) -> Sequence[Step] | None:
        """Return the steps of one victim's restarts if they are computed in batches."""
        if len(task.restarts) > 1 and (entry := self._batch_entry(task)) is not None:
            return batched_steps([entry])[0]
        return None

    # Running the attack on several victims.

    def _run_several(self, tasks: Iterable[VictimTask]) -> Iterator[tuple[VictimTask, Outcome]]:
        if type(self)._run is not GradientInversion._run:  # it does more than matching
            yield from super()._run_several(tasks)
            return
        waiting: list[tuple[VictimTask, BatchEntry]] = []
        builders: dict[int, ModelCopies] = {}
        for victim_task in tasks:
            try:
                with victim_task.log_context():
                    target = victim_task.target
                    update, knowledge = self._update(target), share_model(target.knowledge, builders)
                    task = self._prepare_task(update, knowledge, target.rng, victim_task.log_context)
                    entry = self._batch_entry(task, [waiting_entry for _, waiting_entry in waiting])
            except FAILURES as error:
                yield victim_task, error
                continue
            if entry is None:
                yield from run_round_robin({victim_task: self._inversion_turns(task, None, victim_task.progress)})
                continue
            # Run those that are waiting if one more does not fit in the memory.
            if not fit_in_memory([*(waiting_entry for _, waiting_entry in waiting), entry]):
                yield from self._run_waiting(waiting)
                waiting = []
            waiting.append((victim_task, entry))
        yield from self._run_waiting(waiting)

    def _run_waiting(self, waiting: Sequence[tuple[VictimTask, BatchEntry]]) -> Iterator[tuple[VictimTask, Outcome]]:
        """Run victims that can be batched in round robin, the others one after the other."""
        batched = {}
        all_steps = batched_steps([entry for _, entry in waiting])
        for (victim_task, entry), steps in zip(waiting, all_steps, strict=True):
            turns = self._inversion_turns(entry.task, steps, victim_task.progress)
            if steps is None:
                yield from run_round_robin({victim_task: turns})
            else:
                batched[victim_task] = turns
        yield from run_round_robin(batched)

    # Preparing a task.

    def _prepare_task(
        self,
        update: Update,
        knowledge: Knowledge,
        rng: torch.Generator,
        victim_context: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> InversionTask:
        """Do all that comes before the first iteration, but for the check that the distance has a gradient."""
        problem, recipe = self._state_problem(update, knowledge)
        self._warn_of_mismatch(recipe, problem, update, knowledge)
        if recipe.normalised_by_batch:
            model = copy_with_batch_statistics(problem.model)
            problem = replace(problem, model=model, uses_batch_statistics=True)
        # Check the shapes of inputs and outputs.
        shape = (update.num_examples * recipe.epochs, *(knowledge.input_shape or ()))
        recipe = add_public_prior(recipe, problem, self.prior, self.prior_weight, self.components, shape[1:])
        output_shape = find_output_shape(problem, knowledge, shape)
        if recipe.relu_width and not has_relus(problem, shape):
            warn(f"{problem.where}: relu_width does nothing, because the model calls no plain ReLU; leave it out")
        # Prepare the labels.
        if any(defense.mixes for defense in problem.defenses):
            recipe, problem = match_mixtures(recipe, problem, output_shape)
        if recipe.label_step_size is None:
            problem = self._add_labels(recipe, problem, update, knowledge, rng)
        else:
            _check_output_shape(output_shape, problem, knowledge)
        # Draw the restarts, which share their consensus.
        restarts = []
        for _ in range(self.restarts):
            restart = Restart(recipe, problem, shape, output_shape, self.iterations, rng)
            restarts.append(restart)
            restart.consensus = restarts[0].consensus
        task = InversionTask(
            recipe=recipe,
            problem=problem,
            target=recipe.distance.target(problem),
            restarts=restarts,
            half_precision=self.precision == "bfloat16",
            victim_context=victim_context,
        )
        return task.with_enough_precision() if task.half_precision else task

    def _state_problem(self, update: Update, knowledge: Knowledge) -> tuple[InversionProblem, Recipe]:
        """Return the problem, without labels, and the recipe by which it is solved."""
        problem = self._problem(update, knowledge)
        recipe = replace(self._recipe(problem), relu_width=self.relu_width)
        if problem.unknown_names or knowledge.private_parts:
            recipe = match_private_parts(recipe, problem, update, knowledge)
        return problem, optimise_vector_targets(recipe, problem, update, knowledge)

    def _warn_of_mismatch(
        self, recipe: Recipe, problem: InversionProblem, update: Update, knowledge: Knowledge
    ) -> None:
        """Warn if the client trained differently from what the attack assumes."""
        steps = known_steps(problem, update.num_examples)
        if recipe.one_step and steps != 1:
            number = "an unknown number of" if steps is None else steps
            warn(f"{self.title} on {problem.where}: assumes one local step, the update is of {number}; expect little")
        if problem.sent_gradient is None:
            warn_unless_plain_sgd(self, knowledge, problem.where, simulated=recipe.update_model.simulates)
        warn_of_dropout(self, problem.model, knowledge, problem.where)
        uses_batch_statistics = recipe.normalised_by_batch or problem.uses_batch_statistics
        if not uses_batch_statistics and used_batch_statistics(update, problem.model):
            warn(
                f"{self.title} on {problem.where}: running statistics of BatchNorm layers moved, as where the client "
                "normalises by the batch or adds noise to them, and this attack normalises by the running ones; unless "
                "it is noise, expect little, or choose an attack that normalises by the batch, such as "
                "see-through-gradients with exact_statistics = true"
            )

    def _add_labels(
        self,
        recipe: Recipe,
        problem: InversionProblem,
        update: Update,
        knowledge: Knowledge,
        rng: torch.Generator,
    ) -> InversionProblem:
        """Return the problem with a label for each dummy example."""
        labels = self._labels(problem, update, knowledge, rng).to(knowledge.device)
        if self.prior in ("pca", "denoiser"):
            warn_of_missing_classes(problem, labels, self.title)
        if recipe.update_model.splits_batches and (problem.batch_size or 0) < len(labels):
            # In ascending order a mini-batch would have one or two classes.
            labels = labels[torch.randperm(len(labels), generator=rng).to(labels.device)]
        return replace(problem, labels=torch.cat([labels] * recipe.epochs))

    # The descent.

    def _inversion_turns(
        self, task: InversionTask, steps: Sequence[Step] | None, progress: Progress
    ) -> Generator[None, None, Reconstruction]:
        """Run a task, one iteration for each `next`; return its finding."""
        return self._conclude((yield from self._descent_turns(task, steps, progress)))

    def _descent_turns(
        self, task: InversionTask, steps: Sequence[Step] | None, progress: Progress
    ) -> Generator[None, None, list[tuple[Restart, Trial]]]:
        """Run all restarts, one iteration for each `next`; return those that did not diverge."""
        if steps is None:
            task.check_gradient()
        pairs = zip(task.restarts, steps or self._restart_steps(task), strict=True)
        restarts_by_trial = {restart.make_trial(step): restart for restart, step in pairs}
        trials = list(restarts_by_trial)
        remaining = yield from iterate_descent(
            trials,
            self.iterations,
            progress,
            where=task.problem.where,
            patience=self.patience,
            snapshots=_SNAPSHOTS,
            before_iteration=lambda active: task.update_consensus([trial.point() for trial in active]),
        )
        if not remaining:
            raise divergence_error(trials, task.problem.where, "step_size")
        return [(restarts_by_trial[trial], trial) for trial in remaining]

    def _batch_entry(self, task: InversionTask, others: Sequence[BatchEntry] = ()) -> BatchEntry | None:
        """Return what batches the restarts with one another and with other victims', if it can.

        Args:
            others: victims before this one; what those know that are alike is not measured again.
        """
        if self.compile or task.recipe.optimizer == "lbfgs" or task.recipe.smoothing:  # evaluate several times a step
            return None
        if not batching_is_faster(task.problem.labels.device):
            return None
        try:
            return BatchEntry.from_task(task, others)
        except torch.OutOfMemoryError:  # a batch takes more memory than convolutions of one victim
            return None

    def _restart_steps(self, task: InversionTask) -> Sequence[Step]:
        """Return the steps of each restart, computed by itself."""
        if self.compile:
            return make_compiled_steps(task)
        return [restart.make_step(task.restart_evaluation(restart)) for restart in task.restarts]


def _check_output_shape(shape: tuple[int, ...], problem: InversionProblem, knowledge: Knowledge) -> None:
    """Raise AttackError unless the outputs for an example are logits of which its labels can be optimised."""
    if problem.goal == "masks" and len(shape) == 3:  # logits `class height width`
        return
    if knowledge.num_classes not in (None, *shape[-1:]) or len(shape) != 1:
        raise AttackError(
            f"{problem.where}: the model gives outputs of shape {shape} for each "
            f"example, num_classes is {knowledge.num_classes}; grant the right one"
        )


def best_restart(ends: Sequence[tuple[Restart, Trial]]) -> tuple[Restart, Trial]:
    """Return the restart with the smallest objective at its end."""
    return min(ends, key=lambda end: end[1].objective)
