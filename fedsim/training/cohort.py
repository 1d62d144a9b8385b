"""Local training of several clients at once, in one batched computation.

A small network's step is mostly overhead, which a batch of clients pays once; on an accelerator so
is the step of a network with convolutions, which are unfolding and batched products. The result is that of
`fedsim.training.loop.local_update`, the reference, up to the order of floating-point sums: where
training is stable, they differ by less than `TOLERANCE` of the norm of the update. (Where it is
chaotic, with a large step size over hundreds of steps, any two orders of summation diverge.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from fedsim.base.randomness import generator
from fedsim.base.task import Loss, smooth_labels
from fedsim.interfaces.defense import TRAINING_HOOKS, Defense, overrides, supports_ghost_clipping
from fedsim.recording.wire_format import State
from fedsim.training import ghost_clipping
from fedsim.training.cohort_clipping import ParameterCall, clipped_gradients
from fedsim.training.convolution_products import convolve, products_are_faster
from fedsim.training.gradients import flatten_examples
from fedsim.training.hooks import TrainingHooks
from fedsim.training.model_state import check_broadcast
from fedsim.training.optimizers import sgd_direction
from fedsim.training.sampling import shuffled_batches
from fedsim.training.settings import LocalTraining

_CPU = torch.device("cpu")
TOLERANCE = 1e-4
"""Largest L2 distance to the reference's update, relative to its L2 norm."""
_MAX_PARAMETERS = 500_000
"""Largest network on a CPU; the gain shrinks as networks grow (docs/studies/scale.md)."""
_MIN_CLIENTS, _MAX_CLIENTS = 8, 64
"""Fewest and most clients in a group on a CPU."""
_MAX_CLIENTS_OF_ACCELERATOR = 128
"""Most clients in a group where starting a kernel costs more than what it computes."""
_GROUP_PARAMETERS_OF_ACCELERATOR = 1 << 28
"""Parameters of all clients of a group there; weights, gradients and momentum take 4 GiB."""
_GROUP_PARAMETERS = 1 << 21
"""Parameters of all clients of a group, which fit into a cache."""
_SUPPORTED_LAYERS = (
    nn.Sequential,
    nn.Flatten,
    nn.Linear,
    nn.ReLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.GELU,
    nn.LeakyReLU,
    nn.Identity,
)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_LAYERS_OF_ACCELERATOR = (
    *_SUPPORTED_LAYERS,
    *_CONVOLUTIONS,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AvgPool3d,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
)


@dataclass(frozen=True, kw_only=True)
class LocalData:
    """Data of one client for local training, with the key of its randomness.

    Attributes:
        inputs: `example ...` in model units.
        labels: `example`, class indices or targets.
        key: key of all its randomness in the round, as for `fedsim.training.loop.local_update`.
        order: examples of each step where they are given, likewise.
        hooks: of a client whose defense clips the gradients of its examples; None where no defense
            acts inside training.
    """

    inputs: Tensor
    labels: Tensor
    key: tuple[int | str, ...]
    order: tuple[Tensor, ...] | None = None
    hooks: TrainingHooks | None = None

    def draw_batches(self, settings: LocalTraining) -> list[Tensor]:
        """Return the examples of each of its steps, drawn where no order is given."""
        if self.hooks is not None:
            return list(self.hooks.batch_order(self.order))
        if self.order is not None:
            return list(self.order)
        return list(shuffled_batches(len(self.labels), settings, generator(*self.key, "order")))


def can_vectorise(
    model: nn.Module, settings: LocalTraining, defenses: Sequence[Defense], device: torch.device = _CPU
) -> bool:
    """Return whether clients can train at once on `device` and are faster so.

    On a CPU, the network must have fully connected layers only and few parameters; elsewhere it may
    have convolutions and pooling, and any size of which several fit. All layers are trained; the
    optimizer is SGD, and no defense acts inside local training but one that clips the gradients of
    examples, as DP-SGD does, in networks that `ghost_clipping` can clip. Clients that send
    gradients are left to the loop, so that gradients are the same to the bit whichever other clients take part.
    """
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return (
        settings.optimizer == "sgd"
        and settings.sends == "weights"
        and trained == list(model.state_dict())  # nothing frozen, shared or counted along
        and all(_is_supported(layer, device) for layer in model.modules())
        and (
            group_size(model, device) > 1
            if products_are_faster(device)
            else _count_parameters(model) <= _MAX_PARAMETERS
        )
        and (not (inside := training_defenses(defenses)) or _only_clips(model, inside))
    )


def _is_supported(layer: nn.Module, device: torch.device) -> bool:
    if ghost_clipping.has_hooks(layer) or getattr(layer, "padding_mode", "zeros") != "zeros":
        return False
    return type(layer) in (_LAYERS_OF_ACCELERATOR if products_are_faster(device) else _SUPPORTED_LAYERS)


