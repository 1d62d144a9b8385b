"""Control variates that somebody's app sends in a record of its own are known to the server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedsim.audit.plausibility import check_fit
from fedsim.base.errors import ConfigError, TranscriptError
from fedsim.federation.config import AttackFile
from fedsim.federation.open_run import OpenRun
from fedsim.federation.table_validation import validate_tables
from fedsim.interfaces.knowledge import Knowledge
from fedsim.recording.control_variates import join_controls, split_controls
from fedsim.recording.message_format import MessageFormat
from fedsim.recording.payloads import Payload, State
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.training.settings import LocalTraining
from tests.support.experiments import make_tiny_config, run_serial

FORMAT = {"record": "arrays", "controls": "controls"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> OpenRun:
    """Three rounds of fedsim's own SCAFFOLD, some steps in each."""
    config = make_tiny_config(algorithm={"name": "scaffold"}, strategy={"name": "scaffold"}, federation={"rounds": 3})
    return run_serial(config, tmp_path_factory.mktemp("run") / "run")


def put_in_records(state: State) -> dict[str, Tensor]:
    model, controls = split_controls(state)
    named = [("arrays", model), ("controls", controls)]
    return {f"{record}/{name}": tensor for record, tensors in named for name, tensor in tensors.items()}


def record_as_app(run: OpenRun, folder: Path, *, replies: str, sends_delta: bool = False, scale: float = 1.0) -> Path:
    """Record the same federation as an app sends it: two records, and what the client makes of its control variate."""
    values: dict[int, State] = {}
    for number in run.recording.rounds:
        updates = []
        for client in run.recording.clients(number):
            update = run.recording.recorded_update(number, client)
            received, (model, sent) = split_controls(update.before)[1], split_controls(update.after)
            change = {name: scale * (sent[name].double() - control.double()) for name, control in received.items()}
            before = values.get(client, {})
            values[client] = {name: before.get(name, 0) + tensor for name, tensor in change.items()}
            shown = values[client] if replies == "value" else change
            if sends_delta:
                model = {name: tensor - update.before[name] for name, tensor in model.items()}
            arrays = put_in_records(join_controls(model, shown))
            payload = Payload.from_dense(arrays, "weights")
            records = ("arrays", "controls")
            # The settings are not told, so that what a client goes is fitted.
            updates.append(replace(update, before=put_in_records(update.before), payload=payload, records=records))
        Recorder(folder, resume=True).write(number, updates)
    return folder


@pytest.mark.parametrize("replies", ["change", "value"])
@pytest.mark.parametrize("sends_delta", [False, True], ids=["weights", "delta"])
def test_the_move_of_the_gradients_is_that_of_a_run_of_our_own(
    run: OpenRun, tmp_path: Path, replies: Any, sends_delta: bool
) -> None:
    folder = record_as_app(run, tmp_path / "app", replies=replies, sends_delta=sends_delta)
    app = MessageFormat(**FORMAT, control_replies=replies, replies="delta" if sends_delta else "weights")
    recording = Transcript(folder, message_format=app)
    recording.restrict_to([3]).copy_to(tmp_path / "copy")
    for number in (1, 3):
        expected, update = run.recording.update(number, 2), recording.update(number, 2)
        assert update.before.keys() == expected.before.keys()
        for name, move in expected.pseudo_gradient.items():
            assert torch.allclose(update.pseudo_gradient[name], move, rtol=1e-3, atol=1e-6)
        if number == 3:
            copied = Transcript(tmp_path / "copy").update(3, 2)
            assert all(torch.equal(copied.pseudo_gradient[name], move) for name, move in update.pseudo_gradient.items())
            # It is not the bare difference of the weights.
            difference = {name: update.before[name] - update.after[name] for name in update.before}
            assert any(
                not torch.allclose(difference[name], move, rtol=0.05) for name, move in copied.pseudo_gradient.items()
            )


def record_in_one_record(run: OpenRun, folder: Path, *, positions: bool) -> Path:
    """Record the same federation as an app sends it whose control variates stand behind the model in one record."""
    for number in run.recording.rounds:
        updates = []
        for client in run.recording.clients(number):
            update = run.recording.recorded_update(number, client)
            received, (model, sent) = split_controls(update.before)[1], split_controls(update.after)
            states = [update.before, join_controls(model, {name: sent[name] - received[name] for name in sent})]
            before, after = (
                {
                    str(place) if positions else name.replace("control/", "c."): tensor
                    for place, (name, tensor) in enumerate(state.items())
                }
                for state in states
            )
            updates.append(replace(update, before=before, payload=Payload.from_dense(after, "weights"), config={}))
        Recorder(folder, resume=True).write(number, updates)
    return folder


