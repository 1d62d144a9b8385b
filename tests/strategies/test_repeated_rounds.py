"""A run that goes on in the round in which it was interrupted sums the same clients, or ends with a sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Error, Message, RecordDict

import strategies.app
from fedsim.base.errors import RunError
from strategies.checkpoint import Checkpoint
from strategies.repeated_rounds import RepeatedRound
from tests.support.experiments import make_tiny_config, run_serial

SECURE = {"secure_aggregation": {"groups": "all", "threshold": 0.6}}
NOISE = {"noise_multiplier": 4.0, "delta": 1e-3}
TABLES: dict[str, dict[str, Any]] = {
    "sums": SECURE,
    "noisy sums": SECURE | {"distributed_privacy": NOISE},
    "central": {"central_privacy": NOISE},
    "central, of which one client is recorded": {"central_privacy": NOISE, "recording": {"clients": [0]}},
}
REFUSAL = "round 2: clients 3 answered either now or before the run was interrupted, not both times"


class Killed(BaseException):
    """Like a signal: nothing catches it."""


def silence_client(patch: pytest.MonkeyPatch, silent: int) -> None:
    """Have a client be too late in each round."""
    real = strategies.app.check_replies

    def check(*args: Any, **kwargs: Any) -> Iterator[Message]:
        for reply in real(*args, **kwargs):
            if reply.metadata.src_node_id == silent:
                asked = Message(reply.content, dst_node_id=silent, message_type="train")
                yield Message(Error(code=3, reason="too late"), reply_to=asked)
            else:
                yield reply

    patch.setattr(strategies.app, "check_replies", check)


def interrupt(config: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, silent: int | None = None) -> None:
    """Run, and die after round 2 was recorded and before its checkpoint."""
    save = Checkpoint.save

    def save_or_die(self: Checkpoint, *rest: Any, **keywords: Any) -> None:
        if self.round == 2:
            raise Killed
        save(self, *rest, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", save_or_die)
        if silent is not None:
            silence_client(patch, silent)
        with pytest.raises(Killed):
            run_serial(config, folder)


def reply_from(client: int, *, fails: bool = False) -> Message:
    asked = Message(RecordDict(), dst_node_id=client, message_type="train")
    return Message(Error(code=3, reason="too late"), reply_to=asked) if fails else Message(RecordDict(), reply_to=asked)


@pytest.mark.usefixtures("server_task")
def test_the_noise_of_a_trusted_server_may_not_hide_clients_of_whom_none_was_there_before() -> None:
    """Client 1 answered before and client 2 now: the difference of both sums has no noise at all."""
    replies = [reply_from(1, fails=True), reply_from(2)]
    repeated = RepeatedRound(2, [frozenset({1})], failed_clients=[2])
    with pytest.raises(RunError, match=r"^round 2: clients 1, 2 answered either now or before"):
        list(repeated.check_replies(replies))
    assert list(RepeatedRound(2, [frozenset({2})], failed_clients=[1]).check_replies(replies)) == replies


@pytest.mark.parametrize("kind", TABLES)
def test_other_clients_in_a_round_that_is_made_again_are_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_tiny_config(**TABLES[kind], federation={"rounds": 3})
    interrupt(config, tmp_path / "run", monkeypatch)
    with monkeypatch.context() as patch:
        silence_client(patch, 3)
        for _ in range(2):  # the first sum stays recorded, so that to try again is refused as well
            with pytest.raises(RunError, match=re.escape(REFUSAL)):
                run_serial(config, tmp_path / "run", resume=True)
    # With the same clients nothing more is shown, so that the run goes on, and later rounds may have others.
    run_serial(config, tmp_path / "run", resume=True)


def test_a_client_that_was_too_late_may_not_be_added_to_the_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_tiny_config(**TABLES["noisy sums"], federation={"rounds": 3})
    interrupt(config, tmp_path / "run", monkeypatch, silent=3)
    with pytest.raises(RunError, match=re.escape(REFUSAL)):
        run_serial(config, tmp_path / "run", resume=True)
    with monkeypatch.context() as patch:
        silence_client(patch, 3)
        run_serial(config, tmp_path / "run", resume=True)


def test_without_a_checkpoint_all_rounds_that_were_seen_are_made_again_with_the_same_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_tiny_config(**TABLES["central"], federation={"rounds": 2})
    run = run_serial(config, tmp_path / "run")
    run.checkpoint.unlink()
    real = strategies.app.check_replies
    with monkeypatch.context() as patch:
        silence_client(patch, 3)
        late = strategies.app.check_replies
        checks = iter((real, late))
        patch.setattr(strategies.app, "check_replies", lambda *args, **kwargs: next(checks)(*args, **kwargs))
        with pytest.raises(RunError, match=re.escape(REFUSAL)):
            run_serial(config, tmp_path / "run", resume=True)
    run.checkpoint.unlink()  # of round 1
    run_serial(config, tmp_path / "run", resume=True)


def test_where_nothing_is_recorded_of_a_round_that_was_begun_a_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_tiny_config(**TABLES["central"], federation={"rounds": 3}, recording={"rounds": [1]})
    interrupt(config, tmp_path / "run", monkeypatch)
    run_serial(config, tmp_path / "run", resume=True)
    assert "round 2 was begun before the run was interrupted, and no sum is recorded of it" in caplog.text


def test_a_round_without_ledger_and_recording_may_have_been_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_tiny_config(**SECURE, federation={"rounds": 3}, recording={"rounds": [1]})
    interrupt(config, tmp_path / "run", monkeypatch)
    run_serial(config, tmp_path / "run", resume=True)
    assert "round 2 has no recording that can be read, so it is unknown whether a sum of it" in caplog.text


def test_a_round_of_which_the_recording_is_cut_off_is_made_again_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a power cut leaves it, where recording.fsync is off."""
    config = make_tiny_config(**SECURE, federation={"rounds": 3})
    interrupt(config, tmp_path / "run", monkeypatch)
    [path] = (tmp_path / "run").glob("transcript/round-*2.safetensors")
    path.write_bytes(path.read_bytes()[:20])
    run_serial(config, tmp_path / "run", resume=True)
    assert "round 2 has no recording that can be read" in caplog.text
