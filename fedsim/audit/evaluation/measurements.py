"""Values of claimed examples by every installed metric; a metric that fails leaves a reason."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from fedsim.audit.evaluation.matches import Pool
from fedsim.audit.evaluation.truth import Truth
from fedsim.base import text_metrics
from fedsim.base.errors import FedsimError, PluginError, error_reason, one_line
from fedsim.interfaces.metric import ExampleContext, ExampleMetric, find_example_metrics
from fedsim.interfaces.modality import PublicExamples
from fedsim.modalities import find_modality
from fedsim.plugins.code_hashes import hash_plugin_code, locate_error

MetricValues = dict[str, Tensor | str]
"""By metric, the value of each true example, NaN where it has none; or why there are no values."""
_ROUNDING = 1e-5
"""Values this far beyond the ends of a metric's range are rounding errors."""


def measure_claims(claimed: Tensor, truth: Truth, weights: Path | None) -> MetricValues:
    """Assign claims one-to-one to the true examples and compute the metrics of their modality.

    A true text without any token has no value. Texts also have `words_found`, of all together.

    Args:
        claimed: `claim ...`.
        truth: of the victim.
        weights: folder with weights of networks.
    """
    if not truth.has_tokens:
        return measure_pairs(_pair_claims(claimed, truth), truth, weights)
    values = measure_pairs(text_metrics.pair_texts(claimed, truth.data, truth.padding), truth, weights)
    return values | {"words_found": _word_recall(claimed, truth)}


def measure_pairs(paired: Tensor, truth: Truth, weights: Path | None) -> MetricValues:
    """Compute the metrics of claims that stand in the order of the true examples."""
    is_scored = _scored_examples(truth)
    if not is_scored.any():
        return dict.fromkeys(_metrics_of(truth), _NO_TOKEN)
    context = _context_of(truth, weights)
    values: MetricValues = {}
    for name, metric in _metrics_of(truth).items():
        measured = measure_safely(metric, paired[is_scored], truth.data[is_scored], context)
        values[name] = measured if isinstance(measured, str) else _fill(measured, is_scored)
    return values


def measure_nearest(truth: Truth, public: PublicExamples, weights: Path | None) -> MetricValues:
    """Compute the metrics of the public examples that are nearest to the true ones.

    Numbers are nearest by squared error. Tokens have no such distance: for each true text, and each
    metric that ranks examples, the best value of any public text counts.
    """
    if not truth.has_tokens:
        distances = torch.cdist(truth.data.flatten(1), public.data.flatten(1))
        return measure_pairs(public.data[distances.argmin(1)], truth, weights)
    is_scored, context = _scored_examples(truth), _context_of(truth, weights)
    values: MetricValues = {}
    for name, metric in _metrics_of(truth).items():
        if metric.ranks_examples and is_scored.any():
            best = _best_public_values(metric, truth.data[is_scored], public.data, context)
            values[name] = best if isinstance(best, str) else _fill(best, is_scored)
    return values


def measure_chance_matches(
    claimed: Tensor, truth: Truth, others: PublicExamples | None, weights: Path | None
) -> MetricValues:
    """Return, by each metric whose evidence is `matches`, the share that claims match by chance.

    Args:
        claimed: `claim ...`.
        truth: of the victim.
        others: examples that it does not hold.
        weights: folder with weights of networks.
    """
    context, shares = _context_of(truth, weights), MetricValues()
    for name, metric in _metrics_of(truth).items():
        if metric.evidence != "matches":
            continue
        pool = Pool.from_truth(truth, others, by_class=metric.depends_on_class(context))
        if pool is None:
            continue
        try:
            matches = metric.find_matches(claimed.clone(), pool.data.clone(), context)
            shares[name] = torch.tensor([pool.expected_share(matches.any(0))])
        except (Exception, SystemExit) as error:  # metrics of any package may fail
            shares[name] = f"the metric raised {one_line(error_reason(error))} ({locate_error(error, type(metric))})"
    return shares


