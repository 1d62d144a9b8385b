"""A device that fails while clients train ends the run in one sentence; it is resumed as if nothing had happened."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import clients.app
import clients.participation
import strategies.app
from fedsim.base.errors import RunError
from fedsim.recording.transcript import Transcript
from fedsim.training.local_round import LocalRound
from tests.support.experiments import make_tiny_config, run_serial
from tests.support.runs import assert_same_runs, read_metrics

LOST = torch.AcceleratorError("CUDA error: unspecified launch failure\nCompile with TORCH_USE_CUDA_DSA")
OLDER = RuntimeError("CUDA error: an illegal memory access was encountered")
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def fail_from(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, error: Exception) -> Callable[[], int]:
    """Let a function raise from this call on; return how often it was called."""
    real, calls = getattr(owner, name), [0]

    def fail(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] >= call:
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, fail)
    return lambda: calls[0]


@pytest.mark.parametrize(
    ("owner", "name", "call", "error", "at_once", "culprit"),
    [
        (
            clients.app,
            "run_algorithm",
            6,
            LOST,
            False,
            "round 2, client 1: its device failed (AcceleratorError: CUDA er",
        ),
        (
            clients.app,
            "run_algorithm",
            6,
            OLDER,
            False,
            "round 2, client 1: its device failed (RuntimeError: CUDA error",
        ),
        (
            clients.app,
            "run_algorithm",
            6,
            FULL,
            False,
            "round 2, client 1: its device failed (OutOfMemoryError: CUDA ou",
        ),
        (
            clients.app,
            "local_updates",
            2,
            LOST,
            True,
            "round 2, client 0: its device failed (AcceleratorError: CUDA er",
        ),
        (clients.app, "evaluate", 6, LOST, True, "round 2, client 1: its device failed (AcceleratorError: CUDA error"),
        (
            strategies.app,
            "evaluate",
            2,
            LOST,
            True,
            "round 2: the server's device failed (CUDA error: unspecified laun",
        ),
    ],
    ids=["lost", "lost, older error", "memory", "cohort lost", "client's evaluation", "server's evaluation"],
)
def test_the_rounds_before_are_kept_and_the_run_is_resumed(
    owner: Any,
    name: str,
    call: int,
    error: Exception,
    at_once: bool,
    culprit: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    config = make_tiny_config(
        federation={"rounds": 3, "vectorise": at_once}, partition={"samples_per_client": 24, "test_fraction": 0.25}
    )
    whole = run_serial(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        fail_from(patch, owner, name, call, error)
        with pytest.raises(RunError, match=re.escape(culprit)) as caught:
            run_serial(config, tmp_path / "run")
    assert caught.value.exit_code == 1
    assert str(caught.value).endswith(
        "; fix the cause or free its memory, and resume the run, which keeps finished rounds"
    )
    assert "\n" not in str(caught.value)
    is_recorded = "evaluation" in culprit or name == "evaluate"
    assert Transcript(tmp_path / "run" / "transcript").rounds == ([1, 2] if is_recorded else [1])
    assert_same_runs(whole, run_serial(config, tmp_path / "run", resume=True))


def test_clients_whose_memory_does_not_last_at_once_train_one_by_one_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_tiny_config(federation={"rounds": 2})
    whole = run_serial(config, tmp_path / "whole")
    calls = fail_from(monkeypatch, clients.app, "local_updates", 2, FULL)
    run = run_serial(config, tmp_path / "run")
    assert calls() == 2
    assert "round 2, 4 clients: the memory of their device does not last for them at once" in caplog.text
    for row, other in zip(read_metrics(run), read_metrics(whole), strict=True):
        assert float(row["loss"]) == pytest.approx(float(other["loss"]), rel=1e-4)


def test_a_recipe_is_not_blamed_for_a_lost_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = make_tiny_config(federation={"rounds": 1, "vectorise": False}, recording={"keep": "recipe"})
    fail_from(monkeypatch, clients.app, "run_algorithm", 5, LOST)
    with pytest.raises(RunError, match=r"round 1, client 0: its device failed .* while its update was computed again"):
        run_serial(config, tmp_path / "run")


@pytest.mark.parametrize(
    ("tables", "owner", "name"),
    [
        (
            {"defense": [{"name": "gate", "measure": "gradient-norm", "above": 1e9}]},
            clients.participation,
            "apply_on_data",
        ),
        ({"measure": [{"name": "gradient-norm"}]}, LocalRound, "client_message"),
    ],
    ids=["defense", "measure"],
)
def test_what_goes_on_after_other_errors_does_not_after_a_lost_device(
    tables: dict[str, Any], owner: Any, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A defense that fails makes its client silent, and a measure that fails leaves a gap."""
    config = make_tiny_config(federation={"rounds": 2, "vectorise": False}, **tables)
    run_serial(config, tmp_path / "whole")
    fail_from(monkeypatch, owner, name, 6, LOST)
    with pytest.raises(RunError, match=r"round 2, client \d: its device failed"):
        run_serial(config, tmp_path / "run")
