"""TGIAs-RO: inversion of several gradients of one mini-batch [Li2023b]."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Le, Lt
from torch import Tensor
from torch.nn.functional import normalize

from adversaries.inversion.sent_gradients import (
    ClientGradients,
    ClientUpdates,
    describe_problem_rounds,
    problems_with_other_labels,
)
from fedsim.base.constraints import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from fedsim.base.errors import AttackError, ConfigError, list_rounds
from fedsim.base.papers import cite
from fedsim.interfaces.attack import ALL, Attack, Knowledge, MessageKind, Paper, Progress, RoundsNeeded, Target, warn
from fedsim.interfaces.findings import Finding, Reconstruction
from fedsim.inversion import aggregation
from fedsim.inversion.alignment import align
from fedsim.inversion.batch_norm import check_returned_statistics
from fedsim.inversion.descent import Curves, Step, Trial, descend, divergence_error, make_optimizer_step
from fedsim.inversion.differentiability import check_differentiability, check_inputs
from fedsim.inversion.distances import SquaredL2
from fedsim.inversion.labels.gradients import LABEL_RULES, check_distinct_labels
from fedsim.inversion.labels.last_layer import LastLayer, count_outputs, last_layer
from fedsim.inversion.labels.logit_gradient import check_mean_cross_entropy
from fedsim.inversion.lbfgs import ValuesAndGradients, minimise
from fedsim.inversion.priors import total_variation
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.recipe import INPUT_MOMENTS, cosine_schedule
from fedsim.inversion.temporal import temporal_objective
from fedsim.inversion.training_mismatch import warn_of_dropout
from fedsim.recording.wire_format import Update
from fedsim.training.optimizers import Adam

_SNAPSHOTS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Fractions of the iterations after which the estimate is kept for the report."""


