"""Where the gradient of the dummy data is taken; what sets one inversion attack apart from another.

A place may have variables of its own, which are optimised together with the dummy data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adversaries.engine.distances import length
from adversaries.scene import Scene, known_steps
from fedsim.errors import AttackError


@dataclass(frozen=True)
class Variable:
    """Something that is optimised beside the dummy data.

    Attributes:
        start: where it begins.
        step_size: of its optimizer.
        low: it is kept at least here.
        high: and at most here.
        every: its slope is computed each so many iterations; in between its optimizer goes on with the last one.
    """

    start: Tensor
    step_size: float
    low: float = 0.0
    high: float = 1.0
    every: int = 1


class Place(ABC):
    """A frozen dataclass that says at which weights the dummy data are differentiated.

    Class attributes:
        simulates: which departures from plain SGD it follows, of `adversaries.scene.STEPPING`.
        cuts: whether it cuts the dummy data into mini-batches in their order, so that the order of labels matters.
    """

    simulates: ClassVar[frozenset[str]] = frozenset()
    cuts: ClassVar[bool] = False

    def variables(self, scene: Scene) -> dict[str, Variable]:
        """What is optimised beside the dummy data, by name; a single number becomes a curve in the report."""
        return {}

    @abstractmethod
    def gradient(self, scene: Scene, values: Mapping[str, Tensor], dummy: Tensor, labels: Tensor) -> list[Tensor]:
        """What is compared with the recorded update, differentiable in the dummy data and in `values`."""


@dataclass(frozen=True)
class AtBroadcast(Place):
    """At w_0: the update counts as one gradient (DLG, IG)."""

    def gradient(self, scene: Scene, values: Mapping[str, Tensor], dummy: Tensor, labels: Tensor) -> list[Tensor]:
        """See `Place`."""
        return scene.gradient(scene.before, dummy, labels)


@dataclass(frozen=True, kw_only=True)
class OnLine(Place):
    """At alpha w_0 + (1 - alpha) w_T, the surrogate model of SME, Eq. 5.

    Attributes:
        alpha: position at the start; 1 is the broadcast state.
        step_size: of alpha's optimizer; alpha stays in [0, 1].
        per_layer: an alpha for each parameter tensor.
        every: see `Variable`.
    """

    alpha: float = 0.5
    step_size: float = 0.001
    per_layer: bool = False
    every: int = 1

    def variables(self, scene: Scene) -> dict[str, Variable]:
        """Alpha, one number or one a tensor.

        Raises:
            AttackError: a gradient was sent, so there is no w_T.
        """
        if scene.sent is not None:
            raise AttackError(
                f"{scene.where}: a gradient was sent, no weights; this attack needs the weights that a client returns"
            )
        start = torch.tensor(self.alpha).to(scene.before[0])
        if self.per_layer:
            start = start.repeat(len(scene.before))
        return {"alpha": Variable(start, self.step_size, every=self.every)}

    def gradient(self, scene: Scene, values: Mapping[str, Tensor], dummy: Tensor, labels: Tensor) -> list[Tensor]:
        """See `Place`."""
        alpha = values["alpha"]
        alphas = alpha if self.per_layer else [alpha] * len(scene.before)
        ends = zip(alphas, scene.before, scene.after, strict=True)
        return scene.gradient([a * start + (1 - a) * end for a, start, end in ends], dummy, labels)


@dataclass(frozen=True, kw_only=True)
class AlongTraining(Place):
    """Along the whole local training, which is simulated: the gradients of all steps count (DLFA).

    The dummy data are `epoch x example`: each epoch has images of its own, in the order in which its
    mini-batches take them. What is compared is the mean of the simulated steps over the learning rate: of gradients,
    with momentum, weight decay and FedProx's proximal term where clients are known to have them.
    """

    simulates: ClassVar[frozenset[str]] = frozenset({"momentum", "weight_decay", "proximal_mu"})
    cuts: ClassVar[bool] = True

    def variables(self, scene: Scene) -> dict[str, Variable]:
        """None.

        Raises:
            AttackError: clients train by another optimizer than SGD.
        """
        if scene.sent is None and scene.optimizer != "sgd":
            raise AttackError(
                f"{scene.where}: this attack simulates local training by SGD, and clients train by {scene.optimizer}; "
                "choose one that does not simulate it, as sme"
            )
        return {}

    def gradient(self, scene: Scene, values: Mapping[str, Tensor], dummy: Tensor, labels: Tensor) -> list[Tensor]:
        """See `Place`."""
        assert scene.learning_rate is not None
        weights: Sequence[Tensor] = scene.before
        moves: list[Tensor] = []
        total: list[Tensor] = []
        for batch, targets in self._batches(scene, dummy, labels):
            gradient = self._penalised(scene, weights, scene.gradient(weights, batch, targets))
            if scene.momentum and moves:
                gradient = [scene.momentum * m + g for m, g in zip(moves, gradient, strict=True)]
            moves = gradient
            weights = [w - scene.learning_rate * m for w, m in zip(weights, moves, strict=True)]
            total = [t + m for t, m in zip(total, moves, strict=True)] if total else moves
        return [t / scene.steps for t in total]

    def _batches(self, scene: Scene, dummy: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The examples of each local step, of which there may be fewer than whole epochs have."""
        assert scene.batch_size is not None
        found: list[tuple[Tensor, Tensor]] = []
        for start in range(0, len(dummy), scene.num_examples):
            epoch = slice(start, start + scene.num_examples)
            pieces = (torch.split(whole[epoch], scene.batch_size) for whole in (dummy, labels))
            found += zip(*pieces, strict=True)
        return found[: scene.steps]

    def _penalised(self, scene: Scene, weights: Sequence[Tensor], gradient: list[Tensor]) -> list[Tensor]:
        """With the slopes of weight decay and of the proximal term, as in `fedsim.training.loop`."""
        decay, pull = scene.weight_decay, scene.proximal_mu
        if not (decay or pull):
            return gradient
        together = zip(gradient, weights, scene.before, strict=True)
        return [g + decay * w + pull * (w - start) for g, w, start in together]


