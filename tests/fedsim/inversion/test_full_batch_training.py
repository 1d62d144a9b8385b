"""Simulated local training whose steps take all examples."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedsim.interfaces.message_noise import MessageNoise
from fedsim.inversion.distances import global_norm
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.problem_builder import build_problem
from fedsim.inversion.update_models import (
    FullBatchTraining,
    GradientAtBroadcast,
    UpdateModel,
    choose_training_model,
    simulate_known_training,
)
from fedsim.recording.payloads import Payload
from fedsim.recording.wire_format import Update
from fedsim.training.loop import local_update
from fedsim.training.model_state import copy_state
from fedsim.training.settings import LocalTraining
from tests.support.digit_clients import COUNT, data, knowledge, mlp


def make_problem(epochs: int, momentum: float = 0.0) -> InversionProblem:
    """Return the problem of a client that takes all of its digits in each of so many steps, with its labels."""
    inputs, labels = data(0)
    plan = LocalTraining(local_epochs=epochs, batch_size=COUNT, learning_rate=0.2, momentum=momentum)
    before = copy_state(mlp())
    after, _ = local_update(mlp(), before, inputs, labels, plan, key=("client", 0))
    update = Update(round=1, client=0, before=before, payload=Payload.from_dense(after, "weights"), num_examples=COUNT)
    facts = replace(knowledge(0), local_epochs=epochs, learning_rate=0.2, momentum=momentum)
    return replace(build_problem(update, facts), labels=labels)


def error(model: UpdateModel, problem: InversionProblem) -> float:
    """Return by how much the update of the true data differs from the recorded one, as a share of it."""
    dummy: Tensor = (data(0)[0] - problem.scaling.centre) / problem.scaling.scale
    gradient = model.gradient(problem, {}, dummy, problem.labels)
    differences = [g.detach() - sent for g, sent in zip(gradient, problem.mean_gradient, strict=True)]
    return (global_norm(differences) / global_norm(problem.mean_gradient)).item()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_is_the_training_of_a_client_that_takes_all_examples_in_each_step(momentum: float) -> None:
    assert error(FullBatchTraining(), make_problem(5, momentum)) < 1e-3


def test_few_long_steps_are_nearer_than_one_gradient() -> None:
    problem = make_problem(12)
    one, few = error(GradientAtBroadcast(), problem), error(FullBatchTraining(most_steps=4), problem)
    assert few < one / 2


def test_steps_with_momentum_are_all_simulated() -> None:
    """One long step stands for several of plain SGD only."""
    assert error(FullBatchTraining(most_steps=2), make_problem(5, momentum=0.9)) < 1e-3


def test_what_cannot_be_simulated_counts_as_one_gradient() -> None:
    problem = make_problem(5)
    assert isinstance(simulate_known_training(problem), FullBatchTraining)
    for changes in ({"local_epochs": 1}, {"optimizer": "adam"}, {"batch_size": None}):
        assert isinstance(simulate_known_training(replace(problem, **changes)), GradientAtBroadcast)


def test_noise_that_is_added_hides_the_error_of_one_gradient() -> None:
    problem = make_problem(5)
    assert isinstance(choose_training_model(problem), FullBatchTraining)
    silent, noisy = (MessageNoise(deviations={"a": torch.full((2,), deviation)}) for deviation in (0.0, 0.1))
    assert isinstance(choose_training_model(replace(problem, noise=silent)), FullBatchTraining)
    assert isinstance(choose_training_model(replace(problem, noise=noisy)), GradientAtBroadcast)


def test_a_sum_of_clients_is_of_the_steps_of_each() -> None:
    """Two clients of four digits each take the five steps that each of them takes, not those of eight."""
    problem = replace(make_problem(5), num_examples=2 * COUNT, num_clients=2)
    dummy = torch.cat([(data(0)[0] - problem.scaling.centre) / problem.scaling.scale] * 2)
    labels = torch.cat([problem.labels] * 2)
    gradient = FullBatchTraining().gradient(problem, {}, dummy, labels)
    for value, sent in zip(gradient, make_problem(5).mean_gradient, strict=True):
        assert torch.allclose(value, sent, atol=1e-5)
