"""The engine behind gradient inversion: move dummy data until their update looks like the recorded one.

An attack is a `Recipe`: where the gradient is taken (`places`), how it is compared (`distances`), what
else is asked of the data (`priors`), and how all that is minimised. The files of the attacks have
little else in them.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from adversaries.batch_norm import normalising_by_batch, trained_by_batch
from adversaries.engine.compiled import compiled
from adversaries.engine.descent import Curves, Schedule, Trial, descend, diverged, steps_of
from adversaries.engine.distances import Cosine, Distance, length
from adversaries.engine.places import AtBroadcast, Place, Variable
from adversaries.engine.priors import Prior, total_variation
from adversaries.engine.slopes import check_inputs, check_slope
from adversaries.labels.updates import count_labels
from adversaries.scene import STEPPING, Scene, known_steps, scene_of, warn_of_dropout, warn_unless_plain
from fedsim.attacks import Attack, Knowledge, Progress, single_update
from fedsim.errors import AttackError, ConfigError
from fedsim.findings import Finding, Reconstruction
from fedsim.recording.transcript import Transcript
from fedsim.wire.messages import Update

__all__ = ["GradientInversion", "Recipe", "total_variation"]

log = logging.getLogger("fedsim." + __name__)

MEAN_GRADIENT = frozenset({"learning_rate", "local_epochs", "batch_size"})
"""What an attack has to know that compares sizes of gradients, not only their direction."""
MOMENTS = frozenset({"input_mean", "input_std"})
"""What dummy data are standardised with."""
_SNAPSHOTS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Fractions of the iterations after which the dummy data are kept for the report."""


def by_tenths(iteration: int, iterations: int) -> float:
    """To a tenth after 3/8, 5/8 and 7/8 of the way, as in IG's and SME's released code."""
    return 0.1 ** sum(iteration >= int(part * iterations) for part in (3 / 8, 5 / 8, 7 / 8))


def by_cosine(iteration: int, iterations: int) -> float:
    """From one to zero along a cosine."""
    return (1 + math.cos(math.pi * iteration / iterations)) / 2


