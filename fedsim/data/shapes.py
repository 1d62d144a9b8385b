"""A segmentation task that is made here: images of shapes, with the mask of each."""

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

_CLASSES = ("background", "disc", "square", "triangle")
_BACKGROUNDS = (0.0, 0.4)
"""Lowest and highest grey value of a background."""
_GREYS = (0.5, 1.0)
"""Lowest and highest grey value of a shape."""
_RADII = (0.12, 0.28)
"""Smallest and largest radius of a shape, as a share of the side of the image."""
_MOST_SHAPES = 3


@dataclass(frozen=True, kw_only=True)
class Shapes(CheckedSettings):
    """Synthetic images of one to three discs, squares and triangles, each with a mask: the class of each pixel.

    The kind, the place, the size and the grey value of each shape are drawn, and so is the grey value of the
    background; a later shape covers an earlier one. Every client has a kind of its own that half of its shapes are of.
    Clients are the natural groups. Each part of each client has its own random numbers, so that more clients or
    examples do not change the others.

    Args:
        side: pixels of a side of the images, which are square and grey.
        clients: number of clients.
        examples_per_client: training images of each; a quarter as many, rounded up, are to test.
        noise: standard deviation of the noise.
        seed: seed of all random numbers.
    """

    side: Annotated[int, Ge(8)] = 16
    clients: PositiveInt = 10
    examples_per_client: PositiveInt = 100
    noise: Share = 0.02
    seed: NonNegativeInt = 0

    def load(self, folder: Path | None) -> Dataset:
        """Draw the images and masks; no file is read."""
        return Dataset(
            name="shapes",
            train=self._draw_part("train", self.examples_per_client),
            test=self._draw_part("test", -(-self.examples_per_client // 4)),
            num_classes=0,
            mask_classes=len(_CLASSES),
            source=f"shapes drawn by fedsim, seed {self.seed}",
            licence="none needed",
            modality="image",
            class_names=_CLASSES,
            group_names=tuple(f"client {client}" for client in range(self.clients)),
        )

    def _draw_part(self, part: str, count: int) -> Examples:
        """Return `count` examples of each client."""
        images, masks = [], []
        for client in range(self.clients):
            rng = numpy_generator(self.seed, "shapes", client, part)
            for _ in range(count):
                image, mask = self._draw_example(1 + client % (len(_CLASSES) - 1), rng)
                images.append(image)
                masks.append(mask)
        return Examples(
            raw=torch.from_numpy(np.stack(images).astype(np.float32))[:, None],
            labels=torch.from_numpy(np.stack(masks)),
            scale=1.0,
            groups=torch.arange(self.clients).repeat_interleave(count),
        )

    def _draw_example(self, usual_kind: int, rng: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return an image and its mask, both `height width`."""
        image = np.full((self.side, self.side), rng.uniform(*_BACKGROUNDS))
        mask = np.zeros((self.side, self.side), np.int64)
        for _ in range(rng.integers(1, _MOST_SHAPES + 1)):
            kind = usual_kind if rng.random() < 0.5 else int(rng.integers(1, len(_CLASSES)))
            radius = rng.uniform(*_RADII) * self.side
            centre = rng.uniform(radius, self.side - radius, 2)
            covered = self._cover(kind, radius, centre)
            image[covered], mask[covered] = rng.uniform(*_GREYS), kind
        return (image + rng.normal(0, self.noise, image.shape)).clip(0, 1), mask

    def _cover(self, kind: int, radius: float, centre: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return which pixels a shape covers, by their centres."""
        places = np.arange(self.side) + 0.5
        down, across = places[:, None] - centre[0], np.abs(places[None, :] - centre[1])
        if _CLASSES[kind] == "disc":
            return np.asarray(down**2 + across**2 <= radius**2)
        if _CLASSES[kind] == "square":
            return np.asarray((np.abs(down) <= 0.8 * radius) & (across <= 0.8 * radius))
        return np.asarray((np.abs(down) <= radius) & (across <= (down + radius) / 2))