@dataclass(frozen=True, kw_only=True)
class AlongStrides(Place):
    """Along a simulated local training of a few long strides, each by the gradient in its middle.

    Local training with small steps follows the gradient flow, whatever the batches (SME, App. E). Two
    strides of the midpoint rule follow it closely where the line between w_0 and w_T no longer does, and
    their cost does not grow with T. Strides are equally long, together as long as that line times a
    `stretch` that is optimised. (Strides of equal time, eta T / strides each, overshoot where the loss
    is curved.) Where the client is known to have taken one step, it is the gradient at w_0.

    Attributes:
        strides: how many.
        step_size: of the stretch's optimizer; it begins at 1 and stays in [0.5, 2].
    """

    strides: int = 2
    step_size: float = 0.001

    def variables(self, scene: Scene) -> dict[str, Variable]:
        """The stretch, one number."""
        if known_steps(scene, scene.num_examples) == 1:
            return {}
        return {"stretch": Variable(scene.before[0].new_ones(()), self.step_size, 0.5, 2.0)}

    def gradient(self, scene: Scene, values: Mapping[str, Tensor], dummy: Tensor, labels: Tensor) -> list[Tensor]:
        """See `Place`; the sum of the strides."""
        if known_steps(scene, scene.num_examples) == 1:
            return scene.gradient(scene.before, dummy, labels)
        stride = values["stretch"] * length(scene.direction) / self.strides
        weights: Sequence[Tensor] = scene.before
        total = [torch.zeros_like(w) for w in weights]
        for _ in range(self.strides):
            gradient = scene.gradient(weights, dummy, labels)
            half = stride / 2 / length(gradient)
            gradient = scene.gradient([w - half * g for w, g in zip(weights, gradient, strict=True)], dummy, labels)
            whole = stride / length(gradient)
            moved = [whole * g for g in gradient]
            weights = [w - m for w, m in zip(weights, moved, strict=True)]
            total = [t + m for t, m in zip(total, moved, strict=True)]
        return total