def constant(iteration: int, iterations: int) -> float:
    """One."""
    return 1.0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One inversion attack.

    Attributes:
        place: where the dummy gradient is taken.
        distance: how it is compared with the update.
        priors: further terms of the objective with their weights.
        optimizer: `adam`, `sgd` or `lbfgs` (torch's, whose closures count as one iteration).
        step_size: of the dummy data, in standard deviations of the inputs.
        signed: feed the optimizer the sign of each pixel's gradient.
        schedule: of all step sizes.
        noise: deviation of Gaussian noise added to the dummy data after each step, in step sizes.
        emphasis: `(iteration, iterations) -> factor` of the distance, beside the priors.
        bounded: keep pixels in the valid range after each step.
        joint_labels: step size of label logits that are optimised with the data; None takes the
            labels that are granted or counted.
        epochs: how many dummy images stand for each example, one an epoch.
        normalised_by_batch: BatchNorm layers normalise the dummy data by their own statistics, as those of
            clients do in training, instead of by the running ones of w_0.
        one_step: the attack assumes T = 1; with more it warns.
    """

    place: Place = field(default_factory=AtBroadcast)
    distance: Distance = field(default_factory=Cosine)
    priors: Sequence[tuple[float, Prior]] = ()
    optimizer: Literal["adam", "sgd", "lbfgs"] = "adam"
    step_size: float = 1.0
    signed: bool = False
    schedule: Schedule = by_tenths
    noise: float = 0.0
    emphasis: Schedule = constant
    bounded: bool = True
    joint_labels: float | None = None
    epochs: int = 1
    normalised_by_batch: bool = False
    one_step: bool = False


@dataclass(frozen=True, kw_only=True)
class GradientInversion(Attack):
    """Base of the attacks that reconstruct a victim's data from one update by matching gradients.

    A subclass has its hyperparameters as fields and writes a `_recipe`.

    Args:
        iterations: steps of the optimizer.
        restarts: random starts; the one with the smallest objective at its end is the finding.
        patience: stop when the objective has not fallen by a hundredth of itself for so many
            iterations; 0 never stops early.
        compile: trace and compile the double backward pass, once for each shape: it took 30 to 110 s on two busy
            cores, for small networks too. Not for models whose control flow depends on values.
        precision: `bfloat16` computes convolutions and linear layers in it, on hardware that can.
    """

    iterations: int = 1000
    restarts: int = 1
    patience: int = 0
    compile: bool = False
    precision: Literal["float32", "bfloat16"] = "float32"

    needs: ClassVar[frozenset[str]] = frozenset({"model", "loss", "input_shape", "value_range"})
    uses: ClassVar[frozenset[str]] = MOMENTS | MEAN_GRADIENT | STEPPING | {"labels"}

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
        where = f"round {update.round}, client {update.client}"
        if knowledge.labels is None:
            before, after = (
                dict(zip(scene.names, weights, strict=True)) | dict(scene.buffers)
                for weights in (scene.before, scene.after or scene.before)  # where a gradient was sent
            )
            return count_labels(update, knowledge, scene.model, before, after, rng)
        if len(knowledge.labels) != update.num_examples:
            granted, count = len(knowledge.labels), update.num_examples
            raise AttackError(f"{where}: {granted} labels are granted, but the client reported N = {count}")
        return knowledge.labels

    def _run(
        self, transcript: Transcript, knowledge: Knowledge, victim: int, rng: torch.Generator, progress: Progress
    ) -> Finding:
        """Minimise the recipe's objective over the dummy data.

        The result is the last iterate of the restart whose objective is smallest; nothing is picked
        with hindsight. Curves hold each iteration's values before its step, as in SME's released
        code, so their last is that of the last iterate but one.
        """
        update = self._update(transcript, knowledge, victim)
        scene = self._scene(update, knowledge)
        recipe = self._recipe(scene)
        where = f"round {update.round}, client {update.client}"
        steps = known_steps(scene, update.num_examples)
        if recipe.one_step and steps != 1:
            told = "an unknown number of" if steps is None else str(steps)
            log.warning(
                "%s on %s: assumes one local step, the update is of %s; expect little", self.called, where, told
            )
        if scene.sent is None:
            warn_unless_plain(self, knowledge, where, simulated=recipe.place.simulates)
        warn_of_dropout(self, scene.model, where)
        if not (recipe.normalised_by_batch or scene.by_batch) and trained_by_batch(update, scene.model):
            log.warning(
                "%s on %s: the client's BatchNorm layers normalised by the batch, this attack normalises by the "
                "running statistics; expect little",
                self.called,
                where,
            )
        if recipe.normalised_by_batch:
            scene = replace(scene, model=normalising_by_batch(scene.model), by_batch=True)
        shape = (update.num_examples * recipe.epochs, *(knowledge.input_shape or ()))
        classes = check_inputs(scene, scene.before[0].new_zeros(shape)).shape[1:]
        if recipe.joint_labels is not None and (knowledge.num_classes,) != tuple(classes):
            raise AttackError(
                f"{where}: the model gives outputs of shape {tuple(classes)} for each example, num_classes is "
                f"{knowledge.num_classes}; grant the right one"
            )
        if recipe.joint_labels is None:
            labels = self._labels(scene, update, knowledge, rng).to(knowledge.device)
            if recipe.place.cuts and (scene.batch_size or 0) < len(
                labels
            ):  # in ascending order a mini-batch would be of one class or two
                labels = labels[torch.randperm(len(labels), generator=rng).to(labels.device)]
            scene = replace(scene, labels=labels.repeat(recipe.epochs))
        runs = [_Run(recipe, scene, shape, knowledge, self.iterations, rng) for _ in range(self.restarts)]
        evaluate = self._evaluator(recipe, scene, runs[0])
        consensus = torch.empty_like(runs[0].dummy)
        trials = {run.trial(evaluate, consensus): run for run in runs}

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
        best = min(left, key=lambda trial: trial.objective)
        return trials[best].finding(best, self._merged)

    def _merged(self, data: Tensor, scene: Scene) -> Tensor:
        """One image an example, out of `epochs` of them; by default they are one already."""
        return data

    def _evaluator(self, recipe: Recipe, scene: Scene, run: _Run) -> Evaluate:
        """A function from values to the objective, the distance and the slopes."""
        target = recipe.distance.target(scene)

        def evaluate(
            values: dict[str, Tensor], around: Around, scene: Scene, target: list[Tensor], moving: Moving
        ) -> list[Tensor]:
            with torch.autocast(scene.labels.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
                return _objective(recipe, scene, values, around, target, moving)

        def distance_of(values: dict[str, Tensor]) -> Tensor:
            labels = _labels_of(recipe, scene, values)
            return recipe.distance(recipe.place.gradient(scene, values, values["dummy"], labels), target)

        check_slope(scene, run.values(), _labels_of(recipe, scene, run.values()), distance_of)
        if not self.compile:
            return lambda values, around, moving: evaluate(values, around, scene, target, moving)
        graphs: dict[Moving, Callable[..., list[Tensor]]] = {}

        def by_graph(values: dict[str, Tensor], around: Around, moving: Moving) -> list[Tensor]:
            if moving not in graphs:
                key = (type(self).__name__, repr(self), *moving)
                graphs[moving] = compiled(partial(evaluate, moving=moving), key, scene, target, (values, around))
            return graphs[moving](values, around)

        return by_graph


Around = tuple[Tensor, Tensor]
"""What changes from iteration to iteration besides the values: the emphasis, and the restarts' consensus."""
Moving = tuple[str, ...]
"""Names of the values whose slopes are asked for."""
Evaluate = Callable[[dict[str, Tensor], Around, Moving], list[Tensor]]
"""`(values, around, moving) -> [objective, distance, L_sim, slope of each that moves]`."""


def _objective(
    recipe: Recipe, scene: Scene, given: Mapping[str, Tensor], around: Around, target: list[Tensor], moving: Moving
) -> list[Tensor]:
    """The objective and its slopes, by one double backward pass."""
    emphasis, consensus = around
    values = {name: value.detach().requires_grad_(name in moving) for name, value in given.items()}
    dummy = values["dummy"]
    gradient = recipe.place.gradient(scene, values, dummy, _labels_of(recipe, scene, values))
    distance = recipe.distance(gradient, target)
    objective = emphasis * distance
    for weight, prior in recipe.priors:
        if weight:
            objective = objective + weight * prior(scene, dummy, consensus)
    slopes = torch.autograd.grad(objective, [values[name] for name in moving], materialize_grads=True)
    if recipe.distance == Cosine():
        l_sim = distance.detach()
    else:
        with torch.no_grad():  # SME compares attacks of all distances by it (Table 2)
            l_sim = 1 - (1 - Cosine()(gradient, target)) / length(target)
    return [objective.detach(), distance.detach(), l_sim, *slopes]


def _labels_of(recipe: Recipe, scene: Scene, values: Mapping[str, Tensor]) -> Tensor:
    """Class indices, targets, or probabilities that are optimised with the data."""
    return scene.labels if recipe.joint_labels is None else values["label_logits"].softmax(1)


class _Run:
    """One restart: the values that are optimised, their optimizer, and what they went through."""

    def __init__(
        self,
        recipe: Recipe,
        scene: Scene,
        shape: tuple[int, ...],
        knowledge: Knowledge,
        iterations: int,
        rng: torch.Generator,
    ) -> None:
        self._recipe, self._scene, self._iterations, self._rng = recipe, scene, iterations, rng
        like = scene.before[0]
        self.dummy = torch.randn(shape, generator=rng).to(like)
        if recipe.bounded:
            scene.units.clamp_(self.dummy)
        self._variables = recipe.place.variables(scene)
        if recipe.joint_labels is not None:
            assert knowledge.num_classes is not None
            logits = torch.randn((shape[0], knowledge.num_classes), generator=rng).to(like)
            self._variables["label_logits"] = Variable(logits, recipe.joint_labels, -math.inf, math.inf)
        self._own = {name: variable.start.clone() for name, variable in self._variables.items()}
        groups = [{"params": [self.dummy], "lr": recipe.step_size}]
        groups += [{"params": [self._own[name]], "lr": v.step_size} for name, v in self._variables.items()]
        self._optimizer = _optimizer(recipe, groups)

    def values(self) -> dict[str, Tensor]:
        """What is optimised, the dummy data first."""
        return {"dummy": self.dummy, **self._own}

    def trial(self, evaluate: Evaluate, consensus: Tensor) -> Trial:
        """What moves it; `consensus` is filled with that of all restarts before each step."""
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
            shown=self._scene.units.to_unit_range,
        )

    def _project(self) -> None:
        """What follows a step: noise, then all values back into their ranges."""
        if self._recipe.noise:
            noise = torch.randn(self.dummy.shape, generator=self._rng).to(self.dummy)
            self.dummy.add_(noise, alpha=self._recipe.noise * float(self._optimizer.param_groups[0]["lr"]))
        if self._recipe.bounded:
            self._scene.units.clamp_(self.dummy)
        for name, variable in self._variables.items():
            self._own[name].clamp_(variable.low, variable.high)

    def finding(self, trial: Trial, merged: Callable[[Tensor, Scene], Tensor]) -> Reconstruction:
        """What was reconstructed."""
        data = [merged(images, self._scene) for images in trial.snapshots.values()]
        logits = self._own.get("label_logits")
        labels = self._scene.labels[: self._scene.num_examples] if logits is None else logits.argmax(1)
        return Reconstruction(
            data=data[-1],
            labels=labels.cpu(),
            trace=trial.trace(),
            snapshots=torch.stack(data),
            snapshot_iterations=torch.tensor(list(trial.snapshots)),
        )