def _count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def training_defenses(defenses: Sequence[Defense]) -> list[Defense]:
    """Return those of `defenses` that act inside local training."""
    return [defense for defense in defenses if any(overrides(defense, hook) for hook in TRAINING_HOOKS)]


def _only_clips(model: nn.Module, inside: Sequence[Defense]) -> bool:
    """Return whether `inside` is one defense that clips examples' gradients and changes their sum."""
    other_hooks = set(TRAINING_HOOKS) - {"sampling", "on_examples"}
    return (
        len(inside) == 1
        and supports_ghost_clipping(inside[0])
        and not any(overrides(inside[0], hook) for hook in other_hooks)
        and ghost_clipping.can_clip(model)
        and not any(getattr(layer, "inplace", False) for layer in model.modules())
    )


def is_worthwhile(shares: Sequence[LocalData], settings: LocalTraining) -> bool:
    """Return whether these clients have about the same work, as all wait for the one with most."""
    counts = [len(share.labels) for share in shares]
    steps = [settings.steps(count) for count in counts]
    widths = [min(count, settings.batch_size) for count in counts]
    useful = sum(step * width for step, width in zip(steps, widths, strict=True))
    return len(shares) * max(steps) * max(widths) <= 2 * useful


def group_size(model: nn.Module, device: torch.device = _CPU) -> int:
    """Return how many clients should train at once."""
    count = _count_parameters(model)
    if products_are_faster(device):
        return max(1, min(_MAX_CLIENTS_OF_ACCELERATOR, _GROUP_PARAMETERS_OF_ACCELERATOR // count))
    return max(_MIN_CLIENTS, min(_MAX_CLIENTS, _GROUP_PARAMETERS // count))


def local_updates(
    model: nn.Module,
    before: State,
    shares: Sequence[LocalData],
    settings: LocalTraining,
    loss: Loss = cross_entropy,
) -> list[tuple[State, float] | None]:
    """Train several clients from `before`; return (w_T, mean training loss) of each, in order.

    A client with fewer steps than others waits for them; a batch with fewer examples is padded with
    examples of weight zero. All is computed on the device of `model`, where the results stay.

    Returns:
        None for a client whose weights became NaN or infinite, or overflow in their sum, or all of
        whose batches were empty.
    """
    check_broadcast(model, before)  # a tensor of one element would be broadcast to a whole parameter
    device = next(model.parameters()).device
    plan = _BatchPlan.from_shares(shares, settings, device)
    # Flower's adaptive strategies broadcast float64, which a network takes as what it is made of. A
    # copy, because products round otherwise where messages or files leave memory less aligned.
    before = {name: before[name].to(parameter, copy=True) for name, parameter in model.named_parameters()}
    state = {name: tensor.expand(len(shares), *tensor.shape) for name, tensor in before.items()}
    momentum: dict[str, Tensor] = {}
    losses, objective = torch.zeros(len(shares), device=device), smooth_labels(loss, settings.label_smoothing)
    for step in range(plan.index.shape[1]):
        # Compute all clients' gradients.
        inputs, labels, weights = plan.batch(step)
        training = plan.is_training(step)
        hooks = None
        if shares[0].hooks is not None:
            pairs = zip(shares, training.tolist(), strict=True)
            hooks = [share.hooks if is_training else None for share, is_training in pairs]
        step_losses, gradient = _gradients(model, state, inputs, labels, weights, objective, hooks)
        losses += step_losses
        # Take one step of SGD with those that still train.
        for name, start in before.items():
            direction = sgd_direction(gradient[name], state[name], start, settings, momentum, name)
            if not training.all():
                direction = direction * training.to(device).reshape(-1, *[1] * start.ndim)
            # In place where that is safe: fresh memory for all clients costs more than the
            # arithmetic.
            if step:
                state[name] = state[name].sub_(direction, alpha=settings.learning_rate)
            else:
                out = None if settings.momentum else direction
                state[name] = torch.sub(start, direction, alpha=settings.learning_rate, out=out)
    # Split the result by client.
    means = (losses.cpu() / plan.non_empty_steps).tolist()
    sums = torch.stack([flatten_examples(tensor).sum(1) for tensor in state.values()])
    finite = sums.isfinite().all(0).tolist()
    results: list[tuple[State, float] | None] = []
    for client, (mean, is_finite) in enumerate(zip(means, finite, strict=True)):
        after = {name: state[name][client] for name in before}
        results.append((after, mean) if is_finite and not math.isnan(mean) else None)
    return results


def _gradients(
    model: nn.Module,
    state: State,
    inputs: Tensor,
    labels: Tensor,
    weights: Tensor,
    loss: Loss,
    hooks: Sequence[TrainingHooks | None] | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute loss and gradient of each client's batch.

    Args:
        state: `client ...` by parameter.
        hooks: by client, None for one that has taken all its steps; their defenses make gradients of clipped sums.
            None where no defense does.
    """
    state = {name: tensor.detach().requires_grad_() for name, tensor in state.items()}
    calls: list[ParameterCall] = []
    logits = _forward(model, "", state, inputs, calls)
    example_losses = loss(logits.flatten(0, 1), labels.flatten(0, 1), reduction="none").view(labels.shape[:2])
    losses = (example_losses * weights).sum(1)
    if hooks is not None:
        return losses.detach(), clipped_gradients(state, calls, example_losses, weights > 0, hooks)
    # No client's loss depends on another's weights, so the gradient of the sum of losses is the gradient of each.
    gradients = torch.autograd.grad(losses.sum(), list(state.values()))
    return losses.detach(), dict(zip(state, gradients, strict=True))


def _forward(module: nn.Module, name: str, state: State, inputs: Tensor, calls: list[ParameterCall]) -> Tensor:
    """Compute outputs of `module` for `inputs`, `client example ...`, with each client's weights.

    The use of each parameter is added to `calls`.

    torch.func would do this for any network, at a price: its first gradient imports PyTorch's
    compiler, two seconds, and gradients of a layer come transposed, which slows each later use.
    """
    if isinstance(module, nn.Sequential):
        for child, layer in module._modules.items():
            inputs = _forward(layer, f"{name}{child}.", state, inputs, calls)
        return inputs
    if isinstance(module, nn.Linear):
        rows = inputs.flatten(1, -2).mT
        weight, bias = state[f"{name}weight"], state.get(f"{name}bias")
        outputs = torch.bmm(weight, rows) if bias is None else torch.baddbmm(bias[..., None], weight, rows)
        outputs = outputs.mT.reshape(*inputs.shape[:-1], -1)
        calls.append(ParameterCall(inputs, outputs))
        if bias is not None:
            calls.append(ParameterCall(inputs.new_ones(()), outputs))
        return outputs
    if isinstance(module, _CONVOLUTIONS):
        bias = state.get(f"{name}bias")
        outputs = convolve(
            inputs,
            state[f"{name}weight"],
            bias,
            module.stride,
            module.padding,
            module.dilation,
            module.groups,
            leading_axes=1,
        )
        clipped_layer = module if isinstance(module, nn.Conv2d) else None  # others are not clipped
        calls.append(ParameterCall(inputs, outputs, clipped_layer))
        if bias is not None:
            calls.append(ParameterCall(inputs.new_ones(()), outputs, clipped_layer))
        return outputs
    flat: Tensor = module(inputs.flatten(0, 1))
    return flat.reshape(*inputs.shape[:2], *flat.shape[1:])


@dataclass(frozen=True)
class _BatchPlan:
    """Batches of all clients in all steps, padded to one shape.

    Attributes:
        inputs: `example ...` of each client, on the device that trains, as all but the steps.
        labels: `client example`, padded with zeros.
        index: `client step slot`, indices of examples.
        weights: `client step slot`, one over the size of the batch, zero for padding.
        steps: `client`, the number of steps.
        non_empty_steps: `client`, the number of steps whose batch is not empty.
    """

    inputs: Sequence[Tensor]
    labels: Tensor
    index: Tensor
    weights: Tensor
    steps: Tensor
    non_empty_steps: Tensor

    @classmethod
    def from_shares(cls, shares: Sequence[LocalData], settings: LocalTraining, device: torch.device) -> _BatchPlan:
        """Plan the batches of all clients; move what training needs to `device`."""
        batches_by_client = [share.draw_batches(settings) for share in shares]
        steps = torch.tensor([len(client_batches) for client_batches in batches_by_client])
        is_step = torch.arange(int(steps.max())) < steps[:, None]  # client step
        # Pad all batches to the size of the largest.
        all_batches = [batch for client_batches in batches_by_client for batch in client_batches]
        sizes = torch.tensor([batch.numel() for batch in all_batches])
        padded = pad_sequence(all_batches, batch_first=True)
        index = torch.zeros(*is_step.shape, padded.shape[1], dtype=torch.int64)
        weights = torch.zeros(index.shape)
        index[is_step] = padded
        is_example = torch.arange(padded.shape[1]) < sizes[:, None]
        weights[is_step] = is_example / sizes[:, None].clamp(min=1)
        non_empty_steps = torch.tensor(
            [sum(batch.numel() > 0 for batch in client_batches) for client_batches in batches_by_client]
        )
        inputs = [share.inputs.to(device) for share in shares]
        labels = pad_sequence([share.labels for share in shares], batch_first=True)
        return cls(inputs, labels.to(device), index.to(device), weights.to(device), steps, non_empty_steps)

    def batch(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return inputs, labels and weights of one step, `client slot ...` each."""
        index = self.index[:, step]
        clients = torch.arange(len(index), device=index.device)[:, None]
        # Client by client: padding the inputs would copy all examples of a round, this copies those
        # of one step.
        inputs = torch.stack([examples[rows] for examples, rows in zip(self.inputs, index, strict=True)])
        return inputs, self.labels[clients, index], self.weights[:, step]

    def is_training(self, step: int) -> Tensor:
        """Return for each client whether it still trains in `step`, `client`."""
        return self.steps > step
