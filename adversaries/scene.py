"""One victim's update as the matching engine sees it: tensors in the order of the model's parameters."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

from adversaries.named_states import named_states, running_statistics
from fedsim.attacks import Attack, Knowledge
from fedsim.datasets.checks import beyond_memory
from fedsim.defense import Defense, adversary_views
from fedsim.errors import AttackError, some_of
from fedsim.task import Loss
from fedsim.training.apart import training_only_layer
from fedsim.training.modes import normalise_by_instance
from fedsim.training.stochastic_layers import find_stochastic_layers
from fedsim.wire.messages import State, Update

log = logging.getLogger("fedsim." + __name__)


@dataclass(frozen=True)
class Units:
    """The dummy data live in standardised coordinates; this maps them to the model's and to [0, 1]."""

    centre: Tensor
    scale: Tensor
    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, knowledge: Knowledge, like: Tensor) -> Units:
        """By the granted moments, else half the range wide around its middle."""
        assert knowledge.value_range is not None
        assert knowledge.input_shape is not None
        axes = [-1] + [1] * (len(knowledge.input_shape) - 1)
        low, high = (torch.as_tensor(end).to(like).reshape(axes) for end in knowledge.value_range)
        if knowledge.input_mean is None or knowledge.input_std is None:
            return cls(centre=(low + high) / 2, scale=(high - low) / 4, low=low, high=high)
        mean, std = (torch.as_tensor(m).to(like).reshape(axes) for m in (knowledge.input_mean, knowledge.input_std))
        return cls(centre=mean, scale=std, low=low, high=high)

    def to_model(self, dummy: Tensor) -> Tensor:
        """What the model is fed with."""
        return self.centre + self.scale * dummy

    def to_unit_range(self, dummy: Tensor) -> Tensor:
        """What a finding holds: float32 on the CPU, in [0, 1]."""
        return ((self.to_model(dummy) - self.low) / (self.high - self.low)).clamp(0, 1).float().cpu()

    def from_unit_range(self, data: Tensor) -> Tensor:
        """The dummy data that a finding's `data` stand for."""
        return (self.low + (self.high - self.low) * data - self.centre) / self.scale

    @torch.no_grad()
    def clamp_(self, dummy: Tensor) -> None:
        """Keep pixels in the valid range (SME, App. D)."""
        dummy.clamp_(*self._bounds)

    @cached_property
    def _bounds(self) -> tuple[Tensor, Tensor]:
        """The valid range of dummy data."""
        return (self.low - self.centre) / self.scale, (self.high - self.centre) / self.scale


