"""Metrics of one set of claims."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from fedsim.audit.evaluation.measurements import CPU, MetricValues, measure_sets
from fedsim.audit.evaluation.truth import Truth


def measure_claims(claimed: Tensor, truth: Truth, weights: Path | None) -> MetricValues:
    return measure_sets([claimed], truth, weights, CPU)[0]
