"""Mixtures of records, found by matching gradients, are taken apart (after Carlini et al. 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from adversaries.engine.descent import following
from adversaries.engine.linear_mixtures import MOST, records_of
from adversaries.engine.matching import GradientInversion
from adversaries.engine.recipe import Recipe
from adversaries.engine.settings import check_positive
from adversaries.local_updates import rounds_of
from adversaries.scene import Scene, Units, scene_of
from fedsim.attacks import CLIENT, Knowledge, Paper, Progress, single_update
from fedsim.errors import AttackError
from fedsim.findings import Finding, Reconstruction
from fedsim.recording.transcript import Transcript
from fedsim.wire.messages import Update

_THERE = 0.3
"""A record has a weight of one in all examples of a round together; a class with less than this has none."""
_TINY = 1e-12


@dataclass(frozen=True, kw_only=True)
class Unmixing(GradientInversion):
    """Find the mixtures that a client trained on in each round, and from all of them its records.

    Against mixup and InstaHide, where a client takes one step a round on all of its records, each time mixed anew. In
    each round the mixtures and their soft labels are found by matching the gradient. Where all records are of different
    classes, a soft label says how much of which record is in a mixture, which makes a system of linear equations: N for
    each round, which count by how well its gradient was matched. Where signs were flipped, it is one of absolute
    values, solved for each pixel from all 2^N choices of signs in each round. A pixel of all records and the same with
    all signs turned are alike then; of two that explain the mixtures the darker one is taken, as fits dark backgrounds.

    Whether signs were flipped is known where the defenses are known; otherwise they are taken not to be.

    Args:
        iterations: steps of the optimizer in each round.
        step_size: of Adam, for the mixtures in standard deviations of the inputs and for the logits of their labels.
        restarts: random starts in each round; the one with the smallest objective counts.
        patience: stop when the objective has not fallen by 1 % for so many iterations; 0 never.
        compile: trace and compile both backward passes, see `adversaries.engine.compiled`.
        precision: `bfloat16` computes convolutions and linear layers in it.

    References:
        Carlini et al.: Is Private Learning Possible with Instance Encoding?, S&P 2021. Differs: the encoded images are
        not given but reconstructed from gradients; which mixtures share a record is read off their soft labels, which
        needs records of different classes, where the paper learns it; the equations are solved by least squares from
        many starts instead of gradient descent.
    """

    iterations: int = 1500
    step_size: float = 0.1

    reads: ClassVar[frozenset[str]] = frozenset({CLIENT})
    temporal: ClassVar[bool] = True
    paper: ClassVar[Paper] = Paper(
        title="Is Private Learning Possible with Instance Encoding?",
        authors="Carlini, Deng, Garg, Jha, Mahloujifar, Mahmoody, Song, Thakurta, Tramèr",
        venue="IEEE S&P",
        year=2021,
        url="https://arxiv.org/abs/2011.05315",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "step_size")

    def _recipe(self, scene: Scene) -> Recipe:
        return Recipe(step_size=self.step_size, joint_labels=self.step_size, bounded=False, one_step=True)

    def _scene(self, update: Update, knowledge: Knowledge) -> Scene:
        """Without the defenses that mix, whose mixtures are what is found."""
        scene = super()._scene(update, knowledge)
        return replace(scene, defenses=[defense for defense in scene.defenses if not defense.mixes])

    def _run(
        self, transcript: Transcript, knowledge: Knowledge, victim: int, rng: torch.Generator, progress: Progress
    ) -> Finding:
        updates = [single_update(transcript.only([number]), victim) for number in rounds_of(transcript, victim)]
        count, first = _size(updates), scene_of(updates[0], knowledge)
        flipped = any(defense.flips_signs for defense in knowledge.defenses or ())
        if flipped and count > MOST:
            raise AttackError(
                f"client {victim}: N is {count}, and 2^N choices of signs are tried; attack clients with at most {MOST}"
            )
        mixtures, weights, trust = [], [], []
        for place, update in enumerate(updates):
            told = following(progress, place * self.iterations, len(updates) * self.iterations)
            restart, trial = self._matched(update, knowledge, rng, told)
            mixtures.append(first.units.to_model(trial.point()).flatten(1).double().cpu())
            weights.append(restart.values()["label_logits"].softmax(1).double().cpu())
            trust.append(max(trial.objective, _TINY) ** -0.5)
        labels = _classes(torch.stack(weights), knowledge.labels, f"client {victim}")
        shares = _summing_to_one(torch.stack(weights)[:, :, labels])
        scale = (torch.tensor(trust).double() / max(trust))[:, None, None]
        low, high = _range(first.units, knowledge.input_shape or ())
        records = records_of(scale * torch.stack(mixtures), scale * shares, low, high, flipped=flipped)
        data = ((records - low) / (high - low)).clamp(0, 1).float()
        return Reconstruction(data=data.view(count, *(knowledge.input_shape or ())), labels=labels, trace=trial.trace())


def _size(updates: Sequence[Update]) -> int:
    """N of all rounds.

    Raises:
        AttackError: it differs.
    """
    sizes = sorted({update.num_examples for update in updates})
    if len(sizes) > 1:
        raise AttackError(
            f"client {updates[0].client}: N differs between rounds ({', '.join(map(str, sizes))}), so the mixtures are "
            "of different records; choose rounds with the same"
        )
    return sizes[0]


def _classes(weights: Tensor, granted: Tensor | None, where: str) -> Tensor:
    """The classes of the records, ascending, one each.

    Args:
        weights: `round example class`, soft labels.

    Raises:
        AttackError: there are fewer classes than records.
    """
    count = weights.shape[1]
    total = weights.sum(1).mean(0)
    largest = total.topk(min(count, len(total)))
    there = largest.values > (_THERE if count > 1 else 0)
    found = largest.indices[there] if granted is None else granted.cpu()
    classes = set(found.tolist())
    if len(classes) != count or found.is_floating_point():
        raise AttackError(
            f"{where}: labels of {len(classes)} classes for N = {count} records; which mixture a record is part "
            "of is read off its label, so all records have to be of different classes; choose another victim"
        )
    return found.sort().values


def _summing_to_one(shares: Tensor) -> Tensor:
    return shares / shares.sum(-1, keepdim=True).clamp_min(torch.finfo(shares.dtype).tiny)


def _range(units: Units, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Lowest and highest value of each input, flat, in model units."""
    low, high = (end.expand(shape).flatten().double().cpu() for end in (units.low, units.high))
    return low, high
