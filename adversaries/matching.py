"""The engine behind gradient inversion: move dummy data until their gradient points along an update.

An attack says where on the line between w_0 and w_T the dummy gradient is taken and how to optimise;
see `inverting_gradients` and `surrogate_model`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from adversaries.labels import count_labels
from fedsim.attack import Attack, Knowledge, Progress, single_update
from fedsim.errors import AttackError, ConfigError, TranscriptError
from fedsim.findings import Reconstruction
from fedsim.messages import State, Update, by_name
from fedsim.transcript import Transcript

_SNAPSHOTS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Fractions of the iterations after which the dummy data are kept for the report."""
_DECAY = (3 / 8, 5 / 8, 7 / 8)
"""Fractions of the iterations after which step sizes fall to a tenth, as in IG's and SME's released code."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """Where the dummy gradient is taken: at alpha w_0 + (1 - alpha) w_T (SME, Eq. 5).

    Attributes:
        alpha: position at the start; 1 is the broadcast state.
        step_size: Adam's, for alpha; None keeps it fixed.
    """

    alpha: float = 1.0
    step_size: float | None = None


@dataclass(frozen=True, kw_only=True)
class GradientMatching(Attack):
    """Reconstruct a victim's data from one update by matching gradients.

    Minimises L_sim(w_0 - w_T, grad loss(w, D)) + lambda TV(D) over the dummy data D, where L_sim is
    one minus the cosine and w lies on the line between w_0 and w_T        [SME, Eqs. 1 and 5].
    A subclass says where on that line.

    Args:
        iterations: K.                                                        [SME App. D: 1000]
        step_size: Adam's for the dummy data, in standard deviations of the inputs. [SME App. D: 1]
        tv_weight: lambda, dimensionless.                                     [SME App. D: 0.01]
        signed: feed Adam the sign of each pixel's gradient.    [Geiping et al.: yes; SME: no]
        decay: step sizes x 0.1 after 3/8, 5/8 and 7/8 of the way. [released code of both papers]
    """

    iterations: int = 1000
    step_size: float = 1.0
    tv_weight: float = 0.01
    signed: bool = False
    decay: bool = True

    needs: ClassVar[frozenset[str]] = frozenset({"model", "loss", "input_shape", "value_range"})

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise ConfigError(f"iterations: expected at least 1, got {self.iterations}")
        if not 0 < self.step_size < math.inf:
            raise ConfigError(f"step_size: expected a finite value above 0, got {self.step_size}")
        if not 0 <= self.tv_weight < math.inf:
            raise ConfigError(f"tv_weight: expected a finite value of at least 0, got {self.tv_weight}")

    @abstractmethod
    def _line(self) -> Line: ...

    def _run(
        self, transcript: Transcript, knowledge: Knowledge, victim: int, rng: torch.Generator, progress: Progress
    ) -> Reconstruction:
        update = single_update(transcript, victim)
        return invert(update, knowledge, self, self._line(), rng=rng, progress=progress)


@dataclass(frozen=True)
class _Units:
    """The dummy data live in standardised coordinates; this maps them to the model's and to [0, 1]."""

    centre: Tensor
    scale: Tensor
    low: Tensor
    high: Tensor

    def to_model(self, dummy: Tensor) -> Tensor:
        return self.centre + self.scale * dummy

    def to_unit_range(self, dummy: Tensor) -> Tensor:
        return ((self.to_model(dummy) - self.low) / (self.high - self.low)).clamp(0, 1).float().cpu()

    @torch.no_grad()
    def clamp_(self, dummy: Tensor) -> None:
        """Keep pixels in the valid range (SME, App. D)."""
        bounds = ((end - self.centre) / self.scale for end in (self.low, self.high))
        dummy.clamp_(*bounds)


@dataclass
class _Trace:
    """Curves and snapshots collected on the way."""

    values: dict[str, list[Tensor]] = field(default_factory=lambda: {"objective": [], "l_sim": [], "alpha": []})
    at: list[int] = field(default_factory=list)
    data: list[Tensor] = field(default_factory=list)


