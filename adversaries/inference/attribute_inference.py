"""AIA: a sensitive attribute of records of which all else is known (Driouich et al. 2022; Lyu, Chen 2021)."""

from __future__ import annotations

import logging
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

from adversaries.batch_norm import normalising_by_batch
from adversaries.engine.descent import Curves, Trial, descend, diverged, following, steps_of
from adversaries.engine.settings import check_positive
from adversaries.local_models.model_sources import ModelAttack, known, losses, matched, outputs
from adversaries.local_updates import PAPER, rounds_of
from adversaries.named_states import named_states
from adversaries.scene import STEPPING, warn_of_dropout, warn_unless_plain
from fedsim.attacks import CLIENT, Attack, Knowledge, Paper, PartialRecords, Progress
from fedsim.errors import AttackError, ConfigError
from fedsim.findings import Finding, Inference
from fedsim.recording.transcript import Transcript
from fedsim.wire.messages import State, Update, non_finite

log = logging.getLogger("fedsim." + __name__)


@dataclass(frozen=True, kw_only=True)
class ModelAttributeInference(ModelAttack):
    """Claim of each record the category with which the model comes closest to the record's label.

    The score of a category is minus || h(x, category) - y ||^2 (Eq. 3), where h is the softmax output and y the one-hot
    label, or in a regression (labels that are floating point) the prediction and the target.

    BatchNorm layers whose running statistics were not shared normalise all records in all of their completions as one
    batch: a batch in which every record has the same category would hide it, as normalisation removes what is common
    to all.

    Args:
        source: `global` is w_t of the last inspected round, `last-returned` the last w_T that the victim returned;
            else the title of an attack in the same file that decodes local models, or `optimal` for the victim's
            true optimal local model, which only the evaluator has.

    References:
        Driouich et al.: Local Model Reconstruction Attacks in Federated Learning and their Uses, 2022, Eq. 3 and
        Prop. 4, after Kasiviswanathan et al. 2013; for regressions Diana et al.: Attribute Inference Attacks for
        Federated Regression Tasks, AAAI 2025, whose passive attack on least squares is this one with `lmra-linear` as
        source. Differs: the papers do not say how they evaluate networks whose BatchNorm statistics are not shared.
    """

    paper: ClassVar[Paper] = PAPER
    needs: ClassVar[frozenset[str]] = frozenset({"model", "partial_records"})

    @torch.no_grad()
    def _run(
        self, transcript: Transcript, knowledge: Knowledge, victim: int, rng: torch.Generator, progress: Progress
    ) -> Finding:
        assert knowledge.partial_records is not None
        records = knowledge.partial_records
        _, labels = known(records, knowledge.device)
        categories = range(len(records.categories))
        model = self._network(transcript, knowledge, victim)
        completions = torch.cat([records.completed(category) for category in categories]).to(knowledge.device)
        made = outputs(model, completions, f"client {victim}, model source {self.source}")
        distances = _distances(made.reshape(len(categories), len(labels), -1), labels)
        progress(1, 1, {"objective": float(distances.amin(0).mean())})
        return Inference(of="attribute", candidates=torch.arange(len(categories)), scores=-distances.T.float().cpu())


def _distances(made: Tensor, labels: Tensor) -> Tensor:
    """`category record`, of outputs `category record output`."""
    if labels.is_floating_point():
        if made.shape[2] != 1:
            raise AttackError(
                f"the labels are targets of a regression, but the model has {made.shape[2]} outputs; check that "
                "records and model are those of the federation"
            )
        return (made.squeeze(2) - labels).square()
    classes = made.shape[2]
    if not 0 <= labels.min() <= labels.max() < classes:
        raise AttackError(
            f"labels of known records go from {int(labels.min())} to {int(labels.max())}, but the model has {classes} "
            "outputs; check that records and model are those of the federation"
        )
    return (made.softmax(2) - one_hot(labels, classes)).square().sum(2)


