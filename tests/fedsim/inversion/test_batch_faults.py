"""Victims that a batched call would compute otherwise than they are by themselves are found and computed alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy

from adversaries.inversion.surrogate_model import SurrogateModelExtension
from fedsim.base.errors import AttackError
from fedsim.base.randomness import generator
from fedsim.interfaces.attack import Knowledge, Outcome, VictimTask
from fedsim.interfaces.findings import Reconstruction
from fedsim.inversion import matching
from fedsim.inversion.inversion_task import InversionTask
from fedsim.recording.transcript import Transcript
from fedsim.training.model_state import copy_state
from tests.support.recordings import build_update, record_updates, target_client

CLIENTS = 5
ATTACK = SurrogateModelExtension(iterations=4, step_size=0.1)


class ChangesRows(Function):
    """Nothing for one victim; a call for several changes the rows as the subclass says."""

    @staticmethod
    def forward(values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class NormalisesOverRows(ChangesRows):
    @staticmethod
    def vmap(info: Any, dims: tuple[int], values: Tensor) -> tuple[Tensor, int]:
        return values - 0.5 * values.mean(dims[0], keepdim=True), dims[0]


class SwapsTwoRows(ChangesRows):
    @staticmethod
    def vmap(info: Any, dims: tuple[int], values: Tensor) -> tuple[Tensor, int]:
        rows = values.movedim(dims[0], 0)
        order = [0, 2, 1, *range(3, len(rows))] if len(rows) > 3 else list(range(len(rows)))
        return rows[order], 0


class ScalesAllRows(ChangesRows):
    @staticmethod
    def vmap(info: Any, dims: tuple[int], values: Tensor) -> tuple[Tensor, int]:
        return 1.5 * values, dims[0]


class HasOneDerivative(ChangesRows):
    generate_vmap_rule = True

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def in_second_backward(fault: type[Function]) -> Callable[[Tensor], Tensor]:
    """Return a function that does nothing but in its second derivative, in which `fault` is."""

    class SecondBackward(ChangesRows):
        generate_vmap_rule = True

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return fault.apply(gradient)

    class FirstBackward(ChangesRows):
        generate_vmap_rule = True

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return SecondBackward.apply(gradient)

    return FirstBackward.apply


class Faulty(nn.Module):
    """A layer that does what it is told, and whose description does not say what."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, inputs: Tensor) -> Tensor:
        return self.change(inputs)


class CountsCalls:
    """A state that grows with each call, but for those without gradients, by which the training mode is checked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, inputs: Tensor) -> Tensor:
        self.calls += torch.is_grad_enabled()
        return inputs * (1 + 0.1 * self.calls)


def draws_numbers(inputs: Tensor) -> Tensor:
    return inputs * 10 ** random.random()


def draws_tensors(inputs: Tensor) -> Tensor:
    return inputs + torch.rand(inputs.shape)


def network(change: Callable[[Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.Sigmoid(), Faulty(change), nn.ReLU(), nn.Linear(12, 5))


def plain(inputs: Tensor) -> Tensor:
    return inputs


def record(folder: Path, dead_clients: Collection[int] = ()) -> Transcript:
    """Record clients who send w_0 and noise, and those whose units are all dead between w_0 and w_T."""
    before, updates = copy_state(network(plain)), []
    for client in range(CLIENTS):
        rng = generator("faults", client)
        after = {name: tensor + 0.05 * torch.randn(tensor.shape, generator=rng) for name, tensor in before.items()}
        if client in dead_clients:
            after["1.bias"] -= 1e4
        updates.append(build_update(before, after, client=client, num_examples=3))
    return record_updates(folder, updates)


def attack_all(
    transcript: Transcript, change_of: Callable[[int], Callable[[Tensor], Tensor]]
) -> Iterator[tuple[int, Outcome]]:
    """Attack all clients at once; `change_of` says what the layer of a client's model does."""
    tasks = []
    for client in range(CLIENTS):
        knowledge = Knowledge(
            model=lambda client=client: network(change_of(client)),
            loss=cross_entropy,
            input_shape=(1, 6, 6),
            num_classes=5,
            value_range=((0.0,), (1.0,)),
            labels=torch.tensor([0, 1, 4]),
        )
        tasks.append(VictimTask(target=target_client(transcript, knowledge, client, client)))
    for task, outcome in ATTACK.run_several(tasks):
        yield task.target.victim, outcome


