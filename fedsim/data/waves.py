"""A classification task of time series that is made here: waves of four forms."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge
from numpy.typing import NDArray

from fedsim.base.constraints import CheckedSettings, NonNegativeInt, PositiveInt, Share
from fedsim.base.randomness import numpy_generator
from fedsim.data import Dataset, Examples

Array = NDArray[np.float64]

_FORMS = ("sine", "square", "sawtooth", "triangle")
_AMPLITUDES = (0.4, 0.8)
"""Lowest and highest amplitude; what noise adds beyond 1 is cut off."""
_CYCLES = (2.0, 6.0)
"""Lowest and highest number of cycles in a series; each client's are near one of them."""


@dataclass(frozen=True, kw_only=True)
class Waves(CheckedSettings):
    """Synthetic time series, in [-1, 1]: sines, square waves, sawtooths and triangles, with noise.

    The form is the class. Phase and amplitude are drawn for each channel of each example, and the
    number of cycles lies near that of its client, as machines turn at speeds of their own. Clients
    are the natural groups. Each part of each client has its own random numbers, so that more
    clients or examples do not change the others.

    Args:
        channels: series that run side by side in one example.
        length: times of a series.
        clients: number of clients.
        examples_per_client: training examples of each; a quarter as many, rounded up, are to test.
        noise: standard deviation of the noise.
        seed: seed of all random numbers.
    """

    channels: PositiveInt = 1
    length: Annotated[int, Ge(8)] = 64
    clients: PositiveInt = 10
    examples_per_client: PositiveInt = 100
    noise: Share = 0.05
    seed: NonNegativeInt = 0

    def load(self, folder: Path | None) -> Dataset:
        """Make the series; no file is read."""
        return Dataset(
            name="waves",
            train=self._draw_part("train", self.examples_per_client),
            test=self._draw_part("test", -(-self.examples_per_client // 4)),
            num_classes=len(_FORMS),
            source=f"waves drawn by fedsim, seed {self.seed}",
            licence="none needed",
            modality="series",
            value_range=(-1.0, 1.0),
            class_names=_FORMS,
            group_names=tuple(f"client {client}" for client in range(self.clients)),
        )

    def _draw_part(self, part: str, count: int) -> Examples:
        """Return `count` examples of each client."""
        series, labels = [], []
        for client in range(self.clients):
            rng = numpy_generator(self.seed, "waves", client, part)
            client_labels = rng.permutation(np.arange(count) % len(_FORMS))
            series.append(self._draw_series(client, client_labels, rng))
            labels.append(client_labels)
        return Examples(
            raw=torch.from_numpy(np.concatenate(series).astype(np.float32)),
            labels=torch.from_numpy(np.concatenate(labels)),
            scale=1.0,
            groups=torch.arange(self.clients).repeat_interleave(count),
        )

    def _draw_series(self, client: int, labels: NDArray[np.int64], rng: np.random.Generator) -> Array:
        """Return `example channel time` of these classes."""
        shape = (len(labels), self.channels, 1)
        usual_cycles = numpy_generator(self.seed, "waves", client, "cycles").uniform(*_CYCLES)
        cycles = usual_cycles + rng.normal(0, 0.2, shape)
        start = rng.uniform(0, 1, shape)
        turns = start + cycles * np.arange(self.length) / self.length
        waves = np.stack([_draw_form(form, turns % 1) for form in _FORMS])
        chosen = waves[labels, np.arange(len(labels))]
        values = rng.uniform(*_AMPLITUDES, shape) * chosen
        return (values + rng.normal(0, self.noise, values.shape)).clip(-1, 1)


def _draw_form(form: str, turn: Array) -> Array:
    """Return a wave in [-1, 1] at each share of a turn."""
    if form == "sine":
        return np.sin(2 * np.pi * turn)
    if form == "square":
        return np.where(turn < 0.5, 1.0, -1.0)
    if form == "sawtooth":
        return 2 * turn - 1
    return 1 - 4 * np.abs(turn - 0.5)
