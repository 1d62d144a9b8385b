"""What a federation of many clients saves: data and network are made once, replies are averaged as they come."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import strategies.app
import strategies.curious
from fedsim.federation.experiment import Experiment
from fedsim.recording.transcript import Transcript
from strategies.reply_means import ReplyCollector
from tests.support.counted_setups import ReplyReads, make_noting_config, read_notes
from tests.support.experiments import make_tiny_config, run_serial


@pytest.mark.parametrize("settings", [{}, {"federation": {"vectorise": False}}, {"recording": {"keep": "recipe"}}])
def test_a_run_makes_data_once_and_recorder_and_strategy_read_each_reply_once(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second network is of another draw: the check that passes follow from what messages hold compares the two."""
    reads = ReplyReads(monkeypatch)
    run_serial(make_noting_config(tmp_path / "note", **settings), tmp_path / "run")
    assert list(read_notes(tmp_path / "note").values()) == [{"data": 1, "network": 2}]
    assert reads.counts() == [2] * (2 * 4 * 4)  # by recorder and strategy; rounds, clients, arrays


def test_an_experiment_takes_from_another_only_what_is_the_same() -> None:
    config = make_tiny_config(attack=[])
    source = Experiment(config)
    same = Experiment(config, source)
    assert (same.dataset, same.data, same.model) == (source.dataset, source.data, source.model)

    federation = config.federation.model_copy(update={"seed": config.federation.seed + 1})
    other = Experiment(config.model_copy(update={"federation": federation}), source)
    assert other.dataset is source.dataset
    assert other.data is not source.data
    assert other.model is not source.model
    table = config.model.model_copy(update={"start": "w.safetensors"})
    further = Experiment(config.model_copy(update={"model": table}), source)
    assert further.data is source.data
    assert further.model is not source.model


def test_replies_that_are_averaged_as_they_come_are_recorded_and_lead_to_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_tiny_config(federation={"clients": 7, "rounds": 2}, attack=[])
    whole = Transcript(run_serial(config, tmp_path / "whole").path)
    monkeypatch.setattr(strategies.app, "_AVERAGE_FROM_BYTES", 0)
    at_once = Transcript(run_serial(config, tmp_path / "at-once").path)
    assert at_once.hash() == whole.hash()
    monkeypatch.setattr(strategies.curious, "ReplyCollector", partial(ReplyCollector, groups_from=0))
    of_means = Transcript(run_serial(config, tmp_path / "of-means").path)
    assert of_means.header(1) == whole.header(1)

    before, expected = of_means.broadcast(2, 0), whole.broadcast(2, 0)
    assert of_means.header(2).broadcasts != whole.header(2).broadcasts  # rounded otherwise
    for name, tensor in expected.items():
        assert torch.allclose(before[name], tensor, rtol=1e-5, atol=1e-7)
