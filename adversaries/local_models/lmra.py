"""LMRA's heuristic for any model: learn the client's update as a function, then find its zero."""

from __future__ import annotations

import copy
import itertools
import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from fedsim.base.constraints import PositiveFloat, PositiveInt
from fedsim.base.errors import AttackError, ConfigError
from fedsim.interfaces.attack import CLIENT, Attack, MessageKind, Paper, Progress, RoundsNeeded, Target
from fedsim.interfaces.findings import LocalModel
from fedsim.inversion.descent import Curves, Trial, descend, make_optimizer_step, offset_progress
from fedsim.inversion.local_updates import PAPER, LocalUpdates, UpdateSpan, read_updates
from fedsim.training.optimizers import Adam

log = logging.getLogger("fedsim." + __name__)

_SHAPES = ("16x2", "32x2", "64x2")
_LEARNING_RATES = (1e-3, 1e-4, 1e-5, 1e-6)
_MINIMISE_LEARNING_RATES = (1e-1, 1e-2, 5e-3, 1e-3)
"""The values of Tables 5-8, among which a setting that is None is chosen."""
_SHAPE_PATTERN = re.compile(r"([1-9]\d*)x([1-9]\d*)")
_VALIDATION_SHARE = 0.2
_MAX_RELATIVE_ERROR = 0.95
"""A mapping whose validation error is above this share of a constant's is rejected."""
_EPOCHS_PER_VALIDATION = 10