@dataclass(frozen=True, kw_only=True)
class GradientAttributeInference(Attack):
    """Search the attributes of all records together, so that the gradient of their loss points along the update.

    Maximises the sum over inspected rounds of the cosine between the gradient of the loss of all its records at w_t and
    w_t - w_T (Eq. 2). The unknowns are logits, one for each category of each record; the records hold their softmax in
    place of a category. For two categories that is the sigmoid of the logits' difference: a value between 0 and 1, as
    in the paper. Scores are the final logits.

    The cosine depends little on each record, by about 1 / N, and slopes and curvatures are as small:
    `torch.optim.LBFGS` with its own thresholds ends before its second step. Here the objective is N (1 - mean cosine)
    and the thresholds are 0.

    Args:
        iterations: steps of L-BFGS.
        learning_rate: its step size, the part that is taken of each quasi-Newton step. The paper's 1e-3 (flight
            prices), 1e-2 (Adult) and 5e-3 (Leaf Synthetic; App. C.2) want hundreds of iterations; 1 may overshoot.
        rounds: use so many of the inspected rounds, evenly spaced, the first and the last among them; None uses all.
        start: deviation of the Gaussian logits at the start; 0 starts from equal shares of all categories.
        restarts: starts; the one whose objective is smallest at its end is the finding.
        patience: stop when the objective has not fallen by a hundredth of itself for so many iterations; 0 never.
        batch_statistics: BatchNorm layers normalise the records by their own statistics, as those of a client in
            training do with its batches; otherwise by the running ones of w_t, where these were shared.

    References:
        Lyu, Chen: A Novel Attribute Reconstruction Attack in Federated Learning, FTL-IJCAI 2021, as run in Driouich et
        al.: Local Model Reconstruction Attacks in Federated Learning and their Uses, 2022, Eq. 2 and App. C.2. Differs:
        the papers say neither how the attributes are kept in their range, nor the start, nor the number of iterations;
        they sum over all inspected rounds, as `rounds = None` does, and take the smaller learning rates above.
    """

    iterations: int = 100
    learning_rate: float = 0.1
    rounds: int | None = 10
    start: float = 0.0
    restarts: int = 1
    patience: int = 0
    batch_statistics: bool = True

    paper: ClassVar[Paper] = Paper(
        title="A Novel Attribute Reconstruction Attack in Federated Learning",
        authors="Lyu, Chen",
        venue="FTL-IJCAI",
        year=2021,
        url="https://arxiv.org/abs/2108.06910",
    )
    needs: ClassVar[frozenset[str]] = frozenset({"model", "loss", "partial_records"})
    uses: ClassVar[frozenset[str]] = STEPPING
    reads: ClassVar[frozenset[str]] = frozenset({CLIENT})
    temporal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, least in (("iterations", 1), ("restarts", 1), ("patience", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: expected at least {least}, got {getattr(self, name)}")
        if self.rounds is not None and self.rounds < 1:
            raise ConfigError(f"rounds: expected at least 1, got {self.rounds}; leave it out to use all")
        check_positive(self, "learning_rate")
        if not 0 <= self.start < math.inf:
            raise ConfigError(f"start: expected a finite value of at least 0, got {self.start}")
        if self.restarts > 1 and not self.start:
            raise ConfigError(
                f"restarts: with start = 0 all {self.restarts} begin at the same point; set start above 0"
            )

    def _run(
        self, transcript: Transcript, knowledge: Knowledge, victim: int, rng: torch.Generator, progress: Progress
    ) -> Finding:
        assert knowledge.partial_records is not None
        records = knowledge.partial_records
        objective = self._objective(transcript, knowledge, victim)
        shape = (len(records.inputs), len(records.categories))
        where, total = f"client {victim}", self.restarts * self.iterations
        ends: list[tuple[float, Trial]] = []
        for restart in range(self.restarts):
            logits = (self.start * torch.randn(shape, generator=rng)).to(knowledge.device, torch.float64)
            trial = self._trial(objective, logits)
            told = following(progress, restart * self.iterations, total)
            descended = descend([trial], self.iterations, told, where=where, patience=self.patience)
            ends.append((float(objective(logits)[0]) if descended else math.nan, trial))
        sound = [end for end in ends if math.isfinite(end[0])]
        if not sound:
            raise diverged([trial for _, trial in ends], where, "learning_rate")
        _, best = min(sound, key=itemgetter(0))
        return Inference(
            of="attribute",
            candidates=torch.arange(shape[1]),
            scores=best.point().float().cpu(),
            trace=best.trace(),
        )

    def _trial(self, objective: Objective, logits: Tensor) -> Trial:
        """The trial that moves `logits` in place."""
        optimizer = torch.optim.LBFGS([logits], lr=self.learning_rate, max_iter=1, tolerance_grad=0, tolerance_change=0)

        def slopes(iteration: int) -> Curves:
            value, slope = objective(logits)
            logits.grad = slope * len(logits)
            return {"objective": value}

        return Trial(step=steps_of(optimizer, slopes), point=lambda: logits)

    def _objective(self, transcript: Transcript, knowledge: Knowledge, victim: int) -> Objective:
        """The function from logits to 1 - the mean cosine and its slope."""
        assert knowledge.model is not None
        assert knowledge.loss is not None
        assert knowledge.partial_records is not None
        records, loss = knowledge.partial_records, knowledge.loss
        inputs, labels = known(records, knowledge.device)
        model = deepcopy(knowledge.model()).to(knowledge.device).eval()
        views = [
            _View.of(transcript.update(number, victim), model, knowledge.device)
            for number in spread(rounds_of(transcript, victim), self.rounds)
        ]
        if any(view.moved for view in views):
            warn_unless_plain(self, knowledge, f"client {victim}")
        warn_of_dropout(self, model, knowledge, f"client {victim}")
        views = [view for view in views if view.direction.any()]
        if not views:
            raise AttackError(
                f"client {victim}: its weights did not change in any of the rounds that are used, there is nothing to "
                "match; inspect others"
            )
        if self.batch_statistics or any(view.by_batch for view in views):
            model = normalising_by_batch(model)
        with torch.no_grad():
            where = f"client {victim}"
            losses(loss, outputs(model, inputs, where), labels, where)

        def objective(logits: Tensor) -> tuple[Tensor, Tensor]:
            shares = logits.detach().requires_grad_(True)
            total, slope = logits.new_zeros(()), torch.zeros_like(logits)
            # Round by round, so that only one graph is in memory at a time.
            for view in views:
                value = 1 - view.cosine(model, loss, relaxed(records, inputs, shares), labels)
                slope += torch.autograd.grad(value, shares, materialize_grads=True)[0] / len(views)
                total += value.detach() / len(views)
            return total, slope

        return objective


Objective = Callable[[Tensor], tuple[Tensor, Tensor]]
"""`logits -> (value, slope)`."""


def relaxed(records: PartialRecords, inputs: Tensor, logits: Tensor) -> Tensor:
    """`record feature`, the records with the softmax of `logits`, `record category`, in place of a category."""
    left, right = inputs[:, : records.features.start], inputs[:, records.features.start + logits.shape[1] :]
    return torch.cat([left, logits.softmax(1).to(inputs), right], 1)


def spread(rounds: Sequence[int], count: int | None) -> list[int]:
    """`count` of `rounds`, evenly spaced from the first to the last; all of them where there are fewer."""
    if count is None or count >= len(rounds):
        return list(rounds)
    return [rounds[round(place * (len(rounds) - 1) / max(1, count - 1))] for place in range(count)]


@dataclass(frozen=True, kw_only=True)
class _View:
    """One inspected round.

    Attributes:
        state: w_t, parameters and buffers, under the names of the model.
        names: of its parameters.
        direction: w_t - w_T, or the gradient that was sent, as one vector of length one (or zero).
        by_batch: BatchNorm's running statistics were not shared.
        moved: weights were returned, no gradient was sent.
    """

    state: State
    names: Sequence[str]
    direction: Tensor
    by_batch: bool
    moved: bool

    @classmethod
    def of(cls, update: Update, model: nn.Module, device: torch.device) -> _View:
        """The view of one update.

        Raises:
            AttackError: the update holds NaN, or the model computes with buffers that were not shared.
            TranscriptError: the update is of another model.
        """
        where = f"round {update.round}, client {update.client}"
        for state in (update.before, update.after, update.gradient or {}):
            if broken := non_finite(state):
                raise AttackError(
                    f"{where}: {broken[0]} holds NaN or infinite values; this update cannot be attacked, inspect other "
                    "rounds or attack another victim"
                )
        found, by_batch = matched(model, update.before, where)
        named = named_states(update, model, where)
        direction = torch.cat([named.direction(name).flatten() for name in named.shapes]).to(device)
        length = direction.norm()
        return cls(
            state={name: tensor.to(device) for name, tensor in found.items()},
            names=list(named.shapes),
            direction=direction / length if length > 0 else direction,
            by_batch=by_batch,
            moved=named.gradient is None,
        )

    def cosine(
        self, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, labels: Tensor
    ) -> Tensor:
        """Of the gradient of the loss at w_t with the direction; differentiable in the inputs."""
        weights = {name: self.state[name].detach().requires_grad_(True) for name in self.names}
        made = functional_call(model, {**self.state, **weights}, (inputs,))
        slopes = torch.autograd.grad(
            loss(made, labels), list(weights.values()), create_graph=True, materialize_grads=True
        )
        gradient = torch.cat([slope.flatten() for slope in slopes])
        cosine: Tensor = gradient @ self.direction / gradient.norm().clamp_min(torch.finfo(gradient.dtype).tiny)
        return cosine
