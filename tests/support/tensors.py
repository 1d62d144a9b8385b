"""Random tensors by seed, and equality of states."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def draw_uniform(*shape: int, seed: int = 0) -> Tensor:
    """Return numbers between 0 and 1, the same for the same seed."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def draw_normal(*shape: int, seed: int = 0) -> Tensor:
    """Return standard normal numbers, the same for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def flatten_state(state: Mapping[str, Tensor]) -> Tensor:
    """Return all tensors of a state in one row."""
    return torch.cat([tensor.flatten() for tensor in state.values()])


def are_equal(state: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Return whether both hold the same names in the same order, with the same values."""
    return list(state) == list(other) and all(torch.equal(state[name], other[name]) for name in state)
