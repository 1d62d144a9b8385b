"""The accuracy that clients reported in evaluations of a recorded app is read, and nothing else is taken for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedsim.recording.messages import RecordedExchange, RecordedMessage, write_messages
from fedsim.recording.reported_accuracy import ReportedAccuracy, read_reported_accuracy


def write_evaluation(folder: Path, *replies: dict[str, Any], number: int = 1, kind: str = "evaluate") -> None:
    """Write an exchange of round `number` in which each client reported these metrics."""
    messages = []
    for client, metrics in enumerate(replies):
        messages.append(RecordedMessage(node=client, client=client, metrics={"metrics": metrics}))
    write_messages(
        folder, RecordedExchange(number=number, kind=kind, round=number, recorded_as=0, sent=[], replies=messages)
    )


def test_it_is_the_mean_of_the_last_round_weighted_by_examples(tmp_path: Path) -> None:
    write_evaluation(tmp_path, {"num-examples": 10, "accuracy": 0.9})
    write_evaluation(
        tmp_path, {"num-examples": 30, "accuracy": 0.5}, {"num-examples": 10, "accuracy": 0.1}, {"loss": 2.0}, number=2
    )
    assert read_reported_accuracy(tmp_path) == ReportedAccuracy(
        accuracy=pytest.approx(0.4), clients=2, examples=40, round=2
    )


def test_without_numbers_of_examples_clients_weigh_the_same(tmp_path: Path) -> None:
    write_evaluation(tmp_path, {"num-examples": 30, "eval_acc": 0.5}, {"eval_acc": 0.1})
    assert read_reported_accuracy(tmp_path) == ReportedAccuracy(
        accuracy=pytest.approx(0.3), clients=2, examples=0, round=1
    )


def test_percentages_are_told_by_any_value_above_1(tmp_path: Path) -> None:
    write_evaluation(tmp_path, {"num-examples": 10, "accuracy": 57.0})
    write_evaluation(tmp_path, {"num-examples": 10, "accuracy": 0.5}, number=2)
    reported = read_reported_accuracy(tmp_path)
    assert reported is not None
    assert reported.accuracy == pytest.approx(0.005)


def test_a_share_of_rounded_weights_is_no_percentage(tmp_path: Path) -> None:
    write_evaluation(tmp_path, {"num-examples": 10, "accuracy": 1.0000000000000002})
    assert read_reported_accuracy(tmp_path) == ReportedAccuracy(accuracy=1.0, clients=1, examples=10, round=1)


def test_clients_that_are_asked_one_by_one_are_all_counted(tmp_path: Path) -> None:
    for number, (client, accuracy) in enumerate([(0, 0.9), (1, 0.8), (0, 0.5), (1, 0.1)], 1):
        metrics = {"metrics": {"num-examples": 10, "accuracy": accuracy}}
        reply = RecordedMessage(node=client, client=client, metrics=metrics)
        write_messages(
            tmp_path,
            RecordedExchange(
                number=number, kind="evaluate", round=(number + 1) // 2, recorded_as=0, sent=[], replies=[reply]
            ),
        )
    assert read_reported_accuracy(tmp_path) == ReportedAccuracy(
        accuracy=pytest.approx(0.3), clients=2, examples=20, round=2
    )


def test_several_models_of_a_client_have_no_common_accuracy(tmp_path: Path) -> None:
    replies = []
    for client, accuracy in [(0, 0.9), (0, 0.2), (1, 0.3), (1, 0.8)]:
        metrics = {"metrics": {"num-examples": 10, "accuracy": accuracy}}
        replies.append(RecordedMessage(node=client, client=client, metrics=metrics))
    write_messages(
        tmp_path, RecordedExchange(number=1, kind="evaluate", round=1, recorded_as=0, sent=[], replies=replies)
    )
    assert read_reported_accuracy(tmp_path) is None


def test_of_flowers_legacy_clients_it_is_among_the_config(tmp_path: Path) -> None:
    reply = RecordedMessage(
        node=1,
        client=1,
        metrics={"evaluateres.num_examples": {"num_examples": 20}},
        config={"evaluateres.metrics": {"accuracy": 0.25}},
    )
    write_messages(
        tmp_path, RecordedExchange(number=1, kind="evaluate", round=4, recorded_as=0, sent=[], replies=[reply])
    )
    assert read_reported_accuracy(tmp_path) == ReportedAccuracy(accuracy=0.25, clients=1, examples=20, round=4)


@pytest.mark.parametrize(
    ("metrics", "kind"),
    [
        ({"accuracy": 0.9}, "train"),  # of a client's own model, on what it trained on
        ({"accuracy": 0.9}, "query.evaluate"),
        ({"inaccuracy": 0.9}, "evaluate"),
        ({"loss": 0.9}, "evaluate"),
        ({"accuracy": float("nan")}, "evaluate"),
        ({"accuracy": -1.0}, "evaluate"),
        ({"accuracy": 1234.0}, "evaluate"),  # no share, and no percentage
    ],
)
def test_nothing_else_is_an_accuracy(tmp_path: Path, metrics: dict[str, Any], kind: str) -> None:
    write_evaluation(tmp_path, metrics, kind=kind)
    assert read_reported_accuracy(tmp_path) is None


def test_a_recording_without_messages_has_none(tmp_path: Path) -> None:
    assert read_reported_accuracy(tmp_path / "messages") is None
