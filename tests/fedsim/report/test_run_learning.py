"""A model that training did not move, or whose clients report no more than chance, is said not to have learnt."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedsim.federation.open_run import OpenRun
from fedsim.recording.messages import RecordedExchange, RecordedMessage, write_messages
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.sealed_files import write_sealed_file
from fedsim.recording.wire_format import State, Update
from fedsim.report.learning import NoLearning
from fedsim.report.run_learning import examine_learning, measure_movement

INITIAL: State = {
    "fc.weight": torch.ones(4, 3),
    "fc.bias": torch.zeros(4),
    "norm.running_mean": torch.zeros(4),
}
LEARNT = {
    "round": "1", "client": "server", "accuracy": "0.9", "loss": "0.1", "guess": "0.25", "num_examples": "1000"
}  # fmt: skip


def make_run(folder: Path, change: float, *, number: int = 1) -> OpenRun:
    """Write a recording of round `number`, and a checkpoint in which each weight is larger by `change`."""
    update = Update(
        round=number, client=0, before=INITIAL, payload=Payload.from_dense(INITIAL, "weights"), num_examples=5
    )
    Recorder(folder / "transcript").write(number, [update])
    run = OpenRun(folder)
    final = {
        "model/fc.weight": (INITIAL["fc.weight"] + change).numpy(),
        "model/fc.bias": INITIAL["fc.bias"].numpy(),
        "model/norm.running_mean": (INITIAL["norm.running_mean"] + 7).numpy(),
    }
    write_sealed_file(run.checkpoint, {"round": number}, final)
    return run


def report_accuracy(run: OpenRun, accuracy: float, examples: int) -> None:
    reply = RecordedMessage(node=0, client=0, metrics={"m": {"num-examples": examples, "accuracy": accuracy}})
    write_messages(
        run.path / "messages",
        RecordedExchange(number=1, kind="evaluate", round=1, recorded_as=0, sent=[], replies=[reply]),
    )


def test_a_negative_variance_is_named_and_not_the_learning_rate(tmp_path: Path) -> None:
    run = make_run(tmp_path, 0.1)
    diverged = LEARNT | {"accuracy": "0.25", "loss": "nan"}
    assert "try a smaller training.learning_rate" in examine_learning(run, [diverged]).sentence
    variance = np.array([0.5, -0.1], np.float32)
    write_sealed_file(run.checkpoint, {"round": 1}, {"model/norm.running_var": variance})
    sentence = examine_learning(run, [diverged]).sentence
    assert sentence.startswith("The model cannot be evaluated: 'norm.running_var', the running variance")
    assert "learning_rate" not in sentence


@pytest.mark.parametrize(("change", "remedy"), [(0.0, "larger steps"), (1e-6, "larger steps"), (1e-3, "")])
def test_a_model_that_hardly_moved_has_not_learnt_whatever_its_accuracy(
    tmp_path: Path, change: float, remedy: str
) -> None:
    run = make_run(tmp_path, change)
    assert measure_movement(run) == pytest.approx(change, rel=0.1, abs=1e-12)
    result = examine_learning(run, [LEARNT])
    assert result.remedy == remedy
    assert bool(result.sentence) == bool(remedy)
    assert not remedy or "so that it is as good as the one that it began with" in result.sentence


def test_of_a_model_that_moved_the_evaluation_decides(tmp_path: Path) -> None:
    result = examine_learning(make_run(tmp_path, 0.1), [LEARNT | {"accuracy": "0.2"}])
    assert result.remedy == "train longer"


def test_movement_is_not_known_without_the_first_round_or_an_evaluation(tmp_path: Path) -> None:
    later = make_run(tmp_path / "later", 0.0, number=2)
    assert examine_learning(later, [LEARNT]) == NoLearning()
    unevaluated = make_run(tmp_path / "unevaluated", 0.0)
    assert examine_learning(unevaluated, [{"round": "1", "client": "server"}]) == NoLearning()


@pytest.mark.parametrize(
    ("accuracy", "examples", "begin"),
    [
        (0.25, 40, "The model has not learnt: the accuracy that its clients reported on 40 examples, 25.0 %"),
        (0.3, 40, "It is not shown that the model has learnt: the accuracy that its clients reported"),
        (0.8, 40, ""),
        (0.25, 0, ""),  # of how many examples is not known
    ],
)
def test_what_clients_of_an_app_report_has_to_be_beyond_chance(
    tmp_path: Path, accuracy: float, examples: int, begin: str
) -> None:
    state = {name: tensor for name, tensor in INITIAL.items() if name.startswith("fc")}
    update = Update(round=1, client=0, before=state, payload=Payload.from_dense(state, "weights"), num_examples=5)
    Recorder(tmp_path / "transcript").write(1, [update])
    run = OpenRun(tmp_path)
    report_accuracy(run, accuracy, examples)
    result = examine_learning(run, [])
    assert result.sentence.startswith(begin)
    assert bool(result.sentence) == bool(begin)
    assert (
        not begin or "is not beyond the 25.0 % that guessing among the 4 outputs of the model gets." in result.sentence
    )
    assert result.remedy == ""


def test_a_model_whose_last_tensors_are_no_layer_is_not_judged_by_chance(tmp_path: Path) -> None:
    run = make_run(tmp_path, 0.1)
    report_accuracy(run, 0.0, 100)
    assert examine_learning(run, []) == NoLearning()