def check_choices(attack: Attack) -> None:
    """See that each setting that is one of several words is one of them.

    Raises:
        ConfigError: it is another.
    """
    for name, kind in get_type_hints(type(attack)).items():
        if get_origin(kind) is Literal and getattr(attack, name) not in get_args(kind):
            told = ", ".join(map(str, get_args(kind)))
            raise ConfigError(f"{name}: expected one of {told}, got {getattr(attack, name)!r}")


def check_positive(attack: Any, *names: str) -> None:
    """Raise ConfigError where one of these settings is not a finite value above 0."""
    for name in names:
        if not 0 < getattr(attack, name) < math.inf:
            raise ConfigError(f"{name}: expected a finite value above 0, got {getattr(attack, name)}")


def check_not_negative(attack: Any, *names: str) -> None:
    """Raise ConfigError where one of these settings is not a finite value of at least 0."""
    for name in names:
        if not 0 <= getattr(attack, name) < math.inf:
            raise ConfigError(f"{name}: expected a finite value of at least 0, got {getattr(attack, name)}")


def _optimizer(recipe: Recipe, groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    if recipe.optimizer == "adam":
        return torch.optim.Adam(groups)
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=recipe.step_size)
    params = [tensor for group in groups for tensor in group["params"]]  # type: ignore[attr-defined]
    return torch.optim.LBFGS(params, lr=recipe.step_size)
