"""What answers say in clear of single people follows from their numbers, whatever the app."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsim.recording.answers_in_clear import describe_answers
from fedsim.recording.messages import RecordedExchange, RecordedMessage


def describe(
    metrics: dict[str, Any],
    arrays: dict[str, Any] | None = None,
    kind: str = "query",
    sent: dict[str, Any] | None = None,
) -> list[str]:
    """Return the sentences on one reply to what was sent."""
    reply = RecordedMessage(node=1, client=0, metrics={"m": metrics}, arrays={"a": arrays or {}})
    messages = [RecordedMessage(node=1, client=0, arrays={"a": sent})] if sent else []
    exchange = RecordedExchange(number=1, kind=kind, round=0, recorded_as=0, sent=messages, replies=[reply])
    return describe_answers([exchange]).get(0, [])


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"bmi_sum": 31.5, "bmi_count": 1}, "31.5 is of one person, whose value it is"),
        ({"bmi_sum": 60.0, "bmi_count": 3}, "60, over 3 people"),
        ({"bmi_std_sum": 50.0, "bmi_std_count": 2, "bmi_std_sum_sqd": 1300.0}, "whose values they give: 20 and 30"),
        ({"bmi_sum": 60.0, "bmi_count": 3, "bmi_sum_sqd": 1200.0}, "who all have the value 20"),
        ({"max_pulse_sum": 300.0, "max_pulse_count": 3}, "300, over 3 people"),
        ({"bmi_sum": 31.5, "bmi_count": 1.6}, "31.5, over a number of people that is not said"),
        ({"age_max": 91, "num-examples": 40}, "91 is the value of a person or of two of 40"),
    ],
)
def test_numbers_say_what_they_give_away(metrics: dict[str, Any], said: str) -> None:
    (sentence,) = describe(metrics)
    assert said in sentence


def test_a_cell_with_one_person_is_that_person() -> None:
    (sentence,) = describe({"num-examples": 6}, {"ages": np.array([3, 1, 2, 0])})
    assert "counts of 6 people in 4 cells, and one of them is alone in a cell (1)" in sentence


def test_an_event_table_is_the_records_themselves() -> None:
    times, events = np.array([2.0, 75.0, 9.0]), np.array([1, 0, 1])
    (sentence,) = describe({"num-examples": 3}, {"T": times, "E": events})
    assert "event table of 3 people" in sentence
    assert "times from 2 to 75 and 2 events" in sentence


def test_weights_of_a_model_are_no_answers() -> None:
    weights = np.array([0.1, -2.0, 3.0])
    assert not describe({"num-examples": 3, "train_loss": 0.3}, {"w": weights}, kind="train")


def test_a_layer_that_is_not_trained_is_no_histogram_of_n_people() -> None:
    scale = np.ones(8)
    assert not describe({"num-examples": 8}, {"norm.weight": scale}, kind="train", sent={"norm.weight": scale})
    (sentence,) = describe({"num-examples": 8}, {"cells": scale}, kind="train", sent={"cells": np.zeros(8)})
    assert "counts of 8 people" in sentence


def test_an_event_table_is_seen_without_n_and_weights_with_a_bias_are_none() -> None:
    (sentence,) = describe({}, {"T": np.array([2.0, 75.0, 9.0]), "E": np.array([1, 0, 1])})
    assert "event table of 3 people" in sentence
    assert "no N is reported" in sentence
    for flags in (np.zeros(3), np.array([0, 1, 1])):
        said = describe({}, {"w": np.array([0.1, -2.0, 3.0]), "b": flags})
        assert not any("records themselves" in sentence for sentence in said)
