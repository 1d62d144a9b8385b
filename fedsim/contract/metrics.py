"""Checks of metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.audit.evaluation.measurements import explain_invalid
from fedsim.base.randomness import generator
from fedsim.contract import common
from fedsim.contract.checks import CheckedPlugin, DoesNotApply, NotChecked, expect
from fedsim.federation.data_folder import find_weights_folder
from fedsim.interfaces.metric import ANY_NUMERIC, ExampleContext, ExampleMetric, Metric, is_metric_name
from fedsim.modalities import find_modality
from fedsim.plugins import registry

_COUNT, _VOCABULARY, _PADDING = 5, 10, 0
_ROUNDING = 1e-4


@dataclass(frozen=True)
class _ClaimTrial:
    """True examples of one modality, and claims: the same, noisy ones, and ones without any relation."""

    context: ExampleContext
    true: Tensor
    noisy: Tensor
    unrelated: Tensor


def is_a_metric(subject: CheckedPlugin) -> None:
    """It derives from fedsim.Metric and has no settings, and its name can be a column."""
    cls = subject.cls
    expect(issubclass(cls, Metric), f"{cls.__name__} does not derive from fedsim.Metric")
    expect(not dataclasses.fields(cls), f"{cls.__name__} has settings, which no file could set; remove them")
    is_name = ":" in subject.name or is_metric_name(subject.name)
    expect(is_name, f"'{subject.name}' cannot be a column; name it by small letters, digits and underscores")


def declares_its_facts(subject: CheckedPlugin) -> None:
    """It declares a title and a direction, and what else it declares fits together."""
    metric = common.build_instance(subject, Metric)
    expect(metric.title.strip() == metric.title, f"its title {metric.title!r} begins or ends with a space")
    expect(metric.of_examples or not isinstance(metric, ExampleMetric), "it measures examples: leave of_examples out")


def measures_each_example(subject: CheckedPlugin) -> None:
    """It gives one number for each example, in the range that it declares."""
    metric = _example_metric(subject)
    for trial in _trials(metric):
        for claimed in (trial.true, trial.noisy, trial.unrelated):
            _measure(metric, claimed, trial)


def rewards_perfect_claims(subject: CheckedPlugin) -> None:
    """Claims that equal the truth get its best value, and others are no better."""
    metric = _example_metric(subject)
    for trial in _trials(metric):
        perfect, unrelated = (_measure(metric, claimed, trial) for claimed in (trial.true, trial.unrelated))
        best, of = metric.best_value, f"{trial.context.modality} examples"
        if best is not None:
            expect(
                bool(((perfect - best).abs() <= _ROUNDING).all()),
                f"of {of} that equal the truth it gives {perfect.tolist()}, declared as best is {best:g}",
            )
        is_better = unrelated > perfect if metric.higher_is_better else unrelated < perfect
        expect(
            not is_better.any(),
            f"by its direction, claims of {of} without any relation to the truth are better than the truth itself",
        )


def measures_examples_by_themselves(subject: CheckedPlugin) -> None:
    """The value of an example depends on no other one, nor on the order."""
    metric = _example_metric(subject)
    order = torch.tensor([3, 0, 4, 1, 2])
    for trial in _trials(metric):
        values = _measure(metric, trial.noisy, trial)
        moved = _ClaimTrial(trial.context, trial.true[order], trial.noisy[order], trial.unrelated)
        _expect_close(_measure(metric, moved.noisy, moved), values[order], "in another order")
        single = _ClaimTrial(trial.context, trial.true[:1], trial.noisy[:1], trial.unrelated)
        _expect_close(_measure(metric, single.noisy, single), values[:1], "alone")


def is_a_pure_function(subject: CheckedPlugin) -> None:
    """It is deterministic, draws from no global generator, and changes nothing that it is given."""
    metric = _example_metric(subject)
    for trial in _trials(metric):
        claimed, true = trial.noisy.clone(), trial.true.clone()
        with common.expect_untouched_generators():
            first = metric.measure(claimed, true, trial.context)
        expect(torch.equal(claimed, trial.noisy) and torch.equal(true, trial.true), "it changes the examples")
        with common.seed_global_generators(1):
            second = metric.measure(claimed, true, trial.context)
        expect(repr(first) == repr(second), "of the same examples it gives something else")


CHECKS = (
    common.is_made,
    common.survives_copying,
    common.is_documented,
    is_a_metric,
    declares_its_facts,
    measures_each_example,
    rewards_perfect_claims,
    measures_examples_by_themselves,
    is_a_pure_function,
)


def _example_metric(subject: CheckedPlugin) -> ExampleMetric:
    metric = common.build_instance(subject, Metric)
    if not isinstance(metric, ExampleMetric):
        raise DoesNotApply("an evaluator computes it, and it only declares what it is")
    return metric


def _trials(metric: ExampleMetric) -> Iterator[_ClaimTrial]:
    """Yield tiny examples of each modality that the metric is for."""
    count = 0
    for name in registry.registered_names("modalities"):
        modality = find_modality(name)
        if name not in metric.modalities and (modality.has_tokens or ANY_NUMERIC not in metric.modalities):
            continue
        shape, rng = (
            (_COUNT, *(modality.trial_shape or (8,) * len(modality.axes))),
            generator("contract", "metric", name),
        )
        count += 1
        if modality.has_tokens:
            true, unrelated = (torch.randint(1, _VOCABULARY, shape, generator=rng) for _ in range(2))
            noisy = torch.where(torch.rand(shape, generator=rng) < 0.3, unrelated, true)
            yield _ClaimTrial(ExampleContext(modality=name, padding=_PADDING), true, noisy, unrelated)
        else:
            true, unrelated = (torch.rand(shape, generator=rng) for _ in range(2))
            context = ExampleContext(modality=name, weights=find_weights_folder())
            yield _ClaimTrial(context, true, true.lerp(unrelated, 0.2), unrelated)
    if not count:
        raise NotChecked(f"none of its modalities is installed: {', '.join(sorted(metric.modalities))}")


def _measure(metric: ExampleMetric, claimed: Tensor, trial: _ClaimTrial) -> Tensor:
    """Return the values of claims."""
    values = metric.measure(claimed.clone(), trial.true.clone(), trial.context)
    if isinstance(values, str):
        raise NotChecked(f"for tiny {trial.context.modality} examples it returns: {values}")
    complaint = explain_invalid(metric, values, len(trial.true))
    expect(not complaint, complaint)
    return values.double()


def _expect_close(values: Tensor, expected: Tensor, when: str) -> None:
    is_same = torch.allclose(values, expected, rtol=_ROUNDING, atol=_ROUNDING, equal_nan=True)
    expect(is_same, f"{when} examples get {values.tolist()}, expected {expected.tolist()} as among the others")
