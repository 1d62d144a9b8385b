"""Checks of measures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from unittest.mock import patch

import torch
from torch import Tensor, nn

from fedsim.base.errors import ConfigError
from fedsim.base.randomness import generator, seed_globals
from fedsim.base.task import Task
from fedsim.contract import common
from fedsim.contract.checks import CheckedPlugin, ContractViolation, DoesNotApply, NotChecked, expect
from fedsim.exposure.measure import Measure
from fedsim.training.message_function import ClientMessage
from fedsim.training.models.mlp import Mlp

_TASKS = (Task((1, 8, 8), 10), Task((4,), 0))


def is_a_measure(subject: CheckedPlugin) -> None:
    """It derives from fedsim.Measure."""
    common.build_instance(subject, Measure)


def gives_values(subject: CheckedPlugin) -> None:
    """It gives a value for each quantity of an ordinary batch, and of each of its examples."""
    for task, model, inputs, labels in _accepted_batches(subject):
        values = common.build_instance(subject, Measure).compute(model, task.loss, inputs, labels)
        for name, value in values.items():
            expect(not math.isnan(value), f"of an ordinary batch it says that {name} is undefined")
        per_example = common.build_instance(subject, Measure).compute_per_example(model, task.loss, inputs, labels)
        is_undefined = any(value.isnan().any() for value in per_example.values())
        expect(not is_undefined, "of some ordinary example it is undefined")


def explains_its_quantities(subject: CheckedPlugin) -> None:
    """It says of each quantity whether a larger value means that more is exposed, or less."""
    meanings = getattr(common.build_instance(subject, Measure), "quantities", None)
    is_valid = isinstance(meanings, Mapping) and meanings and set(meanings.values()) <= {"more", "less"}
    expect(bool(is_valid), f"quantities: expected names, each with 'more' or 'less', got {meanings!r}")


def is_a_pure_function(subject: CheckedPlugin) -> None:
    """It is deterministic, draws from no global generator, and changes neither model nor batch."""
    for task, model, inputs, labels in _accepted_batches(subject):
        measure, sent = common.build_instance(subject, Measure), ClientMessage.create(model, task.loss, inputs, labels)
        weights = {name: tensor.clone() for name, tensor in sent.model.state_dict().items()}
        with common.expect_untouched_generators():
            first = measure.compute_for_message(sent)
        with common.seed_global_generators(1):
            repetitions = measure.compute_for_message(sent), measure.compute(model, task.loss, inputs, labels)
        is_same = all(repr(first) == repr(values) for values in repetitions)
        expect(is_same, "of the same batch it gives something else")
        expect(torch.equal(sent.inputs, inputs) and torch.equal(sent.labels, labels), "it changes the batch")
        state = sent.model.state_dict()
        has_same_weights = all(torch.equal(tensor, weights[name]) for name, tensor in state.items())
        has_no_gradients = all(p.grad is None for p in sent.model.parameters())
        expect(has_same_weights and has_no_gradients, "it changes the model")


def takes_no_derivative(subject: CheckedPlugin) -> None:
    """It takes no derivative of the model if it declares `black_box`."""
    if not common.build_instance(subject, Measure).black_box:
        raise DoesNotApply("it says that it needs derivatives of the model")

    def refuse_derivative(sent: ClientMessage) -> None:
        raise ContractViolation("it takes derivatives of the model by its inputs; set black_box = False")

    for task, model, inputs, labels in _accepted_batches(subject):
        with patch.object(ClientMessage, "jacobian", property(refuse_derivative)):
            common.build_instance(subject, Measure).compute(model, task.loss, inputs, labels)


CHECKS = (
    *common.CHECKS,
    is_a_measure,
    explains_its_quantities,
    gives_values,
    is_a_pure_function,
    takes_no_derivative,
)


def _accepted_batches(subject: CheckedPlugin) -> Iterator[tuple[Task, nn.Module, Tensor, Tensor]]:
    """Yield task, model, inputs and labels of those tiny batches that the measure accepts."""
    refusals, accepted_count = [], 0
    for task in _TASKS:
        with seed_globals("contract", "model"):
            model = Mlp(hidden=(12,)).build(task)
        inputs = torch.rand((4, *task.input_shape), generator=generator("inputs"))
        labels = torch.arange(4) if task.num_classes else torch.linspace(-1, 1, 4)
        try:
            common.build_instance(subject, Measure).compute(model, task.loss, inputs, labels)
        except ConfigError as error:
            refusals.append(str(error))
            continue
        accepted_count += 1
        yield task, model, inputs, labels
    if not accepted_count:
        raise NotChecked(f"it accepts no tiny batch: {'; '.join(refusals)}")