@dataclass(frozen=True, kw_only=True)
class LocalModelReconstruction(Attack):
    """Reconstruct a client's optimal local model from the models that it received and returned.

    The client would not change its optimal local model, so its update is zero there:

    1. Normalise broadcast models and updates (`_build_pairs`).
    2. Learn G, a fully connected ReLU network that maps a broadcast model theta to the client's
       update theta_c - theta, by least squares over its messages with Adam (Eq. 7; `_learn`).
    3. Minimise ||G(theta)||^2 over theta with Adam (Eq. 8; `_minimise`).

    A random fifth of the messages is held out for validation. It selects the shape, the learning
    rate and the number of epochs of Eq. 7; then G is trained on all messages. The learning rate of
    Eq. 8 is the one that reaches the smallest objective. The attack fails if G diverges, or if its
    validation error is above 0.95 times that of a constant, zero or the mean of the other updates:
    such a G does not locate the client's optimum.

    Inputs are centred and divided by one number, so that their mean square is one; updates are
    divided by one number likewise, and not centred, since their zero is wanted.

    With `space = "span"` models are represented in an orthonormal basis of the affine span of all
    observed models (at most 2 n dimensions for n messages), and updates in a basis of their own
    span (n). Gradient descent moves the first layer only within the first span and the last layer
    within the second, so nothing learnable is lost. Left out is the random part of the initial
    weights outside of the spans, which theta would follow in Eq. 8 into directions that the
    messages do not determine. (Adam, which scales each coordinate, does depend on the basis.) The
    time hardly depends on d; most of it reads the messages. `space = "full"` is the paper's literal
    G, with 2 d times the width parameters. If shape and learning rate are to be chosen, Eq. 7 is
    solved twelve times more.

    Args:
        hidden: `AxB`, B hidden layers of A units in G. None chooses among 16x2, 32x2, 64x2.
            [Tables 5-8]
        learning_rate: of Eq. 7. None chooses among 1e-3, 1e-4, 1e-5, 1e-6.      [Tables 5-8]
        epochs: most passes over the messages in Eq. 7, one step each; training ends at the smallest
            validation error.                                                    [not in the paper]
        minimise_learning_rate: of Eq. 8, in units of the inputs of G. None chooses among 1e-1,
            1e-2, 5e-3, 1e-3.                                                    [Tables 5-8]
        minimise_epochs: steps of Eq. 8.                                  [Tables 5-8: 1e2 to 1e4]
        start: where Eq. 8 begins, at the client's `last-returned` model or the last `global` one.
            [not in the paper]
        space: `span` or `full`, see above.

    References:
        [Driouich2022], Algorithm 2. Differs: hyperparameters are selected as above, not given for
        each client (the paper does not say how it found them); inputs and updates are normalised;
        the span.
    """

    hidden: str | None = None
    learning_rate: PositiveFloat | None = None
    epochs: PositiveInt = 1000
    minimise_learning_rate: PositiveFloat | None = None
    minimise_epochs: PositiveInt = 2000
    start: Literal["last-returned", "global"] = "last-returned"
    space: Literal["span", "full"] = "span"

    paper: ClassVar[Paper] = PAPER
    needs: ClassVar[frozenset[str]] = frozenset()
    reads: ClassVar[frozenset[str]] = frozenset({CLIENT})
    rounds_needed: ClassVar[RoundsNeeded] = 3  # a mapping is learnt from some, validated on others
    message_kind: ClassVar[MessageKind] = "weights"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden is not None and not _SHAPE_PATTERN.fullmatch(self.hidden):
            raise ConfigError(f"hidden: expected AxB, units of a layer by layers, such as 64x2, got {self.hidden!r}")

    def _run(self, target: Target, progress: Progress) -> LocalModel:
        """Run Algorithm 2."""
        updates = read_updates(target)
        if torch.equal(updates.before, updates.after):
            raise AttackError(f"{updates.location}: the client returned every model unchanged; choose another victim")
        pairs = _build_pairs(updates, self.space, self.start, target.knowledge.device)
        reporter = _SequentialProgress(progress, self._count_steps())
        mapping, errors = self._learn(pairs, updates.location, target.rng, reporter)
        theta, curve = self._minimise(mapping, pairs.start, updates.location, reporter)
        reporter.finish(float(curve.min()))
        return LocalModel(state=updates.to_state(pairs.to_model(theta.cpu())), trace={"objective": curve, **errors})

    def _list_candidates(self) -> list[tuple[str, float]]:
        """Return the shapes and learning rates of G to choose among."""
        shapes = _SHAPES if self.hidden is None else (self.hidden,)
        learning_rates = _LEARNING_RATES if self.learning_rate is None else (self.learning_rate,)
        return list(itertools.product(shapes, learning_rates))

    def _list_minimise_rates(self) -> tuple[float, ...]:
        return _MINIMISE_LEARNING_RATES if self.minimise_learning_rate is None else (self.minimise_learning_rate,)

    def _count_steps(self) -> int:
        """Return the largest number of steps of all trainings together."""
        num_trainings = len(self._list_candidates()) + 1
        return num_trainings * self.epochs + len(self._list_minimise_rates()) * self.minimise_epochs

    def _learn(
        self, pairs: _Pairs, where: str, rng: torch.Generator, reporter: _SequentialProgress
    ) -> tuple[nn.Module, dict[str, Tensor]]:
        """Solve Eq. 7; return the mapping and its errors by epoch, relative to that of a constant.

        Between two validations the validation error is that of the last one.
        """
        # Hold messages out for validation.
        order = torch.randperm(len(pairs.inputs), generator=rng)
        num_validation = max(1, round(_VALIDATION_SHARE * len(order)))
        training_pairs, validation_pairs = pairs.select(order[num_validation:]), pairs.select(order[:num_validation])
        constants = (training_pairs.targets.mean(0), torch.zeros_like(training_pairs.targets[0]))
        constant_errors = [float((validation_pairs.targets - constant).square().mean()) for constant in constants]
        constant_error = min(constant_errors)
        if not constant_error > 0:
            raise AttackError(
                f"{where}: it returned all models as they were that the mapping would be validated on; inspect rounds "
                "in which it trains"
            )

        # Train a mapping with each shape and learning rate.
        trials: list[tuple[nn.Module, _Training]] = []
        for shape, learning_rate in self._list_candidates():
            untrained = _build_network(shape, pairs, rng)
            network = copy.deepcopy(untrained)
            training = _train(network, learning_rate, training_pairs, validation_pairs, self.epochs, reporter)
            relative_error = training.lowest / constant_error
            log.info("%s: G %s at %g: error %.4g of a constant's", where, shape, learning_rate, relative_error)
            trials.append((untrained, training))

        # Choose the best by its validation error.
        mapping, best = min(trials, key=lambda trial: trial[1].lowest)
        if not math.isfinite(best.lowest):
            raise AttackError(f"{where}: the training of the mapping diverged; lower the attack's learning_rate")
        if best.lowest >= _MAX_RELATIVE_ERROR * constant_error:
            raise AttackError(
                f"{where}: the mapping learnt from {len(training_pairs.inputs)} messages predicts the other "
                f"{num_validation} no better than a constant does (error {best.lowest / constant_error:.3g} times as "
                f"large, expected below {_MAX_RELATIVE_ERROR}), so it does not locate the client's optimum; inspect "
                "more rounds (recording.every, adversary.rounds), or rounds that differ more"
            )

        # Train it on all messages.
        final = _train(mapping, best.learning_rate, pairs, None, best.best_epoch, reporter)
        if not len(final.errors):
            raise AttackError(f"{where}: the training of the mapping diverged; lower the attack's learning_rate")
        validation = torch.tensor(best.validation).repeat_interleave(_EPOCHS_PER_VALIDATION)[: len(best.errors)]
        return mapping, {
            "training_error": best.errors / constant_error,
            "validation_error": validation / constant_error,
        }

    def _minimise(
        self, mapping: nn.Module, start: Tensor, where: str, reporter: _SequentialProgress
    ) -> tuple[Tensor, Tensor]:
        """Solve Eq. 8 with the best learning rate; return theta and the curve of ||G||^2."""
        mapping.requires_grad_(False)
        results = []
        for learning_rate in self._list_minimise_rates():
            result = _descend(mapping, start, learning_rate, self.minimise_epochs, reporter)
            if result is not None:
                results.append(result)
        if not results:
            raise AttackError(f"{where}: minimising the mapping diverged; lower the attack's minimise_learning_rate")
        return min(results, key=lambda result: float(result[1].min()))


