"""The engine behind gradient inversion: move dummy data until their update looks like the recorded one.

An attack is a `recipe`: where the gradient is taken (`places`), how it is compared (`distances`), what
else is asked of the data (`priors`), and how all that is minimised. The files of the attacks have
little else in them.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from adversaries.batch_norm import normalising_by_batch, trained_by_batch
from adversaries.engine.compiled import compiled
from adversaries.engine.descent import Trial, descend, diverged
from adversaries.engine.recipe import MEAN_GRADIENT, MOMENTS, Recipe
from adversaries.engine.restart import Around, Evaluate, Moving, Restart, labels_of, objective_of
from adversaries.engine.settings import check_choices
from adversaries.engine.slopes import check_inputs, check_slope
from adversaries.engine.together import at_once, pays
from adversaries.labels.updates import count_labels
from adversaries.scene import STEPPING, Scene, known_steps, scene_of, warn_of_dropout, warn_unless_plain
from fedsim.attacks import Attack, Knowledge, Progress, single_update
from fedsim.errors import AttackError, ConfigError
from fedsim.findings import Finding, Reconstruction
from fedsim.recording.transcript import Transcript
from fedsim.wire.messages import Update

log = logging.getLogger("fedsim." + __name__)

_SNAPSHOTS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Fractions of the iterations after which the dummy data are kept for the report."""