@dataclass(frozen=True, kw_only=True)
class Scene:
    """All that an objective is computed from. Tensors are on the attack's device.

    Attributes:
        model: in evaluation mode; lends its architecture only.
        loss: what clients minimise.
        names: of the parameters that are trained; `before` and `after` are in their order.
        before: w_0.
        after: w_T; empty where a gradient was sent.
        buffers: of the broadcast state, by name, and the parameters that are not trained.
        returned_buffers: of the state that the client returned; empty where it returned parameters alone.
        labels: `example`, class indices or targets of a regression; empty where they are found together
            with the data.
        units: coordinates of the dummy data.
        num_examples: N.
        learning_rate: step size of local training, None where withheld.
        local_epochs: E, None where withheld.
        local_steps: T, None where withheld, or where clients take passes.
        batch_size: B, None where withheld.
        optimizer: of local training, `sgd` where withheld.
        momentum: of local training, 0 where withheld.
        weight_decay: likewise.
        proximal_mu: likewise.
        sent: the gradient that the client sent instead of weights, in the order of `names`; that is one step, so
            `local_epochs` is 1 and `batch_size` N then, whatever else is granted.
        moved: w_0 - w_T of a client that sent the difference, in the order of `names`.
        by_batch: BatchNorm layers of `model` normalise by the batch, see `normalising_by_batch`.
        defenses: of the clients, in their order, where the adversary knows them.
        mixing: those of `defenses` through which a batch of dummy records passes before its gradient is taken.
        transformed: gradients are taken by a transform of torch.func, as within its `vmap` they have to be.
        where: names the update in errors.
    """

    model: nn.Module
    loss: Loss
    names: tuple[str, ...]
    before: Sequence[Tensor]
    after: Sequence[Tensor]
    buffers: State
    returned_buffers: State
    labels: Tensor
    units: Units
    num_examples: int
    learning_rate: float | None = None
    local_epochs: int | None = None
    local_steps: int | None = None
    batch_size: int | None = None
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    proximal_mu: float = 0.0
    sent: Sequence[Tensor] | None = None
    moved: Sequence[Tensor] | None = None
    by_batch: bool = False
    defenses: Sequence[Defense] = ()
    mixing: Sequence[Defense] = ()
    transformed: bool = False
    where: str = ""

    @property
    def direction(self) -> list[Tensor]:
        """w_0 - w_T, or the gradient that was sent."""
        if self.sent is not None:
            return list(self.sent)
        if self.moved is not None:
            return list(self.moved)
        return [start - end for start, end in zip(self.before, self.after, strict=True)]

    @property
    def steps(self) -> int:
        """T, which must be granted, or E and B."""
        steps = known_steps(self, self.num_examples)
        assert steps is not None
        return steps

    @property
    def mean_gradient(self) -> list[Tensor]:
        """(w_0 - w_T) / (eta T), where eta, E and B must be granted; or the gradient that was sent, bit for bit."""
        if self.sent is not None:
            return list(self.sent)
        assert self.learning_rate is not None
        return [delta / (self.learning_rate * self.steps) for delta in self.direction]

    def outputs(self, weights: Sequence[Tensor], dummy: Tensor) -> Tensor:
        """The outputs of the model for the dummy data, at weights in the order of `names`."""
        return self._fed(weights, self.units.to_model(dummy))

    def _fed(self, weights: Sequence[Tensor], inputs: Tensor) -> Tensor:
        state = {**dict(zip(self.names, weights, strict=True)), **self.buffers}
        outputs: Tensor = functional_call(self.model, state, (inputs,))
        return outputs

    def gradient(self, weights: Sequence[Tensor], dummy: Tensor, labels: Tensor) -> list[Tensor]:
        """Gradient of the loss of the dummy data at `weights`, itself differentiable.

        Args:
            weights: in the order of `names`; the gradient of one that the model does not use is zero, as is its
                part of the update.
            dummy: `example ...` in standardised units.
            labels: `example` class indices or targets, or `example class` probabilities, which are what can be mixed.
        """
        inputs = self.units.to_model(dummy)
        for defense in self.mixing:
            inputs, labels = defense.adversary_batch(inputs, labels)
        if self.transformed:
            return list(grad(lambda at: self.loss(self._fed(at, inputs), labels))(tuple(weights)))
        weights = [w if w.requires_grad else w.detach().requires_grad_(True) for w in weights]
        loss = self.loss(self._fed(weights, inputs), labels)
        return list(torch.autograd.grad(loss, weights, create_graph=True, materialize_grads=True))

    def defended(self, gradient: Sequence[Tensor]) -> list[Tensor]:
        """What the known defenses would make of the gradient of dummy data, in the order of `names`.

        They are shown eta T times it, which is in the unit of what was sent, where eta and T are granted. Where none
        has a view of its own, the gradient stays as it is, to the bit.
        """
        if not self.defenses:
            return list(gradient)
        unit = self._stride
        dummy: State = {name: unit * tensor for name, tensor in zip(self.names, gradient, strict=True)}
        seen = adversary_views(self.defenses, dummy, dict(zip(self.names, self.direction, strict=True)))
        return list(gradient) if seen is None else [seen[name] / unit for name in self.names]

    @property
    def _stride(self) -> float:
        """How much of the mean gradient was sent: eta T of weights, where that is known, otherwise 1."""
        steps = known_steps(self, self.num_examples)
        if self.sent is not None or self.learning_rate is None or steps is None:
            return 1.0
        return self.learning_rate * steps


