"""[app] says which record is w_t, which is the update, and which parts of the model stay with the clients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedsim.base.errors import ConfigError, FedsimError
from fedsim.recording.messages import RecordedExchange, RecordedMessage, write_messages
from tests.integration.test_foreign_apps import COUNT, attacked, built, models, psnr_of, record, trained

__all__ = ["models"]  # the fixture


def test_w_t_in_one_record_and_the_update_in_another(tmp_path: Path) -> None:
    before, after, inputs = trained(built("mlp"))
    sent = {f"global/{n}": t for n, t in before.items()} | {f"c/{n}": t for n, t in after.items()}
    back = {f"local/{n}": t for n, t in after.items()} | {f"c/{n}": torch.zeros(3) for n in after}
    record(tmp_path / "run", sent, back, records=("local", "c"))
    app = {"record": "local", "broadcast_record": "global"}
    assert psnr_of(tmp_path / "run", inputs, app) > 60
    for changed, words in (
        ({"record": "global"}, r"client 7 sent the records of arrays 'local', 'c', and none is called 'global'"),
        (
            {"broadcast_record": "local"},
            r"the server sent .* none is called 'local'; name one with \[app\] broadcast_re",
        ),
        ({"broadcast_record": ""}, r"none is called 'local'; name one with .* with \[app\] broadcast_record"),
    ):
        with pytest.raises(FedsimError, match=words):
            attacked(tmp_path / "run", app | changed)


def test_control_variates_in_a_record_of_their_own_are_taken_off_the_move(tmp_path: Path) -> None:
    before, after, inputs = trained(built("mlp"))
    rng, rate = torch.Generator().manual_seed(5), 0.5
    control = {n: 0.1 * torch.randn(t.shape, generator=rng) for n, t in before.items()}
    # One step of SCAFFOLD in the first round, where c_i is 0: w_T = w_t - rate (g + c), and c_i+ = g.
    gradient = {n: (before[n] - after[n]) / rate for n in before}
    moved = {n: after[n] - rate * control[n] for n in before}
    sent = {f"model/{n}": t for n, t in before.items()} | {f"cv/{n}": t for n, t in control.items()}
    back = {f"model/{n}": t for n, t in moved.items()} | {f"cv/{n}": t for n, t in gradient.items()}
    record(tmp_path / "run", sent, back, records=("model", "cv"))
    assert psnr_of(tmp_path / "run", inputs, {"record": "model", "controls": "cv"}) > 60
    _, failures = attacked(tmp_path / "run", {"record": "model"})
    assert "the update spans more than N = 6 inputs" in failures[0]
    with pytest.raises(FedsimError, match=r"none is called 'c'; name one with \[app\] controls"):
        attacked(tmp_path / "run", {"record": "model", "controls": "c"})


def test_a_record_that_no_message_holds(tmp_path: Path) -> None:
    before, after, _ = trained(built("mlp"))
    record(tmp_path / "run", before, after)
    for key in ("record", "broadcast_record"):
        with pytest.raises(ConfigError, match=rf"app.{key}: 'weights' chooses between records of arrays, and each of"):
            attacked(tmp_path / "run", {key: "weights"})


def test_w_t_in_another_record_of_a_query(tmp_path: Path) -> None:
    before, after, inputs = trained(built("mlp"))
    states = [{name: {n: t.numpy() for n, t in state.items()}} for name, state in (("to", before), ("from", after))]
    sent, reply = (
        RecordedMessage(node=7, client=7, arrays={**held, "x": {"y": torch.ones(2).numpy()}}) for held in states
    )
    messages = RecordedExchange(number=1, kind="query.step", round=0, recorded_as=0, sent=[sent], replies=[reply])
    write_messages(tmp_path / "run" / "messages", messages)
    app = {"messages": "query.step", "num_examples": COUNT, "record": "from", "broadcast_record": "to"}
    assert psnr_of(tmp_path / "run", inputs, app) > 60
    with pytest.raises(
        ConfigError, match=r"w_t in 'to', not those of messages 'query.step', record 'from'; remove that"
    ):
        attacked(tmp_path / "run", app | {"broadcast_record": ""})


def test_a_head_that_stays_with_the_client_is_not_known(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before, after, inputs = trained(built("mlp"))
    sent = [{name: t for name, t in state.items() if name.startswith("1.")} for state in (before, after)]
    record(tmp_path / "run", *sent)
    with pytest.raises(ConfigError, match=r"'3.weight' \(10, 120\) is not there; .* prefix, record, frozen or private"):
        attacked(tmp_path / "run")
    # Exact attacks read the first layer, whatever the head is, and nobody looks at that of the model's function.
    assert psnr_of(tmp_path / "run", inputs, {"private": ["3"]}) > 60
    assert "moved in no reply" not in caplog.text
    for private, words in (
        (["3", "1"], "'1.bias' is in the messages, so the server sees it; name only parts that no client sends"),
        (["head"], "the model has no part 'head', known: 1, 3"),
    ):
        with pytest.raises(ConfigError, match=words):
            attacked(tmp_path / "run", {"private": private})
    numbered = [{str(place): tensor for place, tensor in enumerate(state.values())} for state in sent]
    record(tmp_path / "numbered", *numbered)
    with pytest.raises(ConfigError, match=r"it is unknown which of them are missing; name them with \[app\] names"):
        attacked(tmp_path / "numbered", {"private": ["3"]})
    assert psnr_of(tmp_path / "numbered", inputs, {"private": ["3"], "names": ["1.weight", "1.bias"]}) > 60
