"""Defenses of answers to queries, as a Flower mod for apps of federated analytics."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from flwr.app import Array, Context, Message, MetricRecord
from flwr.clientapp.typing import ClientAppCallable, Mod
from numpy.typing import NDArray

from fedsim.base.constraints import CheckedSettings, NonNegativeFloat
from fedsim.base.errors import ConfigError, RunError
from fedsim.recording.header import EXAMPLE_COUNT_KEYS

_KINDS = "query", "train"
"""Kinds of messages whose replies are answers."""


@dataclass(frozen=True, kw_only=True)
class AnswerDefense(CheckedSettings):
    """Settings of what a client does to each number before it answers, in this order.

    Args:
        noise: distribution of the noise that is added, fresh for each number and answer.
        scale: standard deviation of Gaussian noise, mean absolute value of Laplace noise. A
            histogram in which one person changes one cell by 1 is then 1 / `scale`-differentially
            private for each answer with Laplace noise, up to the rounding of floats; N beside it,
            which is sent as it is, is not.
        smallest_cell: numbers below it are answered as 0.
        rounded_to: numbers are rounded to multiples of it; 0 leaves them.
    """

    noise: Literal["none", "laplace", "gaussian"] = "none"
    scale: NonNegativeFloat = 0.0
    smallest_cell: NonNegativeFloat = 0.0
    rounded_to: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.noise == "none") != (self.scale == 0):
            raise ConfigError(
                f"scale: got {self.scale:g} with noise '{self.noise}'; name both a distribution and a scale above 0, "
                "or neither"
            )

    @property
    def standard_deviation(self) -> float:
        """Return that of the noise, as the attack `differencing` is told it (`noise`)."""
        return self.scale * (math.sqrt(2) if self.noise == "laplace" else 1)

    def defend(self, values: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
        """Return an answer of the same shape; in float64 where noise was added."""
        defended = np.asarray(values)
        if self.noise != "none":
            draw = rng.laplace if self.noise == "laplace" else rng.normal
            defended = defended + draw(0.0, self.scale, defended.shape)
        if self.smallest_cell:
            defended = np.where(defended < self.smallest_cell, np.zeros_like(defended), defended)
        if self.rounded_to:
            defended = (np.round(defended / self.rounded_to) * self.rounded_to).astype(defended.dtype)
        return np.asarray(defended)


def answer_mod(defense: AnswerDefense, rng: np.random.Generator | None = None) -> Mod:
    """Return a mod that defends all numbers in replies to queries and to training messages.

        app = ClientApp(mods=[answer_mod(AnswerDefense(noise="laplace", scale=2.0))])

    It acts on arrays and metrics; the number of examples N is sent as it is.

    Args:
        defense: its settings.
        rng: source of the noise; None draws a fresh seed from the operating system.
    """
    source = rng or np.random.default_rng()

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        reply = call_next(message, context)
        if reply.has_error() or message.metadata.message_type.split(".")[0] not in _KINDS:
            return reply
        for arrays in reply.content.array_records.values():
            for name, array in arrays.items():
                values = array.numpy()
                if values.dtype.kind not in "biuf":
                    raise RunError(f"answer_mod: '{name}' holds no real numbers to be defended; send numbers")
                arrays[name] = Array(defense.defend(values, source))
        for metrics in reply.content.metric_records.values():
            _defend_metrics(metrics, defense, source)
        return reply

    return mod


def _defend_metrics(metrics: MetricRecord, defense: AnswerDefense, rng: np.random.Generator) -> None:
    for name, value in metrics.items():
        if name not in EXAMPLE_COUNT_KEYS:
            defended = defense.defend(np.asarray(value), rng)
            metrics[name] = defended.tolist()