def scene_of(update: Update, knowledge: Knowledge, *, by_batch: bool = False) -> Scene:
    """The scene of an update, without labels.

    Args:
        by_batch: the model is one of `normalising_by_batch`, and so needs no running statistics.

    Raises:
        AttackError: w_T equals w_0, the gradient is zero or too large, N is not positive or more than memory holds,
            or the model normalises by buffers that were not shared, or computes otherwise while it trains.
        TranscriptError: the update is not one of this model.
    """
    where = f"round {update.round}, client {update.client}"
    assert knowledge.model is not None
    assert knowledge.loss is not None
    model = knowledge.model().to(knowledge.device).eval()
    named = named_states(update, model, where)
    shapes, floating, before, after, gradient, delta = named
    excused = running_statistics(model) if by_batch else []
    if missing := [name for name in floating if name not in before and name not in excused]:
        raise AttackError(
            f"the model normalises with {missing[0]}, which clients of this federation do not share; "
            "this attack needs a model without such buffers, or one that shares them"
        )
    if update.num_examples < 1:
        raise AttackError(
            f"{where}: N is {update.num_examples}, so nothing says how many examples to look for; "
            "attack a client that reports its num_examples"
        )
    if why := beyond_memory(4.0 * update.num_examples * math.prod(knowledge.input_shape or (1,))):
        raise AttackError(
            f"{where}: N is {update.num_examples}, and so many examples {why}; if that is no count of examples, say N "
            "with [app] num_examples"
        )
    normalise_by_instance(model, before, after)
    check_evaluation(model, knowledge, where)
    device = knowledge.device
    frozen = _frozen(model, before, after, gradient)
    trained = [name for name in shapes if name not in frozen]
    scene = Scene(
        model=model,
        loss=knowledge.loss,  # type: ignore[arg-type]
        names=tuple(trained),
        before=[before[name].to(device) for name in trained],
        after=[] if gradient is not None else [after[name].to(device) for name in trained],
        buffers={name: before[name].to(device) for name in (*floating, *frozen) if name in before},
        returned_buffers={name: after[name].to(device) for name in floating if name in after},
        labels=torch.empty(0, dtype=torch.int64, device=device),
        units=Units.of(knowledge, before[next(iter(shapes))].to(device)),
        num_examples=update.num_examples,
        learning_rate=knowledge.learning_rate,
        local_epochs=knowledge.local_epochs if gradient is None else 1,
        local_steps=knowledge.local_steps if gradient is None else None,
        batch_size=knowledge.batch_size if gradient is None else update.num_examples,
        **_stepping(knowledge if gradient is None else Knowledge()),
        sent=None if gradient is None else [gradient[name].to(device) for name in trained],
        moved=None if delta is None else [named.direction(name).to(device) for name in trained],
        by_batch=by_batch,
        defenses=knowledge.defenses or (),
        where=where,
    )
    if not all(bool(delta.square().sum().isfinite()) for delta in scene.direction):
        raise AttackError(
            f"{where}: what it sent is so large that its square is infinite; this update cannot be attacked, choose "
            "another round or victim"
        )
    if not any(bool((delta != 0).any()) for delta in scene.direction):
        still = "w_T equals w_0" if gradient is None else "the gradient is zero"
        raise AttackError(f"{where}: {still}, there is nothing to match")
    return scene


def _stepping(knowledge: Knowledge) -> dict[str, Any]:
    """How clients step, as far as it is granted; a client that sends a gradient takes no step."""
    rest = {name: getattr(knowledge, name) or 0.0 for name in ("momentum", "weight_decay", "proximal_mu")}
    return {"optimizer": knowledge.optimizer or "sgd", **rest}


