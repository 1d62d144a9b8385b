"""The inversion problem: one victim's update as tensors in the order of the model's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

from fedsim.base.errors import AttackError
from fedsim.base.loss_term import LossWithTerm, describe_undeclared_term, has_loss_term
from fedsim.base.task import Goal, Loss, goal_of
from fedsim.interfaces.attack import Records
from fedsim.interfaces.defense import Defense, apply_adversary_views
from fedsim.interfaces.message_noise import MessageNoise
from fedsim.inversion.input_scaling import InputScaling
from fedsim.recording.wire_format import State
from fedsim.training.settings import known_steps


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
            `copy_with_batch_statistics`.
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
        parameters = dict(zip(self.parameter_names, weights, strict=True))
        state = {**parameters, **self.buffers, **self.unknown_parts}
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
