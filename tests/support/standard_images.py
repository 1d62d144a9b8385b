"""Small images in [0, 1], and what a model is fed with in their place."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.base.randomness import generator

SHAPE, MEAN, STD = (1, 8, 8), 0.3, 0.35
LOW, HIGH = (0 - MEAN) / STD, (1 - MEAN) / STD


def truth(count: int = 3) -> Tensor:
    """Return images in [0, 1]."""
    return torch.rand((count, *SHAPE), generator=generator("truth"))


def standard(images: Tensor) -> Tensor:
    """Return images in the units of models."""
    return (images - MEAN) / STD
