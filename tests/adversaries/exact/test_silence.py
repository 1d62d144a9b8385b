"""Columns from the units that are silent for one example."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from adversaries.exact.mixture import InputMixture
from adversaries.exact.silence import follow_estimates
from fedsim.base.randomness import generator

UNITS, EXAMPLES, INPUTS = 120, 10, 30


class LargestTensor(TorchDispatchMode):
    """Keeps the size of the largest tensor that is computed."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch and look at what it returns."""
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numbers = max(self.numbers, result.numel())
        return result


def test_estimates_are_followed_to_all_columns_without_a_matrix_for_each_unit() -> None:
    """2000 units and 256 examples would take a gigabyte of such matrices."""
    rng = generator("mixture")
    inputs = torch.randn(EXAMPLES, INPUTS, generator=rng, dtype=torch.float64)
    weight = torch.randn(UNITS, INPUTS, generator=rng, dtype=torch.float64)
    silence = -(inputs @ weight.T)
    gradients = torch.randn(UNITS, EXAMPLES, generator=rng, dtype=torch.float64) * (silence.T < 0)
    change = gradients @ inputs
    mixture = InputMixture.from_update(change, gradients.sum(1), EXAMPLES, "here")
    true = torch.linalg.lstsq(mixture.rows, gradients[mixture.unit_indices]).solution
    true = true / true.norm(dim=0)
    estimates = true + 0.05 * torch.randn(true.shape, generator=rng, dtype=torch.float64)
    with LargestTensor() as largest:
        columns = follow_estimates(mixture, silence[:, mixture.unit_indices], estimates, [])
    assert len(columns) == EXAMPLES
    assert ((torch.stack(columns) @ true).abs().amax(1) > 1 - 1e-6).all()
    assert largest.numbers < UNITS * EXAMPLES**2 / 2
