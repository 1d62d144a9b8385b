"""Values of claimed examples by every installed metric; a metric that fails leaves a reason."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from fedsim.audit.evaluation.matches import Pool
from fedsim.audit.evaluation.truth import Truth
from fedsim.base import metrics, text_metrics
from fedsim.base.errors import FedsimError, PluginError, error_reason, one_line
from fedsim.interfaces.metric import ExampleContext, ExampleMetric, find_example_metrics
from fedsim.interfaces.modality import PublicExamples
from fedsim.modalities import find_modality
from fedsim.plugins.code_hashes import hash_plugin_code, locate_error

MetricValues = dict[str, Tensor | str]
"""By metric, the value of each true example, NaN where it has none; or why there are no values."""
NO_TEXT_SCORED = "no text has any token"
"""Why texts of padding alone have no score."""
CPU = torch.device("cpu")
BATCH_BYTES = 2**26
"""Claims that are measured at once, at most, unless a single set has more."""
_ROUNDING = 1e-5
"""Values this far beyond the ends of a metric's range are rounding errors."""


def measure_sets(
    claimed_sets: Sequence[Tensor], truth: Truth, weights: Path | None, device: torch.device
) -> list[MetricValues]:
    """Assign each set of claims one-to-one to the true examples and compute the metrics of their modality.

    A true text without any token has no value. Texts also have `words_found`, of all together.

    Metrics and modalities of fedsim get as many sets at once as a batch has room for, on `device`.
    Those of other packages get one after the other, on the CPU: they may look at a set as a whole.
    """
    if truth.has_tokens:
        return [_measure_texts(claimed, truth, weights) for claimed in claimed_sets]
    bytes_of_costs = 8 * len(truth.data) * max(map(len, claimed_sets), default=0)  # of pairs, in double precision
    bytes_of_set = max(truth.data.nbytes, *(claimed.nbytes for claimed in claimed_sets), bytes_of_costs, 1)
    sets_at_once = max(1, BATCH_BYTES // bytes_of_set)
    values: list[MetricValues] = []
    for start in range(0, len(claimed_sets), sets_at_once):
        paired_sets = _pair_sets(claimed_sets[start : start + sets_at_once], truth, device)
        values += _measure_paired_sets(paired_sets, truth, weights)
    return values


def measure_nearest(
    truth: Truth, public: PublicExamples, weights: Path | None, device: torch.device = CPU
) -> MetricValues:
    """Compute the metrics of the public examples that are nearest to the true ones.

    Numbers are nearest by squared error. Tokens have no such distance: for each true text, and each
    metric that ranks examples, the best value of any public text counts.
    """
    if not truth.has_tokens:
        data = move_once(public.data, device)
        distances = torch.cdist(truth.data.to(device).flatten(1), data.flatten(1))
        return _measure_paired_sets([data[distances.argmin(1)]], truth, weights)[0]
    is_scored, context = _scored_examples(truth), _context_of(truth, weights)
    values: MetricValues = {}
    for name, metric in _metrics_of(truth).items():
        if metric.ranks_examples and is_scored.any():
            best = _best_public_values(metric, truth.data[is_scored], public.data, context)
            values[name] = best if isinstance(best, str) else _fill(best, is_scored)
    return values


def move_once(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; one that all victims have in common, as public examples, is moved once."""
    return tensor if tensor.device == device else _move(tensor, device)


@lru_cache(maxsize=2)
def _move(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device)


def _measure_texts(claimed: Tensor, truth: Truth, weights: Path | None) -> MetricValues:
    paired = text_metrics.pair_texts(claimed, truth.data, truth.padding)
    is_scored, context = _scored_examples(truth), _context_of(truth, weights)
    if not is_scored.any():
        return dict.fromkeys([*_metrics_of(truth), "words_found"], NO_TEXT_SCORED)
    values: MetricValues = {}
    for name, metric in _metrics_of(truth).items():
        measured = measure_safely(metric, paired[is_scored], truth.data[is_scored], context)
        values[name] = measured if isinstance(measured, str) else _fill(measured, is_scored)
    recall = text_metrics.word_recall(claimed, truth.data, truth.padding)
    return values | {"words_found": torch.tensor([recall])}


def _measure_paired_sets(paired_sets: Sequence[Tensor], truth: Truth, weights: Path | None) -> list[MetricValues]:
    """Compute the metrics of sets of claims that stand in the order of the true examples, all on one device."""
    context, count = _context_of(truth, weights), len(paired_sets)
    claimed = torch.cat(list(paired_sets))
    true = truth.data.to(claimed.device)
    values: list[MetricValues] = [{} for _ in paired_sets]
    for name, metric in _metrics_of(truth).items():
        measured: Sequence[Tensor | str] = ()
        if is_own(type(metric)):
            together = measure_safely(metric, claimed, true.repeat(count, *[1] * (true.ndim - 1)), context)
            if isinstance(together, Tensor):
                measured = torch.split(together, len(true))
            elif count == 1:
                measured = [together]
        if not measured:  # a stranger's, or a set of ours has no value
            move_strangers = not is_own(type(metric))
            measured = []
            for paired in paired_sets:
                pair = (paired.cpu(), true.cpu()) if move_strangers else (paired, true)
                measured.append(measure_safely(metric, *pair, context))
        for set_values, set_measured in zip(values, measured, strict=True):
            set_values[name] = set_measured
    return values


def is_own(plugin: type) -> bool:
    """Return whether a metric or modality is of fedsim alone."""
    return hash_plugin_code(plugin) is None


def measure_chance_matches(
    claimed: Tensor,
    truth: Truth,
    others: PublicExamples | None,
    weights: Path | None,
    device: torch.device,
) -> MetricValues:
    """Return, by each metric whose evidence is `matches`, the share that claims match by chance."""
    context, shares = _context_of(truth, weights), MetricValues()
    pools: dict[bool, Pool | None] = {}
    for name, metric in _metrics_of(truth).items():
        if metric.evidence != "matches":
            continue
        by_class = metric.depends_on_class(context)
        if by_class not in pools:
            pools[by_class] = Pool.from_truth(truth, others, by_class=by_class)
        pool = pools[by_class]
        if pool is None:
            continue
        metric_device = device if is_own(type(metric)) else CPU
        try:
            examples = move_once(pool.data, metric_device)
            matches = metric.find_matches(claimed.to(metric_device, copy=True), examples.clone(), context)
            shares[name] = torch.tensor([pool.expected_share(matches.any(0).cpu())])
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
    if isinstance(values, Tensor):
        values = values.cpu()
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


def _metrics_of(truth: Truth) -> Mapping[str, ExampleMetric]:
    return find_example_metrics(truth.modality, is_numeric=not truth.has_tokens)


def _pair_sets(claimed_sets: Sequence[Tensor], truth: Truth, device: torch.device) -> list[Tensor]:
    """Return the claims of each set that are assigned to the true examples, in their order, on `device`."""
    modality = find_modality(truth.modality)
    if not is_own(type(modality)):  # those of any package may change what they are given
        paired_sets = [modality.pair_claims(claimed.clone(), truth.data.clone()) for claimed in claimed_sets]
        for paired in paired_sets:
            if paired.shape != truth.data.shape:
                raise PluginError(
                    f"modalities: '{truth.modality}' pairs claims to the shape {tuple(paired.shape)}, expected "
                    f"{tuple(truth.data.shape)} like the data; fix its pair_claims"
                )
        return [paired.to(device) for paired in paired_sets]
    # The misfits of all sets, and of mid-grey, by one computation that is read once.
    true = truth.data.to(device)
    claimed = torch.cat([*claimed_sets, torch.full_like(truth.data[:1], 0.5)]).to(device)
    costs = modality.misfits(claimed, true).cpu()
    lengths = [*map(len, claimed_sets), 1]
    *costs_of_sets, cost_of_grey = torch.split(costs, lengths, 1)
    paired_sets = []
    for cost, examples in zip(costs_of_sets, torch.split(claimed, lengths), strict=False):
        assignment = metrics.assign_by_costs(cost, lambda: cost_of_grey)
        paired_sets.append(metrics.reorder_claims(examples, true, assignment))
    return paired_sets


def _context_of(truth: Truth, weights: Path | None) -> ExampleContext:
    return ExampleContext(modality=truth.modality, padding=truth.padding, weights=weights)


def _scored_examples(truth: Truth) -> Tensor:
    """Return `example`, whether it has a value: a text of only padding has none."""
    if truth.has_tokens:
        return ~text_metrics.are_empty(truth.data, truth.padding)
    return torch.ones(len(truth.data), dtype=torch.bool)


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
