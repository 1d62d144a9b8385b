"""Victims that are computed in one call of the network are those that are attacked one after the other."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.functional import cross_entropy

from fedsim.base.errors import AttackError, KnowledgeError
from fedsim.base.randomness import generator, seed_globals
from fedsim.base.task import Task
from fedsim.interfaces.attack import Attack, Knowledge, Outcome, Paper, Progress, Target, VictimTask
from fedsim.interfaces.findings import Finding, Reconstruction, Representatives
from fedsim.inversion import batched_call, batched_restarts, matching
from fedsim.inversion.matching import GradientInversion
from fedsim.inversion.restart import Restart
from fedsim.plugins import registry
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update
from fedsim.training import convolution_products
from fedsim.training.loop import local_update
from fedsim.training.model_state import copy_state
from fedsim.training.settings import LocalTraining
from tests.support.networks import Branching

IMAGES, ROWS, COLUMNS = Task((1, 6, 6), 5), Task((6,), 5), (1, 3, 2)
ITERATIONS = 4
SIZES = {3: 4, 5: 4, 8: 4, 9: 3, 11: 3}
"""N by client: two that differ, each of several clients."""
SETTINGS: dict[str, dict[str, Any]] = {
    "see-through-gradients": {"bn_weight": 0.0, "restarts": 3},
    "inverting-gradients": {"restarts": 2},
    "sme": {"alpha_every": 2},
    "tableak": {"restarts": 2},
}
ATTACKS = ["inverting-gradients", "sme", "sra-gradient"]
MORE_ATTACKS = ["dlfa", "long-strides", "nl-sme", "sapag", "see-through-gradients", "tableak"]


class Counted:
    """Cross-entropy that knows how often it was asked."""

    factor = 1.0

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        return self.factor * cross_entropy(outputs, labels)


def network(task: Task) -> nn.Module:
    with seed_globals("victims"):
        return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(task.input_shape), 12), nn.Sigmoid(), nn.Linear(12, 5))


def convolutional(task: Task) -> nn.Module:
    with seed_globals("victims"):
        layers = nn.Conv2d(1, 3, 3, padding=1), nn.Sigmoid(), nn.AvgPool2d(2), nn.Conv2d(3, 4, 3, stride=2)
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4, 5))


def branching(task: Task) -> nn.Module:
    return nn.Sequential(network(task), Branching())


@dataclass
class Federation:
    """A round of clients with data of their own, and what is known of it."""

    folder: Path
    task: Task = IMAGES
    build: Callable[[Task], nn.Module] = network
    loss: Counted = field(default_factory=Counted)
    heard: dict[int, list[str]] = field(default_factory=dict)
    told: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        model, updates = self.build(self.task), []
        before = copy_state(model)
        for client, count in SIZES.items():
            inputs, labels = self.data(client)
            training = LocalTraining(local_epochs=2, batch_size=2, learning_rate=0.1)
            after, _ = local_update(model, before, inputs, labels, training, key=(client,))
            sent = Payload.from_dense(after, "weights")
            updates.append(Update(round=1, client=client, before=before, payload=sent, num_examples=count))
        Recorder(self.folder).write(1, updates)
        self.transcript = Transcript(self.folder)

    def data(self, client: int) -> tuple[Tensor, Tensor]:
        shape, rng = (SIZES[client], *self.task.input_shape), generator("data", client)
        return torch.rand(shape, generator=rng), torch.randint(5, shape[:1], generator=rng)

    def order(self, client: int, **known: Any) -> VictimTask:
        knowledge = Knowledge(
            model=lambda: self.build(self.task),
            loss=self.loss,
            input_shape=self.task.input_shape,
            num_classes=5,
            columns=COLUMNS if self.task is ROWS else None,
            value_range=((0.0,), (1.0,)),
            labels=self.data(client)[1],
            learning_rate=0.1,
            local_epochs=2,
            batch_size=2,
        )
        return VictimTask(
            target=Target(
                transcript=self.transcript,
                victim=client,
                knowledge=replace(knowledge, **known),
                rng=generator("attack", client),
            ),
            progress=lambda iteration, iterations, values: self.told.setdefault(client, []).append(iteration),
            log_context=lambda: self.overheard(client),
        )

    @contextmanager
    def overheard(self, client: int) -> Iterator[None]:
        """The warnings of one client's turn."""

        class Listener(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                said.append(record.getMessage())

        said, listener = self.heard.setdefault(client, []), Listener(logging.WARNING)
        logging.getLogger("fedsim").addHandler(listener)
        try:
            yield
        finally:
            logging.getLogger("fedsim").removeHandler(listener)

    def run_alone(self, by: Attack, order: VictimTask) -> Finding:
        """What comes of one that is attacked by itself, as on a CPU."""
        return by.run(replace(order.target, rng=generator("attack", order.target.victim)))


def attack(name: str = "inverting-gradients", **settings: Any) -> GradientInversion:
    given = {"iterations": ITERATIONS} | SETTINGS.get(name, {}) | settings
    return cast("GradientInversion", registry.build("attacks", name, given, name))


def outcomes(by: Attack, orders: Sequence[VictimTask]) -> dict[int, Outcome]:
    found = {order.target.victim: outcome for order, outcome in by.run_several(orders)}
    assert len(found) == len(orders)
    return found


def check_same(outcome: Outcome, other: Finding) -> None:
    assert isinstance(outcome, type(other)), outcome
    assert list(outcome.tensors) == list(other.tensors)
    for name, tensor in other.tensors.items():
        torch.testing.assert_close(outcome.tensors[name], tensor, rtol=1e-3, atol=1e-3, equal_nan=True)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on several at once save time."""
    return lambda: monkeypatch.setattr(matching, "batching_is_faster", lambda device: True)


@pytest.mark.parametrize("name", [*ATTACKS, *(pytest.param(name, marks=pytest.mark.thorough) for name in MORE_ATTACKS)])
def test_victims_at_once_are_found_as_they_are_one_after_the_other(
    name: str, at_once: Callable[[], None], tmp_path: Path
) -> None:
    some = Federation(tmp_path / "recording", ROWS if name == "tableak" else IMAGES)
    by, orders = attack(name), [some.order(client) for client in SIZES]
    apart = {order.target.victim: some.run_alone(by, order) for order in orders}
    some.heard.clear()
    at_once()
    whole = outcomes(by, orders)
    for client, found in apart.items():
        check_same(whole[client], found)
    assert len({found.tensors["data"].sum().item() for found in apart.values()}) == len(SIZES)
    assert not any("one after the other" in said for heard in some.heard.values() for said in heard)
    assert all(told == [1, 2, 3, 4] for told in some.told.values())
    if name == "sra-gradient":
        assert isinstance(whole[3], Representatives)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[tuple[int, ...]]]:
    """From now on convolutions are products; the shapes of their inputs."""

    def patched() -> list[tuple[int, ...]]:
        shapes: list[tuple[int, ...]] = []
        convolve = convolution_products.convolve

        def note_shape(inputs: Tensor, *settings: Any, **others: Any) -> Tensor:
            shapes.append(tuple(inputs.shape))
            return convolve(inputs, *settings, **others)

        monkeypatch.setattr(convolution_products, "convolve", note_shape)
        monkeypatch.setattr(convolution_products, "products_are_faster", lambda device: True)
        return shapes

    return patched


@pytest.mark.parametrize("name", ["inverting-gradients", pytest.param("sme", marks=pytest.mark.thorough)])
def test_victims_of_convolutions_are_found_by_products_as_they_are_by_convolutions(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    at_once: Callable[[], None],
    products: Callable[[], list[tuple[int, ...]]],
    tmp_path: Path,
) -> None:
    some, by = Federation(tmp_path / "recording", build=convolutional), attack(name)
    apart = {client: some.run_alone(by, some.order(client)) for client in (3, 5, 8)}
    at_once()
    shapes, compute = products(), batched_call.BatchedCall.compute

    def watched(self: Any, *given: Any) -> list[Tensor]:
        shapes.clear()
        return compute(self, *given)

    monkeypatch.setattr(batched_call.BatchedCall, "compute", watched)
    whole = outcomes(by, [some.order(client) for client in (3, 5, 8)])
    for client, found in apart.items():
        check_same(whole[client], found)
    assert set(shapes) == {(4, 1, 6, 6), (4, 3, 3, 3)}
    assert not any("one after the other" in said for heard in some.heard.values() for said in heard)


def test_the_memory_of_unfolded_inputs_is_counted_once(
    products: Callable[[], list[tuple[int, ...]]], tmp_path: Path
) -> None:
    some, by = Federation(tmp_path / "recording", build=convolutional), attack()
    matched = by._prepare_task(*_single(some, by), generator(0))
    folded = batched_call.BatchEntry.from_task(matched).bytes_per_restart
    products()
    unfolded = batched_call.BatchEntry.from_task(matched).bytes_per_restart
    inputs = 4 * 36 + 4 * 27  # of each layer: examples and numbers of an example
    windows = 4 * 36 * 9 + 4 * 1 * 27  # examples, positions and numbers of a position
    assert unfolded - folded == 4 * (windows - inputs)


def test_a_victim_for_which_a_batch_has_no_memory_is_computed_alone(
    monkeypatch: pytest.MonkeyPatch, at_once: Callable[[], None], tmp_path: Path
) -> None:
    some, by = Federation(tmp_path / "recording"), attack()
    apart = {client: some.run_alone(by, some.order(client)) for client in (3, 5)}
    at_once()

    def full(*given: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(batched_call.BatchEntry, "from_task", full)
    for client, outcome in outcomes(by, [some.order(client) for client in (3, 5)]).items():
        check_same(outcome, apart[client])


def test_half_of_the_free_memory_of_a_gpu_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 200)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    assert batched_restarts.memory_budget(torch.device("cuda")) == 400
    assert batched_restarts.memory_budget(torch.device("cpu")) == batched_restarts.MEMORY_BUDGET


def test_all_that_are_alike_are_one_call_in_each_iteration(at_once: Callable[[], None], tmp_path: Path) -> None:
    some = Federation(tmp_path / "recording")
    at_once()

    def calls(iterations: int) -> int:
        some.loss.calls = 0
        outcomes(attack(iterations=iterations), [some.order(client) for client in SIZES])
        return some.loss.calls

    calls(1)  # once, a loss is tried to know what targets it takes
    assert calls(7) - calls(4) == 3 * 2  # two numbers of examples


def test_only_what_differs_is_computed_for_each(
    monkeypatch: pytest.MonkeyPatch, at_once: Callable[[], None], tmp_path: Path
) -> None:
    calls: list[batched_call.BatchedCall] = []
    keep = batched_call.BatchedCall.compute

    def kept(self: Any, *given: Any) -> Any:
        calls.append(self)
        return keep(self, *given)

    monkeypatch.setattr(batched_call.BatchedCall, "compute", kept)
    some = Federation(tmp_path / "recording")
    at_once()
    outcomes(attack("sme"), [some.order(client) for client in (3, 5, 8)])
    alike, shown = calls[-1]._differing_leaves, calls[-1].slots[0][0]
    assert [place for place, leaf in enumerate(shown.leaves) if leaf.shape == (12, 36)] == [0, 4, 13]
    assert 0 not in alike  # w_0, which is one for all
    assert {4, 13} <= set(alike)  # w_T and the direction


def test_victims_that_are_not_alike_are_not_computed_with_one_another(
    at_once: Callable[[], None], tmp_path: Path
) -> None:
    some, other = Federation(tmp_path / "recording"), Federation(tmp_path / "other", build=branching)
    doubled = Counted()
    doubled.factor = 2.0
    orders = [some.order(3), some.order(5, learning_rate=0.2), other.order(8), some.order(5, loss=doubled)]
    by = attack("sapag")
    apart = [some.run_alone(by, order) for order in orders]
    some.heard.clear()
    at_once()
    whole = dict(by.run_several(orders))
    for order, found in zip(orders, apart, strict=True):
        check_same(whole[order], found)
    assert not any("at once" in said for heard in some.heard.values() for said in heard)


def test_one_that_cannot_be_attacked_leaves_the_others_alone(at_once: Callable[[], None], tmp_path: Path) -> None:
    some = Federation(tmp_path / "recording")
    at_once()

    def broken() -> nn.Module:
        raise ZeroDivisionError("a stranger's model")

    orders = [
        some.order(3),
        replace(some.order(3), target=replace(some.order(3).target, victim=4)),
        some.order(5, labels=torch.tensor([1])),
        some.order(8, model=broken),
        some.order(9, value_range=None),
        some.order(11),
    ]
    whole = outcomes(attack("sme"), orders)
    for client in (3, 11):
        check_same(whole[client], some.run_alone(attack("sme"), some.order(client)))
    assert "client 4" in str(whole[4])
    assert isinstance(whole[5], AttackError)
    assert "1 labels are granted" in str(whole[5])
    assert isinstance(whole[8], ZeroDivisionError)
    assert isinstance(whole[9], KnowledgeError)


def test_one_that_diverges_leaves_the_others_alone(
    monkeypatch: pytest.MonkeyPatch, at_once: Callable[[], None], tmp_path: Path
) -> None:
    some, by = Federation(tmp_path / "recording"), attack("inverting-gradients", restarts=1, iterations=6)
    apart = {client: some.run_alone(by, some.order(client)) for client in (3, 8)}
    at_once()
    step = Restart.project

    def lost(self: Restart) -> None:
        step(self)
        if self.problem.where == "round 1, client 5" and self._steps_taken == 3:
            self.dummy.fill_(torch.nan)

    monkeypatch.setattr(Restart, "project", lost)
    whole = outcomes(by, [some.order(client) for client in (3, 5, 8)])
    assert "objective became NaN at iteration" in str(whole[5])
    for client, found in apart.items():
        check_same(whole[client], found)


def test_one_that_raises_on_its_way_leaves_the_others_alone(
    monkeypatch: pytest.MonkeyPatch, at_once: Callable[[], None], tmp_path: Path
) -> None:
    some, by = Federation(tmp_path / "recording"), attack("sme", alpha_step_size=0.2)
    apart = {client: some.run_alone(by, some.order(client)) for client in (3, 8)}
    at_once()
    step = Restart.project

    def failing(self: Restart) -> None:
        step(self)
        if self.problem.where == "round 1, client 5":
            raise RuntimeError("no luck")

    monkeypatch.setattr(Restart, "project", failing)
    whole = outcomes(by, [some.order(client) for client in (3, 5, 8)])
    assert isinstance(whole[5], RuntimeError)
    for client, found in apart.items():
        check_same(whole[client], found)


def test_one_that_is_at_its_end_earlier_is_given_then(at_once: Callable[[], None], tmp_path: Path) -> None:
    some, by = Federation(tmp_path / "recording"), attack(restarts=1, patience=2, iterations=60)
    clients = (3, 5, 8)
    apart = {client: cast("Reconstruction", some.run_alone(by, some.order(client))) for client in clients}
    lengths = {client: len(found.trace["objective"]) for client, found in apart.items()}
    assert len(set(lengths.values())) > 1
    at_once()
    order = []
    for given, outcome in by.run_several([some.order(client) for client in clients]):
        order.append(lengths[given.target.victim])
        check_same(outcome, apart[given.target.victim])
    assert order == sorted(order)


def test_a_model_that_cannot_be_computed_for_several_is_told_of_each_victim(
    at_once: Callable[[], None], tmp_path: Path
) -> None:
    some, by = Federation(tmp_path / "recording", build=branching), attack("sme")
    apart = {client: some.run_alone(by, some.order(client)) for client in (3, 5)}
    some.heard.clear()
    some.told.clear()
    at_once()
    whole = {}
    for order, outcome in by.run_several([some.order(client) for client in (3, 5)]):
        whole[order.target.victim] = outcome
        assert list(some.told) == list(whole)  # the next one has not begun
    for client, found in apart.items():
        told = [said for said in some.heard[client] if "one after the other" in said]
        assert len(told) == 1
        assert told[0].startswith(f"round 1, client {client}: ")
        assert torch.equal(cast("Finding", whole[client]).tensors["data"], found.tensors["data"])


def test_one_that_gives_other_values_at_once_is_computed_alone(
    monkeypatch: pytest.MonkeyPatch, at_once: Callable[[], None], tmp_path: Path
) -> None:
    some, by = Federation(tmp_path / "recording"), attack(restarts=2)
    apart = {client: some.run_alone(by, some.order(client)) for client in (3, 5, 8)}
    some.heard.clear()
    at_once()
    compute = batched_call.BatchedCall.compute

    def off(self: Any, left: list[int], *given: Any) -> list[Tensor]:
        found = compute(self, left, *given)
        for tensor in found if 3 in left else ():  # the second one's second
            tensor[left.index(3)] *= 1.1
        return found

    monkeypatch.setattr(batched_call.BatchedCall, "compute", off)
    whole = outcomes(by, [some.order(client) for client in (3, 5, 8)])
    for client, found in apart.items():
        check_same(whole[client], found)
        told = [said for said in some.heard[client] if "several at once gave other values" in said]
        assert len(told) == (client == 5)
    assert torch.equal(cast("Finding", whole[5]).tensors["data"], apart[5].tensors["data"])


@pytest.mark.parametrize(("holds", "calls"), [pytest.param(1, 6, marks=pytest.mark.thorough), (4, 2)])
def test_as_many_victims_are_computed_at_once_as_the_memory_allows(
    holds: int, calls: int, monkeypatch: pytest.MonkeyPatch, at_once: Callable[[], None], tmp_path: Path
) -> None:
    some, by = Federation(tmp_path / "recording"), attack(restarts=2)
    clients = (3, 5, 8)
    apart = {client: some.run_alone(by, some.order(client)) for client in clients}
    at_once()
    size = batched_call.BatchEntry.from_task(by._prepare_task(*_single(some, by), generator(0))).bytes_per_restart
    monkeypatch.setattr(batched_restarts, "MEMORY_BUDGET", holds * size)

    def count_losses(iterations: int) -> int:
        some.loss.calls = 0
        outcomes(attack(restarts=2, iterations=iterations), [some.order(client) for client in clients])
        return some.loss.calls

    assert count_losses(5) - count_losses(4) == calls
    whole = outcomes(by, [some.order(client) for client in clients])
    for client, found in apart.items():
        check_same(whole[client], found)


def test_where_the_memory_ends_midway_fewer_are_computed_at_once_and_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch, at_once: Callable[[], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    some, by = Federation(tmp_path / "recording"), attack("sme", restarts=2, alpha_every=2)
    clients, asked = (3, 5, 8), list[int]()
    apart = {client: some.run_alone(by, some.order(client)) for client in clients}
    some.told.clear()
    at_once()

    def held(holds: int) -> Callable[..., Any]:
        """A memory that lasts for so many from the second iteration on; three calls come before the first one."""

        def held_vmap(compute: Callable[..., Any], axes: Any) -> Callable[..., Any]:
            def call(values: dict[str, Tensor], *others: Any) -> Any:
                asked.append(len(values["dummy"]))
                if len(asked) > 4 and asked[-1] > holds:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                return vmap(compute, axes)(values, *others)

            return call

        return held_vmap

    for holds, tried in ((6, [6]), (4, [6, 3, 3]), (2, [6, 3, 2, 2, 2]), (1, [6, 3, 2, 1, 1, 1, 1, 1, 1])):
        monkeypatch.setattr(batched_call, "vmap", held(holds))
        asked.clear()
        caplog.clear()
        some.told.clear()
        whole = outcomes(by, [some.order(client) for client in clients])
        for client, found in apart.items():
            check_same(whole[client], found)
        assert asked[4 : 4 + len(tried)] == tried
        assert max(asked[5:]) <= max(holds, tried[1] if len(tried) > 1 else holds)
        warned = [text for text in caplog.messages if "the memory does not last" in text]
        assert len(warned) == len(set(tried)) - 1
        assert all(told == [1, 2, 3, 4] for told in some.told.values())

    monkeypatch.setattr(batched_call, "vmap", held(0))
    asked.clear()
    whole = outcomes(by, [some.order(client) for client in clients])
    assert all(isinstance(outcome, torch.OutOfMemoryError) for outcome in whole.values())


def test_those_for_whom_there_is_no_memory_begin_later(
    monkeypatch: pytest.MonkeyPatch, at_once: Callable[[], None], tmp_path: Path
) -> None:
    some, by = Federation(tmp_path / "recording"), attack(restarts=2)
    at_once()
    size = batched_call.BatchEntry.from_task(by._prepare_task(*_single(some, by), generator(0))).bytes_per_restart
    monkeypatch.setattr(batched_restarts, "MEMORY_BUDGET", 5 * size)
    given = by.run_several([some.order(client) for client in (3, 5, 8)])
    assert [next(given)[0].target.victim for _ in range(2)] == [3, 5]
    assert set(some.told) == {3, 5}
    assert next(given)[0].target.victim == 8


def test_the_memory_of_weights_that_differ_is_counted(tmp_path: Path) -> None:
    some, by = Federation(tmp_path / "recording"), attack()
    matched = by._prepare_task(*_single(some, by), generator(0))
    parameters = sum(tensor.numel() for tensor in matched.problem.before)
    kept, _ = batched_call._measure_saved_bytes(lambda: matched.restart_evaluation(matched.restarts[0])(0))
    entry = batched_call.BatchEntry.from_task(matched)
    assert 3 * 4 * parameters <= entry.bytes_per_restart - kept <= 3.2 * 4 * parameters  # w_0, w_T and the direction


def _single(some: Federation, by: GradientInversion) -> tuple[Update, Knowledge]:
    order = some.order(3)
    return by._update(order.target), order.target.knowledge


@pytest.mark.parametrize("name", [pytest.param("dlg", marks=pytest.mark.thorough), "unmixing"])
def test_what_cannot_be_done_at_once_is_done_one_after_the_other(
    name: str, at_once: Callable[[], None], tmp_path: Path
) -> None:
    some, by = Federation(tmp_path / "recording"), attack(name, restarts=1, iterations=2)
    orders = [some.order(client, labels=torch.arange(4)) for client in (3, 5)]
    apart = {order.target.victim: some.run_alone(by, order) for order in orders}
    at_once()
    given = by.run_several(orders)
    first, outcome = next(given)
    assert first.target.victim == 3
    assert set(some.told) == {3}
    check_same(outcome, apart[3])
    second, outcome = next(given)
    assert second.target.victim == 5
    check_same(outcome, apart[5])


def test_ctrl_c_ends_all(monkeypatch: pytest.MonkeyPatch, at_once: Callable[[], None], tmp_path: Path) -> None:
    some = Federation(tmp_path / "recording")
    at_once()

    def interrupted(self: Restart) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Restart, "project", interrupted)
    with pytest.raises(KeyboardInterrupt):
        outcomes(attack(), [some.order(client) for client in SIZES])


@dataclass(frozen=True, kw_only=True)
class Plain(Attack):
    """Knows nothing of several victims; claims what is not there of one of them."""

    paper = Paper(title="T", authors="A", venue="V", year=2020)
    needs = frozenset({"labels"})

    def _run(self, target: Target, progress: Progress) -> Any:
        knowledge, victim = target.knowledge, target.victim
        assert knowledge.granted_facts() == ["labels"]
        progress(1, 1, {"objective": 0.0})
        logging.getLogger("fedsim").warning("client %d", victim)
        if victim == 8:
            sys.exit("no more")
        assert knowledge.labels is not None
        return None if victim == 5 else Reconstruction(data=torch.zeros(4, 1, 6, 6), labels=knowledge.labels)


def test_an_attack_that_knows_nothing_of_several_is_made_on_each(tmp_path: Path) -> None:
    some = Federation(tmp_path / "recording")
    whole = outcomes(Plain(), [some.order(3), some.order(5), some.order(8), some.order(9, labels=None)])
    check_same(whole[3], Reconstruction(data=torch.zeros(4, 1, 6, 6), labels=some.data(3)[1]))
    assert "expected a Finding" in str(whole[5])
    assert isinstance(whole[8], SystemExit)
    assert isinstance(whole[9], KnowledgeError)
    assert some.told == {3: [1], 5: [1], 8: [1]}
    assert some.heard == {client: [f"client {client}"] for client in (3, 5, 8)}
