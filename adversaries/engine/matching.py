"""The engine behind gradient inversion: move dummy data until their update looks like the recorded one.

An attack is a `recipe`: where the gradient is taken (`places`), how it is compared (`distances`), what
else is asked of the data (`priors`), and how all that is minimised. The files of the attacks have
little else in them.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from adversaries.batch_norm import normalising_by_batch, trained_by_batch
from adversaries.engine.compiled import compiled
from adversaries.engine.descent import Step, Trial, descending, diverged, ended
from adversaries.engine.recipe import MEAN_GRADIENT, MOMENTS, Recipe
from adversaries.engine.restart import Around, Matching, Moving, Restart, labels_of, objective_of
from adversaries.engine.settings import check_choices
from adversaries.engine.slopes import check_inputs, check_slope
from adversaries.engine.together import Entry, at_once, fit, pays
from adversaries.engine.turns import taking_turns
from adversaries.labels.updates import count_labels
from adversaries.scene import STEPPING, Scene, known_steps, scene_of, warn_of_dropout, warn_unless_plain
from fedsim.attacks import FAILURES, Attack, Knowledge, Order, Outcome, Progress, single_update
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
        matching = self._matching(update, knowledge, rng)
        several = len(matching.restarts) > 1 and self._joins(matching)
        steps = at_once([Entry.of(matching)])[0] if several else None
        return ended(self._descending(matching, steps, progress))

    def _run_several(self, orders: Iterable[Order]) -> Iterator[tuple[Order, Outcome]]:
        if type(self)._run is not GradientInversion._run:  # it does something else with what is matched
            yield from super()._run_several(orders)
            return
        waiting: list[tuple[Order, Entry]] = []
        for order in orders:
            try:
                with order.turn():
                    update = self._update(order.transcript, order.knowledge, order.victim)
                    matching = self._matching(update, order.knowledge, order.rng, order.turn)
                    entry = Entry.of(matching) if self._joins(matching) else None
            except FAILURES as error:
                yield order, error
                continue
            if entry is None:
                yield from taking_turns({order: self._concluding(matching, None, order.progress)})
                continue
            if not fit([*(other for _, other in waiting), entry]):
                yield from self._together(waiting)
                waiting = []
            waiting.append((order, entry))
        yield from self._together(waiting)

    def _together(self, waiting: Sequence[tuple[Order, Entry]]) -> Iterator[tuple[Order, Outcome]]:
        """Those that can be computed at once in step, the others one after the other."""
        turns, apart = {}, []
        for (order, entry), steps in zip(waiting, at_once([entry for _, entry in waiting]), strict=True):
            turns[order] = self._concluding(entry.matching, steps, order.progress)
            if steps is None:
                apart.append(order)
        for order in apart:
            yield from taking_turns({order: turns.pop(order)})
        yield from taking_turns(turns)

    def _matching(
        self,
        update: Update,
        knowledge: Knowledge,
        rng: torch.Generator,
        turn: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> Matching:
        """All that comes before the first iteration."""
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
        for restart in restarts:
            restart.consensus = restarts[0].consensus
        target = recipe.distance.target(scene)

        def distance_of(values: dict[str, Tensor]) -> Tensor:
            labels = labels_of(recipe, scene, values)
            gradient = recipe.place.gradient(scene, values, values["dummy"], labels)
            return recipe.distance(scene.defended(gradient), target)

        first = restarts[0].values()
        check_slope(scene, first, labels_of(recipe, scene, first), distance_of)
        computing = partial(self._computing, scene.labels.device)
        return Matching(recipe=recipe, scene=scene, target=target, restarts=restarts, computing=computing, turn=turn)

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
        warn_of_dropout(self, scene.model, knowledge, scene.where)
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

    def _concluding(
        self, matching: Matching, steps: Sequence[Step] | None, progress: Progress
    ) -> Generator[None, None, Reconstruction]:
        """The finding, an iteration a turn; without `steps`, each restart is computed by itself."""
        return self._concluded((yield from self._descending(matching, steps, progress)))

    def _descending(
        self, matching: Matching, steps: Sequence[Step] | None, progress: Progress
    ) -> Generator[None, None, list[tuple[Restart, Trial]]]:
        """Move all restarts together; those that did not diverge."""
        given = zip(matching.restarts, steps or self._steps(matching), strict=True)
        trials = {restart.trial(step): restart for restart, step in given}
        where = matching.scene.where
        left = yield from descending(
            list(trials),
            self.iterations,
            progress,
            where=where,
            patience=self.patience,
            snapshots=_SNAPSHOTS,
            before=lambda left: matching.agree([trial.point() for trial in left]),
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

    def _joins(self, matching: Matching) -> bool:
        """Whether its restarts can be computed at once, and with those of other victims."""
        steps_alike = matching.recipe.optimizer != "lbfgs"  # which asks another number of times a step
        return steps_alike and not self.compile and pays(matching.scene.labels.device)

    def _steps(self, matching: Matching) -> Sequence[Step]:
        """Of each restart by itself."""
        if not self.compile:
            return [restart.stepping(matching.alone(restart)) for restart in matching.restarts]
        recipe, scene, target = matching.recipe, matching.scene, matching.target
        graphs: dict[Moving, Callable[..., list[Tensor]]] = {}

        def evaluate(
            values: dict[str, Tensor], around: Around, scene: Scene, target: list[Tensor], moving: Moving
        ) -> list[Tensor]:
            with matching.computing():
                return objective_of(recipe, scene, values, around, target, moving)

        def by_graph(restart: Restart, iteration: int) -> list[Tensor]:
            given, moving = (restart.values(), restart.around(iteration)), restart.moving(iteration)
            if moving not in graphs:
                key = (type(self).__name__, repr(self), *moving)
                graphs[moving] = compiled(partial(evaluate, moving=moving), key, scene, target, given)
            return graphs[moving](*given)

        return [restart.stepping(partial(by_graph, restart)) for restart in matching.restarts]


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