def measure_safely(metric: ExampleMetric, claimed: Tensor, true: Tensor, context: ExampleContext) -> Tensor | str:
    """Return the value of each example, or why there are none: metrics of any package may fail."""
    try:
        values = metric.measure(claimed.clone(), true.clone(), context)
    except FedsimError as error:
        return str(error)
    except (Exception, SystemExit) as error:
        return f"the metric raised {one_line(error_reason(error))} ({locate_error(error, type(metric))})"
    if isinstance(values, str):
        return one_line(values) if values else "the metric gave no reason"
    return explain_invalid(metric, values, len(true)) or _as_numbers(metric, values)


def find_instruments(truth: Truth, weights: Path | None) -> dict[str, str]:
    """Return what each metric measures with, see `ExampleMetric.instrument`, and a stranger's code."""
    context, instruments = _context_of(truth, weights), {}
    for name, metric in _metrics_of(truth).items():
        try:
            instrument = one_line(str(metric.instrument(context)))
        except (Exception, SystemExit) as error:  # metrics of any package may fail
            instrument = f"unknown, since {one_line(error_reason(error))}"
        code = hash_plugin_code(type(metric))
        instruments[name] = instrument if code is None else f"{instrument} by code {code[:10]}".strip()
    return instruments


_NO_TOKEN = "no text has any token"


def _metrics_of(truth: Truth) -> Mapping[str, ExampleMetric]:
    return find_example_metrics(truth.modality, is_numeric=not truth.has_tokens)


def _pair_claims(claimed: Tensor, truth: Truth) -> Tensor:
    """Return the claim of each true example; modalities of any package may change what they are given.

    Raises:
        PluginError: the pairs have another shape than the true examples, and would be broadcast.
    """
    paired = find_modality(truth.modality).pair_claims(claimed.clone(), truth.data.clone())
    if paired.shape != truth.data.shape:
        raise PluginError(
            f"modalities: '{truth.modality}' pairs claims to the shape {tuple(paired.shape)}, expected "
            f"{tuple(truth.data.shape)} like the data; mend its pair_claims"
        )
    return paired


def _context_of(truth: Truth, weights: Path | None) -> ExampleContext:
    return ExampleContext(modality=truth.modality, padding=truth.padding, weights=weights)


def _scored_examples(truth: Truth) -> Tensor:
    """Return `example`, whether it has a value: a text of only padding has none."""
    if truth.has_tokens:
        return ~text_metrics.are_empty(truth.data, truth.padding)
    return torch.ones(len(truth.data), dtype=torch.bool)


def _word_recall(claimed: Tensor, truth: Truth) -> Tensor | str:
    if not _scored_examples(truth).any():
        return _NO_TOKEN
    return torch.tensor([text_metrics.word_recall(claimed, truth.data, truth.padding)])


def _fill(values: Tensor, is_scored: Tensor) -> Tensor:
    """Return `example`, the values of scored examples and NaN for the others."""
    return torch.full((len(is_scored),), math.nan, dtype=values.dtype).masked_scatter(is_scored, values)


def _best_public_values(metric: ExampleMetric, true: Tensor, public: Tensor, context: ExampleContext) -> Tensor | str:
    best_values = []
    for example in true:
        values = measure_safely(metric, public, example.expand_as(public), context)
        if isinstance(values, str):
            return values
        best_values.append(values.max() if metric.higher_is_better else values.min())
    return torch.stack(best_values)


def _as_numbers(metric: ExampleMetric, values: Tensor) -> Tensor:
    """Return a copy, because a metric may write its next values into the same tensor."""
    values = values.detach()
    return (values if values.is_floating_point() else values.float()).clamp(*metric.value_range)


def explain_invalid(metric: ExampleMetric, values: object, count: int) -> str:
    """Say why `values` are not one number an example in the range of the metric; empty if they are."""
    if not isinstance(values, Tensor):
        return f"the metric returned {type(values).__name__}, expected a tensor or a reason"
    if values.shape != (count,) or values.is_complex():
        return f"the metric returned {values.dtype} of shape {tuple(values.shape)}, expected {count} real numbers"
    if missing := int(values.isnan().sum()):
        return f"the metric returned NaN for {missing} of {count} examples, expected a number or a reason"
    lowest, highest = metric.value_range
    if not ((values >= lowest - _ROUNDING) & (values <= highest + _ROUNDING)).all():
        return (
            f"the metric returned values from {float(values.min()):.4g} to {float(values.max()):.4g}, declared are "
            f"{lowest:g} to {highest:g}"
        )
    return ""
