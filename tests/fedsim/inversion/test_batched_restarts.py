"""Restarts that are computed in one call of the network are those that are computed one after the other."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsim.base.randomness import generator, seed_globals
from fedsim.base.task import Task
from fedsim.interfaces.attack import Knowledge
from fedsim.interfaces.findings import Reconstruction
from fedsim.inversion import batched_call, batched_restarts, matching
from fedsim.inversion.batch_faults import rows_agree
from fedsim.inversion.batched_restarts import batching_is_faster
from fedsim.inversion.matching import GradientInversion
from fedsim.inversion.restart import Restart
from fedsim.plugins import registry
from fedsim.recording.payloads import Payload
from fedsim.recording.wire_format import Update
from fedsim.training.loop import local_update
from fedsim.training.model_state import copy_state
from fedsim.training.settings import LocalTraining
from tests.support.networks import Branching

TASK, LABELS = Task((1, 6, 6), 5), torch.tensor([0, 3, 3, 4])
RESTARTS, ITERATIONS = 5, 4
SETTINGS: dict[str, dict[str, Any]] = {"see-through-gradients": {"bn_weight": 0.0}}


class Counted:
    """Cross-entropy that knows how often it was asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        return cross_entropy(outputs, labels)


def network() -> nn.Module:
    with seed_globals("together"):
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.Sigmoid(), nn.Linear(12, 5))


def branching() -> nn.Module:
    return nn.Sequential(network(), Branching())


def attack(name: str = "inverting-gradients", **settings: Any) -> GradientInversion:
    given = {"iterations": ITERATIONS, "restarts": RESTARTS} | SETTINGS.get(name, {}) | settings
    return cast("GradientInversion", registry.build("attacks", name, given, name))


def invert_update(by: GradientInversion, build: Any = network) -> tuple[Reconstruction, int]:
    """What the attack claims of a client of two steps, and how often it computed the loss."""
    model, loss = build(), Counted()
    inputs = torch.rand((len(LABELS), *TASK.input_shape), generator=generator("inputs"))
    training = LocalTraining(local_epochs=2, batch_size=len(LABELS), learning_rate=0.1)
    before = copy_state(model)
    after, _ = local_update(model, before, inputs, LABELS, training, key=("x",))
    sent = Payload.from_dense(after, "weights")
    update = Update(round=1, client=2, before=before, payload=sent, num_examples=len(LABELS))
    known = Knowledge(
        model=build,
        loss=loss,
        input_shape=TASK.input_shape,
        num_classes=TASK.num_classes,
        value_range=((0.0,), (1.0,)),
        labels=LABELS,
        learning_rate=0.1,
        local_epochs=2,
        batch_size=len(LABELS),
    )
    return by.invert(update, known, generator("attack"), lambda *told: None), loss.calls


def check_same(one: Reconstruction, other: Reconstruction) -> None:
    for name, tensor in one.tensors.items():
        torch.testing.assert_close(other.tensors[name], tensor, rtol=1e-3, atol=1e-3)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "batching_is_faster", lambda device: True)


def test_it_pays_on_an_accelerator_alone() -> None:
    assert batching_is_faster(torch.device("cuda"))
    assert not batching_is_faster(torch.device("cpu"))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("inverting-gradients", marks=pytest.mark.thorough),
        pytest.param("sme", marks=pytest.mark.thorough),
        "long-strides",
        "dlfa",
        "sapag",
        "see-through-gradients",
    ],
)
def test_restarts_at_once_find_what_they_find_one_after_the_other(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    apart, _ = invert_update(attack(name))
    monkeypatch.setattr(matching, "batching_is_faster", lambda device: True)
    whole, _ = invert_update(attack(name))
    check_same(apart, whole)
    assert "one after the other" not in caplog.text


def test_restarts_at_once_see_the_jumps_of_relus(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def relus() -> nn.Module:
        with seed_globals("relus"):
            return nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.ReLU(), nn.Linear(12, 5))

    apart, _ = invert_update(attack(relu_width=0.5), relus)
    assert not torch.allclose(apart.data, invert_update(attack(), relus)[0].data, atol=1e-2)
    monkeypatch.setattr(matching, "batching_is_faster", lambda device: True)
    check_same(apart, invert_update(attack(relu_width=0.5), relus)[0])
    assert "one after the other" not in caplog.text


@pytest.mark.thorough
@pytest.mark.usefixtures("at_once")
def test_as_many_are_computed_at_once_as_the_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    def calls_of_iterations() -> int:
        return invert_update(attack(iterations=ITERATIONS))[1] - invert_update(attack(iterations=1))[1]

    sizes: list[int] = []
    measure = batched_call.BatchEntry.from_task

    def note_size(*given: Any) -> Any:
        entry = measure(*given)
        sizes.append(entry.bytes_per_restart)
        return entry

    monkeypatch.setattr(batched_call.BatchEntry, "from_task", note_size)
    whole, _ = invert_update(attack())
    for budget, calls in (
        (batched_restarts.MEMORY_BUDGET, 1),
        (4 * sizes[0], 2),
        (2 * sizes[0], 3),
        (sizes[0], RESTARTS),
    ):
        monkeypatch.setattr(batched_restarts, "MEMORY_BUDGET", budget)
        assert calls_of_iterations() == calls * (ITERATIONS - 1)
        check_same(whole, invert_update(attack())[0])


def test_a_model_that_cannot_be_computed_for_several_is_computed_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    apart, _ = invert_update(attack(), branching)
    monkeypatch.setattr(matching, "batching_is_faster", lambda device: True)
    again, _ = invert_update(attack(), branching)
    assert "restarts are computed one after the other" in caplog.text
    assert torch.equal(apart.data, again.data)


def test_values_that_differ_at_once_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    apart, _ = invert_update(attack())
    monkeypatch.setattr(matching, "batching_is_faster", lambda device: True)
    compute = batched_call.BatchedCall.compute

    def off(self: Any, *given: Any) -> list[Tensor]:
        return [1.1 * tensor for tensor in compute(self, *given)]

    monkeypatch.setattr(batched_call.BatchedCall, "compute", off)
    again, _ = invert_update(attack())
    assert "several at once gave other values" in caplog.text
    assert torch.equal(apart.data, again.data)


def test_small_slopes_that_differ_are_not_taken_for_the_same() -> None:
    slopes = torch.full((4,), 0.01)
    rows, others = torch.stack([slopes * 1.0001, slopes * 1.01, torch.full((4,), 1e-9)]), torch.zeros(3, 4)
    others[:2] = slopes
    assert rows_agree(rows, others).tolist() == [True, False, True]


def test_a_memory_that_does_not_last_for_several_lasts_for_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    apart, _ = invert_update(attack())
    monkeypatch.setattr(matching, "batching_is_faster", lambda device: True)

    def full(self: Any, *given: Any) -> list[Tensor]:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(batched_call.BatchedCall, "compute", full)
    again, _ = invert_update(attack())
    assert "restarts are computed one after the other (out of memory)" in caplog.text
    assert torch.equal(apart.data, again.data)


def test_a_restart_that_diverges_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    start, made = Restart.__init__, []

    def starts(self: Restart, *given: Any) -> None:
        start(self, *given)
        made.append(self)
        if len(made) % RESTARTS == 2:
            self.dummy.fill_(torch.nan)

    monkeypatch.setattr(Restart, "__init__", starts)
    apart, _ = invert_update(attack())
    monkeypatch.setattr(matching, "batching_is_faster", lambda device: True)
    whole, _ = invert_update(attack())
    assert apart.data.isfinite().all()
    check_same(apart, whole)
