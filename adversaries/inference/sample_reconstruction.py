"""SRA: what a class looks like, from a model (Fredrikson et al. 2015) or from an update (Geiping et al. 2020)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal

import torch

from adversaries.batch_norm import normalising_by_batch, trained_by_batch
from adversaries.engine.descent import Curves, Trial, descend, diverged, steps_of
from adversaries.engine.matching import GradientInversion
from adversaries.engine.priors import TotalVariation, total_variation
from adversaries.engine.recipe import MOMENTS, Recipe, by_tenths, constant
from adversaries.engine.restart import Restart
from adversaries.engine.settings import check_choices, check_not_negative, check_positive
from adversaries.local_models.model_sources import ModelAttack, outputs
from adversaries.local_updates import PAPER, rounds_of
from adversaries.scene import STEPPING, Scene, scene_of
from fedsim.attacks import Knowledge, Paper, Progress, single_update
from fedsim.errors import AttackError, ConfigError
from fedsim.findings import Finding, Reconstruction, Representatives
from fedsim.recording.transcript import Transcript
from fedsim.training.optimizers import SGD, Adam
from fedsim.wire.messages import Update

log = logging.getLogger("fedsim." + __name__)


@dataclass(frozen=True, kw_only=True)
class ModelSampleReconstruction(ModelAttack):
    """Change a grey image for each class until the model is sure of the class.

    Maximises h(x)[k], the softmax output of class k, over the pixels of one image a class (Eq. 5), from mid-grey on,
    with pixels kept in their range. All classes are one batch, but images do not influence one another, unless
    BatchNorm layers normalise by the batch because their running statistics were not shared.

    Args:
        iterations: steps of the optimizer.
        objective: `probability` is Eq. 5; `log-probability` has the same maximum and a slope that does not vanish where
            the class is improbable.
        optimizer: `sgd` or `adam`, whose equal steps of all pixels give noisier images.
        learning_rate: step size, in widths of the pixels' range. The paper's SGD with 1e-3 or 1e-4 (App. C.2) on Eq. 5
            hardly moves the pixels.
        tv_weight: of each image's total variation, which smooths it; for images alone.        [paper: none]
        patience: stop when the objective has not fallen by a hundredth of itself for so many iterations; 0 never.
        source: `global` is w_t of the last inspected round, `last-returned` the last w_T that the victim returned;
            else the title of an attack in the same file that decodes local models, or `optimal` for the victim's
            true optimal local model, which only the evaluator has.

    References:
        Fredrikson, Jha, Ristenpart: Model Inversion Attacks that Exploit Confidence Information and Basic
        Countermeasures, CCS 2015, Algorithm 1, as run in Driouich et al.: Local Model Reconstruction Attacks in
        Federated Learning and their Uses, 2022, Eq. 5 and App. C.2. Differs: leaves out the processing of images
        (denoising, sharpening) and the auxiliary term, as Driouich et al. do; they give no number of iterations. The
        defaults are not theirs, with which images stay grey.
    """

    iterations: int = 1000
    objective: Literal["probability", "log-probability"] = "log-probability"
    optimizer: Literal["sgd", "adam"] = "sgd"
    learning_rate: float = 1.0
    tv_weight: float = 0.0
    patience: int = 0

    paper: ClassVar[Paper] = Paper(
        title="Model Inversion Attacks that Exploit Confidence Information and Basic Countermeasures",
        authors="Fredrikson, Jha, Ristenpart",
        venue="CCS",
        year=2015,
        url="https://doi.org/10.1145/2810103.2813677",
    )
    needs: ClassVar[frozenset[str]] = frozenset({"model", "input_shape", "value_range", "num_classes"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self)
        for name, least in (("iterations", 1), ("patience", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: expected at least {least}, got {getattr(self, name)}")
        check_positive(self, "learning_rate")
        check_not_negative(self, "tv_weight")

    def _run(
        self, transcript: Transcript, knowledge: Knowledge, victim: int, rng: torch.Generator, progress: Progress
    ) -> Finding:
        assert knowledge.input_shape is not None
        assert knowledge.value_range is not None
        assert knowledge.num_classes is not None
        where = f"client {victim}, model source {self.source}"
        model = self._network(transcript, knowledge, victim).requires_grad_(False)
        axes = [-1] + [1] * (len(knowledge.input_shape) - 1)
        low, high = (torch.as_tensor(end, device=knowledge.device).reshape(axes) for end in knowledge.value_range)
        images = torch.full((knowledge.num_classes, *knowledge.input_shape), 0.5, device=knowledge.device)
        classes = torch.arange(knowledge.num_classes)
        with torch.no_grad():
            found = outputs(model, low + (high - low) * images, where).shape
        if found != (len(classes), len(classes)):
            raise AttackError(
                f"{where}: for {len(classes)} classes the model has outputs of shape {tuple(found)}, expected one "
                "logit a class; check num_classes"
            )
        images.requires_grad_(True)
        kind = SGD if self.optimizer == "sgd" else Adam
        optimizer = kind([images], self.learning_rate)

        def slopes(iteration: int) -> Curves:
            logs = model(low + (high - low) * images).log_softmax(1).diagonal()
            # A sum, so that the step of one class does not depend on how many there are.
            missed = 1 - logs.exp() if self.objective == "probability" else -logs
            objective = missed.sum()
            if self.tv_weight and images.ndim == 4:
                objective = objective + self.tv_weight * len(images) * total_variation(images)
            (images.grad,) = torch.autograd.grad(objective, images)
            return {"objective": objective / len(classes)}

        trial = Trial(
            step=steps_of(optimizer, slopes, project=lambda: images.data.clamp_(0, 1)),
            point=images.detach,
        )
        if not descend([trial], self.iterations, progress, where=where, patience=self.patience):
            raise diverged([trial], where, "learning_rate")
        return Representatives(data=images.detach().cpu(), labels=classes, trace=trial.trace())


@dataclass(frozen=True, kw_only=True)
class GradientSampleReconstruction(GradientInversion):
    """Match one round's update with the gradient of as many images as the victim has in a batch, labels and all.

    Minimises one minus the cosine between the gradient of B dummy images with labels of theirs, at w_t, and w_t - w_T,
    plus the weighted total variation (Eq. 4). Labels are logits that are optimised together with the pixels; each image
    is claimed to be typical of its label's class at the end. An update of many steps is of more images than B,
    and no gradient at w_t: this is the baseline that the paper compares model inversion with. BatchNorm layers
    normalise as the client's did, by the batch where it returned other running statistics or shares none.

    Args:
        round: which inspected round is read; by default the first in which the victim took part.
        optimizer: `sgd` of constant steps, or `adam`, whose steps fall to a tenth after 3/8, 5/8 and 7/8 of the way.
            [App. C.2: SGD with 1e-3; Geiping et al.: Adam with 0.1, signed, and these decays]
        step_size: of the pixels, in standard deviations of the inputs.
        label_step_size: of the labels' logits.
        signed: feed the optimizer the sign of each pixel's gradient.
        tv_weight: alpha of Eq. 4.                                      [not given; Geiping et al.: 1e-4 to 1e-1]
        iterations: steps of the optimizer.                             [not given]
        restarts: random starts; the one with the smallest objective is the finding.
        patience: stop when the objective has not fallen by 1 % for so many iterations; 0 never.
        compile: trace and compile both backward passes, see `adversaries.engine.compiled`.
        precision: `bfloat16` computes convolutions and linear layers in it.

    References:
        Geiping et al.: Inverting Gradients, NeurIPS 2020, as run in Driouich et al.: Local Model Reconstruction Attacks
        in Federated Learning and their Uses, 2022, Eq. 4 and App. C.2. Differs: total variation is a mean over pixels
        and images, not a sum over images; the papers do not say how labels are moved; defaults are Geiping et al.'s.
    """

    round: int | None = None
    optimizer: Literal["sgd", "adam"] = "adam"
    step_size: float = 0.1
    label_step_size: float = 0.1
    signed: bool = True
    tv_weight: float = 0.01

    paper: ClassVar[Paper] = PAPER
    needs: ClassVar[frozenset[str]] = GradientInversion.needs | {"num_classes", "batch_size"}
    uses: ClassVar[frozenset[str]] = MOMENTS | STEPPING
    temporal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "step_size", "label_step_size")
        check_not_negative(self, "tv_weight")
        if self.round is not None and self.round < 1:
            raise ConfigError(f"round: expected a round, counted from 1, got {self.round}")

    def _update(self, transcript: Transcript, knowledge: Knowledge, victim: int) -> Update:
        """That of the chosen round, as if the victim held one batch."""
        assert knowledge.batch_size is not None
        rounds = rounds_of(transcript, victim)
        if self.round is not None and self.round not in rounds:
            raise AttackError(
                f"round: client {victim} is not in round {self.round} of those that are inspected, expected one of "
                f"{_told(rounds)}"
            )
        chosen = rounds[0] if self.round is None else self.round
        update = single_update(transcript.only([chosen]), victim)
        return replace(update, num_examples=min(knowledge.batch_size, update.num_examples))

    def _scene(self, update: Update, knowledge: Knowledge) -> Scene:
        assert knowledge.model is not None
        by_batch = trained_by_batch(update, knowledge.model())
        scene = scene_of(update, knowledge, by_batch=by_batch)
        return replace(scene, model=normalising_by_batch(scene.model)) if by_batch else scene

    def _recipe(self, scene: Scene) -> Recipe:
        return Recipe(
            priors=[(self.tv_weight, TotalVariation())],
            optimizer=self.optimizer,
            step_size=self.step_size,
            signed=self.signed,
            schedule=by_tenths if self.optimizer == "adam" else constant,
            joint_labels=self.label_step_size,
        )

    def _concluded(self, ends: Sequence[tuple[Restart, Trial]]) -> Reconstruction:
        found = super()._concluded(ends)
        return Representatives(**{field.name: getattr(found, field.name) for field in fields(found)})


def _told(rounds: Sequence[int]) -> str:
    shown = ", ".join(map(str, rounds[:10]))
    return shown if len(rounds) <= 10 else f"{shown}, ..."