def victims_alone(caplog: pytest.LogCaptureFixture) -> set[int]:
    said = [text for text in caplog.messages if "restarts are computed one after the other" in text]
    return {client for client in range(CLIENTS) for text in said if f"client {client}:" in text}


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on victims are attacked at once, as on an accelerator."""
    return lambda: monkeypatch.setattr(matching, "batching_is_faster", lambda device: True)


def factor_of(client: int) -> Callable[[Tensor], Tensor]:
    """Return what differs for client 2 alone, in a model that is described as the others'."""
    return lambda inputs: inputs * (1.03 if client == 2 else 1.0)


@pytest.mark.parametrize(
    ("change_of", "alone"),
    [
        pytest.param(lambda client: plain, set(), id="no fault"),
        pytest.param(lambda client: NormalisesOverRows.apply, {0, 1, 2, 3, 4}, id="statistics over rows"),
        pytest.param(lambda client: in_second_backward(SwapsTwoRows), {1, 2}, id="rows mixed in second backward"),
        pytest.param(lambda client: in_second_backward(ScalesAllRows), {0, 1, 2, 3, 4}, id="wrong second backward"),
        pytest.param(factor_of, {2}, id="another model of the same description"),
    ],
)
def test_a_model_that_computes_otherwise_for_several_is_computed_alone(
    change_of: Any, alone: set[int], at_once: Callable[[], None], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    transcript = record(tmp_path)
    by_themselves = dict(attack_all(transcript, change_of))
    at_once()
    for client, finding in attack_all(transcript, change_of):
        expected = by_themselves[client]
        assert isinstance(finding, Reconstruction), finding
        assert isinstance(expected, Reconstruction)
        torch.testing.assert_close(finding.data, expected.data, rtol=1e-3, atol=1e-3)
    assert victims_alone(caplog) == alone


@pytest.mark.parametrize("change", [draws_numbers, draws_tensors, CountsCalls()], ids=["numbers", "tensors", "state"])
def test_a_model_that_computes_otherwise_each_time_is_computed_alone(
    change: Any, at_once: Callable[[], None], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    at_once()
    random.seed(0)  # numbers of two passes that happened to agree would be no fault to find
    torch.manual_seed(0)
    outcomes = dict(attack_all(record(tmp_path), lambda client: change))
    assert all(isinstance(outcome, Reconstruction) for outcome in outcomes.values()), outcomes
    assert victims_alone(caplog) == set(outcomes)


def test_a_victim_whose_distance_has_no_gradient_is_refused_alone(
    at_once: Callable[[], None], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    at_once()
    outcomes = dict(attack_all(record(tmp_path, dead_clients=[2]), lambda client: plain))
    assert isinstance(outcomes.pop(2), AttackError)
    assert all(isinstance(outcome, Reconstruction) for outcome in outcomes.values())
    assert not victims_alone(caplog)


def test_a_model_that_cannot_be_differentiated_twice_is_refused_for_all(
    at_once: Callable[[], None], tmp_path: Path
) -> None:
    """`torch.autograd.grad` leaves such a function out, in all calls alike, and gives a part of the gradient."""
    at_once()
    for outcome in dict(attack_all(record(tmp_path), lambda client: HasOneDerivative.apply)).values():
        assert isinstance(outcome, AttackError)
        assert "cannot be differentiated twice" in str(outcome)


def test_victims_between_some_that_cannot_be_attacked_are_checked(
    at_once: Callable[[], None], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    at_once()
    transcript, fault = record(tmp_path, dead_clients=[0, 4]), in_second_backward(ScalesAllRows)
    outcomes = dict(attack_all(transcript, lambda client: fault))
    assert [client for client, outcome in outcomes.items() if isinstance(outcome, AttackError)] == [0, 4]
    assert victims_alone(caplog) == {1, 2, 3}


def test_checks_of_a_further_victim_take_no_second_backward_pass(
    at_once: Callable[[], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its objective is computed once by its own model; the checks with all gradients are of two victims of a call."""
    checked: list[str] = []
    for name in ("check_gradient", "restart_evaluation"):
        whole = getattr(InversionTask, name)

        def note(self: InversionTask, *given: Any, name: str = name, whole: Any = whole) -> Any:
            checked.append(f"{name} of {self.problem.where}")
            return whole(self, *given)

        monkeypatch.setattr(InversionTask, name, note)
    at_once()
    dict(attack_all(record(tmp_path), lambda client: plain))
    assert sorted(checked) == sorted(
        f"{name} of round 1, client {client}" for name in ("check_gradient", "restart_evaluation") for client in (0, 4)
    )
