"""The inversion problem: one victim's update as tensors in the order of the model's parameters."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

from fedsim.base.errors import AttackError, join_first
from fedsim.base.loss_term import LossWithTerm, add_model_term, describe_undeclared_term, has_loss_term
from fedsim.base.task import Goal, Loss, goal_of
from fedsim.data.checks import memory_complaint
from fedsim.interfaces.attack import Attack, Knowledge, Records, warn
from fedsim.interfaces.defense import Defense, apply_adversary_views
from fedsim.interfaces.message_noise import MessageNoise
from fedsim.inversion.named_states import named_states, running_statistic_names
from fedsim.inversion.shared_setup import ask_once, move_weights
from fedsim.modalities import known_modality, smooth_dimensions
from fedsim.recording.wire_format import State, Update
from fedsim.training.example_independence import find_training_only_layer
from fedsim.training.hidden_state import find_written_parameter
from fedsim.training.modes import normalise_by_instance
from fedsim.training.settings import known_steps
from fedsim.training.stochastic_layers import find_stochastic_layers


@dataclass(frozen=True)
class InputScaling:
    """Affine map from the standardised dummy data to the model's inputs and to [0, 1].

    Attributes:
        centre: of the model's inputs, where the dummy data are 0.
        scale: of the model's inputs for one unit of the dummy data.
        low: smallest value of an input, in the model's range.
        high: largest value of an input.
    """

    centre: Tensor
    scale: Tensor
    low: Tensor
    high: Tensor

    @classmethod
    def from_knowledge(cls, knowledge: Knowledge, like: Tensor) -> InputScaling:
        """Standardise by the granted moments, else by the middle and a quarter of the range.

        Args:
            like: gives the type and the device.
        """
        assert knowledge.value_range is not None
        assert knowledge.input_shape is not None
        axes = [-1] + [1] * (len(knowledge.input_shape) - 1)
        low, high = (torch.as_tensor(end).to(like).reshape(axes) for end in knowledge.value_range)
        if knowledge.input_mean is None or knowledge.input_std is None:
            return cls(centre=(low + high) / 2, scale=(high - low) / 4, low=low, high=high)
        mean = torch.as_tensor(knowledge.input_mean).to(like).reshape(axes)
        std = torch.as_tensor(knowledge.input_std).to(like).reshape(axes)
        return cls(centre=mean, scale=std, low=low, high=high)

    def to_model(self, dummy: Tensor) -> Tensor:
        """Return the model's inputs for dummy data, differentiable in them."""
        return self.centre + self.scale * dummy

    def to_unit_range(self, dummy: Tensor) -> Tensor:
        """Return the data of a finding for dummy data: float32 on the CPU, in [0, 1]."""
        values = (self.to_model(dummy) - self.low) / (self.high - self.low)
        return values.clamp(0, 1).float().cpu()

    def from_unit_range(self, data: Tensor) -> Tensor:
        """Return the dummy data for a finding's `data` in [0, 1]."""
        return (self.low + (self.high - self.low) * data - self.centre) / self.scale

    @torch.no_grad()
    def clamp_(self, dummy: Tensor) -> None:
        """Clamp dummy data in place to the valid range of inputs (SME, App. D)."""
        dummy.clamp_(*self._bounds)

    @cached_property
    def _bounds(self) -> tuple[Tensor, Tensor]:
        return (self.low - self.centre) / self.scale, (self.high - self.centre) / self.scale