def invert(
    update: Update,
    knowledge: Knowledge,
    matching: GradientMatching,
    line: Line,
    *,
    rng: torch.Generator,
    progress: Progress,
) -> Reconstruction:
    """Minimise L_sim(w_0 - w_T, grad of the dummy data) + lambda TV(dummy data)     (SME, Eqs. 1 and 5).

    The result is the last iterate; nothing is picked with hindsight. Curves hold each iteration's
    values before its step, as in SME's released code, so their last is that of the last iterate but one.

    Raises:
        AttackError: a zero update, buffers that were not shared, or an objective that became NaN.
        KnowledgeError: labels are withheld and cannot be recovered from this model.
        TranscriptError: the update is not one of this model.
    """
    model, before, after, buffers = _prepare(update, knowledge)
    direction = [before[name] - after[name] for name in before]
    norm = torch.sqrt(sum((d.square().sum() for d in direction), torch.zeros((), device=knowledge.device)))
    if not norm > 0:
        raise AttackError(f"round {update.round}, client {update.client}: w_T equals w_0, there is nothing to match")
    target = [d / norm for d in direction]
    labels = _labels(update, knowledge, model, {**before, **buffers}, {**after, **buffers}, rng).to(knowledge.device)
    units = _units(knowledge, next(iter(before.values())))

    shape = (len(labels), *(knowledge.input_shape or ()))
    dummy = torch.randn(shape, generator=rng).to(norm)
    units.clamp_(dummy)
    dummy.requires_grad_(True)
    alpha = torch.tensor(line.alpha, dtype=norm.dtype, device=norm.device, requires_grad=line.step_size is not None)
    groups = [{"params": [dummy], "lr": matching.step_size}]
    if line.step_size is not None:
        groups.append({"params": [alpha], "lr": line.step_size})
    optimizer = torch.optim.Adam(groups)
    milestones = [int(part * matching.iterations) for part in _DECAY] if matching.decay else []
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, gamma=0.1)
    loss = knowledge.loss
    assert loss is not None

    surrogate = {
        name: weights.detach().requires_grad_(True) for name, weights in _surrogate(alpha, before, after).items()
    }
    trace = _Trace()
    keep = {round(part * matching.iterations) for part in _SNAPSHOTS}
    for iteration in range(matching.iterations):
        if iteration in keep:
            trace.at.append(iteration)
            trace.data.append(units.to_unit_range(dummy.detach()))
        if line.step_size is not None:
            surrogate = _surrogate(alpha, before, after)
        logits = functional_call(model, {**surrogate, **buffers}, (units.to_model(dummy),))
        gradient = torch.autograd.grad(loss(logits, labels), list(surrogate.values()), create_graph=True)
        l_sim = 1 - _cosine(gradient, target)
        objective = l_sim + matching.tv_weight * total_variation(dummy)
        wanted = [dummy] if line.step_size is None else [dummy, alpha]
        for variable, slope in zip(wanted, torch.autograd.grad(objective, wanted), strict=True):
            variable.grad = slope.sign() if matching.signed and variable is dummy else slope
        for name, value in (("objective", objective), ("l_sim", l_sim), ("alpha", alpha)):
            trace.values[name].append(value.detach().clone())
        _report(iteration, matching.iterations, trace, update, progress)
        optimizer.step()
        schedule.step()
        units.clamp_(dummy)
        with torch.no_grad():
            alpha.clamp_(0, 1)
    trace.at.append(matching.iterations)
    trace.data.append(units.to_unit_range(dummy.detach()))
    return Reconstruction(
        data=trace.data[-1],
        labels=labels.cpu(),
        trace={name: torch.stack(values).float().cpu() for name, values in trace.values.items()},
        snapshots=torch.stack(trace.data),
        snapshot_iterations=torch.tensor(trace.at),
    )


def _surrogate(alpha: Tensor, before: State, after: State) -> dict[str, Tensor]:
    return {name: alpha * before[name] + (1 - alpha) * after[name] for name in before}


def total_variation(images: Tensor) -> Tensor:
    """Mean absolute difference of neighbouring pixels, averaged over both directions.

    `images` is `example channel height width`; anisotropic and without wrap-around, in the units of
    the dummy data, as in SME's released code (IG's own code sums the directions).
    """
    across = (images[..., 1:] - images[..., :-1]).abs().mean()
    down = (images[..., 1:, :] - images[..., :-1, :]).abs().mean()
    return (across + down) / 2


