"""LMRA's heuristic for any model: learn how the client moves models, then find one that it would leave alone."""

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

from adversaries.engine.descent import Curves, Trial, descend, following, steps_of
from adversaries.engine.settings import check_choices
from adversaries.local_updates import PAPER, LocalUpdates, Span, read_updates
from fedsim.attacks import CLIENT, Attack, Knowledge, Paper, Progress
from fedsim.errors import AttackError, ConfigError
from fedsim.findings import Finding, LocalModel
from fedsim.recording.transcript import Transcript
from fedsim.training.optimizers import Adam

log = logging.getLogger("fedsim." + __name__)

_SHAPES = ("16x2", "32x2", "64x2")
_RATES = (1e-3, 1e-4, 1e-5, 1e-6)
_MINIMISE_RATES = (1e-1, 1e-2, 5e-3, 1e-3)
"""The values of Tables 5-8, of which a setting that is None is chosen."""
_SHAPE = re.compile(r"([1-9]\d*)x([1-9]\d*)")
_HELD_OUT = 0.2
_USEFUL = 0.95  # a mapping whose validation error is above this share of a constant's is of no use
_FEWEST = 3
_EVERY = 10  # epochs between two evaluations on the held-out messages


@dataclass(frozen=True, kw_only=True)
class LocalModelReconstruction(Attack):
    """Reconstruct the model that a client would have trained alone, from the models it got and returned.

    Learns G, a fully connected ReLU network that maps a broadcast model theta to the client's update theta_c - theta,
    by least squares over its messages (Eq. 7), then minimises ||G(theta)||^2 over theta (Eq. 8), both with Adam. The
    idea: it would leave its optimal local model where it is.

    A fifth of the messages, drawn at random, is held out: on them the shape, the learning rate and the number of
    epochs of Eq. 7 are chosen, then G is trained on all messages. The rate of Eq. 8 is chosen by the objective that
    it reaches. The attack fails where G diverges, and where its error on the held-out updates is above 0.95 times
    that of a constant, zero or the mean of the other updates: then it shows nothing of where the client's optimum is.

    Inputs are centred and divided by one number, so that their mean square is one; updates are divided by one number
    likewise, and not centred, since it is their zero that is sought.

    With `space = "span"` models are represented in an orthonormal basis of the affine span of all that were seen (at
    most 2 n dimensions for n messages), updates in one of theirs (n). By gradient descent the first layer only moves
    within the first, the last layer within the second, so nothing that could be learnt is lost: what is left out is
    the random part of their initial weights outside of the spans, which theta would follow in Eq. 8 into directions
    of which the messages say nothing. Adam, which scales each coordinate, does depend on the basis. It costs time that
    hardly depends on d; to read the messages is most of it. `space = "full"` is the paper's literal G, of 2 d times
    the width parameters. Where shape and rate are to be chosen, Eq. 7 is solved twelve times more.

    Args:
        hidden: `AxB`, B hidden layers of A units in G. None chooses among 16x2, 32x2, 64x2.          [Tables 5-8]
        learning_rate: of Eq. 7. None chooses among 1e-3, 1e-4, 1e-5, 1e-6.                           [Tables 5-8]
        epochs: most passes over the messages in Eq. 7, each one step; where the held-out messages were predicted
            best, training ends.                                                                 [not in the paper]
        minimise_learning_rate: of Eq. 8, in units of the inputs of G. None chooses among 1e-1, 1e-2, 5e-3, 1e-3.
            [Tables 5-8]
        minimise_epochs: steps of Eq. 8.                                                  [Tables 5-8: 1e2 to 1e4]
        start: where Eq. 8 begins, at the client's `last-returned` model or the last `global` one. [not in the paper]
        space: `span` or `full`, see above.

    References:
        Driouich et al.: Local Model Reconstruction Attacks in Federated Learning and their Uses, 2022, Algorithm 2.
        Differs: hyperparameters are chosen as said, not given a client (how the paper's were found it does not say);
        inputs and updates are normalised; the span.
    """

    hidden: str | None = None
    learning_rate: float | None = None
    epochs: int = 1000
    minimise_learning_rate: float | None = None
    minimise_epochs: int = 2000
    start: Literal["last-returned", "global"] = "last-returned"
    space: Literal["span", "full"] = "span"

    paper: ClassVar[Paper] = PAPER
    needs: ClassVar[frozenset[str]] = frozenset()
    reads: ClassVar[frozenset[str]] = frozenset({CLIENT})
    temporal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choices(self)
        if self.hidden is not None and not _SHAPE.fullmatch(self.hidden):
            raise ConfigError(f"hidden: expected AxB, units of a layer by layers, such as 64x2, got {self.hidden!r}")
        for name in ("epochs", "minimise_epochs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1, got {getattr(self, name)}")
        for name in ("learning_rate", "minimise_learning_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name}: expected a finite value above 0, got {value}")

    def _run(
        self, transcript: Transcript, knowledge: Knowledge, victim: int, rng: torch.Generator, progress: Progress
    ) -> Finding:
        """Algorithm 2."""
        updates = read_updates(
            transcript, victim, fewest=_FEWEST, remedy="a mapping is learnt from some and validated on others"
        )
        if torch.equal(updates.before, updates.after):
            raise AttackError(f"{updates.where}: the client returned every model unchanged; choose another victim")
        pairs = _pairs(updates, self.space, self.start, knowledge.device)
        told = _Told(progress, self._steps())
        mapping, errors = self._learn(pairs, updates.where, rng, told)
        found, curve = self._minimise(mapping, pairs.start, updates.where, told)
        told.done(float(curve.min()))
        return LocalModel(state=updates.state(pairs.model(found.cpu())), trace={"objective": curve, **errors})

    def _candidates(self) -> list[tuple[str, float]]:
        """Shapes and learning rates to choose among."""
        shapes = _SHAPES if self.hidden is None else (self.hidden,)
        rates = _RATES if self.learning_rate is None else (self.learning_rate,)
        return list(itertools.product(shapes, rates))

    def _minimise_rates(self) -> tuple[float, ...]:
        return _MINIMISE_RATES if self.minimise_learning_rate is None else (self.minimise_learning_rate,)

    def _steps(self) -> int:
        """How many steps there are at most."""
        return (len(self._candidates()) + 1) * self.epochs + len(self._minimise_rates()) * self.minimise_epochs

    def _learn(
        self, pairs: _Pairs, where: str, rng: torch.Generator, told: _Told
    ) -> tuple[nn.Module, dict[str, Tensor]]:
        """Eq. 7: the mapping, and its errors by epoch while it was validated, relative to that of a constant.

        Between two evaluations on the held-out messages the validation error is that of the last one.
        """
        order = torch.randperm(len(pairs.inputs), generator=rng)
        held = max(1, round(_HELD_OUT * len(order)))
        seen, unseen = pairs.at(order[held:]), pairs.at(order[:held])
        constants = (seen.targets.mean(0), torch.zeros_like(seen.targets[0]))
        constant = min(float((unseen.targets - guess).square().mean()) for guess in constants)
        if not constant > 0:
            raise AttackError(
                f"{where}: it returned all models as they were that the mapping would be validated on; inspect rounds "
                "in which it trains"
            )
        tried: list[tuple[nn.Module, _Training]] = []
        for shape, rate in self._candidates():
            fresh = _network(shape, pairs, rng)
            training = _train(copy.deepcopy(fresh), rate, seen, unseen, self.epochs, told)
            log.info("%s: G %s at %g: error %.4g of a constant's", where, shape, rate, training.lowest / constant)
            tried.append((fresh, training))
        fresh, chosen = min(tried, key=lambda pair: pair[1].lowest)
        if not math.isfinite(chosen.lowest):
            raise AttackError(f"{where}: the training of the mapping diverged; lower the attack's learning_rate")
        if chosen.lowest >= _USEFUL * constant:
            raise AttackError(
                f"{where}: the mapping learnt from {len(seen.inputs)} messages predicts the other {held} no better "
                f"than a constant does (error {chosen.lowest / constant:.3g} times as large, below {_USEFUL} is asked "
                "for), so it cannot tell where the client would stay; inspect more rounds (recording.every, "
                "adversary.rounds), or rounds that differ more"
            )
        final = _train(fresh, chosen.rate, pairs, None, chosen.epochs, told)
        if not len(final.errors):
            raise AttackError(f"{where}: the training of the mapping diverged; lower the attack's learning_rate")
        validation = torch.tensor(chosen.validation).repeat_interleave(_EVERY)[: len(chosen.errors)]
        return fresh, {"training_error": chosen.errors / constant, "validation_error": validation / constant}

    def _minimise(self, mapping: nn.Module, start: Tensor, where: str, told: _Told) -> tuple[Tensor, Tensor]:
        """Eq. 8, by the learning rate that gets lowest: where ||G||^2 was smallest, and its curve."""
        mapping.requires_grad_(False)
        tried = [_descend(mapping, start, rate, self.minimise_epochs, told) for rate in self._minimise_rates()]
        found = [end for end in tried if end is not None]
        if not found:
            raise AttackError(f"{where}: minimising the mapping diverged; lower the attack's minimise_learning_rate")
        return min(found, key=lambda end: float(end[1].min()))


