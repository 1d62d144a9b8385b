"""Local training of several clients at once: one batched computation instead of a loop, for small networks.

A small network's step is mostly overhead, which a batch of clients pays once. The result is that of
`fedsim.training.loop.local_update`, the reference, up to the order of float sums: where training is stable,
they differ by less than `TOLERANCE` of the size of the update. (Where it is chaotic, a large step
size over hundreds of steps, any two orders of summation lead apart.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from fedsim.defense import INSIDE, Defense, overrides, shortens
from fedsim.errors import RunError
from fedsim.randomness import generator
from fedsim.task import Loss, smoothed
from fedsim.training import shortened
from fedsim.training.gradients import rows_of_examples
from fedsim.training.hooks import Hooks
from fedsim.training.model_state import check_broadcast
from fedsim.training.optimizers import sgd_direction
from fedsim.training.sampling import batches
from fedsim.training.settings import LocalTraining
from fedsim.wire.messages import State

TOLERANCE = 1e-4
"""Largest L2 distance to the reference's update, relative to its L2 norm."""
_LARGEST = 500_000  # parameters; a little above, the loop is as fast (docs/scale.md)
_FEWEST, _MOST, _AT_ONCE = 8, 64, 1 << 21  # clients, clients, parameters of all of them, which fit into a cache
_KNOWN = (nn.Sequential, nn.Flatten, nn.Linear, nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.LeakyReLU, nn.Identity)


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one client brings: its data, and the key of its randomness.

    Attributes:
        inputs: `example ...` in model units.
        labels: `example`, class indices or targets.
        key: as in `fedsim.training.loop.local_update`.
        order: likewise.
        hooks: of a client whose defense shortens the gradients of its examples; None where none acts inside training.
    """

    inputs: Tensor
    labels: Tensor
    key: tuple[int | str, ...]
    order: tuple[Tensor, ...] | None = None
    hooks: Hooks | None = None

    def drawn(self, settings: LocalTraining) -> list[Tensor]:
        """The examples of each of its steps."""
        if self.hooks is not None:
            return list(self.hooks.order(self.order))
        own = batches(len(self.labels), settings, generator(*self.key, "order")) if self.order is None else self.order
        return list(own)


def fits(model: nn.Module, settings: LocalTraining, defenses: Sequence[Defense]) -> bool:
    """Whether clients can train at once, and gain by it.

    That is: fully connected layers only, all of them trained, few parameters, SGD, and no defense inside local
    training but one that shortens the gradients of examples, as DP-SGD does. Clients that send gradients are left to
    the loop, so that those are the same to the bit whichever other clients take part.
    """
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return (
        settings.optimizer == "sgd"
        and settings.sends == "weights"
        and trained == list(model.state_dict())  # nothing frozen, shared or counted along
        and all(type(m) in _KNOWN and not (m._forward_hooks or m._forward_pre_hooks) for m in model.modules())
        and sum(parameter.numel() for parameter in model.parameters()) <= _LARGEST
        and (not (inside := acting_inside(defenses)) or _shorten(model, inside))
    )


def acting_inside(defenses: Sequence[Defense]) -> list[Defense]:
    """Those of `defenses` that act inside local training."""
    return [defense for defense in defenses if any(overrides(defense, hook) for hook in INSIDE)]


def _shorten(model: nn.Module, inside: Sequence[Defense]) -> bool:
    """Whether what acts inside local training does nothing but shorten gradients of examples and change their sum."""
    others = set(INSIDE) - {"sampling", "on_examples"}
    return (
        len(inside) == 1
        and shortens(inside[0])
        and not any(overrides(inside[0], hook) for hook in others)
        and shortened.fits(model)
        and not any(getattr(layer, "inplace", False) for layer in model.modules())
    )


def pays(shares: Sequence[Share], settings: LocalTraining) -> bool:
    """Whether these clients have about the same to do; the others wait for who has most."""
    counts = [len(share.labels) for share in shares]
    steps = [settings.steps(count) for count in counts]
    widths = [min(count, settings.batch_size) for count in counts]
    useful = sum(step * width for step, width in zip(steps, widths, strict=True))
    return len(shares) * max(steps) * max(widths) <= 2 * useful


def group_size(model: nn.Module) -> int:
    """How many clients should train at once."""
    return max(_FEWEST, min(_MOST, _AT_ONCE // sum(parameter.numel() for parameter in model.parameters())))


def local_updates(
    model: nn.Module,
    before: State,
    shares: Sequence[Share],
    settings: LocalTraining,
    loss: Loss = cross_entropy,
) -> list[tuple[State, float] | None]:
    """Train each of `shares` from `before`; (w_T, mean training loss) of each, in their order.

    None for a client whose weights became, or seem to have become, NaN or infinite, or all of whose batches were empty.

    A client with fewer steps than others waits for them; a batch with fewer examples is filled up
    with examples of weight zero.
    """
    check_broadcast(model, before)  # a tensor of one element would be spread over all of a parameter
    plan = _Plan.of(shares, settings)
    # Flower's adaptive strategies broadcast float64, which a network takes as what it is made of.
    before = {name: before[name].to(parameter.dtype) for name, parameter in model.named_parameters()}
    state = {name: tensor.expand(len(shares), *tensor.shape) for name, tensor in before.items()}
    momentum: dict[str, Tensor] = {}
    losses, objective = torch.zeros(len(shares)), smoothed(loss, settings.label_smoothing)
    for step in range(plan.index.shape[1]):
        inputs, labels, weights = plan.batch(step)
        training = plan.training(step)
        if shares[0].hooks is None:
            losses_now, gradient = _gradients(model, state, inputs, labels, weights, objective)
        else:
            hooks = [share.hooks if busy else None for share, busy in zip(shares, training.tolist(), strict=True)]
            losses_now, gradient = _defended(model, state, inputs, labels, weights, objective, hooks)
        losses += losses_now
        for name, start in before.items():
            towards = sgd_direction(gradient[name], state[name], start, settings, momentum, name)
            if not training.all():
                towards = towards * training.reshape(-1, *[1] * start.ndim)
            # In place where that is safe: fresh memory for all clients costs more than the arithmetic.
            if step:
                state[name] = state[name].sub_(towards, alpha=settings.learning_rate)
            else:
                out = None if settings.momentum else towards
                state[name] = torch.sub(start, towards, alpha=settings.learning_rate, out=out)
    means = (losses / plan.filled).tolist()
    finite = torch.stack([rows_of_examples(tensor).sum(1) for tensor in state.values()]).isfinite().all(0).tolist()
    afters = [
        dict(zip(before, tensors, strict=True)) for tensors in zip(*(state[name] for name in before), strict=True)
    ]
    return [
        (after, mean) if good and not math.isnan(mean) else None
        for after, mean, good in zip(afters, means, finite, strict=True)
    ]


def _gradients(
    model: nn.Module, state: State, inputs: Tensor, labels: Tensor, weights: Tensor, loss: Loss
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradient of each client's batch; `state` holds a tensor `client ...` of each parameter.

    No client's loss depends on another's weights, so the gradient of their sum is the gradient of each.
    """
    state = {name: tensor.detach().requires_grad_() for name, tensor in state.items()}
    logits = _forward(model, "", state, inputs, [])
    each = loss(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    losses = (each * weights).sum(1)
    gradients = torch.autograd.grad(losses.sum(), list(state.values()))
    return losses.detach(), dict(zip(state, gradients, strict=True))


def _defended(
    model: nn.Module,
    state: State,
    inputs: Tensor,
    labels: Tensor,
    weights: Tensor,
    loss: Loss,
    hooks: Sequence[Hooks | None],
) -> tuple[Tensor, dict[str, Tensor]]:
    """As `_gradients`, of what each client's defense makes of the sum of its examples' gradients, each shortened.

    For norms and sums see `fedsim.training.shortened`.

    Args:
        hooks: by client; None of one that has taken all its steps.

    Raises:
        RunError: a linear layer is given more than a row for each example.
    """
    state = {name: tensor.detach().requires_grad_() for name, tensor in state.items()}
    seen: list[tuple[Tensor, Tensor]] = []
    logits = _forward(model, "", state, inputs, seen)
    each, there = loss(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels), weights > 0
    slopes = torch.autograd.grad((each * there).sum(), [outputs for _, outputs in seen])
    if any(slope.ndim != 3 for slope in slopes):
        raise RunError("a linear layer has several rows an example, whose gradients are not shortened at once")
    pairs = [(given.detach(), slope) for (given, _), slope in zip(seen, slopes, strict=True)]
    factors = torch.stack([given.norm(dim=2) * slope.norm(dim=2) for given, slope in pairs])  # parameter client place
    widths = there.sum(1).tolist()
    for client, own in enumerate(hooks):
        if own is not None and own.factors is not None and widths[client]:
            factors[:, client, : widths[client]] = own.factors(factors[:, client, : widths[client]])
    sums = {
        name: torch.bmm((slope * factor[..., None]).mT, given).view_as(state[name])
        for name, (given, slope), factor in zip(state, pairs, factors, strict=True)
    }
    for client, own in enumerate(hooks):
        if own is not None:
            total = {name: tensor[client] for name, tensor in sums.items()}
            for name, made in own.summed(total, widths[client], total).items():
                sums[name][client] = made
    return (each * weights).sum(1).detach(), sums


def _forward(module: nn.Module, name: str, state: State, inputs: Tensor, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
    """What `module` makes of `inputs`, `client example ...`, each client with weights of its own.

    For each parameter, what its layer is given and gives is added to `seen`; a bias is a weight that is given 1.

    torch.func would do this for any network, at a price: its first gradient imports PyTorch's
    compiler, two seconds, and gradients of a layer come transposed, which each later use pays for.
    """
    if isinstance(module, nn.Sequential):
        for child, layer in module._modules.items():
            inputs = _forward(layer, f"{name}{child}.", state, inputs, seen)
        return inputs
    if isinstance(module, nn.Linear):
        rows = inputs.flatten(1, -2).mT
        weight, bias = state[f"{name}weight"], state.get(f"{name}bias")
        outputs = torch.bmm(weight, rows) if bias is None else torch.baddbmm(bias[..., None], weight, rows)
        outputs = outputs.mT.reshape(*inputs.shape[:-1], -1)
        seen.append((inputs, outputs))
        if bias is not None:
            seen.append((inputs.new_ones(()).expand(*inputs.shape[:-1], 1), outputs))
        return outputs
    flat: Tensor = module(inputs.flatten(0, 1))
    return flat.reshape(*inputs.shape[:2], *flat.shape[1:])


@dataclass(frozen=True)
class _Plan:
    """Who uses which examples in which step.

    Attributes:
        inputs: `example ...` of each client.
        labels: `client example`, filled up with zeros.
        index: `client step place`, into the examples.
        weights: `client step place`, one over the size of the batch, zero where there is no example.
        steps: `client`, how many steps each takes.
        filled: `client`, in how many of them there are examples.
    """

    inputs: Sequence[Tensor]
    labels: Tensor
    index: Tensor
    weights: Tensor
    steps: Tensor
    filled: Tensor

    @classmethod
    def of(cls, shares: Sequence[Share], settings: LocalTraining) -> _Plan:
        drawn = [share.drawn(settings) for share in shares]
        steps = torch.tensor([len(own) for own in drawn])
        taken = torch.arange(int(steps.max())) < steps[:, None]  # client step
        rows = [batch for own in drawn for batch in own]
        widths = torch.tensor([len(batch) for batch in rows])
        padded = pad_sequence(rows, batch_first=True)
        index = torch.zeros(*taken.shape, padded.shape[1], dtype=torch.int64)
        weights = torch.zeros(index.shape)
        index[taken] = padded
        weights[taken] = (torch.arange(padded.shape[1]) < widths[:, None]) / widths[:, None].clamp(min=1)
        filled = torch.tensor([sum(map(bool, map(len, own))) for own in drawn])
        inputs = [share.inputs for share in shares]
        labels = pad_sequence([share.labels for share in shares], batch_first=True)
        return cls(inputs, labels, index, weights, steps, filled)

    def batch(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """`client place ...` each: inputs, labels, weights."""
        clients, index = torch.arange(len(self.index))[:, None], self.index[:, step]
        # Client by client: of all its examples a copy would be made, once a round, where it takes one of a batch.
        inputs = torch.stack([own[rows] for own, rows in zip(self.inputs, index, strict=True)])
        return inputs, self.labels[clients, index], self.weights[:, step]

    def training(self, step: int) -> Tensor:
        """`client`, whether it has not finished yet."""
        return self.steps > step