@dataclass(frozen=True, kw_only=True)
class TemporalInversion(Attack):
    """Reconstruct one mini-batch from its gradients that a FedSGD client sent in several rounds.

    1. Recover labels from the last layer of each gradient (`_recover_labels`), and select the first
       T rounds whose gradients are of the same mini-batch as the first one (`_select_rounds`).
    2. Repeat R_g times (`_build_step`): move the common estimate towards each gradient separately,
       by R_l steps of L-BFGS on f_t, the weighted squared distance of gradients (Eq. 4).
    3. Aggregate the T estimates robustly, so that a minority of invalid gradients cannot move the
       result (Eq. 15; `_aggregate`).

    There is no prior on the data by default.

    The defaults are the paper's, but 300 times 20 steps for 10 gradients are many minutes on a CPU.
    A twentieth of that, 300 evaluations of each gradient, achieves much with one robustly
    aggregated gradient an iteration, the case R_l = 1 that the proof of Theorem 1 analyses, fed to
    Adam: `optimizer = "adam"`, `step_size = 0.5`, `distance = "cosine"`, `layers = "equal"`,
    `aggregation = "trimmed-mean"`, and `tv_weight = 0.1` where the data are images. How much
    depends on how far the weights move between the gradients: gradients at nearly the same weights
    contain nearly the same information.

    Args:
        gradients: T, number of gradients used, the first ones of the mini-batch.   [App. C: 10]
        fewest: attack with as few gradients as this where there are not T; by default with T only.
        iterations: R_g, number of aggregations.                                    [App. C: 300]
        local_iterations: R_l, steps of L-BFGS for each gradient; with `adam` 1.    [App. C: 20]
        optimizer: `lbfgs` moves one estimate for each gradient and aggregates them, as in Algorithm
            1; `adam` aggregates gradients at the common estimate, as in the proof of Theorem 1, and
            takes one signed step, whose size falls to zero along a cosine.
        step_size: of L-BFGS, or of Adam in standard deviations of the inputs.      [App. C: 1]
        aggregation: `median`, `trimmed-mean`, `krum` or `mean`, which is Eq. 5.    [Fig. 4: median]
        trim: share that `trimmed-mean` leaves out at each end, in [0, 0.5).
        invalid: f of `krum`, how many gradients may be invalid; T has to be at least 2 f + 3.
        distance: `l2`, squared Euclidean, divided by the recorded gradient's squared norm, or
            `cosine`, one minus the cosine.                                         [Eq. 4: l2]
        layers: weights of the layers in the distance: `increasing` linearly from the first
            parameter tensor to the last, `decreasing`, or `equal`; `relative` divides each tensor's
            share by its recorded gradient's squared norm, so that no tensor dominates.
            [Sect. 4.1: increasing]
        tv_weight: weight of total variation; with `adam`, its normalised gradient is added with
            this weight to the normalised aggregated gradient.          [0; Table IX: > 0]
        bn_weight: weight of the distance of BatchNorm statistics to those of the mini-batch, which
            are computed from the ones sent and returned, or to the returned ones where the client
            did not normalise by the batch.                             [0; Table IX: > 0]
        labels: `optimisation`, `bias` or `column`, see `fedsim.inversion.labels.gradients`; granted
            labels take precedence.                                     [Eq. 16]
        align: select the rounds of the first round's mini-batch; otherwise all rounds are assumed
            to be of it. Batches that a client reshuffles in each epoch (`training.batches =
            "reshuffled"`) do not recur.
        similarity: least similarity of two gradients of one mini-batch, see
            `fedsim.inversion.alignment`.
        bounded: keep pixels in the valid range after each aggregation.
        batch_statistics: BatchNorm layers normalise dummy data by their own statistics, as clients
            in training mode do, instead of by the running ones of w_t; None does as the client did,
            judged by the statistics that it returned (where none are sent, by the batch).
        vectorise: compute the gradients at all w_t in one call; otherwise in a loop.

    References:
        [Li2023b], Algorithm 1.
        Differs: distances are divided by the norm of the recorded gradient, which makes the step
        sizes independent of the state of training; L-BFGS is restarted in each iteration; an
        estimate that is not finite is left out of the aggregation; pixels are kept in their range;
        with `adam`, gradients are normalised before they are aggregated, and signed. The paper
        leaves open Krum's f, the share trimmed, and the layers' weights except that they are
        linear. Dropout is assumed to be off while clients train, as in the paper
        (`training.dropout`); against clients that drop units a reconstruction is poor.
    """

    gradients: PositiveInt = 10
    fewest: PositiveInt | None = None
    iterations: PositiveInt = 300
    local_iterations: PositiveInt = 20
    optimizer: Literal["lbfgs", "adam"] = "lbfgs"
    step_size: PositiveFloat = 1.0
    aggregation: Literal["median", "trimmed-mean", "krum", "mean"] = "median"
    trim: Annotated[float, Ge(0), Lt(0.5)] = 0.2
    invalid: NonNegativeInt = 2
    distance: Literal["l2", "cosine"] = "l2"
    layers: Literal["increasing", "decreasing", "equal", "relative"] = "increasing"
    tv_weight: NonNegativeFloat = 0.0
    bn_weight: NonNegativeFloat = 0.0
    labels: Literal["optimisation", "bias", "column"] = "optimisation"
    align: bool = True
    similarity: Annotated[float, Ge(-1), Le(1)] = 0.7
    bounded: bool = True
    batch_statistics: bool | None = None
    vectorise: bool = True

    paper: ClassVar[Paper] = cite("Li2023b")
    needs: ClassVar[frozenset[str]] = frozenset({"model", "loss", "input_shape", "value_range"})
    uses: ClassVar[frozenset[str]] = INPUT_MOMENTS | {"labels", "defenses"}
    rounds_needed: ClassVar[RoundsNeeded] = ALL
    message_kind: ClassVar[MessageKind] = "gradient"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fewest is not None and self.fewest > self.gradients:
            raise ConfigError(f"fewest: expected at most gradients = {self.gradients}, got {self.fewest}")
        if self.aggregation == "krum" and self._min_gradients < 2 * self.invalid + 3:
            raise ConfigError(
                f"{'gradients' if self.fewest is None else 'fewest'}: krum with invalid = {self.invalid} needs at "
                f"least {2 * self.invalid + 3}, got {self._min_gradients}"
            )

    def count_fewest_rounds(self, num_parameters: int | None) -> int:
        """Return how many rounds it needs: one of each gradient."""
        del num_parameters
        return self._min_gradients

    def check_facts(self, knowledge: Knowledge, num_examples: int | None = None, granted: Collection[str] = ()) -> None:
        """Refuse more examples than there are classes, where each class is found once."""
        if num_examples is None or self.labels != "column" or "labels" in granted:
            return
        if (outputs := count_outputs(knowledge)) is not None:
            check_distinct_labels(num_examples, outputs)

    def check_message(self, update: Update, knowledge: Knowledge) -> None:
        """Refuse a network of which a part stays with the clients, and labels that its last layer does not tell."""
        messages = ClientUpdates.from_update(update)
        problem = ClientGradients.from_messages(messages, knowledge, self.batch_statistics).build_problem(update.round)
        dummy = torch.zeros((problem.num_examples, *(knowledge.input_shape or ()))).to(problem.before[0])
        check_inputs(problem, dummy)
        if self.align or knowledge.labels is None:
            _read_last_layers([problem], dummy)

    @property
    def _min_gradients(self) -> int:
        return self.gradients if self.fewest is None else self.fewest

    def _run(self, target: Target, progress: Progress) -> Finding:
        messages = ClientUpdates.from_target(target)
        return self.invert(messages, target.knowledge, target.rng, progress)

    def invert(
        self, messages: ClientUpdates, knowledge: Knowledge, rng: torch.Generator, progress: Progress
    ) -> Reconstruction:
        """Run Algorithm 1 on a client's messages.

        Args:
            messages: of the client whose mini-batch is reconstructed.
        """
        gradients = ClientGradients.from_messages(messages, knowledge, self.batch_statistics)
        first = gradients.build_problem(gradients.rounds[0])
        dummy = torch.randn((first.num_examples, *(knowledge.input_shape or ())), generator=rng).to(first.before[0])
        warn_of_dropout(self, first.model, knowledge, f"client {gradients.victim}")
        check_inputs(first, dummy)

        # Select the gradients of the first mini-batch and recover its labels.
        problems = [gradients.build_problem(number) for number in self._select_rounds(gradients, dummy, rng)]
        labels = self._labels(problems, knowledge, dummy, rng)
        if mismatched := problems_with_other_labels(problems, labels):
            remedy = "set align = true, or choose rounds of one mini-batch"
            if self.align:
                remedy = "raise similarity"
            warn(
                f"client {gradients.victim}, {describe_problem_rounds(mismatched)}: the gradient "
                "seems to be of examples with other labels, so of another mini-batch than that of "
                f"the first round; {remedy}"
            )

        problems = [replace(problem, labels=labels.to(dummy.device)) for problem in problems]
        return self._optimise(problems, dummy, progress)

    def _select_rounds(self, gradients: ClientGradients, dummy: Tensor, rng: torch.Generator) -> list[int]:
        """Select up to T rounds whose gradients are of the first round's mini-batch."""
        groups = [list(gradients.rounds)]
        if self.align and len(gradients.rounds) > 1:
            labels, rows = [], []
            for number in gradients.rounds:
                problem = gradients.build_problem(number)
                labels.append(self._recover_labels([problem], dummy, rng))
                rows.append(torch.cat([tensor.flatten() for tensor in problem.mean_gradient]).float().cpu())
            groups = []
            for group in align(labels, rows, self.similarity):
                groups.append([gradients.rounds[index] for index in group])
        elif len(gradients.sizes) > 1:
            raise AttackError(
                f"client {gradients.victim}: N differs between rounds ({', '.join(map(str, gradients.sizes))}), so the "
                "gradients are of different mini-batches; set align = true, or choose rounds of one mini-batch"
            )
        self._check_enough(groups, gradients)
        return groups[0][: self.gradients]

    def _check_enough(self, groups: Sequence[list[int]], gradients: ClientGradients) -> None:
        """Raise AttackError if there are too few gradients of the first mini-batch."""
        selected = groups[0]
        if len(selected) >= self._min_gradients:
            return
        remedy = (
            'attack more rounds (adversary.rounds = "all"), record more, of clients whose mini-batches come back '
            f'(training.batches = "fixed"), or set fewest to {len(selected)}'
        )
        largest = max(groups, key=len)
        if len(largest) >= self._min_gradients:
            remedy = f"there are {len(largest)} of another one, set adversary.rounds to {largest}"
        count = "is 1 gradient" if len(selected) == 1 else f"are {len(selected)} gradients"
        raise AttackError(
            f"client {gradients.victim}: of the mini-batch of the first round there {count} "
            f"({list_rounds(selected)}) among {len(gradients.rounds)} that were sent, expected {self._min_gradients}; "
            f"{remedy}"
        )

    def _recover_labels(self, problems: Sequence[InversionProblem], dummy: Tensor, rng: torch.Generator) -> Tensor:
        return LABEL_RULES[self.labels](_read_last_layers(problems, dummy), problems[0].num_examples, rng)

    def _labels(
        self, problems: Sequence[InversionProblem], knowledge: Knowledge, dummy: Tensor, rng: torch.Generator
    ) -> Tensor:
        """Return the granted labels, or else recover them from all gradients jointly."""
        count = problems[0].num_examples
        if knowledge.labels is None:
            return self._recover_labels(problems, dummy, rng)
        if len(knowledge.labels) != count:
            raise AttackError(
                f"{problems[0].where}: {len(knowledge.labels)} labels are granted, but the client reported N = {count}"
            )
        return knowledge.labels

    def _optimise(self, problems: Sequence[InversionProblem], estimate: Tensor, progress: Progress) -> Reconstruction:
        """Run steps II and III of Algorithm 1.

        Args:
            estimate: `example ...` in standardised units, the first estimate.
        """
        self._check_priors(problems, estimate)
        trial = Trial(
            step=self._build_step(problems, estimate, self._objective(problems)),
            point=lambda: estimate,
            to_snapshot=problems[0].scaling.to_unit_range,
        )
        where = _describe_problems(problems)
        if not descend([trial], self.iterations, progress, where=where, snapshots=_SNAPSHOTS):
            raise divergence_error([trial], where, "step_size")
        return Reconstruction(
            data=trial.snapshots[self.iterations],
            labels=problems[0].labels.cpu(),
            trace=trial.trace(),
            snapshots=torch.stack(list(trial.snapshots.values())),
            snapshot_iterations=torch.tensor(list(trial.snapshots)),
        )

    def _build_step(self, problems: Sequence[InversionProblem], estimate: Tensor, evaluate: ValuesAndGradients) -> Step:
        """Return an iteration that moves `estimate` in place.

        With L-BFGS it is that of Algorithm 1, with Adam that of the proof of Theorem 1.
        """
        points = estimate.expand(len(problems), *estimate.shape)

        def clamp_estimate() -> None:
            if self.bounded:
                problems[0].scaling.clamp_(estimate)

        def set_gradient(iteration: int) -> Curves:
            values, gradients = evaluate(points)
            gradient = self._aggregate(_normalise_gradients(gradients), problems, iteration + 1)
            estimate.grad = self._add_total_variation(gradient, estimate, problems[0].smooth_dimensions).sign()
            return {"objective": values[values.isfinite()].mean()}

        def minimise_and_aggregate(iteration: int) -> Curves:
            estimates, values = minimise(evaluate, points, steps=self.local_iterations, step_size=self.step_size)
            estimate.copy_(self._aggregate(estimates, problems, iteration + 1))
            clamp_estimate()
            return {"objective": values[values.isfinite()].mean()}

        if self.optimizer == "lbfgs":
            return minimise_and_aggregate
        return make_optimizer_step(
            Adam([estimate], self.step_size),
            set_gradient,
            factor=lambda iteration: cosine_schedule(iteration, self.iterations),
            project=clamp_estimate,
        )

    def _aggregate(self, estimates: Tensor, problems: Sequence[InversionProblem], iteration: int) -> Tensor:
        """Apply RobustAgg of Eq. 15 to the estimates, or gradients, that are finite."""
        finite = estimates.flatten(1).isfinite().all(1)
        if not finite.any():
            raise AttackError(
                f"{_describe_problems(problems)}: all estimates diverged at iteration {iteration}; lower the attack's "
                "step_size"
            )
        estimates = estimates[finite]
        if self.aggregation == "mean":
            return aggregation.mean(estimates)
        if self.aggregation == "median":
            return aggregation.median(estimates)
        if self.aggregation == "trimmed-mean":
            return aggregation.trimmed_mean(estimates, trim=self.trim)
        return aggregation.krum(estimates, invalid=self.invalid)

    def _objective(self, problems: Sequence[InversionProblem]) -> ValuesAndGradients:
        """Return f_t of all gradients with priors; Adam adds total variation later."""
        return temporal_objective(
            problems,
            distance=self.distance,
            layers=self.layers,
            bn_weight=self.bn_weight,
            tv_weight=self.tv_weight if self.optimizer == "lbfgs" else 0.0,
            vectorise=self.vectorise,
        )

    def _add_total_variation(self, gradient: Tensor, estimate: Tensor, dimensions: Sequence[int]) -> Tensor:
        """Add the gradient of total variation to the aggregated gradient, both normalised."""
        if not self.tv_weight:
            return gradient
        with torch.enable_grad():
            images = estimate.detach().requires_grad_(True)
            (tv_gradient,) = torch.autograd.grad(total_variation(images, dimensions), images)
        gradient = _normalise_gradients(gradient[None])[0]
        tv_gradient = _normalise_gradients(tv_gradient[None])[0]
        return gradient.add(tv_gradient, alpha=self.tv_weight)

    def _check_priors(self, problems: Sequence[InversionProblem], estimate: Tensor) -> None:
        """Check that priors suit the data and model, and that the distance is differentiable."""
        first = problems[0]
        if self.tv_weight and not first.smooth_dimensions:
            raise AttackError(
                "tv_weight is a prior on images and series, and the inputs are neither; set tv_weight = 0"
            )
        for problem in problems if self.bn_weight else ():
            check_returned_statistics(problem)
        distance = SquaredL2()

        def distance_of(values: Mapping[str, Tensor]) -> Tensor:
            return distance(first.gradient(first.before, values["dummy"], first.labels), distance.target(first))

        check_differentiability(first, {"dummy": estimate}, first.labels, distance_of)


def _normalise_gradients(gradients: Tensor) -> Tensor:
    """Scale each gradient, `gradient ...`, to norm one, so that all count equally."""
    tiny = torch.finfo(gradients.dtype).tiny
    return normalize(gradients.flatten(1), dim=1, eps=tiny).reshape(gradients.shape)


def _describe_problems(problems: Sequence[InversionProblem]) -> str:
    """Name the client and the rounds, for errors."""
    return f"{problems[0].where.rpartition(', ')[2]}, {describe_problem_rounds(problems)}"


def _read_last_layers(problems: Sequence[InversionProblem], dummy: Tensor) -> list[LastLayer]:
    """Return the last layers, of which labels can be recovered."""
    layers, first = [last_layer(problem, dummy) for problem in problems], problems[0]
    check_mean_cross_entropy(first.loss, len(layers[0].weight), first.before[0].device, first.where)
    return layers
