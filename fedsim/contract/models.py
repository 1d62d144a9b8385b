"""What a model keeps to."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedsim.contract import common
from fedsim.contract.checks import Broken, NotChecked, Subject, expect
from fedsim.datasets import Dataset, Examples
from fedsim.errors import ConfigError
from fedsim.models.checks import a_network, check_model
from fedsim.randomness import generator, seeded
from fedsim.task import Task
from fedsim.training.model_state import state_of

_TASKS = (
    Task((1, 8, 8), 7),
    Task((1, 28, 28), 7),
    Task((3, 32, 32), 7),
    Task((3, 64, 64), 7),
    Task((12,), 7),
    Task((12,), 0),
    Task((20,), 7, vocabulary=30),
)
_EXAMPLES = 5


def says_what_it_takes(subject: Subject) -> None:
    """It is built for a task, or says in one sentence what it takes instead."""
    _fitting(subject)
    for refusal in subject.kept["refusals"]:
        says = re.fullmatch("model: [^\n]+ takes [^\n]+, got [^\n]+", refusal)
        expect(says, f"it refuses a task with '{refusal}', expected 'model: NAME takes ..., got ...'")


def learns_its_tasks(subject: Subject) -> None:
    """It gives outputs for any batch of its tasks, and can be differentiated, twice for attacks."""
    for task in _fitting(subject):
        model, inputs = _built(subject, task), _inputs(task)
        labels = torch.zeros(_EXAMPLES, dtype=torch.int64 if task.num_classes else torch.float32)
        examples = Examples(raw=inputs, labels=labels, scale=None if task.vocabulary else 1.0)
        dataset = Dataset(
            name="tiny",
            train=examples,
            test=examples,
            num_classes=task.num_classes,
            source="made here",
            licence="none",
            vocabulary=task.vocabulary,
        )
        check_model(model, dataset, inputs, subject.name, attacked=True)
        model.zero_grad(set_to_none=True)
        task.loss(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
        expect(not unused, f"'{unused[0] if unused else ''}' has no gradient, so it is never trained")


def weights_are_floats(subject: Subject) -> None:
    """All that it learns are floating-point numbers, finite from the start."""
    for task in _fitting(subject):
        state = state_of(_built(subject, task))
        for name, parameter in _built(subject, task).named_parameters():
            expect(name in state, f"'{name}' is {parameter.dtype}, expected floating-point numbers")
            expect(parameter.isfinite().all(), f"'{name}' is NaN or infinite from the start")


def has_the_same_weights_again(subject: Subject) -> None:
    """With the same seed of torch's generator it has the same weights."""
    for task in _fitting(subject):
        first = state_of(_built(subject, task))
        with common.other_global_generators(7):
            again = state_of(_built(subject, task))
        expect(list(first) == list(again), "built again, its parameters have other names or another order")
        for name, tensor in first.items():
            expect(torch.equal(tensor, again[name]), f"built again with the same seed, '{name}' has other weights")


CHECKS = (
    *common.CHECKS,
    says_what_it_takes,
    learns_its_tasks,
    weights_are_floats,
    has_the_same_weights_again,
)


def _fitting(subject: Subject) -> Sequence[Task]:
    """The tasks that it is built for.

    Raises:
        NotChecked: there are none.
    """
    if "tasks" not in subject.kept:
        tasks, refusals = [], []
        for task in _TASKS:
            try:
                _built(subject, task)
            except ConfigError as error:
                refusals.append(str(error))
            else:
                tasks.append(task)
        subject.kept.update(tasks=tasks, refusals=refusals)
    if not subject.kept["tasks"]:
        raise NotChecked(f"it takes none of the tiny tasks; {'; '.join(subject.kept['refusals'])}")
    found: Sequence[Task] = subject.kept["tasks"]
    return found


def _built(subject: Subject, task: Task) -> nn.Module:
    with seeded("contract", "model"):
        network = subject.build().build(task)
    if not isinstance(network, nn.Module):
        raise Broken(f"build returns a {type(network).__name__}, expected a torch.nn.Module")
    return a_network(network, subject.name)


def _inputs(task: Task) -> Tensor:
    shape, rng = (_EXAMPLES, *task.input_shape), generator("inputs")
    return torch.randint(task.vocabulary, shape, generator=rng) if task.vocabulary else torch.rand(shape, generator=rng)