def _frozen(model: nn.Module, before: State, after: State, gradient: State | None) -> list[str]:
    """Names of parameters that the model does not train and that did not move: there is nothing to match in them."""
    still = (name for name, parameter in model.named_parameters() if not parameter.requires_grad)
    if gradient is not None:
        return [name for name in still if not gradient[name].any()]
    return [name for name in still if torch.equal(before[name], after[name])]


def known_steps(knowledge: Knowledge | Scene, num_examples: int) -> int | None:
    """T, where the threat model grants it, or E and B."""
    if knowledge.local_steps is not None:
        return knowledge.local_steps
    if knowledge.local_epochs is None or knowledge.batch_size is None:
        return None
    return knowledge.local_epochs * math.ceil(num_examples / knowledge.batch_size)


STEPPING = frozenset({"optimizer", "momentum", "weight_decay", "proximal_mu"})
"""What an attack reads to find out whether clients train by plain SGD."""


def warn_unless_plain(attack: Attack, knowledge: Knowledge, where: str, *, simulated: Collection[str] = ()) -> None:
    """Warn where clients do not train by plain SGD, which the attack assumes, or where that is not known.

    Args:
        simulated: which of `STEPPING` the attack simulates.
    """
    facts = {name: getattr(knowledge, name) for name in ("optimizer", "momentum", "weight_decay", "proximal_mu")}
    odd = [f"{n.replace('_', ' ')} {v}" for n, v in facts.items() if v and v != "sgd" and n not in simulated]
    hidden = [name for name, value in facts.items() if value is None]
    if odd:
        log.warning(
            "%s on %s: assumes plain SGD, but clients train with %s; expect less",
            attack.called,
            where,
            ", ".join(odd),
        )
    elif hidden:
        log.warning(
            "%s on %s: assumes plain SGD; %s of the clients %s not known",
            attack.called,
            where,
            ", ".join(hidden),
            "is" if len(hidden) == 1 else "are",
        )


def warn_of_dropout(attack: Attack, model: nn.Module, knowledge: Knowledge, where: str) -> None:
    """Warn where layers of `model` draw while clients train, as dropout does; in the attack they do not."""
    inputs = _probe(model, knowledge)
    if inputs is None or not getattr(model, "draws_in_training", True):
        return
    if layers := find_stochastic_layers(deepcopy(model).train(), inputs):
        log.warning(
            "%s on %s: %s of the model drop%s at random while clients train (dropout), this attack takes them for off; "
            "expect little",
            attack.called,
            where,
            some_of([f"'{name}'" for name in layers], 3),
            "s" if len(layers) == 1 else "",
        )


def check_evaluation(model: nn.Module, knowledge: Knowledge, where: str) -> None:
    """Raise AttackError where a layer computes otherwise while clients train than in evaluation, as attacks have it."""
    inputs = _probe(model, knowledge)
    if inputs is not None and (layer := training_only_layer(model, inputs)):
        raise AttackError(
            f"{where}: {layer} computes otherwise while a client trains than in evaluation, so that no gradient could "
            "be matched; use parametrizations in place of the old spectral_norm and weight_norm, and no 'self.training'"
        )


def _probe(model: nn.Module, knowledge: Knowledge) -> Tensor | None:
    """Two examples that the model takes, or None; others find out what is wrong with it."""
    if knowledge.input_shape is None:
        return None
    like, draw = next(model.parameters()), torch.Generator().manual_seed(0)
    for inputs in (
        torch.rand((2, *knowledge.input_shape), generator=draw).to(like),
        torch.zeros((2, *knowledge.input_shape), dtype=torch.long, device=like.device),  # tokens
    ):
        try:
            with torch.no_grad():
                model(inputs)
        except (RuntimeError, ValueError, IndexError, TypeError):
            continue
        return inputs
    return None