@pytest.mark.parametrize("positions", [True, False])
def test_control_variates_behind_the_model_in_one_record_are_read(
    run: OpenRun, tmp_path: Path, positions: bool
) -> None:
    folder = record_in_one_record(run, tmp_path / "app", positions=positions)
    sent_names = [name.replace("control/", "c.") for name in run.recording.recorded_update(1, 2).before]
    app = MessageFormat(controls="c.", names=sent_names if positions else [])
    update, expected = Transcript(folder, message_format=app).update(3, 2), run.recording.update(3, 2)
    assert update.before.keys() == update.after.keys() == expected.before.keys()
    for name, move in expected.pseudo_gradient.items():
        assert torch.allclose(update.pseudo_gradient[name], move, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_a_common_factor_of_control_variates_is_found_by_the_stated_steps(
    run: OpenRun, tmp_path: Path, factor: float, caplog: pytest.LogCaptureFixture
) -> None:
    """An app that divides by a third of its steps sends threefold control variates, which fit its moves as well."""
    folder = tmp_path / "app"
    for number in run.recording.rounds:
        updates = []
        for client in run.recording.clients(number):
            update = run.recording.recorded_update(number, client)
            received, (model, sent) = split_controls(update.before)[1], split_controls(update.after)
            change = {name: factor * sent[name] - received[name] for name in sent}
            payload = Payload.from_dense(put_in_records(join_controls(model, change)), "weights")
            before, records = put_in_records(update.before), ("arrays", "controls")
            updates.append(replace(update, before=before, payload=payload, records=records, config={}))
        Recorder(folder, resume=True).write(number, updates)
    recording = Transcript(folder, message_format=MessageFormat(**FORMAT))
    assert recording.update(1, 2)  # what it sent fits its move
    settings = LocalTraining.from_message(run.recording.recorded_update(1, 2).config)
    known = Knowledge(learning_rate=settings.learning_rate, local_steps=settings.steps(update.num_examples))
    if factor == 1:
        check_fit(recording, known)
    else:
        with pytest.raises(ConfigError, match="fix learning_rate"):
            check_fit(recording, known)
    caplog.clear()
    check_fit(recording, Knowledge())
    assert "nothing says whether it is" in caplog.text


@pytest.mark.parametrize(("sent", "stated"), [("change", "value"), ("value", "change")])
def test_the_wrong_reading_of_replies_is_found_by_what_clients_moved(
    run: OpenRun, tmp_path: Path, sent: str, stated: Any
) -> None:
    folder = record_as_app(run, tmp_path / "app", replies=sent)
    recording = Transcript(folder, message_format=MessageFormat(**FORMAT, control_replies=stated))
    assert recording.update(1, 2)  # both are the same
    with pytest.raises(TranscriptError, match=f"set control_replies = '{sent}'"):
        recording.update(3, 2)


def test_control_variates_that_do_not_follow_from_moves_are_refused(run: OpenRun, tmp_path: Path) -> None:
    folder = record_as_app(run, tmp_path / "app", replies="change", scale=0.1)
    recording = Transcript(folder, message_format=MessageFormat(**FORMAT))
    with pytest.raises(TranscriptError, match="of its move unexplained"):
        recording.update(3, 2)
    # Noise leaves more unexplained.
    assert recording.in_format(MessageFormat(**FORMAT, defended=True)).update(3, 2).gradient_move


def test_records_that_are_not_there_are_named(run: OpenRun, tmp_path: Path) -> None:
    folder = record_as_app(run, tmp_path / "app", replies="change")
    with pytest.raises(TranscriptError, match=r"none is called 'state'; name one with \[app\] controls"):
        Transcript(folder, message_format=MessageFormat(record="arrays", controls="state")).update(1, 2)
    with pytest.raises(TranscriptError, match="sent one record of arrays, in which no name"):
        run.recording.in_format(MessageFormat(controls="controls")).update(1, 2)


@pytest.mark.parametrize(
    ("app", "message"),
    [
        ({"control_replies": "value"}, "no record of control variates is named"),
        ({"controls": "c", "replies": "gradient"}, "replies = 'gradient' excludes"),
        ({"controls": "c", "message": 2}, "message = 2 excludes"),
    ],
)
def test_formats_that_exclude_control_variates_are_named(app: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate_tables(AttackFile, {"app": app}, "attack.toml")
