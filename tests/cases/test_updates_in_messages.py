"""Apps that send their weights as answers to queries, as lists of numbers or as bytes can be attacked as well."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from fedsim import Transcript
from fedsim.base.errors import ConfigError, TranscriptError, TrustError
from fedsim.federation.engines.serial import InProcessGrid
from fedsim.recording.header import parse_count
from fedsim.recording.message_format import MessageFormat
from fedsim.recording.messages import RecordedExchange, RecordedMessage, write_messages
from fedsim.recording.updates_in_messages import check_source, record_updates
from strategies.curious_grid import CuriousGrid

BEFORE = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(2, np.float32)}
AFTER = {name: values + 1 for name, values in BEFORE.items()}
Packed = Callable[[Mapping[str, NDArray[Any]]], dict[str, Any]]


def as_npz(state: Mapping[str, NDArray[Any]]) -> bytes:
    np.savez(file := io.BytesIO(), **state)  # type: ignore[arg-type]
    return file.getvalue()


def as_torch(state: Mapping[str, NDArray[Any]]) -> bytes:
    torch.save({name: torch.from_numpy(values) for name, values in state.items()}, file := io.BytesIO())
    return file.getvalue()


def exchange(run: Path, sent: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
    messages = RecordedExchange(
        number=1,
        kind="query.weights",
        round=0,
        recorded_as=0,
        sent=[RecordedMessage(node=5, client=5, **sent)],
        replies=[RecordedMessage(node=5, client=5, metrics={"m": {"num-examples": 9, "loss": 0.5}}, **answer)],
    )
    write_messages(run / "messages", messages)


def config(value: Any) -> dict[str, Any]:
    return {"config": {"weights": value}}


WAYS: dict[str, tuple[Packed, bool]] = {
    "arrays": (lambda state: {"arrays": {"weights": dict(state)}}, False),
    "lists": (lambda state: config({name: values.flatten().tolist() for name, values in state.items()}), False),
    "npz": (lambda state: config({"all": np.frombuffer(as_npz(state), np.uint8)}), False),
    "torch": (lambda state: config({"all": np.frombuffer(as_torch(state), np.uint8)}), False),
    "pickle": (lambda state: config({"all": np.frombuffer(pickle.dumps(dict(state)), np.uint8)}), True),
}


@pytest.mark.parametrize("way", WAYS)
def test_updates_are_read_from_what_they_are_packed_in(tmp_path: Path, way: str) -> None:
    packed, trust = WAYS[way]
    exchange(tmp_path, packed(BEFORE), packed(AFTER))
    if trust:
        with pytest.raises(TrustError, match="--trust"):
            record_updates(tmp_path, "query.weights", "", trust=False)
    record_updates(tmp_path, "query.weights", "", trust=trust)
    update = Transcript(tmp_path, message_format=MessageFormat(shapes={"w": [2, 3]})).update(1, 5)
    assert (update.num_examples, update.metrics) == (9, {"loss": 0.5})
    for name, values in AFTER.items():
        np.testing.assert_array_equal(update.after[name].numpy(), values)
        np.testing.assert_array_equal(update.before[name].numpy(), BEFORE[name])


class Runs:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def test_a_pickle_of_anything_else_than_arrays_runs_nothing(tmp_path: Path) -> None:
    content = np.frombuffer(pickle.dumps(Runs(f"touch {tmp_path / 'ran'}")), np.uint8)
    exchange(tmp_path, config({"all": content}), config({"all": content}))
    with pytest.raises(TranscriptError, match=r"hold no arrays \(it asks for posix.system, which no array needs\)"):
        record_updates(tmp_path, "query.weights", "", trust=True)
    assert not (tmp_path / "ran").exists()


def test_a_kind_or_a_record_that_is_not_there_is_named(tmp_path: Path) -> None:
    exchange(tmp_path, config({"w": [1.0]}), config({"w": [2.0]}))
    with pytest.raises(TranscriptError, match=r"no message is of kind 'train', but of query\.weights"):
        record_updates(tmp_path, "train", "", trust=False)
    with pytest.raises(TranscriptError, match=r"has no record 'x', but 'weights'; name one with \[app\] record"):
        record_updates(tmp_path, "query.weights", "x", trust=False)


def test_what_a_grid_sent_in_a_query_is_recorded_with_the_answers(tmp_path: Path) -> None:
    app = ClientApp()

    @app.query("weights")
    def weights(message: Message, context: Context) -> Message:
        arrays = ArrayRecord({name: Array(values) for name, values in AFTER.items()})
        return Message(RecordDict({"a": arrays, "m": MetricRecord({"num-examples": 4})}), reply_to=message)

    content = RecordDict({"a": ArrayRecord({n: Array(v) for n, v in BEFORE.items()}), "c": ConfigRecord({"k": 1})})
    with CuriousGrid(InProcessGrid(app, 2), tmp_path) as grid:
        list(grid.send_and_receive([Message(content, node, "query.weights") for node in grid.get_node_ids()]))
    record_updates(tmp_path / "run-1", "query.weights", "a", trust=False)
    transcript = Transcript(tmp_path / "run-1")
    assert len(transcript.clients(1)) == 2
    moved = transcript.update(1, transcript.clients(1)[0]).pseudo_gradient
    assert {name: tensor.unique().tolist() for name, tensor in moved.items()} == {"w": [-1.0], "b": [-1.0]}


@pytest.mark.parametrize("told", [float("nan"), float("inf"), 1e30, -3, 2.5])
def test_an_n_that_is_no_number_of_examples_is_none(told: float) -> None:
    assert parse_count(told) == 0


def test_a_scalar_parameter_stays_one_and_old_pickles_of_arrays_are_read(tmp_path: Path) -> None:
    scalar, old = {"arrays": {"a": {"scale": np.array(2.0)}}}, np.arange(3.0)
    exchange(tmp_path / "scalar", scalar, scalar)
    record_updates(tmp_path / "scalar", "query.weights", "", trust=False)
    assert Transcript(tmp_path / "scalar").update(1, 5).before["scale"].shape == ()
    dumped = config({"w": np.frombuffer(pickle.dumps(old, protocol=2), np.uint8)})
    exchange(tmp_path / "old", dumped, dumped)
    record_updates(tmp_path / "old", "query.weights", "", trust=True)
    assert Transcript(tmp_path / "old").update(1, 5).before["w"].tolist() == [0.0, 1.0, 2.0]


def test_bytes_that_hold_more_than_arrays_are_a_sentence(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "epoch": 3}, file := io.BytesIO())
    checkpoint = config({"all": np.frombuffer(file.getvalue(), np.uint8)})
    exchange(tmp_path, checkpoint, checkpoint)
    with pytest.raises(TranscriptError, match="holds something other than arrays"):
        record_updates(tmp_path, "query.weights", "", trust=False)


def test_updates_of_other_messages_than_those_that_are_named_are_refused(tmp_path: Path) -> None:
    both = {"arrays": {"one": {"w": np.zeros(2)}, "other": {"w": np.ones(2)}}}
    exchange(tmp_path, both, both)
    record_updates(tmp_path, "query.weights", "one", trust=False)
    transcript = Transcript(tmp_path)
    check_source(transcript, "query.weights", "one")
    with pytest.raises(ConfigError, match=r"'one', not those of .* record 'other'; remove"):
        check_source(transcript, "query.weights", "other")
