"""RLU: label distribution inference by least squares, with confidences on auxiliary data."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adversaries.inference.label_distribution import check_output_layer, infer_label_distribution
from adversaries.loadable_network import LoadableNetwork
from adversaries.local_models.model_sources import compute_outputs
from adversaries.simulated import training_plan
from fedsim.base.constraints import NonNegativeInt
from fedsim.base.errors import AttackError, RunError
from fedsim.base.papers import cite
from fedsim.interfaces.attack import (
    ALL,
    Attack,
    Knowledge,
    Paper,
    Progress,
    RoundsNeeded,
    Target,
    warn,
)
from fedsim.interfaces.findings import LabelDistribution
from fedsim.inversion.labels.last_layer import (
    apportion_counts,
    has_own_weights,
    last_bias_name,
    untrained_layer_error,
)
from fedsim.inversion.labels.logit_gradient import logit_gradient
from fedsim.inversion.labels.updates import layer_directions, total_step_size
from fedsim.inversion.named_states import named_states
from fedsim.inversion.training_mismatch import OPTIMIZER_FACTS, warn_unless_plain_sgd
from fedsim.recording.wire_format import State, Update
from fedsim.training.loop import local_update
from fedsim.training.model_state import copy_state
from fedsim.training.settings import known_steps

_MAX_EVALUATION_POINTS = 8
"""At most so many local steps, evenly spaced, at which confidences are computed."""
_FORWARD_CHUNK = 1000
"""Auxiliary records in a forward pass."""
_SUM_CONSTRAINT_WEIGHT = 1e3
"""Weight of the equation that shares sum to 1; the other equations have entries below 1."""


@dataclass(frozen=True, kw_only=True)
class LabelsFromUpdates(Attack):
    """Claim the shares of classes that explain the update of the last layer's bias.

    Over a round the bias changes by -s (S' pi - pi), where s = learning rate x local steps, pi are
    the shares of classes, and S_kc is the model's mean confidence in class c on examples of class
    k, averaged over the local steps. S is estimated on auxiliary records; its off-diagonal entries
    are the erroneous confidence.

    1. Estimate S: for one step, as with a gradient, at w_t; for several steps from logits
       interpolated between those at w_t and at w_k (`_Confidences.interpolate`).
    2. Solve for pi by least squares, with pi >= 0 and sum 1 (`_solve_shares`).
    3. After several steps, refine (`_refine_by_simulation`): simulate the client's training on
       auxiliary records with shares pi, estimate S along it (`_Confidences.simulate`), move pi half
       of the way to the new solution, and repeat. The claim is the mean over the last half of the
       iterations, because records are drawn anew in each.

    Args:
        simulations: number of simulated trainings; 0 claims the first pi.

    References:
        [Chen2024].
        Differs: of the paper only abstract and summaries were available; where it draws each
        epoch's logits from distributions that it updates (Monte Carlo), whole trainings are
        simulated; steps of SGD only, where the paper takes any optimizer.
    """

    simulations: NonNegativeInt = 10

    paper: ClassVar[Paper] = cite("Chen2024")
    needs: ClassVar[frozenset[str]] = frozenset({"model", "auxiliary", "learning_rate", "local_epochs", "batch_size"})
    uses: ClassVar[frozenset[str]] = OPTIMIZER_FACTS | {"defenses", "label_smoothing", "loss"}
    rounds_needed: ClassVar[RoundsNeeded] = ALL

    def check_facts(self, knowledge: Knowledge, num_examples: int | None = None, granted: Collection[str] = ()) -> None:
        """Refuse auxiliary records without classes, other optimizers than SGD, and a last layer without a bias."""
        shape = tuple(_Confidences(self, knowledge).probes.shape[1:])
        if knowledge.optimizer not in (None, "sgd"):
            raise _optimizer_error("optimizer", knowledge.optimizer)
        check_output_layer(replace(knowledge, input_shape=shape), reads_bias=True)

    def check_message(self, update: Update, knowledge: Knowledge) -> None:
        """Refuse a network of which a part stays with the clients."""
        _read_bias_change(update, knowledge, _Confidences(self, knowledge))

    def _run(self, target: Target, progress: Progress) -> LabelDistribution:
        knowledge = target.knowledge
        warn_unless_plain_sgd(
            self, knowledge, f"client {target.victim}", simulated={"momentum", "weight_decay", "proximal_mu"}
        )
        confidences = _Confidences(self, knowledge)

        def solve_shares(update: Update) -> Tensor:
            where = update.name

            bias_change = _read_bias_change(update, knowledge, confidences)
            if update.gradient is not None:
                return _solve_shares(confidences.interpolate(update.before, update.before, 1, where), bias_change)

            # Divide by learning rate x steps.
            scale, steps = total_step_size(update.num_examples, knowledge), known_steps(knowledge, update.num_examples)
            if scale is None or steps is None:
                raise _optimizer_error(where, knowledge.optimizer)
            gradient = bias_change / scale
            shares = _solve_shares(confidences.interpolate(update.before, update.after, steps, where), gradient)
            if steps == 1 or not self.simulations:
                return shares
            return self._refine_by_simulation(shares, confidences, update, gradient, target.rng)

        return infer_label_distribution(target, solve_shares, progress, smoothing=knowledge.label_smoothing)

    def _refine_by_simulation(
        self, shares: Tensor, confidences: _Confidences, update: Update, gradient: Tensor, rng: torch.Generator
    ) -> Tensor:
        """Alternate simulated training and least squares; return the mean of the last half."""
        shares_by_iteration = []
        for _ in range(self.simulations):
            confidence = confidences.simulate(update, shares, rng)
            shares = (shares + _solve_shares(confidence, gradient)) / 2
            shares_by_iteration.append(shares)
        last_half = shares_by_iteration[len(shares_by_iteration) // 2 :]
        return torch.stack(last_half).mean(0)


def _read_bias_change(update: Update, knowledge: Knowledge, confidences: _Confidences) -> Tensor:
    """Return how far the last layer's bias moved, `class`."""
    network, probes = confidences.network.load(update.before, update.name), confidences.probes
    name, owns_weights = last_bias_name(network, probes), has_own_weights(network, probes)
    states, defenses = named_states(update, network, update.name), knowledge.defenses_in(update.round)
    bias_change = layer_directions(name, states, defenses, owns_weights=owns_weights)[name]
    if not bias_change.any():
        raise untrained_layer_error(name)
    form = logit_gradient(knowledge.loss or cross_entropy, len(bias_change), knowledge.device)
    if form.divisors is None or not form.treats_classes_alike:
        raise AttackError(
            f"{update.name}: clients minimise a loss with class weights, or a sum over examples, and RLU needs a mean "
            "without weights; take label-counts"
        )
    return bias_change


def _optimizer_error(where: str, optimizer: str | None) -> AttackError:
    return AttackError(
        f"{where}: clients step with {optimizer}, and how far that moves a weight is not known; take label-counts"
    )


class _Confidences:
    """Estimates the confidence matrix S on auxiliary records."""

    def __init__(self, attack: Attack, knowledge: Knowledge) -> None:
        assert knowledge.auxiliary is not None
        self._inputs = knowledge.auxiliary.inputs.to(knowledge.device)
        self._labels = knowledge.auxiliary.labels.cpu()
        self.network = LoadableNetwork(knowledge)
        self._title, self._knowledge, self._has_warned = attack.title, knowledge, False
        if not len(self._inputs) or self._labels.is_floating_point() or len(self._labels) != len(self._inputs):
            raise AttackError(
                f"of {len(self._inputs)} auxiliary records {len(self._labels)} have labels that are classes, expected "
                "one each; grant others with adversary.knowledge.auxiliary"
            )

    @property
    def probes(self) -> Tensor:
        """Return inputs that show how the network is built, `example ...`."""
        return self._inputs[:2]

    def interpolate(self, before: State, after: State, steps: int, where: str) -> Tensor:
        """Estimate S, `class class`, from logits interpolated between those of two models."""
        start = self._state_logits(before, where)
        end = start if after is before else self._state_logits(after, where)
        points = torch.linspace(0, 1 - 1 / steps, min(steps, _MAX_EVALUATION_POINTS), dtype=torch.float64)
        confidences = [((1 - point) * start + point * end).softmax(1) for point in points]
        return self._average_by_class(torch.stack(confidences), where)

    def simulate(self, update: Update, shares: Tensor, rng: torch.Generator) -> Tensor:
        """Estimate S along a simulated training on auxiliary records with these shares of classes."""
        where, knowledge = update.name, self._knowledge
        num_examples = update.num_examples
        drawn = self._draw_records(shares, num_examples, rng)
        inputs, labels = self._inputs[drawn], self._labels[drawn].to(self._inputs.device)

        # Note the confidences in the middle of each of a few equal spans of steps.
        model = self.network.load(update.before, where)
        interval = max(1, (known_steps(knowledge, num_examples) or 1) // _MAX_EVALUATION_POINTS)
        confidences: list[Tensor] = []
        step = itertools.count()

        def record_confidences() -> None:
            if next(step) % interval == interval // 2:
                confidences.append(self._model_logits(model, where).softmax(1))

        key = ("rlu", int(torch.randint(1 << 62, (), generator=rng)))
        training = training_plan(knowledge, num_examples, label_smoothing=knowledge.label_smoothing or 0.0)
        try:
            local_update(model, copy_state(model), inputs, labels, training, key=key, before_step=record_confidences)
        except RunError as error:
            raise AttackError(
                f"{where}: training that is simulated on auxiliary records diverged ({error}); set simulations = 0"
            ) from error
        return self._average_by_class(torch.stack(confidences), where)

    def _draw_records(self, shares: Tensor, count: int, rng: torch.Generator) -> Tensor:
        """Draw indices of `count` records with replacement, in these shares of classes."""
        indices_by_class = [(self._labels == label).nonzero().flatten() for label in range(len(shares))]
        available = torch.tensor([float(len(indices) > 0) for indices in indices_by_class])
        class_counts = apportion_counts(shares * available, count).tolist()
        drawn = []
        for indices, class_count in zip(indices_by_class, class_counts, strict=True):
            if class_count:
                drawn.append(indices[torch.randint(len(indices), (class_count,), generator=rng)])
        return torch.cat(drawn)

    def _average_by_class(self, confidences: Tensor, where: str) -> Tensor:
        """Average `model record class` over models and over the records of each class.

        A class without auxiliary records gets the mean over all records; a warning says so once.
        """
        record_means, num_classes = confidences.mean(0), confidences.shape[2]
        if int(self._labels.max()) >= num_classes:
            raise AttackError(
                f"{where}: the model has {num_classes} outputs, and an auxiliary record is of class "
                f"{int(self._labels.max())}; grant records of the federation's classes"
            )
        counts = self._labels.bincount(minlength=num_classes)
        missing = (counts == 0).nonzero().flatten().tolist()
        if missing and not self._has_warned:
            self._has_warned = True
            warn(
                f"{self._title}: {where}: there is no auxiliary record of class "
                f"{', '.join(map(str, missing))}; the mean of all is used instead"
            )
        sums = torch.zeros((num_classes, num_classes), dtype=torch.float64)
        sums.index_add_(0, self._labels, record_means)
        class_means = sums / counts.clamp_min(1)[:, None]
        return torch.where((counts > 0)[:, None], class_means, record_means.mean(0))

    def _state_logits(self, state: State, where: str) -> Tensor:
        return self._model_logits(self.network.load(state, where), where)

    @torch.no_grad()
    def _model_logits(self, network: nn.Module, where: str) -> Tensor:
        """Return the logits of the auxiliary records, `record class` in float64."""
        training = network.training
        network.eval()
        chunks = [compute_outputs(network, chunk, where) for chunk in torch.split(self._inputs, _FORWARD_CHUNK)]
        network.train(training)
        return torch.cat(chunks).double().cpu()


def _solve_shares(confidences: Tensor, gradient: Tensor) -> Tensor:
    """Solve S' pi - pi = g for shares pi >= 0 of sum 1 by least squares.

    Args:
        confidences: `class class`, S.
        gradient: `class`, g, the mean gradient of the bias.
    """
    from scipy.optimize import nnls  # takes a while

    num_classes = len(confidences)
    sum_equation = np.full((1, num_classes), _SUM_CONSTRAINT_WEIGHT)
    equations = np.vstack([(confidences.T - torch.eye(num_classes)).numpy(), sum_equation])
    shares, _ = nnls(equations, np.append(gradient.numpy(), _SUM_CONSTRAINT_WEIGHT))
    return torch.from_numpy(shares)
