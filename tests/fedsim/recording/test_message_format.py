"""The table [app] of an attack file is the format in which messages are read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedsim.base.errors import ConfigError, TranscriptError
from fedsim.federation.config import AttackFile
from fedsim.federation.table_validation import validate_tables
from fedsim.recording.message_format import MessageFormat
from fedsim.recording.payloads import Payload, State
from fedsim.recording.wire_format import Update, propose_format


def read(**app: Any) -> MessageFormat:
    return validate_tables(AttackFile, {"app": app}, "a.toml").app


def test_the_table_is_the_format() -> None:
    assert AttackFile.model_fields["app"].annotation is MessageFormat
    assert read() == MessageFormat()
    assert read(names=["w", ""], shapes={"w": [2, 3]}) == MessageFormat(names=["w", ""], shapes={"w": [2, 3]})


def test_the_number_of_examples_is_one_for_all_or_one_for_each_client() -> None:
    assert read(num_examples=5).num_examples_of(3, 8) == 5
    some = read(num_examples={"3": 5, "07": 6})
    assert [some.num_examples_of(client, 8) for client in (3, 7, 4)] == [5, 6, 8]


@pytest.mark.parametrize(
    ("app", "sentence"),
    [
        ({"replies": "gradients"}, "replies: input should be 'weights', 'delta' or 'gradient', got 'gradients'"),
        ({"message": -1}, "message: expected at least 0, got -1"),
        ({"shapes": {"w": [0]}}, "shapes.w.0: expected at least 1, got 0"),
        ({"num_examples": {"x": 3}}, "num_examples: expected client ids as keys, got 'x'"),
        ({"preffix": "a"}, "preffix: unknown key, did you mean 'prefix'?"),
    ],
)
def test_what_no_format_can_be_is_refused_by_its_key(app: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(**app)
    assert str(error.value) == f"a.toml: app.{sentence}"


def test_only_keys_about_updates_change_how_they_are_read() -> None:
    assert not read(messages="query", outputs="module:function", frozen=True).changes_updates
    for app in ({"record": "a"}, {"message": 2}, {"num_examples": 3}, {"transposed": True}, {"replies": "delta"}):
        assert read(**app).changes_updates, app


def make_update(before: State, sent: State) -> Update:
    return Update(round=1, client=3, before=before, payload=Payload.from_arrays(sent, before), num_examples=1)


def test_one_vector_is_cut_into_the_tensors_that_names_and_shapes_say() -> None:
    state = {"w": torch.arange(4.0).view(2, 2), "b": torch.tensor([7.0, 8.0])}
    vector = torch.cat([state["b"], state["w"].flatten()])
    shapes = {"w": [2, 2], "b": [2]}
    weights = read(names=["b", "w"], shapes=shapes).read(make_update({"flat": vector}, {"flat": vector + 1}))
    assert all(torch.equal(weights.before[name], tensor) for name, tensor in state.items())
    assert all(torch.equal(weights.after[name], tensor + 1) for name, tensor in state.items())
    # Clients alone send one, of a delta; w_t has the names of the model.
    delta = read(names=["b", "w"], shapes=shapes, replies="delta").read(make_update(state, {"flat": vector}))
    assert all(torch.equal(delta.before[name], tensor) for name, tensor in state.items())
    assert all(torch.equal(delta.after[name], 2 * tensor) for name, tensor in state.items())
    for app, words in (
        ({"names": ["b", "w"]}, "'flat' is a vector of 6 numbers.* which has none of 'b'"),
        ({"names": ["b", "w"], "shapes": shapes | {"w": [2, 3]}}, "6 numbers, and the tensors in .* have 8 by"),
    ):
        with pytest.raises(TranscriptError, match=words):
            read(**app).read(make_update({"flat": vector}, {"flat": vector}))


def test_what_does_not_fit_a_model_is_said_how_to_read() -> None:
    shapes = {"w": torch.Size([2, 2]), "b": torch.Size([2])}
    flat = propose_format({"flat": torch.ones(6)}, [shapes])
    assert 'names = ["w", "b"] and shapes = { "w" = [2, 2], "b" = [2] }' in flat
    named = propose_format({"lora.w": torch.ones(2, 2), "lora.b": torch.ones(2)}, [shapes])
    assert 'if they come in this order, say in [app] names = ["w", "b"]' in named
    many = {f"w{number}": torch.Size([2]) for number in range(9)}
    assert '"w7", ...] and' in propose_format({"flat": torch.ones(18)}, [many])
    sparse = propose_format({"w.indices": torch.tensor([0, 3]), "w.values": torch.ones(2)}, [shapes])
    assert "'w.indices' holds whole numbers, as the positions of a sparse update" in sparse
    assert propose_format({"flat": torch.ones(5)}, [shapes]) == ""
    assert propose_format({"w": torch.ones(2, 3), "steps": torch.tensor(3)}, [shapes]) == ""


def test_integers_in_place_of_real_numbers_are_no_weights() -> None:
    """Quantised weights would be subtracted from w_t as they are, and attacks on that be undecided."""
    before = {"w": torch.ones(2), "batches": torch.tensor(1.0)}
    counted = read().read(make_update(before, {"w": torch.zeros(2), "batches": torch.tensor(1)}))
    assert counted.pseudo_gradient["w"].tolist() == [1, 1]
    for app in ({}, {"replies": "delta"}, {"names": ["v", ""]}):
        with pytest.raises(TranscriptError, match=r"round 1, client 3: '[vw]' came as integers, .* encode others"):
            read(**app).read(make_update(before, {"w": torch.ones(2, dtype=torch.int8), "batches": torch.tensor(1)}))


@pytest.mark.parametrize("app", [{"prefix": "net."}, {"names": ["w", "w"]}])
def test_two_tensors_are_not_read_as_one(app: dict[str, Any]) -> None:
    """As a model and its moving average, of which the second would be taken for the first."""
    state = {"net.w": torch.ones(2), "w": torch.zeros(2)}
    with pytest.raises(TranscriptError, match="several of the tensors that were sent are called 'w' in the model"):
        read(**app).read(make_update(state, state))


def test_arrays_that_clients_send_behind_the_model_are_named_alone() -> None:
    before = {str(number): torch.full((2,), float(number)) for number in range(2)}
    sent = before | {str(number): torch.zeros(2) for number in (2, 3)}
    update = Update(round=1, client=0, before=before, payload=Payload.from_dense(sent, "weights"), num_examples=1)
    told = read(names=["w", "b", "", ""]).read(update)
    assert list(told.before) == list(told.after) == ["w", "b"]
    assert torch.equal(told.before["b"], before["1"])
    with pytest.raises(TranscriptError, match=r"4 tensors were sent, and .app. names has 2"):
        read(names=["w", "b"]).read(update)
