"""TGIAs-RO: a mini-batch from several gradients of it, taken at different weights (Li et al. 2023)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.nn.modules.batchnorm import _BatchNorm

from adversaries.engine import aggregation
from adversaries.engine.alignment import align
from adversaries.engine.descent import Curves, Step, Trial, descend, diverged, steps_of
from adversaries.engine.distances import SquaredL2
from adversaries.engine.lbfgs import Slopes, minimise
from adversaries.engine.priors import total_variation
from adversaries.engine.recipe import MOMENTS, by_cosine
from adversaries.engine.settings import check_choices, check_not_negative, check_positive
from adversaries.engine.slopes import check_inputs, check_slope
from adversaries.engine.temporal import temporal_objective
from adversaries.inversion.sent_gradients import Messages, SentGradients, in_words, of_other_labels, rounds_of
from adversaries.labels.gradients import RULES
from adversaries.labels.last_layer import last_layer
from adversaries.labels.logit_gradient import check_mean_cross_entropy
from adversaries.scene import Scene, warn_of_dropout
from fedsim.attacks import Attack, Knowledge, Paper, Progress
from fedsim.errors import AttackError, ConfigError
from fedsim.findings import Finding, Reconstruction
from fedsim.recording.transcript import Transcript
from fedsim.training.optimizers import Adam

log = logging.getLogger("fedsim." + __name__)

_SNAPSHOTS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Fractions of the iterations after which the estimate is kept for the report."""