def _cosine(gradient: tuple[Tensor, ...], target: list[Tensor]) -> Tensor:
    """Cosine between a gradient and a unit vector, over all parameters at once."""
    inner = torch.stack([(g * t).sum() for g, t in zip(gradient, target, strict=True)]).sum()
    norm = torch.stack([g.square().sum() for g in gradient]).sum().sqrt()
    return inner / norm.clamp_min(torch.finfo(norm.dtype).tiny)


def _prepare(update: Update, knowledge: Knowledge) -> tuple[nn.Module, State, State, State]:
    """The model, w_0 and w_T under its parameters' names, and the buffers that were sent along."""
    assert knowledge.model is not None
    model = knowledge.model().to(knowledge.device).eval()
    kept = model.state_dict()
    shapes = {name: p.shape for name, p in model.named_parameters()}
    real = {name: t.shape for name, t in kept.items() if t.is_floating_point()}
    floating = [name for name, _ in model.named_buffers() if name in real]
    # Federations send all that a model keeps, all but integer counters, or the parameters alone.
    orders = ({name: t.shape for name, t in kept.items()}, real, shapes)
    before, after = (
        next((named for names in orders if (named := by_name(state, names)) is not None), None)
        for state in (update.before, update.after)
    )
    if before is None or after is None:
        raise TranscriptError(
            f"round {update.round}, client {update.client}: the recorded weights "
            f"({_describe(update.before)}) are not those of the model ({_describe_shapes(shapes)}); "
            "attack with the model of that federation"
        )
    missing = [name for name in floating if name not in before]
    if missing:
        raise AttackError(
            f"the model normalises with {missing[0]}, which clients of this federation do not share; "
            "this attack needs a model without such buffers, or one that shares them"
        )
    device = knowledge.device
    return (
        model,
        {name: before[name].to(device) for name in shapes},
        {name: after[name].to(device) for name in shapes},
        {name: before[name].to(device) for name in floating},
    )


def _labels(
    update: Update, knowledge: Knowledge, model: nn.Module, before: State, after: State, rng: torch.Generator
) -> Tensor:
    if update.num_examples < 1:
        raise AttackError(f"round {update.round}, client {update.client}: N is {update.num_examples}")
    if knowledge.labels is None:
        return count_labels(update, knowledge, model, before, after, rng)
    if len(knowledge.labels) != update.num_examples:
        raise AttackError(
            f"round {update.round}, client {update.client}: {len(knowledge.labels)} labels are granted, "
            f"but the client reported N = {update.num_examples}"
        )
    return knowledge.labels


def _units(knowledge: Knowledge, like: Tensor) -> _Units:
    """Standardised coordinates: by the granted moments, else half the range wide around its middle."""
    assert knowledge.value_range is not None
    assert knowledge.input_shape is not None
    axes = [-1] + [1] * (len(knowledge.input_shape) - 1)
    low, high = (torch.as_tensor(end).to(like).reshape(axes) for end in knowledge.value_range)
    if knowledge.input_mean is None or knowledge.input_std is None:
        return _Units(centre=(low + high) / 2, scale=(high - low) / 4, low=low, high=high)
    mean, std = (torch.as_tensor(m).to(like).reshape(axes) for m in (knowledge.input_mean, knowledge.input_std))
    return _Units(centre=mean, scale=std, low=low, high=high)


def _report(iteration: int, iterations: int, trace: _Trace, update: Update, progress: Progress) -> None:
    if iteration % max(1, iterations // 100) and iteration != iterations - 1:
        return
    values = {name: curve[-1].item() for name, curve in trace.values.items()}
    if values["objective"] != values["objective"]:
        raise AttackError(
            f"round {update.round}, client {update.client}: the objective became NaN at iteration {iteration}; "
            "lower the attack's step_size"
        )
    progress(iteration + 1, iterations, values)


def _describe(state: State) -> str:
    return _describe_shapes({name: t.shape for name, t in state.items()})


def _describe_shapes(shapes: dict[str, torch.Size]) -> str:
    first = ", ".join(f"{name} {tuple(shape)}" for name, shape in list(shapes.items())[:2])
    return f"{len(shapes)} tensors: {first}, ..."
