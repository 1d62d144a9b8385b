"""What the golden experiments name by `module:callable`."""

from __future__ import annotations

import torch
from torch import nn

from fedsim.base.task import Task
from fedsim.data import Dataset, Examples
from fedsim.training.models.mlp import Mlp


def texts() -> Dataset:
    """Texts of six words that are never the same, some with padding."""
    parts = []
    for seed in (0, 1):
        raw = 1 + torch.randperm(48, generator=torch.Generator().manual_seed(seed)).reshape(8, 6)
        raw[::4, 4:] = 0
        parts.append(Examples(raw=raw, labels=torch.arange(8) % 2, scale=None))
    return Dataset(
        name="texts",
        train=parts[0],
        test=parts[1],
        num_classes=2,
        vocabulary=49,
        source="here",
        licence="any",
        tokens=("<pad>", *(f"word{place}" for place in range(48))),
    )


def model() -> nn.Module:
    """The network of fedavg.toml."""
    return Mlp(hidden=[16]).build(Task((1, 8, 8), 10))