@dataclass(frozen=True, kw_only=True)
class _Pairs:
    """Training data of G, normalised and in float32.

    Attributes:
        inputs: `message input`, broadcast models.
        targets: `message output`, updates.
        start: `input`, where Eq. 8 begins.
        to_model: maps `input` back to `parameter`.
    """

    inputs: Tensor
    targets: Tensor
    start: Tensor
    to_model: Callable[[Tensor], Tensor]

    def select(self, indices: Tensor) -> _Pairs:
        """Return the pairs of some messages."""
        indices = indices.to(self.inputs.device)
        return replace(self, inputs=self.inputs[indices], targets=self.targets[indices])


def _build_pairs(updates: LocalUpdates, space: str, start: str, device: torch.device) -> _Pairs:
    """Normalise models and updates, in coordinates of `space`, to a mean square of one."""
    if space == "span":
        span = UpdateSpan(updates)
        before, after, moves = span.before, span.after, span.deltas
        to_model: Callable[[Tensor], Tensor] = span.model
    else:
        origin = updates.before.mean(0)
        before, after, moves = updates.before - origin, updates.after - origin, updates.compute_deltas()
        to_model = partial(torch.add, origin)
    unit = float(before.square().mean().sqrt()) or 1.0  # 0 if all models are equal; validation fails then
    start_model = after[-1] if start == "last-returned" else before[-1]
    return _Pairs(
        inputs=(before / unit).to(device, torch.float32),
        targets=(moves / moves.square().mean().sqrt()).to(device, torch.float32),
        start=(start_model / unit).to(device, torch.float32),
        to_model=lambda coordinates: to_model(coordinates * unit),
    )


