"""What clients tell a server in clear is told before anything is attacked, aloud where it is a row an example."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from fedsim.recording.clear_text import ClearText, find_clear_texts
from fedsim.recording.messages import RecordedExchange, RecordedMessage


def texts_of(*replies: dict[str, Any], kind: str = "query.survival") -> dict[str, ClearText]:
    answers = [RecordedMessage(node=node, client=node, **reply) for node, reply in enumerate(replies)]
    messages = RecordedExchange(number=1, kind=kind, round=0, recorded_as=0, sent=[], replies=answers)
    return {one.name: one for one in find_clear_texts([messages])}


def test_arrays_as_long_as_n_have_a_row_for_each_example() -> None:
    found = texts_of({"arrays": {"a": {"times": np.zeros((30, 2))}}, "metrics": {"m": {"num-examples": 30}}})
    assert (found["a.times"].description, found["a.times"].per_example) == (
        "float64 array with rows of 2, 30 long",
        True,
    )
    assert (found["m.num-examples"].description, found["m.num-examples"].per_example) == ("number, 30", False)


def test_lists_that_differ_in_length_from_client_to_client_have_rows_too() -> None:
    found = texts_of(*({"config": {"c": {"ages": [1.0] * length, "bins": [0.0] * 5}}} for length in (12, 30)))
    assert (found["c.ages"].description, found["c.ages"].per_example) == ("list of numbers, 12 to 30 long", True)
    assert (found["c.bins"].description, found["c.bins"].per_example) == ("list of numbers, 5 long", False)


def test_numbers_pickles_and_the_arrays_of_updates() -> None:
    content = np.frombuffer(pickle.dumps([1, 2, 3]), np.uint8)
    found = texts_of(
        {"config": {"c": {"weights": content, "loss": 0.5}}, "arrays": {"a": {"w": "float32 (3,)"}}},
        {"config": {"c": {"weights": content, "loss": 2}}},
        kind="train",
    )
    assert found["c.weights"].description.startswith("a pickle of bytes, ")
    assert found["c.loss"].description == "number, 0.5 to 2"
    assert "a.w" not in found  # an update, which the recording has
    assert {one.kind for one in found.values()} == {"train"}
    assert found["c.loss"].clients == {0, 1}


def test_stages_of_secure_aggregation_are_not_in_clear() -> None:
    found = texts_of(*({"config": {"secaggplus_configs": {"masked": [1] * length}}} for length in (3, 4)))
    (stage,) = found.values()
    assert (stage.per_example, stage.description) == (False, "a stage of SecAgg+: keys, shares and masked vectors")
