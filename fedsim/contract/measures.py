"""What a measure keeps to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import cast
from unittest.mock import patch

import torch
from torch import Tensor, nn

from fedsim.contract import common
from fedsim.contract.checks import Broken, DoesNotApply, NotChecked, Subject, expect
from fedsim.errors import ConfigError
from fedsim.measure import Measure
from fedsim.models.mlp import Mlp
from fedsim.randomness import generator, seeded
from fedsim.task import Task
from fedsim.training.sent import Sent

_TASKS = (Task((1, 8, 8), 10), Task((4,), 0))


def is_a_measure(subject: Subject) -> None:
    """It derives from fedsim.Measure."""
    measure = subject.build()
    expect(isinstance(measure, Measure), f"{type(measure).__name__} does not derive from fedsim.Measure")


def says_something(subject: Subject) -> None:
    """It gives a value of an ordinary batch under each name, and one of each of its examples."""
    for task, model, inputs, labels in _batches(subject):
        values = _measure(subject).of(model, task.loss, inputs, labels)
        for name, value in values.items():
            expect(not math.isnan(value), f"of an ordinary batch it says that {name} is undefined")
        each = _measure(subject).of_each(model, task.loss, inputs, labels)
        expect(not any(value.isnan().any() for value in each.values()), "of some ordinary example it is undefined")


def says_what_its_values_mean(subject: Subject) -> None:
    """It names its quantities, and says of each whether a larger value means that more is exposed, or less."""
    meanings = getattr(_measure(subject), "quantities", None)
    good = isinstance(meanings, Mapping) and meanings and set(meanings.values()) <= {"more", "less"}
    expect(bool(good), f"quantities: expected names, each with 'more' or 'less', got {meanings!r}")


def is_a_pure_function(subject: Subject) -> None:
    """It gives the same again, draws from no global generator, and leaves the model and the batch to other measures."""
    for task, model, inputs, labels in _batches(subject):
        measure, sent = _measure(subject), Sent.of(model, task.loss, inputs, labels)
        weights = {name: tensor.clone() for name, tensor in sent.model.state_dict().items()}
        with common.global_generators_untouched():
            first = measure.of_sent(sent)
        with common.other_global_generators(1):
            again = measure.of_sent(sent), measure.of(model, task.loss, inputs, labels)
        expect(all(repr(first) == repr(one) for one in again), "of the same batch it gives something else")
        expect(torch.equal(sent.inputs, inputs) and torch.equal(sent.labels, labels), "it changes the batch")
        same = all(torch.equal(tensor, weights[name]) for name, tensor in sent.model.state_dict().items())
        expect(same and all(p.grad is None for p in sent.model.parameters()), "it changes the model")


def keeps_to_the_black_box(subject: Subject) -> None:
    """Where it says that it needs no derivative of the model, it takes none."""
    if not _measure(subject).black_box:
        raise DoesNotApply("it says that it needs derivatives of the model")

    def refused(sent: Sent) -> None:
        raise Broken("it takes derivatives of the model by its inputs; set black_box = False")

    for task, model, inputs, labels in _batches(subject):
        with patch.object(Sent, "linear", property(refused)):
            _measure(subject).of(model, task.loss, inputs, labels)


CHECKS = (
    *common.CHECKS,
    is_a_measure,
    says_what_its_values_mean,
    says_something,
    is_a_pure_function,
    keeps_to_the_black_box,
)


def _measure(subject: Subject) -> Measure:
    return cast("Measure", subject.build())


def _batches(subject: Subject) -> Iterator[tuple[Task, nn.Module, Tensor, Tensor]]:
    """Batches of a classification and of a regression that it accepts.

    Raises:
        NotChecked: it accepts none.
    """
    refusals, accepted = [], 0
    for task in _TASKS:
        with seeded("contract", "model"):
            model = Mlp(hidden=(12,)).build(task)
        inputs = torch.rand((4, *task.input_shape), generator=generator("inputs"))
        labels = torch.arange(4) if task.num_classes else torch.linspace(-1, 1, 4)
        try:
            _measure(subject).of(model, task.loss, inputs, labels)
        except ConfigError as error:
            refusals.append(str(error))
            continue
        accepted += 1
        yield task, model, inputs, labels
    if not accepted:
        raise NotChecked(f"it accepts no tiny batch: {'; '.join(refusals)}")
