"""AIA: inference of one attribute of records whose other features and label are known.

`ModelAttributeInference` reads a model [Driouich2022], `GradientAttributeInference` matches
gradients [Lyu2021].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from operator import itemgetter
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import one_hot

from adversaries.loadable_network import match_state
from adversaries.local_models.model_sources import ModelAttack, compute_losses, compute_outputs, unpack_records
from fedsim.base.constraints import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from fedsim.base.errors import AttackError, ConfigError
from fedsim.base.papers import cite
from fedsim.interfaces.attack import (
    ALL,
    CLIENT,
    Attack,
    Knowledge,
    Paper,
    PartialRecords,
    Progress,
    RoundsNeeded,
    Target,
)
from fedsim.interfaces.findings import Inference
from fedsim.inversion.batch_norm import copy_with_batch_statistics
from fedsim.inversion.descent import Curves, Trial, descend, divergence_error, make_optimizer_step, offset_progress
from fedsim.inversion.local_updates import PAPER
from fedsim.inversion.named_states import named_states
from fedsim.inversion.training_mismatch import OPTIMIZER_FACTS, warn_of_dropout, warn_unless_plain_sgd
from fedsim.recording.wire_format import State, Update, non_finite_names
from fedsim.training.optimizers import LBFGS


@dataclass(frozen=True, kw_only=True)
class ModelAttributeInference(ModelAttack):
    """Claim for each record the category with which the model comes closest to the record's label.

    1. Complete each record with every category.
    2. Compute the model's outputs h for all of them as one batch.
    3. Score a category by minus || h(x, category) - y ||^2 (Eq. 3; `_label_distances`), where h is
       the softmax output and y the one-hot label, or in a regression (labels that are floating
       point) the prediction and the target.

    BatchNorm layers whose running statistics were not shared normalise all records with all their
    categories as one batch: in a batch in which every record has the same category, normalisation
    would remove what is common to all, and so the category.

    References:
        [Driouich2022], Eq. 3 and Prop. 4, after [Kasiviswanathan2013]; for regressions [Diana2025],
        whose passive attack on least squares is this one with `lmra-linear` as source. Differs: the
        papers do not say how they evaluate networks whose BatchNorm statistics are not shared.
    """

    paper: ClassVar[Paper] = PAPER
    needs: ClassVar[frozenset[str]] = frozenset({"model", "partial_records"})

    @torch.no_grad()
    def _run(self, target: Target, progress: Progress) -> Inference:
        knowledge = target.knowledge
        assert knowledge.partial_records is not None
        records = knowledge.partial_records
        _, labels = unpack_records(records, knowledge.device)
        categories = range(len(records.categories))
        model = self._load_network(target)
        completions = torch.cat([records.complete_with(category) for category in categories]).to(knowledge.device)
        predictions = compute_outputs(model, completions, f"client {target.victim}, model source {self.source}")
        distances = _label_distances(predictions.reshape(len(categories), len(labels), -1), labels)
        progress(1, 1, {"objective": float(distances.amin(0).mean())})
        return Inference(of="attribute", candidates=torch.arange(len(categories)), scores=-distances.T.float().cpu())


def _label_distances(predictions: Tensor, labels: Tensor) -> Tensor:
    """Compute || h - y ||^2, `category record`, from outputs h, `category record output`."""
    num_outputs = predictions.shape[2]
    if labels.is_floating_point():
        if num_outputs != 1:
            raise AttackError(
                f"the labels are targets of a regression, but the model has {num_outputs} outputs; check that "
                "records and model are those of the federation"
            )
        return (predictions.squeeze(2) - labels).square()
    if not 0 <= labels.min() <= labels.max() < num_outputs:
        raise AttackError(
            f"labels of known records go from {int(labels.min())} to {int(labels.max())}, but the model has "
            f"{num_outputs} outputs; check that records and model are those of the federation"
        )
    return (predictions.softmax(2) - one_hot(labels, num_outputs)).square().sum(2)


@dataclass(frozen=True, kw_only=True)
class GradientAttributeInference(Attack):
    """Search the attributes of all records jointly by matching gradients with the updates.

    1. Relax the category of each record to the softmax of logits (`relax_categories`). For two
       categories that is a value between 0 and 1, as in the paper.
    2. In each round, compute the cosine between the gradient of the mean loss of all records at w_t
       and w_t - w_T (`_Round.cosine`).
    3. Maximise the mean cosine over rounds (Eq. 2) by L-BFGS (`_objective`, `_build_trial`).
    4. Score categories by the final logits.

    The cosine depends on each record only by about 1 / N, and gradients and curvatures are as
    small: `torch.optim.LBFGS` with its default thresholds stops before its second step. So the
    objective is N (1 - mean cosine) here, and the thresholds are 0.

    Args:
        iterations: steps of L-BFGS.
        learning_rate: its step size, the fraction of each quasi-Newton step that is taken. The
            paper's 1e-3 (flight prices), 1e-2 (Adult) and 5e-3 (Leaf Synthetic; App. C.2) need
            hundreds of iterations; 1 may overshoot.
        rounds: use so many of the inspected rounds, evenly spaced, the first and the last among
            them; None uses all.
        start: standard deviation of the Gaussian initial logits; 0 starts from equal shares of all
            categories.
        restarts: random starts; the one with the smallest final objective is the finding.
        patience: stop if the objective has not fallen by 1 % in this number of iterations; 0 never stops.
        batch_statistics: BatchNorm layers normalise the records by their own statistics, as those
            of a client in training do with its batches; otherwise by the running ones of w_t, where
            these were shared.

    References:
        [Lyu2021], as run in [Driouich2022], Eq. 2 and App. C.2. Differs: the papers say neither how
        the attributes are kept in their range, nor the start, nor the number of iterations; they
        sum over all inspected rounds, as `rounds = None` does, and take the smaller learning rates
        above.
    """

    iterations: PositiveInt = 100
    learning_rate: PositiveFloat = 0.1
    rounds: PositiveInt | None = 10
    start: NonNegativeFloat = 0.0
    restarts: PositiveInt = 1
    patience: NonNegativeInt = 0
    batch_statistics: bool = True

    paper: ClassVar[Paper] = cite("Lyu2021")
    needs: ClassVar[frozenset[str]] = frozenset({"model", "loss", "partial_records"})
    uses: ClassVar[frozenset[str]] = OPTIMIZER_FACTS
    reads: ClassVar[frozenset[str]] = frozenset({CLIENT})
    rounds_needed: ClassVar[RoundsNeeded] = ALL

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.restarts > 1 and not self.start:
            raise ConfigError(
                f"restarts: with start = 0 all {self.restarts} begin at the same point; set start above 0"
            )

    def check_message(self, update: Update, knowledge: Knowledge) -> None:
        """Refuse clients that do not send the whole model."""
        assert knowledge.model is not None
        _Round.from_update(update, deepcopy(knowledge.model()), knowledge.device)

    def _run(self, target: Target, progress: Progress) -> Inference:
        records, device = target.knowledge.partial_records, target.knowledge.device
        assert records is not None
        objective = self._objective(target)
        shape = (len(records.inputs), len(records.categories))
        where, total_iterations = f"client {target.victim}", self.restarts * self.iterations

        # Descend from each start.
        results: list[tuple[float, Trial]] = []
        for restart in range(self.restarts):
            start = self.start * torch.randn(shape, generator=target.rng)
            logits = start.to(device, torch.float64)
            trial = self._build_trial(objective, logits)
            restart_progress = offset_progress(progress, restart * self.iterations, total_iterations)
            surviving = descend([trial], self.iterations, restart_progress, where=where, patience=self.patience)
            final_objective = float(objective(logits)[0]) if surviving else math.nan
            results.append((final_objective, trial))

        # Take the best of those that did not diverge.
        finite = [result for result in results if math.isfinite(result[0])]
        if not finite:
            raise divergence_error([trial for _, trial in results], where, "learning_rate")
        _, best = min(finite, key=itemgetter(0))
        return Inference(
            of="attribute",
            candidates=torch.arange(shape[1]),
            scores=best.point().float().cpu(),
            trace=best.trace(),
        )

    def _build_trial(self, objective: Objective, logits: Tensor) -> Trial:
        """Return the trial that optimises `logits` in place."""
        optimizer = LBFGS([logits], lr=self.learning_rate, max_iter=1, tolerance_grad=0, tolerance_change=0)

        def set_gradient(iteration: int) -> Curves:
            value, gradient = objective(logits)
            logits.grad = gradient * len(logits)
            return {"objective": value}

        return Trial(step=make_optimizer_step(optimizer, set_gradient), point=lambda: logits)

    def _objective(self, target: Target) -> Objective:
        """Return the function that maps logits to 1 - mean cosine and to its gradient."""
        knowledge = target.knowledge
        assert knowledge.model is not None
        assert knowledge.loss is not None
        assert knowledge.partial_records is not None
        records, loss, where = knowledge.partial_records, knowledge.loss, f"client {target.victim}"
        inputs, labels = unpack_records(records, knowledge.device)
        model = deepcopy(knowledge.model()).to(knowledge.device).eval()

        # Read the rounds in which the model changed.
        rounds = []
        for number in choose_evenly_spaced(target.participation_rounds(), self.rounds):
            update = target.transcript.update(number, target.victim)
            rounds.append(_Round.from_update(update, model, knowledge.device))
        if any(round_.returned_weights for round_ in rounds):
            warn_unless_plain_sgd(self, knowledge, where)
        warn_of_dropout(self, model, knowledge, where)
        rounds = [round_ for round_ in rounds if round_.direction.any()]
        if not rounds:
            raise AttackError(
                f"{where}: its weights did not change in any of the rounds that are used, there is nothing to "
                "match; inspect others"
            )
        if self.batch_statistics or any(round_.lacks_statistics for round_ in rounds):
            model = copy_with_batch_statistics(model)

        # Check that model and loss take the records.
        with torch.no_grad():
            compute_losses(loss, compute_outputs(model, inputs, where), labels, where)

        def objective(logits: Tensor) -> tuple[Tensor, Tensor]:
            variable = logits.detach().requires_grad_(True)
            total, gradient = logits.new_zeros(()), torch.zeros_like(logits)
            # Round by round, so that only one graph is in memory at a time.
            for round_ in rounds:
                value = 1 - round_.cosine(model, loss, relax_categories(records, inputs, variable), labels)
                gradient += torch.autograd.grad(value, variable, materialize_grads=True)[0] / len(rounds)
                total += value.detach() / len(rounds)
            return total, gradient

        return objective


Objective = Callable[[Tensor], tuple[Tensor, Tensor]]
"""`logits -> (value, gradient)`."""


def relax_categories(records: PartialRecords, inputs: Tensor, logits: Tensor) -> Tensor:
    """Replace each record's category with the softmax of `logits`, `record category`.

    Returns:
        `record feature`.
    """
    start, stop = records.features.start, records.features.start + logits.shape[1]
    return torch.cat([inputs[:, :start], logits.softmax(1).to(inputs), inputs[:, stop:]], 1)


def choose_evenly_spaced(rounds: Sequence[int], count: int | None) -> list[int]:
    """Choose `count` rounds, evenly spaced from the first to the last; all if there are fewer.

    >>> choose_evenly_spaced([1, 11, 21, 31, 41], 3)
    [1, 21, 41]
    """
    if count is None or count >= len(rounds):
        return list(rounds)
    indices = [round(index * (len(rounds) - 1) / max(1, count - 1)) for index in range(count)]
    return [rounds[index] for index in indices]


@dataclass(frozen=True, kw_only=True)
class _Round:
    """One inspected round of the victim.

    Attributes:
        state: w_t, parameters and buffers, under the names of the model.
        parameter_names: names of the model's parameters.
        direction: w_t - w_T, or the gradient that was sent, as one vector of norm one (or zero).
        lacks_statistics: BatchNorm's running statistics were not shared.
        returned_weights: the client returned weights, not a gradient.
    """

    state: State
    parameter_names: Sequence[str]
    direction: Tensor
    lacks_statistics: bool
    returned_weights: bool

    @classmethod
    def from_update(cls, update: Update, model: nn.Module, device: torch.device) -> _Round:
        """Read one update."""
        where = update.name
        for state in (update.before, update.after, update.gradient or {}):
            if broken := non_finite_names(state):
                raise AttackError(
                    f"{where}: {broken[0]} holds NaN or infinite values; this update cannot be attacked, inspect other "
                    "rounds or attack another victim"
                )
        state, lacks_statistics = match_state(model, update.before, where)
        states = named_states(update, model, where)
        direction = torch.cat([states.direction(name).flatten() for name in states.shapes]).to(device)
        norm = direction.norm()
        return cls(
            state={name: tensor.to(device) for name, tensor in state.items()},
            parameter_names=list(states.shapes),
            direction=direction / norm if norm > 0 else direction,
            lacks_statistics=lacks_statistics,
            returned_weights=states.gradient is None,
        )

    def cosine(
        self, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, labels: Tensor
    ) -> Tensor:
        """Return the cosine of the loss gradient at w_t and the direction, differentiable."""
        weights = {name: self.state[name].detach().requires_grad_(True) for name in self.parameter_names}
        logits = functional_call(model, {**self.state, **weights}, (inputs,))
        gradients = torch.autograd.grad(
            loss(logits, labels), list(weights.values()), create_graph=True, materialize_grads=True
        )
        gradient = torch.cat([tensor.flatten() for tensor in gradients])
        cosine: Tensor = gradient @ self.direction / gradient.norm().clamp_min(torch.finfo(gradient.dtype).tiny)
        return cosine
