"""What an attack reads of a first linear layer: how it moved, and which units it leaves silent."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from adversaries.labels.last_layer import output_layer
from adversaries.scene import Scene, scene_of
from fedsim.attacks import Attack, Knowledge
from fedsim.errors import AttackError, KnowledgeError
from fedsim.randomness import generator
from fedsim.training.first_layer import first_layer, rectified
from fedsim.wire.messages import Update

log = logging.getLogger("fedsim." + __name__)

INSTEAD = "choose an attack that matches gradients, such as sme"
"""What an error says where the first layer gives nothing away."""
_PROBES = 8
_TURNS, _WORTH, _TINY = 30, 0.9, 1e-300


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The first linear layer z = W x + c of an update, in float64 on the CPU.

    Attributes:
        scene: the update as a whole.
        shape: of one example.
        name: of the layer.
        weight: `unit input`, W_0 - W_T, or the gradient that was sent.
        bias: `unit`, likewise of c.
        ends: W, `unit input`, and c, `unit`, at w_0 and at w_T, or at w_0 alone where a gradient was sent.
    """

    scene: Scene
    shape: tuple[int, ...]
    name: str
    weight: Tensor
    bias: Tensor
    ends: tuple[tuple[Tensor, Tensor], ...]

    def silence(self, inputs: Tensor) -> Tensor:
        """`example unit`: how far below 0 the unit stays for the example at w_0 and at w_T; negative where it fires.

        Args:
            inputs: `example input`, float64.
        """
        return -self._before_relu(inputs).amax(0)

    def agreement(self, inputs: Tensor, zeros: Tensor, units: Tensor) -> Tensor:
        """`example`: of how many units that are silent, or fire, at both ends the update says the same, as a share.

        Args:
            inputs: `example input`, float64.
            zeros: `unit example`, where no gradient of the example reached the unit.
            units: `unit`, which they are.
        """
        seen = self._before_relu(inputs)[:, :, units]
        silent, fires = seen.amax(0) < 0, seen.amin(0) > 0
        wrong = (silent & ~zeros.T) | (fires & zeros.T)
        return 1 - wrong.sum(1) / (silent | fires).sum(1).clamp_min(1)

    def _before_relu(self, inputs: Tensor) -> Tensor:
        """`end example unit`, z at w_0 and at w_T."""
        return torch.stack([inputs @ weight.T + bias for weight, bias in self.ends])

    def clamped(self, inputs: Tensor) -> Tensor:
        """`example input`: each value brought into the range that an input can have."""
        units, values = self.scene.units, inputs.reshape(-1, *self.shape)
        return values.clamp(units.low.double().cpu(), units.high.double().cpu()).flatten(1)

    def to_unit_range(self, inputs: Tensor) -> Tensor:
        """`example ...` of `example input`, as a finding holds them: float32 in [0, 1]."""
        units, values = self.scene.units, inputs.reshape(-1, *self.shape)
        low, high = units.low.double().cpu(), units.high.double().cpu()
        return ((values - low) / (high - low)).clamp(0, 1).float()

    @property
    def extent(self) -> float:
        """How wide the range of an input is; of several channels the narrowest."""
        return float((self.scene.units.high - self.scene.units.low).min())


def read_layer(attack: Attack, update: Update, knowledge: Knowledge, *, relu: bool = True) -> Layer:
    """The first linear layer of an update.

    Args:
        relu: the attack reads its zeros, and so needs a ReLU behind it.

    Raises:
        AttackError: the inputs do not enter a linear layer with a bias, or no ReLU follows it; or nothing moved.
    """
    assert knowledge.input_shape is not None
    scene = scene_of(update, knowledge)
    probes = torch.randn((_PROBES, *knowledge.input_shape), generator=generator("first layer"))
    probes = probes.to(scene.before[0])
    weight = first_layer(scene.model, probes)
    if weight is None or weight not in scene.names:
        raise AttackError(
            f"{scene.where}: no linear layer that is trained takes the inputs themselves "
            f"(convolutions, embeddings, dropout or a normalisation come first); {INSTEAD}"
        )
    name = weight.rpartition(".")[0]
    bias = f"{name}.bias".removeprefix(".")
    if bias not in scene.names:
        raise AttackError(
            f"{scene.where}: the first linear layer '{name}' has no bias that is trained, from "
            f"which the scale of each input is read; {INSTEAD}"
        )
    if relu and not rectified(scene.model, name, probes):
        raise AttackError(
            f"{scene.where}: no ReLU directly follows the first linear layer '{name}', whose zeros "
            "tell the inputs apart; choose 'cocktail-party', which needs none"
        )
    at = [scene.names.index(weight), scene.names.index(bias)]
    ends = (scene.before, scene.after) if scene.after else (scene.before,)
    moved_weight, moved_bias = (scene.direction[place].double().cpu() for place in at)
    if not moved_weight.any():
        raise AttackError(
            f"{scene.where}: the first linear layer '{name}' did not move, as where all its units are dead or all "
            f"inputs are 0; {INSTEAD}"
        )
    if not moved_bias.any():
        raise AttackError(
            f"{scene.where}: the bias of the first linear layer '{name}' did not move, from which the scale of each "
            f"input is read; {INSTEAD}"
        )
    return undecayed(
        Layer(
            scene=scene,
            shape=tuple(knowledge.input_shape),
            name=name,
            weight=moved_weight,
            bias=moved_bias,
            ends=tuple((end[at[0]].double().cpu(), end[at[1]].double().cpu()) for end in ends),
        )
    )