def _build_network(shape: str, pairs: _Pairs, rng: torch.Generator) -> nn.Module:
    """Return G with the shape `AxB`, initialised as PyTorch does by default."""
    match = _SHAPE_PATTERN.fullmatch(shape)
    assert match is not None
    width, depth = map(int, match.groups())
    sizes = [pairs.inputs.shape[1], *[width] * depth, pairs.targets.shape[1]]
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layer = nn.Linear(inputs, outputs, device="meta").to_empty(device="cpu")
        for parameter in layer.parameters():
            nn.init.uniform_(parameter, -(inputs**-0.5), inputs**-0.5, generator=rng)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1]).to(pairs.inputs.device)


@dataclass(frozen=True, kw_only=True)
class _Training:
    """Errors of one training of G.

    Attributes:
        errors: mean squared error by epoch; empty if the training diverged.
        validation: validation error, every `_EPOCHS_PER_VALIDATION` epochs.
    """

    learning_rate: float
    errors: Tensor
    validation: list[float]

    @property
    def lowest(self) -> float:
        """Return the lowest validation error, infinity if the training diverged."""
        return min(self.validation) if len(self.errors) else math.inf

    @property
    def best_epoch(self) -> int:
        """Return the number of epochs up to the lowest validation error, at least 1."""
        return max(1, _EPOCHS_PER_VALIDATION * self.validation.index(self.lowest))


def _train(
    network: nn.Module,
    learning_rate: float,
    training_pairs: _Pairs,
    validation_pairs: _Pairs | None,
    epochs: int,
    reporter: _SequentialProgress,
) -> _Training:
    """Train `network` by full-batch steps on Eq. 7."""
    weights = list(network.parameters())
    validation: list[float] = []

    def set_gradients(epoch: int) -> Curves:
        if validation_pairs is not None and epoch % _EPOCHS_PER_VALIDATION == 0:
            with torch.no_grad():
                residuals = network(validation_pairs.inputs) - validation_pairs.targets
                validation.append(float(residuals.square().mean()))
        error = (network(training_pairs.inputs) - training_pairs.targets).square().mean()
        for weight, gradient in zip(weights, torch.autograd.grad(error, weights), strict=True):
            weight.grad = gradient
        return {"objective": error}

    trial = Trial(
        step=make_optimizer_step(Adam(weights, learning_rate, fused=True), set_gradients),
        point=lambda: torch.cat([weight.detach().flatten() for weight in weights]),
    )
    surviving = descend([trial], epochs, reporter.next_stage(epochs), where="G")
    errors = trial.trace()["objective"] if surviving else torch.empty(0)
    return _Training(learning_rate=learning_rate, errors=errors, validation=validation)


def _descend(
    mapping: nn.Module, start: Tensor, learning_rate: float, steps: int, reporter: _SequentialProgress
) -> tuple[Tensor, Tensor] | None:
    """Minimise Eq. 8; return the best theta and the objective by step, None if it diverged."""
    theta = start.clone().requires_grad_()
    best, lowest = start, math.inf

    def set_gradient(step: int) -> Curves:
        nonlocal best, lowest
        objective = mapping(theta).square().mean()
        if (value := objective.item()) < lowest:
            best, lowest = theta.detach().clone(), value
        (theta.grad,) = torch.autograd.grad(objective, theta)
        return {"objective": objective}

    trial = Trial(step=make_optimizer_step(Adam([theta], learning_rate, fused=True), set_gradient), point=theta.detach)
    surviving = descend([trial], steps, reporter.next_stage(steps), where="theta")
    return (best, trial.trace()["objective"]) if surviving else None


class _SequentialProgress:
    """Progress of several trainings that run one after the other."""

    def __init__(self, progress: Progress, total_steps: int) -> None:
        self._progress, self._total_steps, self._steps_so_far = progress, total_steps, 0

    def next_stage(self, steps: int) -> Progress:
        """Return the progress of the next training, of so many steps."""
        progress = offset_progress(self._progress, self._steps_so_far, self._total_steps)
        self._steps_so_far += steps
        return progress

    def finish(self, objective: float) -> None:
        """Report the end, also where fewer steps were taken."""
        self._progress(self._total_steps, self._total_steps, {"objective": objective})
