"""Metrics of claimed series, beside those of all numbers: do they rise and fall together, and how far off are they."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.interfaces.metric import ExampleContext, ExampleMetric


class Correlation(ExampleMetric):
    """Pearson's correlation over time of a claimed series with the true one, the mean over channels.

    A claimed channel that is constant has 0; a true one that is constant has none and is left out.
    Where all channels of a true series are constant, there is no correlation of the victim's series.
    """

    title = "correlation"
    higher_is_better = True
    lowest = -1.0
    highest = 1.0
    preference = 20
    modalities = frozenset({"series"})

    def measure(self, claimed: Tensor, true: Tensor, context: ExampleContext) -> Tensor | str:
        """Return the correlation of each series, or that a true one is constant."""
        is_constant = true.amax(-1) == true.amin(-1)
        if num_constant := int(is_constant.all(1).sum()):
            return f"{num_constant} of {len(true)} true series are constant, with which nothing correlates"
        correlations = (_standardise_in_time(claimed) * _standardise_in_time(true)).sum(-1)
        return correlations.masked_fill(is_constant, torch.nan).nanmean(1).clamp(-1, 1).float()


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


def _standardise_in_time(series: Tensor) -> Tensor:
    """Return series of mean 0 and norm 1; 0 where they are constant, whatever their mean is rounded to."""
    centred = series.double() - series.double().mean(-1, keepdim=True)
    is_constant = series.amax(-1, keepdim=True) == series.amin(-1, keepdim=True)
    return torch.where(is_constant, 0.0, torch.nn.functional.normalize(centred, dim=-1, eps=1e-300))