@dataclass(frozen=True, kw_only=True)
class TemporalInversion(Attack):
    """Reconstruct one mini-batch from the gradients that a FedSGD client sent of it in several rounds.

    Recovers the labels from the last layer of each gradient, finds the rounds whose gradients are of the same
    mini-batch as that of the first round, and takes the first T of them. Then, R_g times: moves the common
    estimate towards each gradient by itself, R_l steps of L-BFGS on f_t, the weighted squared distance of
    gradients (Eq. 4), and aggregates the T estimates so that a minority of invalid gradients cannot move the
    result (Eq. 15). No prior on the data by default.

    The defaults are the paper's, but 300 times 20 steps for 10 gradients are many minutes on a CPU. A twentieth of
    that, 300 evaluations of each gradient, goes far with one robustly aggregated slope an iteration, the case R_l = 1
    that the proof of Theorem 1 analyses, fed to Adam: `optimizer = "adam"`, `step_size = 0.5`, `distance = "cosine"`,
    `layers = "equal"`, `aggregation = "trimmed-mean"`, and `tv_weight = 0.1` where the data are images. How far
    depends on how much the weights change between the gradients: gradients at nearly the same weights hold nearly the
    same information.

    Args:
        gradients: T, how many gradients are used, the first ones of the mini-batch.              [App. C: 10]
        fewest: attack with as few gradients as this where there are not T; by default no fewer than T.
        iterations: R_g, how often estimates are aggregated.                                      [App. C: 300]
        local_iterations: R_l, steps of L-BFGS for each gradient in between; with `adam` it is 1. [App. C: 20]
        optimizer: `lbfgs` moves one estimate for each gradient and aggregates them, as in Algorithm 1; `adam`
            aggregates slopes at the common estimate, as in the proof of Theorem 1, and takes one signed step along
            them, whose size falls to zero along a cosine.
        step_size: of L-BFGS, or of Adam in standard deviations of the inputs.                    [App. C: 1]
        aggregation: `median`, `trimmed-mean`, `krum` or `mean`, which is Eq. 5.        [Fig. 4: median]
        trim: share that `trimmed-mean` leaves out at each end, in [0, 0.5).
        invalid: f of `krum`, how many gradients may be invalid; T has to be at least 2 f + 3.
        distance: `l2`, squared Euclidean, divided by the recorded gradient's squared norm, or `cosine`, one minus
            the cosine.                                                                           [Eq. 4: l2]
        layers: weights of the layers' shares of the distance: `increasing` linearly from the first parameter tensor
            to the last, `decreasing`, or `equal`; `relative` weighs each tensor by its recorded gradient's squared
            norm, so that none is drowned by another's.                                        [Sect. 4.1: increasing]
        tv_weight: of total variation; with `adam`, of its slope at length one beside the aggregated slope at length
            one, after the aggregation.                                                           [0; Table IX: > 0]
        bn_weight: of the distance of BatchNorm statistics to those of the mini-batch, which follow from the ones sent
            and returned, or to the returned ones where the client did not train by the batch. [0; Table IX: > 0]
        labels: `optimisation`, `bias` or `column`, see `adversaries.labels.gradients`; granted labels come first.
            [Eq. 16]
        align: find the rounds of the first round's mini-batch; otherwise all rounds are taken to be of it. Batches
            that a client reshuffles in each epoch (`training.batches = "reshuffled"`) do not come back.
        similarity: gradients are of one mini-batch where they are at least so alike, see
            `adversaries.engine.alignment`.
        bounded: keep pixels in the valid range after each aggregation.
        batch_statistics: BatchNorm layers normalise dummy data by their own statistics, as clients in training mode
            do, instead of by the running ones of w_t; None does as the client did, judged by the statistics that it
            returned (where none are sent, by the batch).
        vectorise: compute the gradients at all w_t in one call; otherwise in a loop.

    References:
        Li et al.: Temporal Gradient Inversion Attacks with Robust Optimization, 2023, Algorithm 1. Differs:
        distances are divided by the norm of the recorded gradient, which makes the step sizes independent of the
        state of training; L-BFGS starts anew in each iteration; an estimate that is not finite is left out of the
        aggregation; pixels are kept in their range; with `adam`, slopes are brought to length one before they are
        aggregated, and signed. The paper leaves open Krum's f, the share trimmed, and the layers' weights but for
        their being linear. Dropout is taken to be off while clients train, as in the paper (`training.dropout`);
        against clients that drop units a reconstruction is poor.
    """

    gradients: int = 10
    fewest: int | None = None
    iterations: int = 300
    local_iterations: int = 20
    optimizer: Literal["lbfgs", "adam"] = "lbfgs"
    step_size: float = 1.0
    aggregation: Literal["median", "trimmed-mean", "krum", "mean"] = "median"
    trim: float = 0.2
    invalid: int = 2
    distance: Literal["l2", "cosine"] = "l2"
    layers: Literal["increasing", "decreasing", "equal", "relative"] = "increasing"
    tv_weight: float = 0.0
    bn_weight: float = 0.0
    labels: Literal["optimisation", "bias", "column"] = "optimisation"
    align: bool = True
    similarity: float = 0.7
    bounded: bool = True
    batch_statistics: bool | None = None
    vectorise: bool = True

    paper: ClassVar[Paper] = Paper(
        title="Temporal Gradient Inversion Attacks with Robust Optimization",
        authors="Li, Gu, Chen, Li, Wu, Ruan, Si, Fan",
        venue="arXiv",
        year=2023,
        url="https://arxiv.org/abs/2306.07883",
    )
    needs: ClassVar[frozenset[str]] = frozenset({"model", "loss", "input_shape", "value_range"})
    uses: ClassVar[frozenset[str]] = MOMENTS | {"labels", "defenses"}
    temporal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("gradients", "iterations", "local_iterations"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.fewest is not None and not 1 <= self.fewest <= self.gradients:
            raise ConfigError(f"fewest: expected 1 to gradients = {self.gradients}, got {self.fewest}")
        if not 0 <= self.trim < 0.5:
            raise ConfigError(f"trim: expected a value in [0, 0.5), got {self.trim}")
        if self.invalid < 0:
            raise ConfigError(f"invalid: expected at least 0, got {self.invalid}")
        if self.aggregation == "krum" and self._least < 2 * self.invalid + 3:
            raise ConfigError(
                f"{'gradients' if self.fewest is None else 'fewest'}: krum with invalid = {self.invalid} needs at "
                f"least {2 * self.invalid + 3}, got {self._least}"
            )
        if not -1 <= self.similarity <= 1:
            raise ConfigError(f"similarity: expected a value in [-1, 1], got {self.similarity}")
        check_positive(self, "step_size")
        check_not_negative(self, "tv_weight", "bn_weight")

    @property
    def _least(self) -> int:
        """How many gradients there have to be."""
        return self.gradients if self.fewest is None else self.fewest

    def _run(
        self, transcript: Transcript, knowledge: Knowledge, victim: int, rng: torch.Generator, progress: Progress
    ) -> Finding:
        return self.invert(Messages.of(transcript, victim), knowledge, rng, progress)

    def invert(
        self, messages: Messages, knowledge: Knowledge, rng: torch.Generator, progress: Progress
    ) -> Reconstruction:
        """Algorithm 1.

        Args:
            messages: of the client whose mini-batch is sought.
            knowledge: what is granted of the data and the model of these messages.

        Raises:
            AttackError: the messages cannot be matched, or all estimates diverged.
        """
        sent = SentGradients.among(messages, knowledge, self.batch_statistics)
        first = sent.scene(sent.rounds[0])
        dummy = torch.randn((first.num_examples, *(knowledge.input_shape or ())), generator=rng).to(first.before[0])
        warn_of_dropout(self, first.model, knowledge, f"client {sent.victim}")
        check_inputs(first, dummy)
        scenes = [sent.scene(number) for number in self._aligned(sent, dummy, rng)]
        labels = self._labels(scenes, knowledge, dummy, rng)
        if strangers := of_other_labels(scenes, labels):
            log.warning(
                "client %d, %s: the gradient seems to be of examples with other labels, so of another mini-batch than "
                "that of the first round; %s",
                sent.victim,
                rounds_of(strangers),
                "raise similarity" if self.align else "set align = true, or choose rounds of one mini-batch",
            )
        scenes = [replace(scene, labels=labels.to(dummy.device)) for scene in scenes]
        return self._optimise(scenes, dummy, progress)

    def _aligned(self, sent: SentGradients, dummy: Tensor, rng: torch.Generator) -> list[int]:
        """Up to T rounds whose gradients are of the first round's mini-batch."""
        groups = [list(sent.rounds)]
        if self.align and len(sent.rounds) > 1:
            labels, rows = [], []
            for number in sent.rounds:
                scene = sent.scene(number)
                labels.append(self._recover_labels([scene], dummy, rng))
                rows.append(torch.cat([tensor.flatten() for tensor in scene.mean_gradient]).float().cpu())
            groups = [[sent.rounds[place] for place in group] for group in align(labels, rows, self.similarity)]
        elif len(sent.sizes) > 1:
            raise AttackError(
                f"client {sent.victim}: N differs between rounds ({', '.join(map(str, sent.sizes))}), so the "
                "gradients are of different mini-batches; set align = true, or choose rounds of one mini-batch"
            )
        self._check_enough(groups, sent)
        return groups[0][: self.gradients]

    def _check_enough(self, groups: Sequence[list[int]], sent: SentGradients) -> None:
        """Check that there are enough gradients of the first mini-batch; the remedy depends on what there is."""
        found = groups[0]
        if len(found) >= self._least:
            return
        remedy = (
            'attack more rounds (adversary.rounds = "all"), record more, of clients whose mini-batches come back '
            f'(training.batches = "fixed"), or set fewest to {len(found)}'
        )
        largest = max(groups, key=len)
        if len(largest) >= self._least:
            remedy = f"there are {len(largest)} of another one, set adversary.rounds to {largest}"
        raise AttackError(
            f"client {sent.victim}: of the mini-batch of the first round there {'is' if len(found) == 1 else 'are'} "
            f"{len(found)} gradient{'s' * (len(found) > 1)} ({in_words(found)}) among {len(sent.rounds)} that were "
            f"sent, expected {self._least}; {remedy}"
        )

    def _recover_labels(self, scenes: Sequence[Scene], dummy: Tensor, rng: torch.Generator) -> Tensor:
        layers = [last_layer(scene, dummy) for scene in scenes]
        first = scenes[0]
        check_mean_cross_entropy(first.loss, len(layers[0].weight), first.before[0].device, first.where)
        return RULES[self.labels](layers, first.num_examples, rng)

    def _labels(self, scenes: Sequence[Scene], knowledge: Knowledge, dummy: Tensor, rng: torch.Generator) -> Tensor:
        """Labels that are granted, or else recovered from all gradients together."""
        count = scenes[0].num_examples
        if knowledge.labels is None:
            return self._recover_labels(scenes, dummy, rng)
        if len(knowledge.labels) != count:
            raise AttackError(
                f"{scenes[0].where}: {len(knowledge.labels)} labels are granted, but the client reported N = {count}"
            )
        return knowledge.labels

    def _optimise(self, scenes: Sequence[Scene], estimate: Tensor, progress: Progress) -> Reconstruction:
        """Steps II and III: from the first estimate, `example ...` in standardised units, to the finding."""
        self._check(scenes, estimate)
        units = scenes[0].units
        trial = Trial(
            step=self._step(scenes, estimate, self._objective(scenes)),
            point=lambda: estimate,
            shown=units.to_unit_range,
        )
        where = _where(scenes)
        if not descend([trial], self.iterations, progress, where=where, snapshots=_SNAPSHOTS):
            raise diverged([trial], where, "step_size")
        return Reconstruction(
            data=trial.snapshots[self.iterations],
            labels=scenes[0].labels.cpu(),
            trace=trial.trace(),
            snapshots=torch.stack(list(trial.snapshots.values())),
            snapshot_iterations=torch.tensor(list(trial.snapshots)),
        )

    def _step(self, scenes: Sequence[Scene], estimate: Tensor, evaluate: Slopes) -> Step:
        """One iteration, which moves `estimate` in place: of Algorithm 1, or of the proof of Theorem 1 with Adam."""
        points = estimate.expand(len(scenes), *estimate.shape)

        def bound() -> None:
            if self.bounded:
                scenes[0].units.clamp_(estimate)

        def slopes(iteration: int) -> Curves:
            values, each = evaluate(points)
            slope = self._aggregate(_of_length_one(each), scenes, iteration + 1)
            estimate.grad = self._smoothed(slope, estimate).sign()
            return {"objective": values[values.isfinite()].mean()}

        def local_steps(iteration: int) -> Curves:
            estimates, values = minimise(evaluate, points, steps=self.local_iterations, step_size=self.step_size)
            estimate.copy_(self._aggregate(estimates, scenes, iteration + 1))
            bound()
            return {"objective": values[values.isfinite()].mean()}

        if self.optimizer == "lbfgs":
            return local_steps
        return steps_of(
            Adam([estimate], self.step_size),
            slopes,
            factor=lambda iteration: by_cosine(iteration, self.iterations),
            project=bound,
        )

    def _aggregate(self, estimates: Tensor, scenes: Sequence[Scene], iteration: int) -> Tensor:
        """RobustAgg of Eq. 15 over the estimates, or slopes, that are finite."""
        finite = estimates.flatten(1).isfinite().all(1)
        if not finite.any():
            raise AttackError(
                f"{_where(scenes)}: all estimates diverged at iteration {iteration}; lower the attack's step_size"
            )
        estimates = estimates[finite]
        if self.aggregation == "mean":
            return aggregation.mean(estimates)
        if self.aggregation == "median":
            return aggregation.median(estimates)
        if self.aggregation == "trimmed-mean":
            return aggregation.trimmed_mean(estimates, trim=self.trim)
        return aggregation.krum(estimates, invalid=self.invalid)

    def _objective(self, scenes: Sequence[Scene]) -> Slopes:
        """f_t of all gradients with the priors; Adam adds total variation after the aggregation."""
        return temporal_objective(
            scenes,
            distance=self.distance,
            layers=self.layers,
            bn_weight=self.bn_weight,
            tv_weight=self.tv_weight if self.optimizer == "lbfgs" else 0.0,
            vectorise=self.vectorise,
        )

    def _smoothed(self, slope: Tensor, estimate: Tensor) -> Tensor:
        """The aggregated slope with a share of that of total variation."""
        if not self.tv_weight:
            return slope
        with torch.enable_grad():
            images = estimate.detach().requires_grad_(True)
            (rough,) = torch.autograd.grad(total_variation(images), images)
        slope, rough = (_of_length_one(each[None])[0] for each in (slope, rough))
        return slope.add(rough, alpha=self.tv_weight)

    def _check(self, scenes: Sequence[Scene], estimate: Tensor) -> None:
        """Check that the dummy data have a slope, and that statistics were returned where a prior needs them."""
        first = scenes[0]
        if self.tv_weight and estimate.ndim != 4:
            raise AttackError("tv_weight is a prior on images, and the inputs are none; set tv_weight = 0")
        if self.bn_weight:
            layers = [name for name, module in first.model.named_modules() if isinstance(module, _BatchNorm)]
            if not layers or any(not scene.returned_buffers for scene in scenes):
                what = "the client returned no statistics of theirs" if layers else "the model has none"
                raise AttackError(f"bn_weight is a prior on BatchNorm layers, and {what}; set bn_weight = 0")
        match = SquaredL2()

        def distance_of(values: Mapping[str, Tensor]) -> Tensor:
            return match(first.gradient(first.before, values["dummy"], first.labels), match.target(first))

        check_slope(first, {"dummy": estimate}, first.labels, distance_of)


def _of_length_one(slopes: Tensor) -> Tensor:
    """Slopes that all count the same, however steep their f_t is."""
    return normalize(slopes.flatten(1), dim=1, eps=torch.finfo(slopes.dtype).tiny).reshape(slopes.shape)


def _where(scenes: Sequence[Scene]) -> str:
    """Whom and which rounds an error is about."""
    return f"{scenes[0].where.rpartition(', ')[2]}, {rounds_of(scenes)}"
