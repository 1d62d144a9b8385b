"""The last linear layer of a model, and what one gradient of it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from adversaries.scene import Scene
from fedsim.defense import Defense, adversary_views
from fedsim.errors import KnowledgeError
from fedsim.wire.messages import State

_REMEDY = "grant them with adversary.knowledge.labels = true, and set align = false where there is such a setting"


@dataclass(frozen=True, kw_only=True)
class LastLayer:
    """The last linear layer of one gradient: what the rules read.

    Attributes:
        weight: `class feature`, at w_t.
        bias: `class`, or None where the layer has none.
        weight_gradient: `class feature`, of the mean loss over the mini-batch.
        bias_gradient: `class`, or None where the layer has no bias.
        non_negative: what goes into the layer is not below 0, as behind a ReLU.
    """

    weight: Tensor
    bias: Tensor | None
    weight_gradient: Tensor
    bias_gradient: Tensor | None
    non_negative: bool = True


def last_layer(scene: Scene, dummy: Tensor) -> LastLayer:
    """The last linear layer of the gradient that a client sent.

    Assumes that the model's outputs go into the cross-entropy as they are.

    Args:
        dummy: `example ...` in standardised units, any data that the model takes: its outputs for them show which
            layer is the last, and whether features may be below 0.

    Raises:
        KnowledgeError: the model's outputs are not those of a linear layer, or of one for a regression.
    """
    prefix, features = output_layer(scene.model, scene.units.to_model(dummy))
    own = [place for place, name in enumerate(scene.names) if name.rpartition(".")[0] == prefix]
    if (name := f"{prefix}.weight".removeprefix(".")) not in scene.names:
        raise untrained(name)
    before, gradient = ([tensors[place].double().cpu() for place in own] for tensors in (scene.before, scene.direction))
    bias = len(own) > 1
    if bias and scene.defenses:
        named = dict(zip([scene.names[place] for place in own], gradient, strict=True))
        gradient = list(completed(named, scene.defenses).values())
    return LastLayer(
        weight=before[0],
        bias=before[1] if bias else None,
        weight_gradient=gradient[0],
        bias_gradient=gradient[1] if bias else None,
        non_negative=bool((features >= 0).all()),
    )


def completed(layer: State, defenses: Sequence[Defense]) -> State:
    """The gradient of a linear layer, what known defenses left out of it filled in as far as its other numbers tell it.

    Row c of the weights' gradient is about the bias's c-th number times the mean feature vector: exactly for one
    example, and nearly for classes that do not occur. That vector follows from the rows whose number was sent, and the
    others' numbers from it. What is filled in is that part which, by their `adversary_view`, the defenses would have
    left out. Where nothing of the bias was sent, nothing is filled.

    Args:
        layer: `class feature` and `class`, the weights first; zeros may have been left out.
    """
    (weight_name, weight), (bias_name, bias) = layer.items()
    tiny = torch.finfo(weight.dtype).tiny
    sent = (weight != 0).to(weight)
    features = (bias @ weight) / (bias.square() @ sent).clamp_min(tiny)
    slopes = torch.where(bias != 0, bias, (weight @ features) / (sent @ features.square()).clamp_min(tiny))
    guess: State = {weight_name: slopes[:, None] * features, bias_name: slopes}
    seen = adversary_views(defenses, guess, layer) or guess
    return {name: torch.where(tensor != 0, tensor, guess[name] - seen[name]) for name, tensor in layer.items()}


@torch.no_grad()
def output_layer(model: nn.Module, inputs: Tensor) -> tuple[str, Tensor]:
    """Name of the linear layer whose outputs are the model's, and what went into it.

    Args:
        inputs: `example ...`, as the model takes them.
    """
    called: list[tuple[str, nn.Module, tuple[Tensor, ...], Tensor]] = []

    def note(name: str, layer: nn.Module, given: tuple[Tensor, ...], made: Tensor) -> None:
        called.append((name, layer, given, made))

    leaves = ((name, layer) for name, layer in model.named_modules() if not any(layer.children()))
    hooks = [layer.register_forward_hook(partial(note, name)) for name, layer in leaves]
    try:
        outputs = model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    linear = [call for call in called if isinstance(call[1], nn.Linear)]
    last = next((call for call in reversed(linear) if torch.equal(call[3], outputs)), None)
    if last is None:
        end = "changes what its last linear layer gives" if linear else "has no linear layer"
        if called and not isinstance(called[-1][1], nn.Linear):
            end = f"ends in {type(called[-1][1]).__name__}, not in a linear layer"
        raise KnowledgeError(f"labels cannot be recovered: the model {end}; {_REMEDY}")
    if outputs.ndim < 2 or outputs.shape[1] == 1:
        raise KnowledgeError(
            f"labels cannot be recovered: they are targets of a regression, which nothing gives away; {_REMEDY}"
        )
    return last[0], last[2][0]


def last_bias(model: nn.Module, inputs: Tensor) -> str:
    """Name of the bias of the layer whose outputs are the model's."""
    name = output_layer(model, inputs)[0]
    if model.get_submodule(name).bias is None:
        raise KnowledgeError(
            "labels are withheld and cannot be counted: the model's last linear layer has no bias; grant them with "
            "adversary.knowledge.labels = true"
        )
    return f"{name}.bias".removeprefix(".")


def untrained(name: str) -> KnowledgeError:
    """The error where labels are read from a layer, called `name`, that was not trained."""
    return KnowledgeError(f"labels cannot be recovered: {name} of the last linear layer did not move; {_REMEDY}")


def apportioned(counts: Tensor, total: int) -> Tensor:
    """Integers that sum to `total`, in proportion to `counts` where they are above 0.

    Where none is, which noise can cause, all classes count alike; what is left over goes to them in their order.
    """
    positive = counts.clamp_min(0)
    if not positive.any():
        positive = 1 + (counts - counts.max()).softmax(0)
    floor = (positive / positive.sum() * total).floor().long()
    left = total - int(floor.sum())
    rest = positive / positive.sum() * total - floor
    floor[rest.argsort(descending=True, stable=True)[:left]] += 1
    return floor


def spelled_out(counts: Tensor) -> Tensor:
    """`example`, each class as often as `counts` says, in ascending order."""
    return torch.repeat_interleave(torch.arange(len(counts)), counts)
