"""Metrics of claimed series, beside those of all numbers: do they rise and fall together, and how far off are they."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.interfaces.metric import ExampleContext, ExampleMetric


class Correlation(ExampleMetric):
    """Pearson's correlation over time of a claimed series with the true one, the mean over channels.

    A claimed channel that is constant has 0; a true one that is constant has none and is left out.
    """

    title = "correlation"
    higher_is_better = True
    lowest = -1.0
    highest = 1.0
    preference = 20
    modalities = frozenset({"series"})

    def measure(self, claimed: Tensor, true: Tensor, context: ExampleContext) -> Tensor | str:
        """Return the correlation of each series."""
        claimed_part, true_part = _centre_in_time(claimed), _centre_in_time(true)
        norms = claimed_part.norm(dim=-1) * true_part.norm(dim=-1)
        products = (claimed_part * true_part).sum(-1)
        correlations = torch.where(norms > 0, products / norms.clamp_min(1e-12), 0.0)
        is_constant = true_part.abs().amax(-1) == 0
        return correlations.masked_fill(is_constant, torch.nan).nanmean(1).float()


class SymmetricPercentageError(ExampleMetric):
    """SMAPE: the mean of 2 |c - t| / (|c| + |t|) over times and channels, of values in [0, 1].

    Where both are 0, the error is 0.
    """

    title = "SMAPE"
    higher_is_better = False
    lowest = 0.0
    highest = 2.0
    preference = 65
    modalities = frozenset({"series"})

    def measure(self, claimed: Tensor, true: Tensor, context: ExampleContext) -> Tensor | str:
        """Return the SMAPE of each series."""
        errors = 2 * (claimed - true).abs() / (claimed.abs() + true.abs()).clamp_min(1e-12)
        return errors.flatten(1).mean(1)


def _centre_in_time(series: Tensor) -> Tensor:
    return series.double() - series.double().mean(-1, keepdim=True)