@dataclass(frozen=True, kw_only=True)
class InversionProblem:
    """One update to be inverted: the model, its states and what is known of the client's training.

    Tensors are on the attack's device.

    Attributes:
        model: in evaluation mode; only its architecture is used.
        loss: that clients minimise.
        parameter_names: of the trained parameters; `before` and `after` are in their order.
        before: w_0.
        after: w_T; empty if a gradient was sent.
        buffers: of the broadcast state, by name, and the parameters that are not trained.
        returned_buffers: of the state that the client returned; empty if it sent parameters only.
        labels: `example`, class indices or targets, or `example target` of several labels or numbers; empty
            if they are optimised together with the data.
        scaling: maps the standardised dummy data to the model's inputs.
        smooth_dimensions: dimensions of the dummy data along which neighbouring values are alike,
            as the modality of the examples says; of images 2 and 3.
        num_examples: N.
        num_clients: whose mean update it is; above 1 under secure aggregation.
        learning_rate: of local training, None if withheld.
        local_epochs: E, None if withheld.
        local_steps: T, None if withheld, or if clients train for epochs.
        batch_size: B, None if withheld.
        optimizer: of local training, `sgd` if withheld.
        momentum: of local training, 0 if withheld.
        weight_decay: likewise.
        proximal_mu: likewise.
        sent_gradient: the gradient that the client sent instead of weights, in the order of
            `parameter_names`. It counts as one local step: `local_epochs` is 1 and `batch_size` N,
            whatever else is granted.
        sent_pseudo_gradient: w_0 - w_T of a client that sent the delta, in the same order.
        uses_batch_statistics: BatchNorm layers of `model` normalise by the batch, see
            `with_batch_statistics`.
        defenses: of the clients, in their order, if the adversary knows them.
        mixing_defenses: those of `defenses` that mix examples; a batch of dummy data passes through
            them before its gradient is computed.
        uses_func_transforms: gradients are computed by torch.func, as they must be inside `vmap`.
        auxiliary: public records of the same kind, inputs in model units, from which priors are
            fitted; None if withheld.
        unknown_parts: guesses of the parameters that never left the client, by name; those of
            `model` where they are left out.
        noise: what is known of how far the message may be from its expectation; None where an attack
            does not ask.
        where: names the update in errors.
    """

    model: nn.Module
    loss: Loss
    parameter_names: tuple[str, ...]
    before: Sequence[Tensor]
    after: Sequence[Tensor]
    buffers: State
    returned_buffers: State
    labels: Tensor
    scaling: InputScaling
    num_examples: int
    learning_rate: float | None = None
    local_epochs: int | None = None
    local_steps: int | None = None
    batch_size: int | None = None
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    proximal_mu: float = 0.0
    sent_gradient: Sequence[Tensor] | None = None
    sent_pseudo_gradient: Sequence[Tensor] | None = None
    uses_batch_statistics: bool = False
    defenses: Sequence[Defense] = ()
    mixing_defenses: Sequence[Defense] = ()
    uses_func_transforms: bool = False
    smooth_dimensions: Sequence[int] = ()
    auxiliary: Records | None = None
    unknown_parts: State = field(default_factory=dict)
    noise: MessageNoise | None = None
    num_clients: int = 1
    where: str = ""

    @property
    def goal(self) -> Goal:
        """Return what the model predicts of an example, as the loss says."""
        return goal_of(self.loss)

    @property
    def direction(self) -> list[Tensor]:
        """Return the update to be matched: w_0 - w_T, or the gradient that was sent."""
        if self.sent_gradient is not None:
            return list(self.sent_gradient)
        if self.sent_pseudo_gradient is not None:
            return list(self.sent_pseudo_gradient)
        return [start - end for start, end in zip(self.before, self.after, strict=True)]

    @property
    def returned_weights(self) -> Sequence[Tensor]:
        """Return w_T, in the order of `parameter_names`.

        Raises:
            AttackError: the client sent a gradient.
        """
        if self.sent_gradient is not None:
            raise AttackError(
                f"{self.where}: a gradient was sent, no weights; this attack needs the weights that a client returns"
            )
        return self.after

    @property
    def steps(self) -> int:
        """Return T; it must be granted, or E and B."""
        steps = known_steps(self, self.num_examples)
        assert steps is not None
        return steps

    @property
    def mean_gradient(self) -> list[Tensor]:
        """Return (w_0 - w_T) / (eta T), or the gradient that was sent, bit for bit.

        For weights, eta and T (or E and B) must be granted.
        """
        if self.sent_gradient is not None:
            return list(self.sent_gradient)
        assert self.learning_rate is not None
        return [delta / (self.learning_rate * self.steps) for delta in self.direction]

    def outputs(self, weights: Sequence[Tensor], dummy: Tensor) -> Tensor:
        """Return the outputs for dummy data, at weights in the order of `parameter_names`."""
        return self._forward(weights, self.scaling.to_model(dummy))

    def _forward(self, weights: Sequence[Tensor], inputs: Tensor) -> Tensor:
        known_state = {**dict(zip(self.parameter_names, weights, strict=True)), **self.buffers}
        state = {**known_state, **self.unknown_parts}
        outputs: Tensor = functional_call(self.model, state, (inputs,))
        if has_loss_term(outputs) and not isinstance(self.loss, LossWithTerm):
            raise AttackError(f"{self.where}: the model {describe_undeclared_term(self.model, outputs)}")
        return outputs

    def gradient(self, weights: Sequence[Tensor], dummy: Tensor, labels: Tensor) -> list[Tensor]:
        """Compute the gradient of the loss of dummy data at `weights`, itself differentiable.

        Args:
            weights: in the order of `parameter_names`. The gradient of a parameter that the model
                does not use is zero, as is its part of the update.
            dummy: `example ...`, standardised.
            labels: `example` class indices or targets, or `example class` probabilities, which are
                the only ones that can be mixed.
        """
        inputs = self.scaling.to_model(dummy)
        for defense in self.mixing_defenses:
            inputs, labels = defense.adversary_batch(inputs, labels)
        if self.uses_func_transforms:
            loss_gradient = grad(lambda point: self.loss(self._forward(point, inputs), labels))
            return list(loss_gradient(tuple(weights)))
        weights = [w if w.requires_grad else w.detach().requires_grad_(True) for w in weights]
        loss = self.loss(self._forward(weights, inputs), labels)
        return list(torch.autograd.grad(loss, weights, create_graph=True, materialize_grads=True))

    def apply_defenses(self, gradient: Sequence[Tensor]) -> list[Tensor]:
        """Apply what the adversary models of the known defenses to the gradient of dummy data.

        The defenses see eta T times the gradient, which has the size of what was sent, if eta and T
        are granted. If no defense has an `adversary_view`, the gradient stays as it is, to the bit.

        Args:
            gradient: in the order of `parameter_names`, as is what is returned.
        """
        if not self.defenses:
            return list(gradient)
        scale = self.update_scale
        dummy: dict[str, Tensor] = {}
        for name, tensor in zip(self.parameter_names, gradient, strict=True):
            dummy[name] = scale * tensor
        recorded = dict(zip(self.parameter_names, self.direction, strict=True))
        defended = apply_adversary_views(self.defenses, dummy, recorded)
        if defended is None:
            return list(gradient)
        return [defended[name] / scale for name in self.parameter_names]

    @property
    def unknown_names(self) -> list[str]:
        """Return the parameters that never left the client, whose values in `model` mean nothing."""
        known_names = {*self.parameter_names, *self.buffers}
        return [name for name, _ in self.model.named_parameters() if name not in known_names]

    @property
    def has_unknown_part(self) -> bool:
        """Tell whether parameters of `model` never left the client."""
        return bool(self.unknown_names)

    @property
    def examples_per_client(self) -> int:
        """Return N, or for a sum over clients the mean of theirs, which the server does not know singly."""
        return max(1, round(self.num_examples / self.num_clients))

    @property
    def update_scale(self) -> float:
        """Return the size of the update over the mean gradient: eta T, or 1 if unknown."""
        steps = known_steps(self, self.examples_per_client)
        if self.sent_gradient is not None or self.learning_rate is None or steps is None:
            return 1.0
        return self.learning_rate * steps


