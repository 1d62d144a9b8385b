"""Unmixing: records from mixtures reconstructed from gradients (after [Carlini2021])."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.base.constraints import PositiveFloat, PositiveInt
from fedsim.base.errors import AttackError, ConfigError, KnowledgeError
from fedsim.base.papers import cite
from fedsim.interfaces.attack import ALL, CLIENT, Knowledge, Paper, Progress, RoundsNeeded, Target
from fedsim.interfaces.findings import Finding, Reconstruction
from fedsim.inversion.descent import offset_progress
from fedsim.inversion.input_scaling import InputScaling
from fedsim.inversion.labels.last_layer import count_outputs
from fedsim.inversion.matching import GradientInversion
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.problem_builder import build_problem
from fedsim.inversion.recipe import Recipe
from fedsim.recording.wire_format import Update

_MIN_CLASS_WEIGHT = 0.3
"""Least sum of a class's weights over a round's mixtures; that of a record is one."""
_MIN_OBJECTIVE = 1e-12
"""Least objective before its power, by which rounds are weighted."""
MAX_RECORDS = 10
"""Largest number of records, because all 2^N choices of signs are tried."""
_RIDGE = 1e-3
_SIGN_ROUNDS = 5
_ERROR_RATIO, _ERROR_SLACK = 3.0, 0.05
"""Two solutions explain a pixel equally well if the error of one is below three times the other's
plus a twentieth of the mixtures' squares."""


@dataclass(frozen=True, kw_only=True)
class Unmixing(GradientInversion):
    """Reconstruct the mixtures of each round by matching gradients, then solve for the records.

    Attacks mixup and InstaHide, where a client takes one step a round on all of its records, mixed
    anew each time. All records have to be of different classes.

    1. In each round, reconstruct the mixtures and their soft labels by matching the gradient.
    2. Read the weight of each record in each mixture off the soft labels (`_record_classes`,
       `_normalise_shares`).
    3. Solve the linear equations, N a round, by least squares, weighting rounds by how well their
       gradients were matched (`unmix_records`).

    If signs were flipped, the equations are of absolute values, solved for each pixel over all 2^N
    choices of signs in each round. A pixel of all records is then determined up to one common sign
    flip; of the two solutions the darker one is taken, as fits dark backgrounds. Signs are assumed
    to be flipped only where known defenses do so.

    Args:
        iterations: steps of the optimizer in each round.
        step_size: of Adam, for the mixtures in standard deviations of the inputs and for the logits
            of their labels.
        restarts: random starts in each round; the one with the smallest objective counts.

    References:
        [Carlini2021]. Differs: the encoded images are not given but reconstructed from gradients;
        which mixtures share a record is read off their soft labels, which needs records of
        different classes, where the paper learns it; the equations are solved by least squares from
        many starts instead of gradient descent.
    """

    iterations: PositiveInt = 1500
    step_size: PositiveFloat = 0.1

    reads: ClassVar[frozenset[str]] = frozenset({CLIENT})
    rounds_needed: ClassVar[RoundsNeeded] = ALL
    paper: ClassVar[Paper] = cite("Carlini2021")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prior != "none":
            raise ConfigError(
                f"prior: '{self.prior}' is a prior of records, and this attack reconstructs mixtures of them; "
                "leave it out"
            )

    def check_facts(self, knowledge: Knowledge, num_examples: int | None = None, granted: Collection[str] = ()) -> None:
        """Refuse more examples than signs can be tried for, or than there are classes."""
        super().check_facts(knowledge, num_examples, granted)
        if num_examples is None:
            return
        _check_signs(knowledge, num_examples, "the clients")
        classes = None
        with suppress(KnowledgeError):  # of a network without a last linear layer
            classes = count_outputs(knowledge)
        if classes is not None and classes < num_examples:
            raise _classes_error("the clients", classes, num_examples)

    def _recipe(self, problem: InversionProblem) -> Recipe:
        return Recipe(step_size=self.step_size, label_step_size=self.step_size, bounded=False, one_step=True)

    def _problem(self, update: Update, knowledge: Knowledge) -> InversionProblem:
        """Build the problem without mixing defenses, whose mixtures are reconstructed."""
        problem = super()._problem(update, knowledge)
        return replace(problem, defenses=[defense for defense in problem.defenses if not defense.mixes])

    def _run(self, target: Target, progress: Progress) -> Finding:
        knowledge, where = target.knowledge, f"client {target.victim}"
        updates = [target.read_update(number) for number in target.participation_rounds()]
        count, first = _common_size(updates), build_problem(updates[0], knowledge)
        _check_signs(knowledge, count, where)

        # Reconstruct the mixtures of each round and their soft labels.
        mixtures, soft_labels, confidences = [], [], []
        for index, update in enumerate(updates):
            round_progress = offset_progress(progress, index * self.iterations, len(updates) * self.iterations)
            restart, trial = self._best_restart(update, knowledge, target.rng, round_progress)
            mixtures.append(first.scaling.to_model(trial.point()).flatten(1).double().cpu())
            soft_labels.append(restart.values()["label_logits"].softmax(1).double().cpu())
            confidences.append(max(trial.objective, _MIN_OBJECTIVE) ** -0.5)

        # Solve for the records.
        labels = _record_classes(torch.stack(soft_labels), knowledge.labels, where)
        shares = _normalise_shares(torch.stack(soft_labels)[:, :, labels])
        scale = (torch.tensor(confidences).double() / max(confidences))[:, None, None]
        low, high = _input_bounds(first.scaling, knowledge.input_shape or ())
        records = unmix_records(
            scale * torch.stack(mixtures), scale * shares, low, high, signs_lost=_loses_signs(knowledge)
        )
        data = ((records - low) / (high - low)).clamp(0, 1).float()
        return Reconstruction(data=data.view(count, *(knowledge.input_shape or ())), labels=labels, trace=trial.trace())


