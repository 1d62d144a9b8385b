"""TGIAs-RO: a mini-batch from several gradients of it, taken at different weights (Li et al. 2023)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import normalize
from torch.nn.modules.batchnorm import _BatchNorm

from adversaries.batch_norm import normalising_by_batch, trained_by_batch
from adversaries.engine import aggregation
from adversaries.engine.alignment import align
from adversaries.engine.descent import Curves, Step, Trial, descend, diverged, steps_of
from adversaries.engine.distances import SquaredL2
from adversaries.engine.lbfgs import Slopes, minimise
from adversaries.engine.matching import MOMENTS, by_cosine, check_choices, check_not_negative, check_positive
from adversaries.engine.priors import BatchNormStatistics, total_variation
from adversaries.engine.slopes import check_inputs, check_slope
from adversaries.labels.gradients import RULES
from adversaries.labels.last_layer import last_layer
from adversaries.scene import Scene, scene_of, warn_of_dropout
from fedsim.attacks import Attack, Knowledge, Paper, Progress
from fedsim.errors import AttackError, ConfigError
from fedsim.findings import Finding, Reconstruction
from fedsim.recording.transcript import Transcript
from fedsim.wire.messages import Update, non_finite

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
    depends on how much the weights change between the gradients: weights that are nearly the same say nearly the same.

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
            one, after the aggregation: 0.1 adds several dB.                                      [0; Table IX: > 0]
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
            do, instead of by the running ones of w_t; None does as the client did, told from the statistics that it
            returned (where none travel, by their own).
        vectorise: compute the gradients at all w_t in one call; otherwise in a loop.

    References:
        Li et al.: Temporal Gradient Inversion Attacks with Robust Optimization, 2023, Algorithm 1. Differs:
        distances are divided by the norm of the recorded gradient, which makes the step sizes independent of the
        state of training; L-BFGS starts anew in each iteration; an estimate that is not finite is left out of the
        aggregation; pixels are kept in their range; with `adam`, slopes are brought to length one before they are
        aggregated, and signed. The paper leaves open Krum's f, the share trimmed, and the layers' weights but for
        their being linear. Dropout is taken to be off while clients train, as in the paper (`training.dropout`);
        against clients who drop units a reconstruction is poor.
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
    uses: ClassVar[frozenset[str]] = MOMENTS | {"labels"}
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
        """Algorithm 1."""
        sent = _Sent.by(transcript, knowledge, victim, self.batch_statistics)
        first = sent.scene(sent.rounds[0])
        dummy = torch.randn((first.num_examples, *(knowledge.input_shape or ())), generator=rng).to(first.before[0])
        warn_of_dropout(self, first.model, f"client {victim}")
        check_inputs(first, dummy)
        scenes = [sent.scene(number) for number in self._aligned(sent, dummy, rng)]
        labels = self._labels(scenes, knowledge, dummy, rng)
        if strangers := _of_other_labels(scenes, labels):
            log.warning(
                "client %d, %s: the gradient seems to be of examples with other labels, so of another mini-batch than "
                "that of the first round; %s",
                victim,
                _told(strangers),
                "raise similarity" if self.align else "set align = true, or choose rounds of one mini-batch",
            )
        scenes = [replace(scene, labels=labels.to(dummy.device)) for scene in scenes]
        return self._invert(scenes, dummy, progress)

    def _aligned(self, sent: _Sent, dummy: Tensor, rng: torch.Generator) -> list[int]:
        """Up to T rounds whose gradients are of the first round's mini-batch."""
        groups = [list(sent.rounds)]
        if self.align and len(sent.rounds) > 1:
            labels, rows = [], []
            for number in sent.rounds:
                scene = sent.scene(number)
                labels.append(RULES[self.labels]([last_layer(scene, dummy)], scene.num_examples, rng))
                rows.append(torch.cat([tensor.flatten() for tensor in scene.mean_gradient]).float().cpu())
            groups = [[sent.rounds[place] for place in group] for group in align(labels, rows, self.similarity)]
        elif len(sent.sizes) > 1:
            raise AttackError(
                f"client {sent.victim}: N differs between rounds ({', '.join(map(str, sent.sizes))}), so the "
                "gradients are of different mini-batches; set align = true, or choose rounds of one mini-batch"
            )
        self._check_enough(groups, sent)
        return groups[0][: self.gradients]

    def _check_enough(self, groups: Sequence[list[int]], sent: _Sent) -> None:
        """See that there are gradients enough of the first mini-batch; the remedy depends on what there is."""
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
            f"{len(found)} gradient{'s' * (len(found) > 1)} ({_named(found)}) among {len(sent.rounds)} that were sent, "
            f"expected {self._least}; {remedy}"
        )

    def _labels(self, scenes: Sequence[Scene], knowledge: Knowledge, dummy: Tensor, rng: torch.Generator) -> Tensor:
        """Labels that are granted, or else recovered from all gradients together."""
        count = scenes[0].num_examples
        if knowledge.labels is None:
            return RULES[self.labels]([last_layer(scene, dummy) for scene in scenes], count, rng)
        if len(knowledge.labels) != count:
            raise AttackError(
                f"{scenes[0].where}: {len(knowledge.labels)} labels are granted, but the client reported N = {count}"
            )
        return knowledge.labels

    def _invert(self, scenes: Sequence[Scene], estimate: Tensor, progress: Progress) -> Reconstruction:
        """Steps II and III: from the first estimate, `example ...` in standardised units, to the finding."""
        self._check(scenes, estimate)
        units = scenes[0].units
        trial = Trial(
            step=self._step(scenes, estimate, self._objective(scenes)),
            point=lambda: estimate,
            shown=units.to_unit_range,
        )
        where = f"client {_client(scenes)}, {_told(scenes)}"
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
            torch.optim.Adam([estimate], lr=self.step_size),
            slopes,
            factor=lambda iteration: by_cosine(iteration, self.iterations),
            project=bound,
        )

    def _aggregate(self, estimates: Tensor, scenes: Sequence[Scene], iteration: int) -> Tensor:
        """RobustAgg of Eq. 15 over the estimates, or slopes, that are finite."""
        finite = estimates.flatten(1).isfinite().all(1)
        if not finite.any():
            raise AttackError(
                f"client {_client(scenes)}, {_told(scenes)}: all estimates diverged at iteration {iteration}; lower "
                "the attack's step_size"
            )
        estimates = estimates[finite]
        if self.aggregation == "mean":
            return aggregation.mean(estimates)
        if self.aggregation == "median":
            return aggregation.median(estimates)
        if self.aggregation == "trimmed-mean":
            return aggregation.trimmed_mean(estimates, trim=self.trim)
        return aggregation.krum(estimates, invalid=self.invalid)

    def _weights(self, targets: Sequence[Tensor]) -> Sequence[float | Tensor]:
        """Of each parameter tensor's share: with mean one, or `gradient` each. Targets are `gradient number`."""
        count = len(targets)
        if self.layers == "relative":
            return [1 / target.square().sum(1).clamp_min(torch.finfo(target.dtype).tiny) for target in targets]
        if self.layers == "equal":
            return (1.0,) * count
        rising = tuple(2 * (place + 1) / (count + 1) for place in range(count))
        return rising if self.layers == "increasing" else rising[::-1]

    def _objective(self, scenes: Sequence[Scene]) -> Slopes:
        """The function `points -> (f_t, slopes)`, both `gradient ...`."""
        targets = [torch.stack(tensors).flatten(1) for tensors in zip(*(s.mean_gradient for s in scenes), strict=True)]
        weights = self._weights(targets)
        gradients = _all_at_once(scenes) if self.vectorise else _one_by_one(scenes)

        def inner(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
            pairs = zip(weights, left, right, strict=True)
            return torch.stack([weight * (a * b).sum(1) for weight, a, b in pairs]).sum(0)

        size = inner(targets, targets)
        tiny = torch.finfo(size.dtype).tiny

        def distance(points: Tensor) -> Tensor:
            dummy = [tensor.flatten(1) for tensor in gradients(points)]
            if self.distance == "cosine":
                return 1 - inner(dummy, targets) / (inner(dummy, dummy) * size).clamp_min(tiny).sqrt()
            apart = [a - b for a, b in zip(dummy, targets, strict=True)]
            return inner(apart, apart) / size

        def evaluate(points: Tensor) -> tuple[Tensor, Tensor]:
            with torch.enable_grad():
                points = points.detach().requires_grad_(True)
                values = distance(points)
                if self.bn_weight:
                    prior = BatchNormStatistics(exact=scenes[0].by_batch)
                    each = [prior(scene, images, images) for scene, images in zip(scenes, points, strict=True)]
                    values = values + self.bn_weight * torch.stack(each)
                if self.tv_weight and self.optimizer == "lbfgs":
                    values = values + self.tv_weight * torch.stack([total_variation(images) for images in points])
                (slopes,) = torch.autograd.grad(values.sum(), points, materialize_grads=True)
            return values.detach(), slopes

        return evaluate

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
        """See that the dummy data have a slope, and that statistics were returned where they are asked for."""
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


def _all_at_once(scenes: Sequence[Scene]) -> Callable[[Tensor], Sequence[Tensor]]:
    """Gradients at all w_t by one vectorised call, tensors `gradient ...` in the model's order."""
    first = scenes[0]
    weights = tuple(torch.stack(tensors) for tensors in zip(*(scene.before for scene in scenes), strict=True))
    buffers = {name: torch.stack([scene.buffers[name] for scene in scenes]) for name in first.buffers}

    def loss_of(weights: Sequence[Tensor], buffers: Mapping[str, Tensor], dummy: Tensor) -> Tensor:
        state = {**dict(zip(first.names, weights, strict=True)), **buffers}
        return first.loss(functional_call(first.model, state, (first.units.to_model(dummy),)), first.labels)

    gradient = vmap(grad(loss_of))
    return lambda points: gradient(weights, buffers, points)


def _one_by_one(scenes: Sequence[Scene]) -> Callable[[Tensor], Sequence[Tensor]]:
    """The same in a loop."""

    def gradients(points: Tensor) -> Sequence[Tensor]:
        each = [s.gradient(s.before, dummy, s.labels) for s, dummy in zip(scenes, points, strict=True)]
        return [torch.stack(tensors) for tensors in zip(*each, strict=True)]

    return gradients


def _of_length_one(slopes: Tensor) -> Tensor:
    """Slopes that all count the same, however steep their f_t is."""
    return normalize(slopes.flatten(1), dim=1, eps=torch.finfo(slopes.dtype).tiny).reshape(slopes.shape)


@dataclass(frozen=True, kw_only=True)
class _Sent:
    """The gradients that the victim sent.

    Attributes:
        knowledge: with one network for all rounds.
        rounds: in which it sent a gradient that is of use, ascending.
        sizes: N of these rounds, ascending, each once.
        by_batch: whether BatchNorm layers normalise by the batch.
    """

    transcript: Transcript
    knowledge: Knowledge
    victim: int
    rounds: Sequence[int]
    sizes: Sequence[int]
    by_batch: bool

    @classmethod
    def by(cls, transcript: Transcript, knowledge: Knowledge, victim: int, by_batch: bool | None) -> _Sent:
        """Those of one client; where `by_batch` is None, as it trained.

        Raises:
            AttackError: it sent none; or weights; or the first cannot be used.
        """
        numbers = [number for number in transcript.rounds if victim in transcript.clients(number)]
        if not numbers:
            raise AttackError(f"client {victim} is in none of the rounds {transcript.rounds}; choose another victim")
        sound, sizes = [], set()
        for number in numbers:
            update = transcript.update(number, victim)
            fault = _fault(update)
            if fault and number == numbers[0]:
                raise AttackError(
                    f"round {number}, client {victim}: {fault}, and its mini-batch is the one to be found; leave the "
                    "round out of adversary.rounds"
                )
            if fault:
                log.warning("round %d, client %d: %s; the round is left out", number, victim, fault)
            else:
                sound.append(number)
                sizes.add(update.num_examples)
        assert knowledge.model is not None
        model = knowledge.model().to(knowledge.device).eval()
        if by_batch is None:
            by_batch = trained_by_batch(transcript.update(numbers[0], victim), model)
        own = normalising_by_batch(model) if by_batch else model
        knowledge = replace(knowledge, model=lambda: own)
        return cls(
            transcript=transcript,
            knowledge=knowledge,
            victim=victim,
            rounds=sound,
            sizes=sorted(sizes),
            by_batch=by_batch,
        )

    def scene(self, number: int) -> Scene:
        """One round."""
        update = self.transcript.update(number, self.victim)
        return scene_of(update, self.knowledge, by_batch=self.by_batch)


def _fault(update: Update) -> str:
    """Why a round is of no use, or nothing.

    Raises:
        AttackError: weights were sent.
    """
    if update.gradient is None:
        raise AttackError(
            f"round {update.round}, client {update.client}: weights were sent, expected a gradient; attack rounds of "
            "FedSGD, or updates with another attack"
        )
    for state, what in ((update.before, "weight"), (update.gradient, "gradient of"), (update.after, "returned")):
        if broken := non_finite(state):
            return f"the {what} {broken[0]} holds NaN or infinite values"
    return "" if any(bool((slope != 0).any()) for slope in update.gradient.values()) else "the gradient is zero"


def _of_other_labels(scenes: Sequence[Scene], labels: Tensor) -> list[Scene]:
    """Those whose last bias has a slope below 0, by more than a little noise, for a class that is not among `labels`.

    With cross-entropy that slope is p_c - n_c / b, so not below 0 for a class that does not occur.
    """
    first = scenes[0]
    layer = first.model.get_submodule(first.names[-1].rpartition(".")[0])
    if not isinstance(layer, nn.Linear) or layer.bias is None or labels.is_floating_point():
        return []
    absent = torch.ones(layer.out_features, dtype=torch.bool)
    absent[labels.cpu()] = False
    return [scene for scene in scenes if (scene.mean_gradient[-1].cpu()[absent] < -0.25 / len(labels)).any()]


def _client(scenes: Sequence[Scene]) -> str:
    return scenes[0].where.rpartition(" ")[2]


def _told(scenes: Sequence[Scene]) -> str:
    """The rounds of these scenes in words."""
    return _named([scene.where.split(",")[0].removeprefix("round ") for scene in scenes])


def _named(numbers: Sequence[int | str]) -> str:
    """Rounds as `round 3` or `rounds 1, 3, 4`."""
    return f"round{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
