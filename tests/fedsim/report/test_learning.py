"""A model that has not learnt is said to be so, with what a guess gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedsim.report.learning import NoLearning, examine_evaluations, explain_low_accuracy
from fedsim.training.loop import evaluate_constant


def rows(**columns: Any) -> list[dict[str, str]]:
    """Rows of `metrics.csv`: an earlier round with a good model, then these columns, then a client."""
    first = {"round": "1", "client": "server", "accuracy": "0.9", "loss": "0.1", "guess": "0.1", "num_examples": "1000"}
    last = first | {"round": "2"} | {name: str(value) for name, value in columns.items()}
    client = dict.fromkeys(first, "") | {"round": "2", "client": "0", "accuracy": "0.9", "num_examples": "20"}
    return [first, last, client]


def test_the_sentence_says_what_the_model_and_a_guess_get_and_what_to_try() -> None:
    assert examine_evaluations(rows(accuracy=0.101, guess=0.103)).sentence == (
        "The model has not learnt: its accuracy on 1000 test examples, 10.1 % (95 % interval 8.3 to 12.1 %), is not "
        "beyond the 10.3 % that always giving the most frequent answer gets; try another "
        "training.learning_rate, more federation.rounds or more training.local_epochs."
    )


@pytest.mark.parametrize(
    ("accuracy", "guess", "count", "has_learnt"),
    [
        (0.125, 0.1, 1000, True),
        (0.115, 0.1, 1000, False),  # within the interval
        (0.115, 0.1, 100_000, True),
        (0.05, 0.5, 1000, False),  # below the guess
        (0.97, 0.98, 1000, False),  # the majority class has nearly all examples
    ],
)
def test_it_depends_on_the_interval_around_the_accuracy(
    accuracy: float, guess: float, count: int, has_learnt: bool
) -> None:
    sentence = examine_evaluations(rows(accuracy=accuracy, guess=guess, num_examples=count)).sentence
    assert (sentence == "") == has_learnt


@pytest.mark.parametrize(("loss", "has_learnt"), [(1.02, False), (0.99, False), (0.5, True)])
def test_a_regression_has_to_beat_the_mean_target(loss: float, has_learnt: bool) -> None:
    sentence = examine_evaluations(rows(accuracy="", loss=loss, guess=1.0)).sentence
    assert (sentence == "") == has_learnt
    assert has_learnt or "that always answering the mean target gets" in sentence


@pytest.mark.parametrize(
    "table",
    [
        [],
        rows(guess="")[1:],
        rows(accuracy="", loss="")[1:],
        [{"round": "1", "client": "server", "accuracy": "0.1"}],  # another program's table
        [{"round": "1", "client": "3", "accuracy": "0.1", "guess": "0.5", "num_examples": "10"}],
    ],
)
def test_nothing_is_said_where_it_is_not_known(table: list[dict[str, str]]) -> None:
    assert examine_evaluations(table) == NoLearning()


def test_one_model_that_learnt_is_enough() -> None:
    assert explain_low_accuracy([0.1, 0.6], 0.1, 500) == ""
    assert "10.5 %" in explain_low_accuracy([0.1, 0.11], 0.1, 500)


def test_a_constant_answer_is_the_most_frequent_class_or_the_mean_target() -> None:
    assert evaluate_constant(torch.tensor([3, 3, 0, 1])) == 0.5
    assert evaluate_constant(torch.tensor([0.0, 1.0, 2.0])) == pytest.approx(2 / 3)


def test_a_value_within_its_interval_of_a_guess_is_not_called_a_failure() -> None:
    sentence = explain_low_accuracy([0.8], 0.76, 200)
    assert sentence.startswith("It is not shown that the model has learnt: its accuracy on 200 test examples, 80.0 %")


@pytest.mark.parametrize(
    ("columns", "remedy"),
    [
        ({"accuracy": 0.1, "loss": 2.3}, "train longer"),
        ({"accuracy": 0.1, "loss": 8.2e27}, "smaller steps"),
        ({"accuracy": 0.1, "loss": "nan"}, "smaller steps"),
        ({"accuracy": "", "loss": 1.02, "guess": 1.0}, "train longer"),
        ({"accuracy": "", "loss": 11.0, "guess": 1.0}, "smaller steps"),
        ({"accuracy": 0.9, "loss": 25.0}, ""),  # sure of a few wrong answers, and right of the others
    ],
)
def test_where_the_loss_has_diverged_smaller_steps_are_the_remedy(columns: dict[str, Any], remedy: str) -> None:
    result = examine_evaluations(rows(**columns))
    assert result.remedy == remedy
    assert ("so try a smaller training.learning_rate" in result.sentence) == (remedy == "smaller steps")
    assert ("more federation.rounds" in result.sentence) == (remedy == "train longer")