def _loses_signs(knowledge: Knowledge) -> bool:
    return any(defense.flips_signs for defense in knowledge.defenses or ())


def _check_signs(knowledge: Knowledge, count: int, where: str) -> None:
    """Raise AttackError where signs are lost of more examples than they can be tried for."""
    if _loses_signs(knowledge) and count > MAX_RECORDS:
        raise AttackError(
            f"{where}: N is {count}, and 2^N choices of signs are tried; attack clients with at most {MAX_RECORDS}"
        )


def _common_size(updates: Sequence[Update]) -> int:
    """Return N, which has to be the same in all rounds."""
    sizes = sorted({update.num_examples for update in updates})
    if len(sizes) > 1:
        raise AttackError(
            f"client {updates[0].client}: N differs between rounds ({', '.join(map(str, sizes))}), so the mixtures are "
            "of different records; choose rounds with the same"
        )
    return sizes[0]


def _classes_error(where: str, classes: int, count: int) -> AttackError:
    return AttackError(
        f"{where}: labels of {classes} classes for N = {count} records; which mixture a record is part of is read off "
        "its label, so all records have to be of different classes; choose another victim"
    )


def _record_classes(soft_labels: Tensor, granted: Tensor | None, where: str) -> Tensor:
    """Return the class of each record, ascending.

    Args:
        soft_labels: `round example class`.
        granted: the records' labels, None where they are withheld.
    """
    count = soft_labels.shape[1]
    class_weights = soft_labels.sum(1).mean(0)
    largest = class_weights.topk(min(count, len(class_weights)))
    present = largest.values > (_MIN_CLASS_WEIGHT if count > 1 else 0)
    labels = largest.indices[present] if granted is None else granted.cpu()
    classes = set(labels.tolist())
    if len(classes) != count or labels.is_floating_point():
        raise _classes_error(where, len(classes), count)
    return labels.sort().values


def _normalise_shares(shares: Tensor) -> Tensor:
    return shares / shares.sum(-1, keepdim=True).clamp_min(torch.finfo(shares.dtype).tiny)


def _input_bounds(scaling: InputScaling, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the lowest and highest value of each input, flat, in model units."""
    low, high = (bound.expand(shape).flatten().double().cpu() for bound in (scaling.low, scaling.high))
    return low, high


def unmix_records(mixtures: Tensor, weights: Tensor, low: Tensor, high: Tensor, *, signs_lost: bool) -> Tensor:
    """Find the records, `record pixel`, by least squares, with each pixel clamped to its range.

    If signs are lost, the solutions for all choices of signs of one round's mixtures are improved
    by turns of the signs and of the records; the best is kept pixel by pixel.

    Args:
        mixtures: `round mixture pixel`, in the model's range.
        weights: `round mixture record`.
        low: `pixel`, lowest value.
        high: `pixel`, highest value.
        signs_lost: the signs of `mixtures` mean nothing.
    """
    values, all_weights = mixtures.flatten(0, 1), weights.flatten(0, 1)
    solver = _least_squares_solver(all_weights)
    if not signs_lost:
        return (solver @ values).clamp(low, high)
    sizes = values.abs()
    best = torch.zeros(all_weights.shape[1], sizes.shape[1]).to(sizes)
    least_error = torch.full_like(best[0], torch.inf)
    for round_sizes, round_weights in zip(mixtures.abs(), weights, strict=True):
        for start in _solutions_by_signs(round_sizes, round_weights):
            # Improve signs and records in turn.
            records = start.clamp(low, high)
            for _ in range(_SIGN_ROUNDS):
                signed = torch.where(all_weights @ records < 0, -sizes, sizes)
                records = (solver @ signed).clamp(low, high)
            # Keep the better solution of each pixel.
            error = _squared_error(records, all_weights, sizes)
            best = torch.where(error < least_error, records, best)
            least_error = torch.minimum(error, least_error)
    return _prefer_darker(best, least_error, all_weights, sizes, low, high)


def _least_squares_solver(weights: Tensor) -> Tensor:
    """Return `record mixture`, the least-squares inverse; a small ridge keeps it finite."""
    squares = weights.mT @ weights
    ridge = _RIDGE * torch.eye(len(squares)).to(squares)
    solver: Tensor = torch.linalg.solve(squares + ridge, weights.mT)
    return solver


def _solutions_by_signs(sizes: Tensor, weights: Tensor) -> Tensor:
    """Return `choice record pixel`, the solution of one round for each choice of signs."""
    signs = torch.tensor(list(product((-1.0, 1.0), repeat=len(sizes)))).to(sizes)
    return _least_squares_solver(weights) @ (signs[:, :, None] * sizes)


def _squared_error(records: Tensor, weights: Tensor, sizes: Tensor) -> Tensor:
    """Return `pixel`, the squared error of the mixtures' absolute values."""
    return ((weights @ records).abs() - sizes).square().sum(0)


def _prefer_darker(records: Tensor, error: Tensor, weights: Tensor, sizes: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Negate pixels that explain absolute values equally well negated, and are darker then."""
    negated = (-records).clamp(low, high)
    limit = _ERROR_RATIO * error + _ERROR_SLACK * sizes.square().sum(0)
    equally_good = _squared_error(negated, weights, sizes) < limit
    return torch.where(equally_good & (negated.sum(0) < records.sum(0)), negated, records)
