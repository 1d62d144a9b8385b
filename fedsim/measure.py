"""The interface of a measure: how exposed a batch is, computed by who holds it, before anything is sent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, final

import torch
from torch import Tensor, nn

from fedsim.errors import RunError
from fedsim.randomness import one_thread, seeded
from fedsim.task import Loss
from fedsim.training.sent import BUDGET, Sent

if TYPE_CHECKING:
    from fedsim.training.settings import LocalTraining

Meaning = Literal["more", "less"]
"""Whether a larger value says that more is exposed, or less."""


@dataclass(frozen=True, kw_only=True)
class Measure(ABC):
    """Base of all measures: a frozen dataclass whose fields are its settings.

    A measure is a pure function of a model, a loss and a batch, by way of what a client sends of it (`Sent`). A
    subclass implements `_of` and names its values in `quantities`. Its docstring says in which unit a value is and
    where it is undefined.

    Attributes:
        quantities: the values that it gives, by name, and what a larger one says.
        black_box: whether it needs no more than what the client would send of inputs that it chooses (`Sent.vector`,
            `Sent.share`, `Sent.around`), and no derivative of the model.
    """

    quantities: ClassVar[Mapping[str, Meaning]]
    black_box: ClassVar[bool] = False

    @final
    def of(
        self,
        model: nn.Module,
        loss: Loss,
        inputs: Tensor,
        labels: Tensor,
        *,
        training: LocalTraining | None = None,
        order: Sequence[Tensor] | None = None,
        memory: int = BUDGET,
    ) -> dict[str, float]:
        """How exposed a batch is, or with `training` a client's local data.

        The model is copied. What its layers draw (dropout) is the same each time.

        Args:
            model: with the weights that the client trains from. Without `training` its layers stay in their modes.
            loss: what the client minimises, as `fedsim.Task.loss`.
            inputs: `example ...` in model units.
            labels: `example`, class indices or targets.
            training: how the client trains, where it sends an update (FedAvg); None of the gradient of the batch.
            order: the examples of each step of `training`; by default in the order that they are in.
            memory: bytes that may be used at once.

        Returns:
            By each name in `quantities` a value; NaN where it is undefined, as all are of a gradient that is zero or,
            after training has diverged, not finite.

        Raises:
            ConfigError: the batch is empty, or there is not one label for each input; the model, the loss or the inputs
                do not allow this measure.
            RunError: the measure gave other quantities than it names, or an infinite value.
        """
        return self.of_sent(Sent.of(model, loss, inputs, labels, training=training, order=order, budget=memory))

    @final
    def of_sent(self, sent: Sent) -> dict[str, float]:
        """As `of`, of what a client sends, which several measures may share with what they compute of it."""
        with seeded("measure"), one_thread():
            return self._checked(sent)

    @final
    def of_each(
        self,
        model: nn.Module,
        loss: Loss,
        inputs: Tensor,
        labels: Tensor,
        *,
        training: LocalTraining | None = None,
        order: Sequence[Tensor] | None = None,
        memory: int = BUDGET,
    ) -> dict[str, Tensor]:
        """How exposed each example of a batch is if all the others are known: as `of`, `example` values by name."""
        return self.each_of_sent(Sent.of(model, loss, inputs, labels, training=training, order=order, budget=memory))

    @final
    def each_of_sent(self, sent: Sent) -> dict[str, Tensor]:
        """As `of_each`, of what a client sends."""
        with seeded("measure"), one_thread():
            every = [self._checked(sent.alone(example)) for example in range(len(sent.inputs))]
        return {name: torch.tensor([values[name] for values in every]) for name in self.quantities}

    def _checked(self, sent: Sent) -> dict[str, float]:
        if sent.is_zero or not sent.vector.isfinite().all():
            return dict.fromkeys(self.quantities, torch.nan)
        values = {name: float(value) for name, value in self._of(sent).items()}
        if values.keys() != self.quantities.keys():
            raise RunError(
                f"{type(self).__name__}: expected the quantities {', '.join(self.quantities)}, got {', '.join(values)}"
            )
        if endless := [name for name, value in values.items() if abs(value) == torch.inf]:
            raise RunError(
                f"{type(self).__name__}: {endless[0]} is infinite; return NaN where the measure is undefined"
            )
        return values

    @abstractmethod
    def _of(self, sent: Sent) -> Mapping[str, float | Tensor]:
        """The values, of something that is not zero; `sent.varying` says which examples are unknown."""
