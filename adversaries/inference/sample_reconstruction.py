"""SRA: reconstruction of typical images of each class.

`ModelSampleReconstruction` inverts a model [Fredrikson2015], `GradientSampleReconstruction` an
update [Geiping2020].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal

import torch

from adversaries.local_models.model_sources import ModelAttack, compute_outputs
from fedsim.base.constraints import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from fedsim.base.errors import AttackError
from fedsim.base.papers import cite
from fedsim.interfaces.attack import ALL, Knowledge, Paper, Progress, RoundsNeeded, Target
from fedsim.interfaces.findings import Reconstruction, Representatives
from fedsim.inversion.batch_norm import copy_with_batch_statistics, used_batch_statistics
from fedsim.inversion.descent import Curves, Trial, descend, divergence_error, make_optimizer_step
from fedsim.inversion.local_updates import PAPER
from fedsim.inversion.matching import GradientInversion
from fedsim.inversion.priors import TotalVariation, total_variation
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.problem_builder import build_problem
from fedsim.inversion.recipe import INPUT_MOMENTS, Recipe, constant_schedule, step_decay_schedule
from fedsim.inversion.restart import Restart
from fedsim.inversion.training_mismatch import OPTIMIZER_FACTS
from fedsim.modalities import known_modality, smooth_dimensions
from fedsim.recording.wire_format import Update
from fedsim.training.optimizers import SGD, Adam


@dataclass(frozen=True, kw_only=True)
class ModelSampleReconstruction(ModelAttack):
    """Optimise one image a class, from mid-grey, until the model is confident in the class.

    1. Start from one mid-grey image for each class k.
    2. Maximise the softmax output h(x)[k] over the pixels (Eq. 5), or its logarithm.
    3. Clip pixels to their range after each step.

    All classes form one batch, but images do not influence one another, unless BatchNorm layers
    normalise by the batch because their running statistics were not shared.

    Args:
        iterations: steps of the optimizer.
        objective: `probability` is Eq. 5; `log-probability` has the same maximum, and a gradient
            that does not vanish where the class is improbable.
        optimizer: `sgd` or `adam`, which moves all pixels equally far and gives noisier images.
        learning_rate: step size, in widths of the pixels' range. The paper's SGD with 1e-3 or 1e-4
            (App. C.2) on Eq. 5 hardly moves the pixels.
        tv_weight: weight of each image's total variation; for images only.    [paper: none]
        patience: stop if the objective has not fallen by 1 % in this number of iterations; 0 never stops.

    References:
        [Fredrikson2015], Algorithm 1, as run in [Driouich2022], Eq. 5 and App. C.2.
        Differs: leaves out the processing of images (denoising, sharpening) and the auxiliary term,
        as Driouich et al. do; they give no number of iterations. The defaults are not theirs, with
        which images stay grey.
    """

    iterations: PositiveInt = 1000
    objective: Literal["probability", "log-probability"] = "log-probability"
    optimizer: Literal["sgd", "adam"] = "sgd"
    learning_rate: PositiveFloat = 1.0
    tv_weight: NonNegativeFloat = 0.0
    patience: NonNegativeInt = 0

    paper: ClassVar[Paper] = cite("Fredrikson2015")
    needs_num_examples: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset({"model", "input_shape", "value_range", "num_classes"})

    def _run(self, target: Target, progress: Progress) -> Representatives:
        knowledge = target.knowledge
        assert knowledge.input_shape is not None
        assert knowledge.value_range is not None
        assert knowledge.num_classes is not None
        where = f"client {target.victim}, model source {self.source}"
        model = self._load_network(target).requires_grad_(False)
        dimensions = smooth_dimensions(known_modality(knowledge))
        axes = [-1] + [1] * (len(knowledge.input_shape) - 1)
        low, high = (torch.as_tensor(end, device=knowledge.device).reshape(axes) for end in knowledge.value_range)
        images = torch.full((knowledge.num_classes, *knowledge.input_shape), 0.5, device=knowledge.device)
        classes = torch.arange(knowledge.num_classes)
        with torch.no_grad():
            output_shape = compute_outputs(model, low + (high - low) * images, where).shape
        if output_shape != (len(classes), len(classes)):
            raise AttackError(
                f"{where}: for {len(classes)} classes the model has outputs of shape {tuple(output_shape)}, expected "
                "one logit a class; check num_classes"
            )
        images.requires_grad_(True)
        optimizer_class = SGD if self.optimizer == "sgd" else Adam
        optimizer = optimizer_class([images], self.learning_rate)

        def set_gradient(iteration: int) -> Curves:
            log_p = model(low + (high - low) * images).log_softmax(1).diagonal()
            class_objectives = 1 - log_p.exp() if self.objective == "probability" else -log_p
            # A sum, so that the step of one class does not depend on how many there are.
            objective = class_objectives.sum()
            if self.tv_weight and dimensions:
                variation = total_variation(images, dimensions)
                objective = objective + self.tv_weight * len(images) * variation
            (images.grad,) = torch.autograd.grad(objective, images)
            return {"objective": objective / len(classes)}

        trial = Trial(
            step=make_optimizer_step(optimizer, set_gradient, project=lambda: images.data.clamp_(0, 1)),
            point=images.detach,
        )
        if not descend([trial], self.iterations, progress, where=where, patience=self.patience):
            raise divergence_error([trial], where, "learning_rate")
        return Representatives(data=images.detach().cpu(), labels=classes, trace=trial.trace())


@dataclass(frozen=True, kw_only=True)
class GradientSampleReconstruction(GradientInversion):
    """Reconstruct one batch of images and labels whose gradient matches one round's update.

    1. Read the update of one round as a gradient at w_t of B images (`_update`).
    2. Minimise 1 - cosine between the gradient of B dummy images and w_t - w_T, plus the weighted
       total variation (Eq. 4; `_recipe`), over the pixels and the logits of the labels.
    3. Claim each image as typical of the class of its final label (`_conclude`).

    An update of many steps comes from more than B images and is no gradient at w_t: this is the
    baseline that the paper compares model inversion with. BatchNorm layers normalise as the
    client's did: by the batch where it returned changed running statistics or shares none.

    Args:
        round: which inspected round is read; by default the first in which the victim took part.
        optimizer: `sgd` with constant steps, or `adam`, whose steps fall to a tenth after 3/8, 5/8
            and 7/8 of the iterations.
            [App. C.2: SGD with 1e-3; Geiping et al.: Adam with 0.1, signed, and these decays]
        step_size: of the pixels, in standard deviations of the inputs.
        label_step_size: of the labels' logits.
        signed: feed the optimizer the sign of each pixel's gradient.
        tv_weight: alpha of Eq. 4.               [not given; Geiping et al.: 1e-4 to 1e-1]
        iterations: steps of the optimizer.      [not given]

    References:
        [Geiping2020], as run in [Driouich2022], Eq. 4 and App. C.2.
        Differs: total variation is a mean over pixels and images, not a sum over images; the papers
        do not say how labels are optimised; defaults are Geiping et al.'s.
    """

    round: PositiveInt | None = None
    optimizer: Literal["sgd", "adam"] = "adam"
    step_size: PositiveFloat = 0.1
    label_step_size: PositiveFloat = 0.1
    signed: bool = True
    tv_weight: NonNegativeFloat = 0.01

    paper: ClassVar[Paper] = PAPER
    needs: ClassVar[frozenset[str]] = GradientInversion.needs | {"num_classes", "batch_size"}
    uses: ClassVar[frozenset[str]] = INPUT_MOMENTS | OPTIMIZER_FACTS
    rounds_needed: ClassVar[RoundsNeeded] = ALL

    def _update(self, target: Target) -> Update:
        """Return the update of the chosen round, as if the victim had one batch of data."""
        batch_size = target.knowledge.batch_size
        assert batch_size is not None
        rounds = target.participation_rounds()
        if self.round is not None and self.round not in rounds:
            raise AttackError(
                f"round: client {target.victim} is not in round {self.round} of those that are "
                f"inspected, expected one of {_list_rounds(rounds)}"
            )
        number = rounds[0] if self.round is None else self.round
        update = target.read_update(number)
        return replace(update, num_examples=min(batch_size, update.num_examples))

    def _problem(self, update: Update, knowledge: Knowledge) -> InversionProblem:
        assert knowledge.model is not None
        by_batch = used_batch_statistics(update, knowledge.model())
        problem = build_problem(update, knowledge, use_batch_statistics=by_batch)
        return replace(problem, model=copy_with_batch_statistics(problem.model)) if by_batch else problem

    def _recipe(self, problem: InversionProblem) -> Recipe:
        return Recipe(
            priors=[(self.tv_weight, TotalVariation())],
            optimizer=self.optimizer,
            step_size=self.step_size,
            signed=self.signed,
            schedule=step_decay_schedule if self.optimizer == "adam" else constant_schedule,
            label_step_size=self.label_step_size,
        )

    def _conclude(self, ends: Sequence[tuple[Restart, Trial]]) -> Reconstruction:
        reconstruction = super()._conclude(ends)
        values = {field.name: getattr(reconstruction, field.name) for field in fields(reconstruction)}
        return Representatives(**values)


def _list_rounds(rounds: Sequence[int]) -> str:
    text = ", ".join(map(str, rounds[:10]))
    return text if len(rounds) <= 10 else f"{text}, ..."