def build_problem(
    update: Update, knowledge: Knowledge, *, use_batch_statistics: bool = False, body_alone: bool = False
) -> InversionProblem:
    """Build the inversion problem of an update, without labels.

    Args:
        use_batch_statistics: the model will be one of `with_batch_statistics`, which needs no
            running statistics.
        body_alone: accept updates of which a part of the model never left the clients; the problem
            then is of the other parameters. So it is where that part is granted, which is fixed.

    Raises:
        AttackError: a part of the model never left the clients; w_T equals w_0, the gradient is zero
            or too large, N is not positive or more than memory holds, or the model normalises by
            buffers that were not shared, or computes differently in training mode.
        TranscriptError: the update is not one of this model.
    """
    where = f"round {update.round}, client {update.client}"
    assert knowledge.model is not None
    assert knowledge.loss is not None
    model = knowledge.model().to(knowledge.device).eval()
    private_parts = knowledge.private_parts or {}
    # Compare the message with the model.
    states = named_states(update, model, where, body_alone=body_alone or bool(private_parts))
    shapes, buffer_names, before, after, gradient, delta = states
    _check_buffers(model, buffer_names, before, use_batch_statistics)
    _check_num_examples(update, knowledge, where)
    normalise_by_instance(model, before, after)
    check_evaluation_mode(model, knowledge, where)
    device = knowledge.device
    # Separate what is trained from what never moves.
    frozen = _frozen_names(model, knowledge, before, after, gradient)
    trained = [name for name in shapes if name not in frozen]
    unmoved_names = [name for name in (*buffer_names, *frozen) if name in before]
    returned_names = [name for name in buffer_names if name in after]
    pseudo_gradient = None
    if delta is not None:
        pseudo_gradient = [states.direction(name).to(device) for name in trained]
    scene = InversionProblem(
        model=model,
        loss=add_model_term(knowledge.loss, model),
        parameter_names=tuple(trained),
        before=move_weights(before, trained, device),
        after=[] if gradient is not None else [after[name].to(device) for name in trained],
        buffers={name: {**before, **private_parts}[name].to(device) for name in (*unmoved_names, *private_parts)},
        returned_buffers={name: after[name].to(device) for name in returned_names},
        labels=torch.empty(0, dtype=torch.int64, device=device),
        scaling=InputScaling.from_knowledge(knowledge, before[next(iter(shapes))].to(device)),
        num_examples=update.num_examples,
        learning_rate=knowledge.learning_rate,
        local_epochs=knowledge.local_epochs if gradient is None else 1,
        local_steps=knowledge.local_steps if gradient is None else None,
        batch_size=knowledge.batch_size if gradient is None else update.num_examples,
        **_optimizer_settings(knowledge if gradient is None else Knowledge()),
        sent_gradient=None if gradient is None else [gradient[name].to(device) for name in trained],
        sent_pseudo_gradient=pseudo_gradient,
        uses_batch_statistics=use_batch_statistics,
        defenses=knowledge.defenses_in(update.round),
        smooth_dimensions=smooth_dimensions(known_modality(knowledge)),
        auxiliary=knowledge.auxiliary,
        num_clients=max(1, len(update.members)),
        where=where,
    )
    _check_direction(scene)
    return scene