def undecayed(layer: Layer) -> Layer:
    """The layer without what weight decay did to it, where it did anything.

    In each step of SGD, with momentum or without, weight decay adds a multiple of the weights to the gradient, and the
    same or another one, often none, of the biases. So in the end multiples of w_0 have come to what the inputs made of
    the update. The latter has a rank of N at most, which tells the multiples: they are those without which the least is
    left beside the N largest directions.
    """
    weight, bias = layer.ends[0]
    starts = [torch.cat([weight, 0 * bias[:, None]], 1), torch.cat([0 * weight, bias[:, None]], 1)]
    moved = torch.cat([layer.weight, layer.bias[:, None]], 1)
    if len(moved) < moved.shape[1]:
        moved, starts = moved.T, [start.T for start in starts]
    if layer.scene.num_examples >= moved.shape[1]:  # nothing would be left
        return layer
    shares = [0.0, 0.0]
    for _ in range(_TURNS):
        left = moved - sum(share * start for share, start in zip(shares, starts, strict=True))
        largest = torch.linalg.eigh(left.T @ left).eigenvectors[:, -layer.scene.num_examples :]
        beside = left - left @ largest @ largest.T
        of_starts = torch.stack([(start - start @ largest @ largest.T).flatten() for start in starts], 1)
        sizes = torch.stack([start.norm() for start in starts]).clamp_min(_TINY)
        gram = of_starts.T @ of_starts / sizes / sizes[:, None] + _TINY * torch.eye(2, dtype=sizes.dtype)
        steps = torch.linalg.lstsq(gram, (of_starts.T @ beside.flatten() / sizes)[:, None]).solution[:, 0] / sizes
        if float((beside.flatten() - of_starts @ steps).norm()) > _WORTH * float(beside.norm()):
            break
        shares = [share + float(step) for share, step in zip(shares, steps, strict=True)]
    if not any(shares):
        return layer
    return replace(layer, weight=layer.weight - shares[0] * weight, bias=layer.bias - shares[1] * bias)


def stacked(layers: Sequence[Layer]) -> Layer:
    """Layers of several updates that are made of the same inputs, as one with the units of all.

    Its N is the largest of theirs.
    """
    ends = zip(*(layer.ends for layer in layers), strict=True)
    largest = max(layers, key=lambda layer: layer.scene.num_examples)
    names = [layer.scene.where for layer in layers]
    where = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    return replace(
        largest,
        scene=replace(largest.scene, where=where),
        weight=torch.cat([layer.weight for layer in layers]),
        bias=torch.cat([layer.bias for layer in layers]),
        ends=tuple((torch.cat([w for w, _ in end]), torch.cat([c for _, c in end])) for end in ends),
    )


def labels_of(layer: Layer, inputs: Tensor) -> Tensor:
    """`example`: the class of each input, whose logit the last layer's update moved up for it.

    With the cross-entropy the update of the last layer is G^T H, where H holds the features of one example a row and
    G, `example class`, is below 0 at the true class alone. G is found by least squares for the features at w_0. Where
    the model does not end in such a layer, labels are what the returned model, or else that at w_0, predicts.

    Args:
        inputs: `example input`, in the model's units.
    """
    scene = layer.scene
    values = inputs.reshape(-1, *layer.shape).to(scene.before[0])
    try:
        _outputs(scene, scene.before, values)
        name, given = output_layer(scene.model, values)
        places = [scene.names.index(f"{name}.{kind}".removeprefix(".")) for kind in ("weight", "bias")]
    except (KnowledgeError, ValueError):
        outputs = _outputs(scene, scene.after or scene.before, values)
        log.warning("%s: labels cannot be read from the last layer; they are what the model predicts", scene.where)
        return outputs.argmax(1).cpu() if outputs.shape[1] > 1 else outputs[:, 0].float().cpu()
    weight, bias = (scene.direction[place].double().cpu() for place in places)
    features = torch.cat([given.double().cpu(), torch.ones(len(values), 1, dtype=torch.float64)], 1)
    moved = torch.cat([weight, bias[:, None]], 1)
    slopes: Tensor = torch.linalg.lstsq(features.T, moved.T, driver="gelsd").solution
    return slopes.argmin(1)


@torch.no_grad()
def _outputs(scene: Scene, weights: Sequence[Tensor], values: Tensor) -> Tensor:
    """What the model, which is left with these weights, makes of inputs."""
    scene.model.load_state_dict({**dict(zip(scene.names, weights, strict=True)), **scene.buffers}, strict=False)
    outputs: Tensor = scene.model(values)
    return outputs.reshape(len(values), -1)
