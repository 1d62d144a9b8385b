"""RLU: the label distribution of a client by least squares, with what the model makes of labelled auxiliary data."""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adversaries.inference.label_distribution import over_rounds
from adversaries.labels.last_layer import apportioned, last_bias, untrained
from adversaries.labels.logit_gradient import logit_gradient
from adversaries.labels.updates import layer_directions, steps_times_rate
from adversaries.local_models.model_sources import Network, outputs
from adversaries.named_states import named_states
from adversaries.scene import STEPPING, known_steps, warn_unless_plain
from adversaries.simulated import training_of
from fedsim.attacks import Attack, Knowledge, Paper, Progress
from fedsim.errors import AttackError, ConfigError, RunError
from fedsim.findings import Finding
from fedsim.recording.transcript import Transcript
from fedsim.training.loop import local_update
from fedsim.training.model_state import state_of
from fedsim.wire.messages import State, Update

log = logging.getLogger("fedsim." + __name__)

_PLACES = 8
"""At most so many local steps at which confidences are taken, spread evenly."""
_WIDTH = 1000
"""Auxiliary records in a forward pass."""
_SUM = 1e3
"""Weight of the condition that shares sum to 1, beside equations whose sides are below 1."""


@dataclass(frozen=True, kw_only=True)
class LabelsFromUpdates(Attack):
    """Claim the shares of classes with which the last layer's bias would have moved as it did.

    Over a round the bias moves by -s (S' pi - pi), where s = learning rate x local steps, pi are the shares of classes
    and S_kc is how sure the model is of class c about examples of class k, on average over the steps. S is that of
    auxiliary records; its values off the diagonal are the erroneous confidence. pi is the solution of these
    equations by least squares, not negative and with sum 1.

    For one step, as behind a gradient, S is taken at w_t. For several steps a first pi comes from logits that go
    straight from what w_t makes of the auxiliary records to what w_k does. Then the client's training is simulated on
    auxiliary records of these shares, S is taken along the way, and pi moves half the way to the solution; and so on.
    The claim is the mean of the last half of them, because the records are drawn anew each time.

    Args:
        simulations: of the client's training; 0 leaves pi as it is first.

    References:
        Chen and Vikalo: Recovering Labels from Local Updates in Federated Learning, ICML 2024. Differs: of the paper
        only abstract and summaries were to be had; where it draws logits of each epoch from distributions that it
        moves along (Monte Carlo), whole trainings are simulated; steps of SGD only, where the paper takes any
        optimizer.
    """

    simulations: int = 10

    paper: ClassVar[Paper] = Paper(
        title="Recovering Labels from Local Updates in Federated Learning",
        authors="Chen, Vikalo",
        venue="ICML",
        year=2024,
        url="https://arxiv.org/abs/2405.00955",
    )
    needs: ClassVar[frozenset[str]] = frozenset({"model", "auxiliary", "learning_rate", "local_epochs", "batch_size"})
    uses: ClassVar[frozenset[str]] = STEPPING | {"defenses", "label_smoothing", "loss"}
    temporal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.simulations < 0:
            raise ConfigError(f"simulations: expected at least 0, got {self.simulations}")

    def _run(
        self, transcript: Transcript, knowledge: Knowledge, victim: int, rng: torch.Generator, progress: Progress
    ) -> Finding:
        warn_unless_plain(self, knowledge, f"client {victim}", simulated={"momentum", "weight_decay", "proximal_mu"})
        confidences = _Confidences(self, knowledge)

        def solved(update: Update) -> Tensor:
            where = f"round {update.round}, client {update.client}"
            name = confidences.bias(update.before, where)
            states = named_states(update, confidences.network.holding(update.before, where), where)
            moved = layer_directions(name, states, knowledge.defenses or ())[name]
            if not moved.any():
                raise untrained(name)
            form = logit_gradient(knowledge.loss or cross_entropy, len(moved), knowledge.device)
            if form.divisors is None or not form.treats_classes_alike:
                raise AttackError(
                    f"{where}: clients minimise a loss with class weights, or a sum, and RLU is of the mean without; "
                    "take label-counts"
                )
            if update.gradient is not None:
                return _shares(confidences.between(update.before, update.before, 1, where), moved)
            scale, steps = steps_times_rate(update.num_examples, knowledge), known_steps(knowledge, update.num_examples)
            if scale is None or steps is None:
                raise AttackError(
                    f"{where}: clients step with {knowledge.optimizer}, and how far that moves a weight is not known; "
                    "take label-counts"
                )
            first = _shares(confidences.between(update.before, update.after, steps, where), moved / scale)
            if steps == 1 or not self.simulations:
                return first
            return self._simulated(first, confidences, update, moved / scale, rng)

        return over_rounds(transcript, victim, knowledge, solved, progress)

    def _simulated(
        self, shares: Tensor, confidences: _Confidences, update: Update, slope: Tensor, rng: torch.Generator
    ) -> Tensor:
        """`class`, shares that explain `slope` by trainings which are simulated with them."""
        found = []
        for _ in range(self.simulations):
            sure = confidences.along(update, shares, rng)
            shares = (shares + _shares(sure, slope)) / 2
            found.append(shares)
        return torch.stack(found[len(found) // 2 :]).mean(0)


class _Confidences:
    """Auxiliary records, and a network that each model is put into in turn."""

    def __init__(self, attack: Attack, knowledge: Knowledge) -> None:
        assert knowledge.auxiliary is not None
        self._inputs = knowledge.auxiliary.inputs.to(knowledge.device)
        self._labels = knowledge.auxiliary.labels.cpu()
        self.network = Network(knowledge)
        self._called, self._knowledge, self._told = attack.called, knowledge, False
        if not len(self._inputs) or self._labels.is_floating_point() or len(self._labels) != len(self._inputs):
            raise AttackError(
                f"of {len(self._inputs)} auxiliary records {len(self._labels)} have labels that are classes, expected "
                "one each; grant others with adversary.knowledge.auxiliary"
            )

    def bias(self, before: State, where: str) -> str:
        """Name of the last layer's bias."""
        return last_bias(self.network.holding(before, where), self._inputs[:2])

    def between(self, before: State, after: State, steps: int, where: str) -> Tensor:
        """`class class`, how sure of each class models between two are about records of each class, a mean."""
        start = self._logits(before, where)
        end = start if after is before else self._logits(after, where)
        parts = torch.linspace(0, 1 - 1 / steps, min(steps, _PLACES), dtype=torch.float64)
        return self._by_class(torch.stack([((1 - part) * start + part * end).softmax(1) for part in parts]), where)

    def along(self, update: Update, shares: Tensor, rng: torch.Generator) -> Tensor:
        """The same of models at the steps of a training that is simulated with records of these shares of classes.

        Raises:
            AttackError: the training diverged.
        """
        where, known, count = f"round {update.round}, client {update.client}", self._knowledge, update.num_examples
        places = [(self._labels == label).nonzero().flatten() for label in range(len(shares))]
        there = torch.tensor([float(len(own) > 0) for own in places])
        chosen = torch.cat(
            [
                own[torch.randint(len(own), (often,), generator=rng)]
                for own, often in zip(places, apportioned(shares * there, count).tolist(), strict=True)
                if often
            ]
        )
        model = self.network.holding(update.before, where)
        every = max(1, (known_steps(known, count) or 1) // _PLACES)
        found: list[Tensor] = []
        step = itertools.count()

        def look() -> None:
            if next(step) % every == every // 2:
                found.append(self._answers(model, where).softmax(1))

        key = ("rlu", int(torch.randint(1 << 62, (), generator=rng)))
        inputs, labels = self._inputs[chosen], self._labels[chosen].to(self._inputs.device)
        plan = training_of(known, count, label_smoothing=known.label_smoothing or 0.0)
        try:
            local_update(model, state_of(model), inputs, labels, plan, key=key, before_step=look)
        except RunError as error:
            raise AttackError(
                f"{where}: training that is simulated on auxiliary records diverged ({error}); set simulations = 0"
            ) from error
        return self._by_class(torch.stack(found), where)

    def _by_class(self, sure: Tensor, where: str) -> Tensor:
        """Means over models and over records of each class of `model record class`.

        Of a class without auxiliary records it is the mean over all records, which a warning says once.
        """
        each, classes = sure.mean(0), sure.shape[2]
        if int(self._labels.max()) >= classes:
            raise AttackError(
                f"{where}: the model has {classes} outputs, and an auxiliary record is of class "
                f"{int(self._labels.max())}; grant records of the federation's classes"
            )
        counts = self._labels.bincount(minlength=classes)
        if (missing := (counts == 0).nonzero().flatten().tolist()) and not self._told:
            self._told = True
            log.warning(
                "%s: %s: there is no auxiliary record of class %s; the mean of all stands in",
                self._called,
                where,
                ", ".join(map(str, missing)),
            )
        sums = torch.zeros((classes, classes), dtype=torch.float64).index_add_(0, self._labels, each)
        return torch.where((counts > 0)[:, None], sums / counts.clamp_min(1)[:, None], each.mean(0))

    def _logits(self, state: State, where: str) -> Tensor:
        """`record class`, float64, of a model for the auxiliary records."""
        return self._answers(self.network.holding(state, where), where)

    @torch.no_grad()
    def _answers(self, network: nn.Module, where: str) -> Tensor:
        training = network.training
        network.eval()
        made = torch.cat([outputs(network, part, where) for part in torch.split(self._inputs, _WIDTH)])
        network.train(training)
        return made.double().cpu()


def _shares(sure: Tensor, slope: Tensor) -> Tensor:
    """`class`, shares pi >= 0 of sum 1 for which `sure`' pi - pi is nearest to `slope`, the bias's mean gradient."""
    from scipy.optimize import nnls  # takes a while

    equations = np.vstack([(sure.T - torch.eye(len(sure))).numpy(), np.full((1, len(sure)), _SUM)])
    solution, _ = nnls(equations, np.append(slope.numpy(), _SUM))
    return torch.from_numpy(solution)