def _check_buffers(model: nn.Module, buffer_names: Sequence[str], before: State, by_batch: bool) -> None:
    excused = running_statistic_names(model) if by_batch else []
    missing = [name for name in buffer_names if name not in before and name not in excused]
    if missing:
        raise AttackError(
            f"the model normalises with {missing[0]}, which clients of this federation do not "
            "share; this attack needs a model without such buffers, or one that shares them"
        )


def _check_num_examples(update: Update, knowledge: Knowledge, where: str) -> None:
    if update.num_examples < 1:
        raise AttackError(
            f"{where}: N is {update.num_examples}, so nothing says how many examples to look for; "
            "attack a client that reports its num_examples"
        )
    reason = memory_complaint(4.0 * update.num_examples * math.prod(knowledge.input_shape or (1,)))
    if reason:
        raise AttackError(
            f"{where}: N is {update.num_examples}, and so many examples {reason}; "
            "if that is no count of examples, say N with [app] num_examples"
        )


def _check_direction(scene: InversionProblem) -> None:
    """Raise AttackError unless the update is finite and not zero."""
    direction = torch.cat([delta.flatten() for delta in scene.direction])
    is_finite, has_moved = torch.stack([direction.square().sum().isfinite(), direction.any()]).tolist()
    if not is_finite:
        raise AttackError(
            f"{scene.where}: what it sent is so large that its square is infinite; this update "
            "cannot be attacked, choose another round or victim"
        )
    if not has_moved:
        cause = "w_T equals w_0" if scene.sent_gradient is None else "the gradient is zero"
        raise AttackError(f"{scene.where}: {cause}, there is nothing to match")


def _optimizer_settings(knowledge: Knowledge) -> dict[str, Any]:
    """Return the client's optimizer as far as it is granted; a sent gradient took no step."""
    names = ("momentum", "weight_decay", "proximal_mu")
    settings = {name: getattr(knowledge, name) or 0.0 for name in names}
    return {"optimizer": knowledge.optimizer or "sgd", **settings}


