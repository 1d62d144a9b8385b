"""What a client keeps from round to round: its own, carried by whoever plays it, and in nobody else's hands."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from hypothesis import given, settings
from hypothesis import strategies as st

import fedsim.federation.engines.cohort
from clients.client_state import ClientMemories
from clients.mods import as_mod
from fedsim.base.errors import RunError
from fedsim.federation.engines.arrays import make_record
from fedsim.federation.engines.client_state import ClientStateStore
from fedsim.federation.engines.cohort import COHORT_MESSAGE_TYPE, CohortGrid
from fedsim.federation.engines.node import play_cohort
from fedsim.federation.engines.serial import InProcessGrid
from fedsim.interfaces.attack import Paper
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.local_context import LocalContext
from fedsim.recording.sealed_files import read_sealed_file, write_sealed_file
from fedsim.recording.wire_format import State
from strategies.checkpoint import Checkpoint

PAPER = Paper(title="none", authors="nobody", venue="none", year=2000, url="")


class Counts(Defense):
    """Adds to its update how many rounds it has taken part in."""

    paper = PAPER

    def on_update(self, update: State, context: LocalContext) -> State:
        count = context.memory.get("count", torch.zeros(()))
        count += 1  # in place: what it is handed is its own
        context.memory["count"] = count
        return {name: tensor + count for name, tensor in update.items()}


# What a defense is handed, and when it is kept.


def test_a_memory_is_copies_until_it_is_stored() -> None:
    state = RecordDict({"A-0": make_record({"a": torch.ones(2)}), "A-1": make_record({"a": torch.zeros(1)})})
    memories = ClientMemories(state)
    memory = memories.read(("A", 0))
    assert list(memory) == ["a"], "nothing of another defense"
    memory["a"].mul_(5)
    memory["b"] = torch.tensor([1, 2], dtype=torch.int8)
    assert memories.read(("A", 0)) is memory, "the same for all hooks of one defense in a round"
    assert state["A-0"]["a"].numpy().tolist() == [1, 1]  # type: ignore[union-attr]
    memories.store()
    assert {name: array.numpy().tolist() for name, array in state.array_records["A-0"].items()} == {
        "a": [5, 5],
        "b": [1, 2],
    }
    memories.read(("A", 0)).clear()
    memories.store()
    assert list(state) == ["A-1"], "an empty memory is none"
    memories.read(("B", 0))
    memories.store()
    assert list(state) == ["A-1"], "and so is one that was only looked at"


def test_a_memory_that_is_discarded_stays_as_it_was_and_that_of_others_is_stored() -> None:
    state = RecordDict({"A-0": make_record({"a": torch.ones(2)})})
    memories = ClientMemories(state)
    memories.read(("A", 0))["a"].mul_(5)
    memories.read(("B", 0))["b"] = torch.zeros(1)
    memories.discard(("A", 0))
    memories.store()
    assert state.array_records["A-0"]["a"].numpy().tolist() == [1, 1]
    assert state.array_records["B-0"]["b"].numpy().tolist() == [0]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("a", 1.0, "expected 'a' in its memory as a dense tensor of real numbers, got a float"),
        ("a", np.ones(2), "got a ndarray"),
        ("a", torch.ones(2, dtype=torch.complex64), "got complex64 of shape (2,)"),
        ("a", torch.ones(2, dtype=torch.bfloat16), "got bfloat16 of shape (2,)"),
        ("a", torch.eye(2).to_sparse(), "got float32 of shape (2, 2)"),
        ("", torch.ones(2), "expected names of 1 to 200 printable characters in its memory, got ''"),
        ("x" * 201, torch.ones(2), "expected names of 1 to 200 printable characters"),
        ("\ud800", torch.ones(2), "expected names of 1 to 200 printable characters"),
        (7, torch.ones(2), "expected names of 1 to 200 printable characters in its memory, got '7'"),
    ],
)
def test_what_cannot_be_carried_is_refused_and_the_former_memory_stays(name: Any, value: Any, expected: str) -> None:
    state = RecordDict({"Counts-0": make_record({"a": torch.ones(2)})})
    memories = ClientMemories(state)
    memories.read(("Before", 0))["a"] = torch.ones(1)
    memories.read(("Counts", 0))[name] = value
    for refuse in (memories.check, memories.store):
        with pytest.raises(RunError) as error:
            refuse()
        assert str(error.value).startswith("Counts-0: ")
        assert expected in str(error.value)
    assert list(state) == ["Counts-0"], "nothing of any defense is stored"
    assert state.array_records["Counts-0"]["a"].numpy().tolist() == [1, 1]


# Carried by the grid.

SECRET = ConfigRecord({"experiment": "what no server would know"})


def counting(message: Message, context: Context) -> Message:
    """Counts its rounds in `context.state`; client 3 fails in its second round, having changed its state."""
    kept: Any = context.state.get("count")
    count = 1 + (int(kept["n"].numpy()) if kept is not None else 0)
    context.state["count"] = ArrayRecord({"n": Array(np.array(count))})
    client = int(context.node_config["partition-id"])
    if client == 3 and message.content.config_records["config"]["round"] == 2:
        raise ValueError("bad luck")
    content = RecordDict({"metrics": MetricRecord({"client": client, "count": count})})
    return Message(content, reply_to=message)


def grid_of(train: Any, *, nodes: int = 2, together: int = 1, ahead: Any = None) -> tuple[CohortGrid, list[Message]]:
    app, sent = ClientApp(), list[Message]()
    app.train()(train)
    app.evaluate()(train)

    @app.query(COHORT_MESSAGE_TYPE.split(".")[1])
    def cohort(message: Message, context: Context) -> Message:
        sent.append(message)
        return play_cohort(app, message, context, ahead)

    physical = InProcessGrid(app, nodes)
    return CohortGrid(physical, 8, SECRET, list(physical.get_node_ids()), group_size=together), sent


def asked(grid: CohortGrid, clients: Any, number: int = 1, kind: str = "train", accept: Any = None) -> dict[int, Any]:
    """The count that each client reports, None where it failed; those of `accept`, or all, are accepted."""
    content = RecordDict({"config": ConfigRecord({"round": number})})
    counts: dict[int, Any] = {}
    for reply in grid.send_and_receive([Message(content, client, kind) for client in clients]):
        client = reply.metadata.src_node_id
        counts[client] = None if reply.has_error() else reply.content.metric_records["metrics"]["count"]
        if not reply.has_error():
            assert list(reply.content) == ["metrics"], "memory is not for the strategy"
            if kind == "train" and (accept is None or client in accept):
                grid.client_state.commit(client)
    assert list(content) == ["config"]
    return counts


@pytest.mark.parametrize("nodes", [1, 3])
def test_who_fails_or_is_not_accepted_or_not_asked_keeps_what_it_had(nodes: int) -> None:
    grid, sent = grid_of(counting, nodes=nodes)
    assert asked(grid, [0, 1, 2, 3]) == {0: 1, 1: 1, 2: 1, 3: 1}
    assert asked(grid, [1, 2, 3], 2, accept={1, 3}) == {1: 2, 2: 2, 3: None}
    assert asked(grid, [0, 1, 2, 3], 3) == {0: 2, 1: 3, 2: 2, 3: 2}
    assert asked(grid, [0], 4, kind="evaluate") == {0: 1}, "memory is for training"
    assert asked(grid, [0, 7], 5) == {0: 3, 7: 1}
    travelled = [name for message in sent for name in message.content if name.startswith("memory/")]
    assert sorted({name.split("/")[1] for name in travelled}) == ["0", "1", "2", "3"]


@given(
    rounds=st.lists(st.sets(st.integers(0, 7), min_size=1), min_size=1, max_size=5),
    nodes=st.integers(1, 4),
    together=st.integers(1, 4),
    size=st.sampled_from([1, 20, 1 << 20]),
    room=st.sampled_from([0, 1 << 20]),
    data=st.data(),
)
@settings(max_examples=40)
def test_each_client_counts_the_rounds_in_which_it_was_accepted(
    rounds: list[set[int]], nodes: int, together: int, size: int, room: int, data: st.DataObject
) -> None:
    """Alone or in a group, that may fail after some of its members have changed their state."""
    fails = data.draw(st.sets(st.tuples(st.integers(0, 4), st.integers(0, 7))))
    now = {"round": 0}

    def train(message: Message, context: Context) -> Message:
        return counting(message, context)

    def ahead(message: Message, states: Mapping[int, RecordDict]) -> dict[int, Any]:
        done = {}
        for client, state in states.items():
            own = Context(1, client, {"partition-id": client}, state, {})
            reply = counting(message, own)
            if (now["round"], client) in fails:
                return {}
            done[client] = reply.content
        return done

    grid, _ = grid_of(train, nodes=nodes, together=together, ahead=ahead)
    expected = dict.fromkeys(range(8), 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fedsim.federation.engines.cohort, "_MESSAGE_BYTES", size)
        patch.setattr(
            fedsim.federation.engines.cohort, "default_reply_memory", lambda num_bytes: room
        )  # what comes before its turn waits on disk
        for number, clients in enumerate(rounds):
            now["round"] = number
            expected |= {client: expected[client] + 1 for client in clients}
            assert asked(grid, sorted(clients), 7) == {client: expected[client] for client in sorted(clients)}
    kept = {client: int(records["count"]["n"]) for client, records in grid.client_state.states.items()}
    assert kept == {client: count for client, count in expected.items() if count}


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (
            lambda reply, state: state.update({"x": ConfigRecord({"a": 1})}),
            "it keeps 'x' as a ConfigRecord, expected an ArrayRecord",
        ),
        (
            lambda reply, state: reply.update({"memory/x": ConfigRecord({"a": 1})}),
            "it sent a record called 'memory/x', but such names are for its state; use another",
        ),
    ],
)
def test_what_would_be_lost_or_mistaken_on_the_way_is_an_error_of_its_client(spoil: Any, expected: str) -> None:
    def train(message: Message, context: Context) -> Message:
        reply = counting(message, context)
        if context.node_config["partition-id"] == 1:
            spoil(reply.content, context.state)
        return reply

    grid, _ = grid_of(train)
    content = RecordDict({"config": ConfigRecord({"round": 1})})
    first, second = grid.send_and_receive([Message(content, client, "train") for client in (0, 1)])
    assert not first.has_error()
    assert second.error.reason == expected


def test_messages_are_cut_by_what_memory_adds_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(message: Message, context: Context) -> Message:
        context.state["large"] = make_record({"x": torch.zeros(1000)})
        return counting(message, context)

    grid, sent = grid_of(train, nodes=1)
    monkeypatch.setattr(fedsim.federation.engines.cohort, "_MESSAGE_BYTES", 8200)
    asked(grid, range(8))
    assert len(sent) == 1
    asked(grid, range(8))
    assert len(sent) == 1 + 4, "two clients a message"


def test_what_is_kept_shares_no_memory_with_a_reply_and_replaces_what_was_kept() -> None:
    brought = torch.zeros(1000)
    memory = ClientStateStore()
    answer: dict[str, Any] = {"memory/0": make_record({"x": brought[10:20]}), "metrics": MetricRecord({"n": 1})}
    memory.extract(5, answer)
    assert list(answer) == ["metrics"]
    assert memory.states == {}
    memory.commit(5)
    brought.fill_(1)
    kept = memory.states[5]["0"]["x"]
    assert not kept.any()
    assert kept.base is None
    assert memory.count_bytes([4, 5]) == 40
    memory.extract(5, {})
    memory.commit(5)
    assert memory.states == {}


def test_between_rounds_the_memory_of_all_clients_is_held_once() -> None:
    def train(message: Message, context: Context) -> Message:
        memories = ClientMemories(context.state)
        memories.read(("Counts", 0))["large"] = torch.from_numpy(np.ones(1 << 17))  # 1 MiB of NumPy's, which is traced
        memories.store()
        return counting(message, context)

    grid, sent = grid_of(train)
    gc.collect()
    gc.disable()  # Python counts objects, not their size
    tracemalloc.start()
    try:
        for number in range(3):
            asked(grid, range(8), number + 5)
            sent.clear()
        now, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    assert grid.client_state.count_bytes(range(8)) == 8 * ((1 << 20) + 8)
    assert now < 9 << 20


# In the checkpoint.


def test_a_checkpoint_holds_what_clients_keep_in_its_order_and_without_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, arrays = tmp_path / "checkpoint.safetensors", ArrayRecord({"w": Array(np.zeros(2))})
    kept = {
        3: {"b": {"y/z": np.arange(3, dtype="i1"), "x": np.array(2.5)}, "b/y": {"z": np.zeros((0, 2), "f4")}},
        0: {"a": {"model/w": np.ones(1, "f2")}},
    }
    written: list[Any] = []
    monkeypatch.setattr(
        "strategies.checkpoint.write_sealed_file", lambda *a, **k: written.append(a) or write_sealed_file(*a, **k)
    )
    Checkpoint.capture(1, arrays, FedAvg(), clients=kept).save(path)
    assert sum(array is kept[3]["b"]["y/z"] for array in written[0][2].values()) == 1
    loaded = Checkpoint.load(path, FedAvg())
    assert loaded is not None
    assert repr(loaded.clients) == repr(kept)
    assert loaded.clients[0]["a"]["model/w"].dtype == np.float16
    assert not [key for key in loaded.tensors if key.startswith("client/")], "held once"


def test_a_checkpoint_without_the_memory_that_clients_go_on_from_is_refused(tmp_path: Path) -> None:
    path, arrays = tmp_path / "checkpoint.safetensors", ArrayRecord({"w": Array(np.zeros(2))})
    Checkpoint.capture(1, arrays, FedAvg(), clients={4: {"a": {"x": np.ones(1)}}}).save(path)
    header, stored = read_sealed_file(path)
    del stored["client/4/0/x"]
    write_sealed_file(path, header, stored)
    with pytest.raises(RunError, match=r"lacks 'client/4/0/x', which a client remembers; begin the run again with"):
        Checkpoint.load(path, FedAvg())


@pytest.mark.parametrize("field", ["round", "model", "memory", "lost", "clients"])
def test_a_checkpoint_that_lacks_a_field_is_refused(field: str, tmp_path: Path) -> None:
    path, arrays = tmp_path / "checkpoint.safetensors", ArrayRecord({"w": Array(np.zeros(2))})
    Checkpoint.capture(1, arrays, FedAvg(), clients={}).save(path)
    header, stored = read_sealed_file(path)
    del header[field]
    write_sealed_file(path, header, stored)
    with pytest.raises(RunError) as caught:
        Checkpoint.load(path, FedAvg())
    assert str(caught.value) == f"{path}: does not say its '{field}'; begin the run again with --overwrite"


# In any other Flower app: the state that a SuperNode keeps for its client.


def updated(mods: list[Any], rounds: int, spoil: Any = None) -> list[Any]:
    """The update of a client in each round, or why it sent none; nodes keep their state from round to round."""
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        after = message.content.array_records["arrays"]["w"].numpy() + 10
        if spoil == message.content.config_records["config"]["round"]:
            after = after * np.nan
        content = RecordDict({"arrays": ArrayRecord({"w": Array(after)}), "metrics": MetricRecord({"n": 1})})
        return Message(content, reply_to=message)

    grid, got = InProcessGrid(app), list[Any]()
    for number in range(1, rounds + 1):
        content = RecordDict(
            {"arrays": ArrayRecord({"w": Array(np.zeros(1))}), "config": ConfigRecord({"round": number})}
        )
        (reply,) = grid.send_and_receive([Message(content, next(iter(grid.get_node_ids())), "train")])
        got.append(reply.error.reason if reply.has_error() else float(reply.content["arrays"]["w"].numpy()[0]))  # type: ignore[index,union-attr]
    return got


class CountsTwice(Counts):
    """Another class, so another memory."""


def test_a_mod_keeps_its_memory_in_the_context_of_its_node() -> None:
    assert updated([as_mod(Counts())], 3) == [11, 12, 13]
    assert updated([as_mod(Counts()), as_mod(CountsTwice())], 3) == [12, 14, 16]


def test_a_mod_whose_round_fails_keeps_what_it_had() -> None:
    first, second, third = updated([as_mod(Counts())], 3, spoil=2)
    assert (first, third) == (11, 12)
    assert "NaN" in second


class CountsEarly(Counts):
    """Acts in the first rounds alone."""

    def acts_in(self, number: int) -> bool:
        return number <= 2


def test_a_mod_that_acts_in_some_rounds_is_told_which_one_it_is() -> None:
    (why,) = updated([as_mod(CountsEarly())], 1)
    assert "it does not act in all rounds, and the server's message names no round" in why


class BreaksOnce(Counts):
    """Fails once, after the defense inside it has changed its memory."""

    def on_update(self, update: State, context: LocalContext) -> State:
        if context.memory and not self.__dict__.get("broke"):
            self.__dict__["broke"] = True
            raise ValueError("bad luck")
        context.memory["rounds"] = context.memory.get("rounds", torch.zeros(())) + 1
        return update


def test_a_mod_that_fails_leaves_the_memory_of_those_inside_it_as_it_was() -> None:
    first, second, third = updated([as_mod(BreaksOnce()), as_mod(Counts())], 3)
    assert (first, third) == (11, 12)
    assert "bad luck" in second


def test_two_mods_of_one_class_do_not_share_a_memory_in_silence() -> None:
    (why,) = updated([as_mod(Counts()), as_mod(Counts())], 1)
    assert "two mods of this class would share one memory; derive a class for each" in why
