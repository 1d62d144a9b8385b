"""The interface of a measure of exposure, which clients compute before they send anything."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, final

import torch
from torch import Tensor, nn

from fedsim.base.constraints import CheckedSettings
from fedsim.base.errors import RunError
from fedsim.base.randomness import seed_globals, use_one_thread
from fedsim.base.task import Loss
from fedsim.training.message_function import MEMORY_BUDGET, ClientMessage

if TYPE_CHECKING:
    from fedsim.training.settings import LocalTraining

Meaning = Literal["more", "less"]
"""Return whether a larger value says that more is exposed, or less."""


@dataclass(frozen=True, kw_only=True)
class Measure(CheckedSettings, ABC):
    """Base of all measures: a frozen dataclass whose fields are its settings.

    A measure is a pure function of a model, a loss and a batch, by way of the message that a client
    sends for them (`ClientMessage`). A subclass implements `_compute` and names its values in
    `quantities`. Its docstring says in which unit a value is and where it is undefined.

    Attributes:
        quantities: its values by name, and whether a larger value means more or less exposure.
        black_box: whether it only uses messages for inputs that it chooses (`ClientMessage.vector`,
            `gradient_share`, `perturbed_messages`), and takes no derivative of the model.
    """

    quantities: ClassVar[Mapping[str, Meaning]]
    black_box: ClassVar[bool] = False

    @final
    def compute(
        self,
        model: nn.Module,
        loss: Loss,
        inputs: Tensor,
        labels: Tensor,
        *,
        training: LocalTraining | None = None,
        order: Sequence[Tensor] | None = None,
        memory: int = MEMORY_BUDGET,
    ) -> dict[str, float]:
        """Measure the exposure of a batch, or with `training` of a client's local data.

        The model is copied. Random draws of its layers (dropout) are the same each time.

        Args:
            model: with the weights from which the client trains. Without `training` its layers stay
                in their modes.
            loss: the loss that the client minimises, as `fedsim.Task.loss`.
            inputs: `example ...` in model units.
            labels: `example`, class indices or targets.
            training: settings of a client that sends an update (FedAvg); None for the gradient of
                the batch.
            order: the indices of the examples in each step of `training`; by default in their
                order.
            memory: bytes that may be used at once.

        Returns:
            A value for each name in `quantities`. NaN where it is undefined, as all are for a
            message that is zero or, after training has diverged, not finite.

        Raises:
            ConfigError: the batch is empty, or there is not one label for each input; or the
                measure does not work for this model, loss or these inputs.
            RunError: the measure returned other quantities than it names, or an infinite value.
        """
        return self.compute_for_message(
            ClientMessage.create(model, loss, inputs, labels, training=training, order=order, budget=memory)
        )

    @final
    def compute_for_message(self, sent: ClientMessage) -> dict[str, float]:
        """Measure the exposure by a message, which several measures can share with its derivatives.

        Raises:
            RunError: the measure returned other quantities than it names, or an infinite value.
        """
        with seed_globals("measure"), use_one_thread():
            return self._compute_checked(sent)

    @final
    def compute_per_example(
        self,
        model: nn.Module,
        loss: Loss,
        inputs: Tensor,
        labels: Tensor,
        *,
        training: LocalTraining | None = None,
        order: Sequence[Tensor] | None = None,
        memory: int = MEMORY_BUDGET,
    ) -> dict[str, Tensor]:
        """Measure the exposure of each example of a batch, if all others are known.

        Arguments are those of `compute`.

        Returns:
            `example` values for each name in `quantities`.
        """
        return self.compute_per_example_for_message(
            ClientMessage.create(model, loss, inputs, labels, training=training, order=order, budget=memory)
        )

    @final
    def compute_per_example_for_message(self, sent: ClientMessage) -> dict[str, Tensor]:
        """Measure the exposure of each example by a message, if all other examples are known."""
        with seed_globals("measure"), use_one_thread():
            per_example = [self._compute_checked(sent.vary_one_example(example)) for example in range(len(sent.inputs))]
        return {name: torch.tensor([values[name] for values in per_example]) for name in self.quantities}

    def _compute_checked(self, sent: ClientMessage) -> dict[str, float]:
        """Compute the values and check their names; all are NaN for a zero or infinite message."""
        if sent.is_zero or not sent.vector.isfinite().all():
            return dict.fromkeys(self.quantities, torch.nan)
        values = {name: float(value) for name, value in self._compute(sent).items()}
        if values.keys() != self.quantities.keys():
            raise RunError(
                f"{type(self).__name__}: expected the quantities {', '.join(self.quantities)}, got {', '.join(values)}"
            )
        for name, value in values.items():
            if abs(value) == torch.inf:
                raise RunError(f"{type(self).__name__}: {name} is infinite; return NaN where the measure is undefined")
        return values

    @abstractmethod
    def _compute(self, sent: ClientMessage) -> Mapping[str, float | Tensor]:
        """Compute the values for a message that is not zero; unknown examples: `sent.varying`."""