@dataclass(frozen=True, kw_only=True)
class _Pairs:
    """What G is learnt from, in its own units and float32.

    Attributes:
        inputs: `message input`, broadcast models.
        targets: `message output`, updates.
        start: `input`, where Eq. 8 begins.
        model: from `input` back to `parameter`.
    """

    inputs: Tensor
    targets: Tensor
    start: Tensor
    model: Callable[[Tensor], Tensor]

    def at(self, places: Tensor) -> _Pairs:
        """Those of some messages."""
        places = places.to(self.inputs.device)
        return replace(self, inputs=self.inputs[places], targets=self.targets[places])


def _pairs(updates: LocalUpdates, space: str, start: str, device: torch.device) -> _Pairs:
    """Models and updates in coordinates of that space, each divided by one number to have mean square one."""
    if space == "span":
        span = Span(updates)
        before, after, moves = span.before, span.after, span.moves
        model: Callable[[Tensor], Tensor] = span.model
    else:
        origin = updates.before.mean(0)
        before, after, moves = updates.before - origin, updates.after - origin, updates.moves()
        model = partial(torch.add, origin)
    unit = float(before.square().mean().sqrt()) or 1.0  # all models are alike; then no mapping passes validation
    begin = after[-1] if start == "last-returned" else before[-1]
    return _Pairs(
        inputs=(before / unit).to(device, torch.float32),
        targets=(moves / moves.square().mean().sqrt()).to(device, torch.float32),
        start=(begin / unit).to(device, torch.float32),
        model=lambda coordinates: model(coordinates * unit),
    )


