"""The interface of a measure: how exposed a batch is, computed by who holds it, before anything is sent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import deepcopy
from dataclasses import dataclass
from typing import final

from torch import Tensor, nn

from fedsim.errors import ConfigError, RunError
from fedsim.randomness import one_thread, seeded
from fedsim.task import Loss


@dataclass(frozen=True, kw_only=True)
class Measure(ABC):
    """Base of all measures: a frozen dataclass whose fields are its settings.

    A measure is a pure function of a model, a loss and a batch. A subclass implements `_of`. Its docstring says in
    which unit a value is, whether a larger value means more exposure, and where it is undefined.
    """

    @final
    def of(self, model: nn.Module, loss: Loss, inputs: Tensor, labels: Tensor) -> Tensor:
        """How exposed a batch is.

        The model is copied, and stays in its modes. What its layers draw (dropout) is the same each time.

        Args:
            model: with the weights that the client trains from.
            loss: what the client minimises, as `fedsim.Task.loss`.
            inputs: `example ...` in model units.
            labels: `example`, class indices or targets.

        Returns:
            One float32 or float64 value of the whole batch, or `example`, one value of each example; NaN where the
            measure is undefined.

        Raises:
            ConfigError: the batch is empty, or there is not one label for each input.
            RunError: the measure returned something else than that, or an infinite value.
        """
        if not len(inputs) or len(inputs) != len(labels):
            raise ConfigError(
                f"measure: expected at least one example and a label for each, got {len(inputs)} inputs and "
                f"{len(labels)} labels"
            )
        with seeded("measure"), one_thread():
            value = self._of(deepcopy(model), loss, inputs.clone(), labels.clone())
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.shape not in ((), (len(inputs),)):
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise RunError(
                f"{type(self).__name__}: expected one floating value, or one for each of {len(inputs)} examples, "
                f"got {got}"
            )
        if value.isinf().any():
            raise RunError(f"{type(self).__name__}: the value is infinite; return NaN where the measure is undefined")
        return value.detach()

    @abstractmethod
    def _of(self, model: nn.Module, loss: Loss, inputs: Tensor, labels: Tensor) -> Tensor: ...
