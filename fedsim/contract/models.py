"""Checks of models."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedsim.base.errors import ConfigError
from fedsim.base.randomness import generator, seed_globals
from fedsim.base.task import Task
from fedsim.contract import common
from fedsim.contract.checks import CheckedPlugin, ContractViolation, NotChecked, expect
from fedsim.data import Dataset, Examples
from fedsim.training.model_state import copy_state
from fedsim.training.models.checks import check_model, check_network

_TASKS = (
    Task((1, 8, 8), 7),
    Task((1, 28, 28), 7),
    Task((3, 32, 32), 7),
    Task((3, 64, 64), 7),
    Task((12,), 7),
    Task((12,), 0),
    Task((20,), 7, vocabulary=30),
    Task((2, 32), 7),
)
_MASKS = Task((1, 8, 8), 0, mask_classes=3)
"""Tried where a model takes none of the others, for those give one row an example."""
_EXAMPLES = 3


def explains_refusals(subject: CheckedPlugin) -> None:
    """It is built for a task, or says in one sentence what it takes instead."""
    _accepted_models(subject)
    for refusal in subject.cache["refusals"]:
        is_explained = re.fullmatch("model: [^\n]+ takes [^\n]+, got [^\n]+", refusal)
        expect(is_explained, f"it refuses a task with '{refusal}', expected 'model: NAME takes ..., got ...'")


def learns_its_tasks(subject: CheckedPlugin) -> None:
    """It gives outputs for any batch of its tasks, and can be differentiated, twice for attacks."""
    for task in _accepted_models(subject):
        # Built anew, as learning changes the model, which checks share.
        model, inputs = _build_model(subject, task), _random_inputs(task)
        dtype = torch.int64 if task.goal in ("classes", "masks") else torch.float32
        labels = torch.zeros((_EXAMPLES, *task.target_shape), dtype=dtype)
        examples = Examples(raw=inputs, labels=labels, scale=None if task.vocabulary else 1.0)
        dataset = Dataset(
            name="tiny",
            train=examples,
            test=examples,
            num_classes=task.num_classes,
            source="made here",
            licence="none",
            vocabulary=task.vocabulary,
            mask_classes=task.mask_classes,
        )
        check_model(model, dataset, inputs, subject.name, attacked=True)
        model.zero_grad(set_to_none=True)
        task.loss(model(inputs), labels).backward()
        unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
        expect(not unused, f"'{unused[0] if unused else ''}' has no gradient, so it is never trained")


def weights_are_floats(subject: CheckedPlugin) -> None:
    """Its parameters are floating-point numbers, and finite from the start."""
    for model in _accepted_models(subject).values():
        state = copy_state(model)
        for name, parameter in model.named_parameters():
            expect(name in state, f"'{name}' is {parameter.dtype}, expected floating-point numbers")
            expect(parameter.isfinite().all(), f"'{name}' is NaN or infinite from the start")


def is_deterministic(subject: CheckedPlugin) -> None:
    """It has the same weights with the same seed of torch's generator."""
    for task, model in _accepted_models(subject).items():
        first = copy_state(model)
        with common.seed_global_generators(7):
            second = copy_state(_build_model(subject, task))
        expect(list(first) == list(second), "built again, its parameters have other names or another order")
        for name, tensor in first.items():
            expect(torch.equal(tensor, second[name]), f"built again with the same seed, '{name}' has other weights")


CHECKS = (
    *common.CHECKS,
    explains_refusals,
    learns_its_tasks,
    weights_are_floats,
    is_deterministic,
)


def _accepted_models(subject: CheckedPlugin) -> Mapping[Task, nn.Module]:
    """Return the models of those tiny tasks for which it can be built; checks share them."""
    if "models" not in subject.cache:
        models: dict[Task, nn.Module] = {}
        refusals: list[str] = []
        for task in (*_TASKS, _MASKS):
            if task is _MASKS and models:
                break
            try:
                models[task] = _build_model(subject, task)
            except ConfigError as error:
                refusals.append(str(error))
        subject.cache.update(models=models, refusals=refusals)
    if not subject.cache["models"]:
        raise NotChecked(f"it takes none of the tiny tasks; {'; '.join(subject.cache['refusals'])}")
    accepted: Mapping[Task, nn.Module] = subject.cache["models"]
    return accepted


def _build_model(subject: CheckedPlugin, task: Task) -> nn.Module:
    with seed_globals("contract", "model"):
        network = subject.build().build(task)
    if not isinstance(network, nn.Module):
        raise ContractViolation(f"build returns a {type(network).__name__}, expected a torch.nn.Module")
    return check_network(network, subject.name)


def _random_inputs(task: Task) -> Tensor:
    shape, rng = (_EXAMPLES, *task.input_shape), generator("inputs")
    if task.vocabulary:
        return torch.randint(task.vocabulary, shape, generator=rng)
    return torch.rand(shape, generator=rng)