def _network(shape: str, pairs: _Pairs, rng: torch.Generator) -> nn.Module:
    """G: `AxB`, initialised as PyTorch does by default."""
    match = _SHAPE.fullmatch(shape)
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
    """How a training of G went.

    Attributes:
        rate: its learning rate.
        errors: mean squared error by epoch; empty where it diverged.
        validation: that of the held-out messages, every `_EVERY` epochs.
    """

    rate: float
    errors: Tensor
    validation: list[float]

    @property
    def lowest(self) -> float:
        """The lowest validation error; infinite where training diverged."""
        return min(self.validation) if len(self.errors) else math.inf

    @property
    def epochs(self) -> int:
        """How many epochs it took to get there."""
        return max(1, _EVERY * self.validation.index(self.lowest))


def _train(network: nn.Module, rate: float, seen: _Pairs, unseen: _Pairs | None, epochs: int, told: _Told) -> _Training:
    """Eq. 7: train `network` on `seen`, all at once."""
    weights = list(network.parameters())
    validation: list[float] = []

    def slopes(epoch: int) -> Curves:
        if unseen is not None and epoch % _EVERY == 0:
            with torch.no_grad():
                validation.append(float((network(unseen.inputs) - unseen.targets).square().mean()))
        error = (network(seen.inputs) - seen.targets).square().mean()
        for weight, slope in zip(weights, torch.autograd.grad(error, weights), strict=True):
            weight.grad = slope
        return {"objective": error}

    trial = Trial(
        step=steps_of(Adam(weights, rate, fused=True), slopes),
        point=lambda: torch.cat([weight.detach().flatten() for weight in weights]),
    )
    sound = descend([trial], epochs, told.next(epochs), where="G")
    return _Training(rate=rate, errors=trial.trace()["objective"] if sound else torch.empty(0), validation=validation)


def _descend(mapping: nn.Module, start: Tensor, rate: float, steps: int, told: _Told) -> tuple[Tensor, Tensor] | None:
    """Eq. 8: the best theta and the objective by step; None where it diverged."""
    theta = start.clone().requires_grad_()
    best, lowest = start, math.inf

    def slopes(step: int) -> Curves:
        nonlocal best, lowest
        objective = mapping(theta).square().mean()
        if (now := objective.item()) < lowest:
            best, lowest = theta.detach().clone(), now
        (theta.grad,) = torch.autograd.grad(objective, theta)
        return {"objective": objective}

    trial = Trial(step=steps_of(Adam([theta], rate, fused=True), slopes), point=theta.detach)
    sound = descend([trial], steps, told.next(steps), where="theta")
    return (best, trial.trace()["objective"]) if sound else None


class _Told:
    """Progress over all trainings, one after the other."""

    def __init__(self, progress: Progress, steps: int) -> None:
        self._progress, self._steps, self._taken = progress, steps, 0

    def next(self, steps: int) -> Progress:
        """That of the next training, of so many steps."""
        told = following(self._progress, self._taken, self._steps)
        self._taken += steps
        return told

    def done(self, objective: float) -> None:
        """All is done, perhaps in fewer steps."""
        self._progress(self._steps, self._steps, {"objective": objective})