@dataclass(frozen=True, kw_only=True)
class GradientInversion(Attack):
    """Base of the attacks that reconstruct a victim's data from one update by matching gradients.

    A subclass has its hyperparameters as fields and writes a `_recipe`.

    Args:
        iterations: steps of the optimizer.
        restarts: random starts; the one with the smallest objective at its end is the finding.
        patience: stop when the objective has not fallen by a hundredth of itself for so many
            iterations; 0 never stops early.
        compile: trace and compile the double backward pass, once for each shape, which takes minutes for small networks
            too. Not for models whose control flow depends on values.
        precision: `bfloat16` computes convolutions and linear layers in it, on hardware that can.
    """

    iterations: int = 1000
    restarts: int = 1
    patience: int = 0
    compile: bool = False
    precision: Literal["float32", "bfloat16"] = "float32"

    needs: ClassVar[frozenset[str]] = frozenset({"model", "loss", "input_shape", "value_range"})
    uses: ClassVar[frozenset[str]] = MOMENTS | MEAN_GRADIENT | STEPPING | {"labels", "defenses"}

    def __post_init__(self) -> None:
        check_choices(self)
        for name, least in (("iterations", 1), ("restarts", 1), ("patience", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: expected at least {least}, got {getattr(self, name)}")

    @abstractmethod
    def _recipe(self, scene: Scene) -> Recipe:
        """What to minimise, and how; may ask `scene` for facts, and raise where they are withheld."""

    def _update(self, transcript: Transcript, knowledge: Knowledge, victim: int) -> Update:
        """What is attacked; its `num_examples` is how many examples are looked for."""
        return single_update(transcript, victim)

    def _scene(self, update: Update, knowledge: Knowledge) -> Scene:
        """What is matched, and the model it is matched on."""
        return scene_of(update, knowledge)

    def _labels(self, scene: Scene, update: Update, knowledge: Knowledge, rng: torch.Generator) -> Tensor:
        """Labels that are granted, or else counted from the last layer."""
        if knowledge.labels is None:
            before, after = (
                dict(zip(scene.names, weights, strict=True)) | dict(scene.buffers)
                for weights in (scene.before, scene.after or scene.before)  # where a gradient was sent
            )
            return count_labels(update, knowledge, scene.model, before, after, rng)
        if len(knowledge.labels) != update.num_examples:
            granted, count = len(knowledge.labels), update.num_examples
            raise AttackError(f"{scene.where}: {granted} labels are granted, but the client reported N = {count}")
        return knowledge.labels

    def _run(
        self, transcript: Transcript, knowledge: Knowledge, victim: int, rng: torch.Generator, progress: Progress
    ) -> Finding:
        return self.invert(self._update(transcript, knowledge, victim), knowledge, rng, progress)

    def invert(self, update: Update, knowledge: Knowledge, rng: torch.Generator, progress: Progress) -> Reconstruction:
        """Minimise the recipe's objective over the dummy data.

        The result is the last iterate of the restart whose objective is smallest; nothing is picked
        with hindsight. Curves hold each iteration's values before its step, as in SME's released
        code, so their last is that of the last iterate but one.

        Args:
            update: is matched; its `num_examples` is how many examples are looked for.
            knowledge: what is granted of the data and the model of that update.

        Raises:
            AttackError: the update cannot be matched, or all restarts diverged.
        """
        return self._concluded(self._ended(update, knowledge, rng, progress))

    def _concluded(self, ends: Sequence[tuple[Restart, Trial]]) -> Reconstruction:
        """The finding, out of the restarts that did not diverge; by default that of the one that matches best."""
        best, trial = best_of(ends)
        return best.finding(trial, self._merged)

    def _matched(
        self, update: Update, knowledge: Knowledge, rng: torch.Generator, progress: Progress
    ) -> tuple[Restart, Trial]:
        """The restart that matches best, at its end."""
        return best_of(self._ended(update, knowledge, rng, progress))

    def _ended(
        self, update: Update, knowledge: Knowledge, rng: torch.Generator, progress: Progress
    ) -> list[tuple[Restart, Trial]]:
        """The restarts that did not diverge, at their ends."""
        scene = self._scene(update, knowledge)
        recipe = self._recipe(scene)
        self._warn(recipe, scene, update, knowledge)
        if recipe.normalised_by_batch:
            scene = replace(scene, model=normalising_by_batch(scene.model), by_batch=True)
        shape = (update.num_examples * recipe.epochs, *(knowledge.input_shape or ()))
        classes = check_inputs(scene, scene.before[0].new_zeros(shape)).shape[1:]
        if any(defense.mixes for defense in scene.defenses):
            recipe, scene = _of_mixtures(recipe, scene, tuple(classes))
        if recipe.joint_labels is None:
            scene = self._labelled(recipe, scene, update, knowledge, rng)
        elif knowledge.num_classes not in (None, *classes[-1:]) or len(classes) != 1:
            raise AttackError(
                f"{scene.where}: the model gives outputs of shape {tuple(classes)} for each example, num_classes is "
                f"{knowledge.num_classes}; grant the right one"
            )
        restarts = [Restart(recipe, scene, shape, tuple(classes), self.iterations, rng) for _ in range(self.restarts)]
        return self._descended(restarts, self._evaluators(recipe, scene, restarts), progress, scene.where)

    def _warn(self, recipe: Recipe, scene: Scene, update: Update, knowledge: Knowledge) -> None:
        """Say so where the client trained otherwise than the attack assumes."""
        steps = known_steps(scene, update.num_examples)
        if recipe.one_step and steps != 1:
            count = "an unknown number of" if steps is None else str(steps)
            log.warning(
                "%s on %s: assumes one local step, the update is of %s; expect little", self.called, scene.where, count
            )
        if scene.sent is None:
            warn_unless_plain(self, knowledge, scene.where, simulated=recipe.place.simulates)
        warn_of_dropout(self, scene.model, scene.where)
        if not (recipe.normalised_by_batch or scene.by_batch) and trained_by_batch(update, scene.model):
            log.warning(
                "%s on %s: the client's BatchNorm layers normalised by the batch, this attack normalises by the "
                "running statistics; expect little",
                self.called,
                scene.where,
            )

    def _labelled(
        self, recipe: Recipe, scene: Scene, update: Update, knowledge: Knowledge, rng: torch.Generator
    ) -> Scene:
        """The scene with a label for each dummy example."""
        labels = self._labels(scene, update, knowledge, rng).to(knowledge.device)
        if recipe.place.cuts and (scene.batch_size or 0) < len(labels):
            # In ascending order a mini-batch would be of one class or two.
            labels = labels[torch.randperm(len(labels), generator=rng).to(labels.device)]
        return replace(scene, labels=labels.repeat(recipe.epochs))

    def _descended(
        self, restarts: Sequence[Restart], evaluators: Sequence[Evaluate], progress: Progress, where: str
    ) -> list[tuple[Restart, Trial]]:
        """Move all restarts together; those that did not diverge."""
        consensus = torch.empty_like(restarts[0].dummy)
        trials = {
            restart.trial(evaluate, consensus): restart for restart, evaluate in zip(restarts, evaluators, strict=True)
        }

        def agree(left: Sequence[Trial]) -> None:
            # A restart that has just diverged must not take the others with it.
            torch.nanmean(torch.stack([trial.point() for trial in left]), 0, out=consensus)

        left = descend(
            list(trials),
            self.iterations,
            progress,
            where=where,
            patience=self.patience,
            snapshots=_SNAPSHOTS,
            before=agree,
        )
        if not left:
            raise diverged(list(trials), where, "step_size")
        return [(trials[trial], trial) for trial in left]

    def _computing(self, device: torch.device) -> AbstractContextManager[object]:
        """What is entered around each evaluation of the objective."""
        return nullcontext() if self.precision == "float32" else torch.autocast(device.type, torch.bfloat16)

    def _merged(self, data: Tensor, scene: Scene) -> Tensor:
        """One image an example, out of `epochs` of them; by default they are one already."""
        return data

    def _evaluators(self, recipe: Recipe, scene: Scene, restarts: Sequence[Restart]) -> Sequence[Evaluate]:
        """For each restart a function from values to the objective, the distance and the slopes."""
        target, restart = recipe.distance.target(scene), restarts[0]
        computing = partial(self._computing, scene.labels.device)

        def evaluate(
            values: dict[str, Tensor], around: Around, scene: Scene, target: list[Tensor], moving: Moving
        ) -> list[Tensor]:
            with computing():
                return objective_of(recipe, scene, values, around, target, moving)

        def alone(values: dict[str, Tensor], around: Around, moving: Moving) -> list[Tensor]:
            return evaluate(values, around, scene, target, moving)

        def distance_of(values: dict[str, Tensor]) -> Tensor:
            labels = labels_of(recipe, scene, values)
            gradient = recipe.place.gradient(scene, values, values["dummy"], labels)
            return recipe.distance(scene.defended(gradient), target)

        check_slope(scene, restart.values(), labels_of(recipe, scene, restart.values()), distance_of)
        if not self.compile:
            several = len(restarts) > 1 and recipe.optimizer != "lbfgs" and pays(scene.labels.device)
            found = at_once(recipe, scene, target, restarts, computing) if several else None
            return found or [alone] * len(restarts)
        graphs: dict[Moving, Callable[..., list[Tensor]]] = {}

        def by_graph(values: dict[str, Tensor], around: Around, moving: Moving) -> list[Tensor]:
            if moving not in graphs:
                key = (type(self).__name__, repr(self), *moving)
                graphs[moving] = compiled(partial(evaluate, moving=moving), key, scene, target, (values, around))
            return graphs[moving](values, around)

        return [by_graph] * len(restarts)


def best_of(ends: Sequence[tuple[Restart, Trial]]) -> tuple[Restart, Trial]:
    """The restart with the smallest objective in the end."""
    return min(ends, key=lambda end: end[1].objective)


def _of_mixtures(recipe: Recipe, scene: Scene, classes: tuple[int, ...]) -> tuple[Recipe, Scene]:
    """How mixtures of records are matched: the dummy records are mixed, too.

    Labels of classes are probabilities then, and who was mixed with whom is not known, so they are found together with
    the data, whether or not the records' labels are granted. Targets of a regression stay as they are.
    """
    if recipe.joint_labels is None and classes != (1,):
        recipe = replace(recipe, joint_labels=recipe.step_size)
    return recipe, replace(scene, mixing=[defense for defense in scene.defenses if defense.mixes])