def _frozen_names(
    model: nn.Module, knowledge: Knowledge, before: State, after: State, gradient: State | None
) -> list[str]:
    """List the parameters that are not trained and did not change: there is nothing to match.

    Those that did not change under weight decay are not used by the model, and optimizers leave them alone.
    """
    parameters = [(name, parameter) for name, parameter in model.named_parameters() if name in before]
    untrained = [name for name, parameter in parameters if not parameter.requires_grad or knowledge.weight_decay]
    if gradient is not None:
        return [name for name in untrained if not gradient[name].any()]
    return [name for name in untrained if torch.equal(before[name], after[name])]


OPTIMIZER_FACTS = frozenset({"optimizer", "momentum", "weight_decay", "proximal_mu"})
"""Facts that tell whether clients train by plain SGD."""


def warn_unless_plain_sgd(attack: Attack, knowledge: Knowledge, where: str, *, simulated: Collection[str] = ()) -> None:
    """Warn if clients do not, or may not, train by plain SGD, which the attack assumes.

    Args:
        simulated: which of `OPTIMIZER_FACTS` the attack simulates.
    """
    names = ("optimizer", "momentum", "weight_decay", "proximal_mu")
    facts = {name: getattr(knowledge, name) for name in names}
    differing = []
    for name, value in facts.items():
        if value and value != "sgd" and name not in simulated:
            differing.append(f"{name.replace('_', ' ')} {value}")
    hidden = [name for name, value in facts.items() if value is None]
    if differing:
        warn(
            f"{attack.title} on {where}: assumes plain SGD, but clients train with {', '.join(differing)}; expect less"
        )
    elif hidden:
        verb = "is" if len(hidden) == 1 else "are"
        warn(f"{attack.title} on {where}: assumes plain SGD; {', '.join(hidden)} of the clients {verb} not known")


def warn_of_dropout(attack: Attack, model: nn.Module, knowledge: Knowledge, where: str) -> None:
    """Warn if layers of `model` are random in training, as dropout is; attacks switch it off."""

    def find_layers() -> Sequence[str]:
        inputs = probe_inputs(model, knowledge)
        if inputs is None or not getattr(model, "draws_in_training", True):
            return []
        return list(find_stochastic_layers(deepcopy(model).train(), inputs))

    if layers := ask_once("layers that draw", model, knowledge, find_layers):
        names = join_first([f"'{name}'" for name in layers], 3)
        verb = "drops" if len(layers) == 1 else "drop"
        warn(
            f"{attack.title} on {where}: {names} of the model {verb} at random while clients train "
            "(dropout), this attack takes them for off; expect little"
        )


def check_evaluation_mode(model: nn.Module, knowledge: Knowledge, where: str) -> None:
    """Raise AttackError if a layer computes differently in training mode, or writes into a parameter.

    Attacks run the model in evaluation mode, clients train it in training mode. A pass that writes into w_t has no
    gradient at w_t.
    """

    def find_layer() -> str | None:
        inputs = probe_inputs(model, knowledge)
        return None if inputs is None else find_training_only_layer(model, inputs)

    if layer := ask_once("layer of training alone", model, knowledge, find_layer):
        raise AttackError(
            f"{where}: {layer} computes otherwise while a client trains than in evaluation, so "
            "that no gradient could be matched; use parametrizations in place of the old "
            "spectral_norm and weight_norm, and no 'self.training'"
        )

    def find_parameter() -> str | None:
        inputs = probe_inputs(model, knowledge)
        return None if inputs is None else find_written_parameter(model, inputs)

    if name := ask_once("parameter that passes write into", model, knowledge, find_parameter):
        raise AttackError(
            f"{where}: each pass of the model writes into its parameter '{name}', as an embedding with max_norm does, "
            "so that no gradient could be matched; let only the optimizer change it"
        )


def probe_inputs(model: nn.Module, knowledge: Knowledge) -> Tensor | None:
    """Return two examples that the model takes, or None; other checks tell what is wrong."""
    if knowledge.input_shape is None:
        return None
    like = next(model.parameters())
    shape = (2, *knowledge.input_shape)
    values = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(like)
    tokens = torch.zeros(shape, dtype=torch.long, device=like.device)
    for inputs in (values, tokens):
        try:
            with torch.no_grad():
                model(inputs)
        except (RuntimeError, ValueError, IndexError, TypeError):
            continue
        return inputs
    return None
