"""Engines are plug-ins: one of another package carries a run, and what it cannot carry it refuses at once."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import fedsim
from fedsim.base.errors import ConfigError, PluginError, RunError
from fedsim.base.randomness import lend_generators, seed_globals
from fedsim.federation.engines.engine import Engine, FederationJob, build_engine
from tests.support.experiments import make_tiny_config, run_serial
from tests.support.runs import hash_recording

PAGE = Path(__file__).parents[4] / "docs" / "how-to" / "write-an-engine.md"


@pytest.fixture
def their_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The engine of docs/how-to/write-an-engine.md, in a file of the working folder."""
    (code,) = re.findall(r"^`my_engine.py`:\n\n```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "my_engine.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_engine", raising=False)
    return "my_engine:Threads"


@pytest.mark.parametrize("vectorise", [True, False])
def test_an_engine_of_threads_records_the_bytes_of_the_serial_one(
    their_engine: str, vectorise: bool, tmp_path: Path
) -> None:
    """Clients that train one by one draw dropout from the global generators, which the server holds meanwhile."""
    model = {"name": "mlp", "hidden": [8], "dropout": 0.0 if vectorise else 0.3}
    federation = {"clients": 6, "vectorise": vectorise}
    runs = {}
    for engine in ("serial", {"name": their_engine, "threads": 3}):
        config = make_tiny_config(model=model, federation={**federation, "engine": engine})
        runs[str(engine)] = hash_recording(run_serial(config, tmp_path / str(len(runs))))
    expected, got = runs.values()
    assert len(expected) == 2
    assert got == expected


def test_its_clients_get_objects_of_the_program(their_engine: str, tmp_path: Path) -> None:
    tables: dict[str, Any] = make_tiny_config(federation={"engine": {"name": their_engine}, "rounds": 1}).model_dump(
        exclude_none=True, include={"data", "partition", "training", "federation", "adversary"}
    )
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    run = fedsim.run({**tables, "model": network}, tmp_path / "run")
    assert sorted(run.transcript.update(1, 0).after) == ["1.bias", "1.weight"]


@pytest.mark.parametrize(
    ("federation", "error", "sentence"),
    [
        ({"engine": "serail"}, PluginError, "engines: nothing is called 'serail', did you mean 'serial'?"),
        ({"engine": {"name": "rai"}}, PluginError, "engines: nothing is called 'rai', did you mean 'ray'?"),
        (
            {"engine": {"name": "my_engine:Threads", "thread": 3}},
            ConfigError,
            "federation.engine.thread: unknown setting for 'my_engine:Threads', did you mean 'threads'?",
        ),
        (
            {"engine": {"name": "serial", "threads": 3}},
            ConfigError,
            "federation.engine.threads: unknown setting for 'serial', there are none",
        ),
        (
            {"engine": "my_engine:Threads", "device": "cuda"},
            ConfigError,
            "federation.device: engine 'threads' trains on CPUs alone; use 'cpu'",
        ),
    ],
)
@pytest.mark.usefixtures("their_engine")
def test_what_no_engine_can_carry_is_refused_before_anything_is_written(
    federation: dict[str, Any],
    error: type[Exception],
    sentence: str,
    tmp_path: Path,
) -> None:
    with pytest.raises(error) as caught:
        run_serial(make_tiny_config(federation=federation), tmp_path / "run")
    assert str(caught.value) == sentence
    assert not (tmp_path / "run").exists()


def test_an_engine_of_other_processes_gets_no_objects(their_engine: str, tmp_path: Path) -> None:
    """Told by the class of the engine, however the tables name it."""
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    with pytest.raises(ConfigError, match=r"^federation.engine: 'ray' works in other processes"):
        fedsim.run({"model": network, "federation": {"engine": {"name": "ray"}}}, tmp_path / "run")


def test_an_engine_that_ends_early_and_says_nothing_is_an_error(
    their_engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FederationJob, "run_rounds", lambda job, grid: None)
    with pytest.raises(RunError, match=r"^engine 'my_engine:Threads' ended before round 2 and gave no reason; fix"):
        run_serial(make_tiny_config(federation={"engine": their_engine}), tmp_path / "run")


def test_an_error_of_somebody_s_engine_is_told_in_one_sentence_with_its_place(
    their_engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(job: FederationJob, grid: Any) -> None:
        raise KeyError("node")

    monkeypatch.setattr(FederationJob, "run_rounds", fail)
    place = r"\(.*my_engine\.py:\d+\); fix the engine, and resume the run$"
    with pytest.raises(RunError, match=rf"^engine 'my_engine:Threads' raised KeyError: 'node' {place}"):
        run_serial(make_tiny_config(federation={"engine": their_engine}), tmp_path / "run")
    with pytest.raises(KeyError):  # one of ours is to be reported with all that led to it
        run_serial(make_tiny_config(), tmp_path / "ours")


def test_the_engine_may_change_when_a_run_is_resumed(
    their_engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = hash_recording(run_serial(make_tiny_config(), tmp_path / "whole"))

    def end_after_one(job: FederationJob, grid: Any) -> None:
        run_rounds(job, grid)
        raise RunError("the power went")

    run_rounds = FederationJob.run_rounds
    one_round = make_tiny_config(federation={"rounds": 1})
    with monkeypatch.context() as patch:
        patch.setattr(FederationJob, "run_rounds", end_after_one)
        with pytest.raises(RunError, match="the power went"):
            run_serial(one_round, tmp_path / "run")
    resumed = run_serial(make_tiny_config(federation={"engine": their_engine}), tmp_path / "run", resume=True)
    assert hash_recording(resumed) == expected


@pytest.mark.parametrize(("name", "nodes", "splits"), [("serial", 1, True), ("ray", 1, True), ("flower", 3, False)])
def test_our_engines_say_what_the_round_loop_needs_to_know(name: str, nodes: int, splits: bool) -> None:
    federation = make_tiny_config(federation={"engine": name, "supernodes": 3}).federation
    engine: Engine = build_engine(federation)
    assert (engine.least_nodes(federation), engine.splits_rounds, engine.in_process) == (
        nodes,
        splits,
        name == "serial",
    )


def test_a_thread_draws_while_the_one_that_seeded_waits_and_changes_nothing_for_it() -> None:
    with seed_globals("server"):
        expected = [torch.rand(2), torch.rand(2)]
    draws: list[torch.Tensor] = []

    def draw() -> None:
        with seed_globals("client"):
            draws.append(torch.rand(2))

    with seed_globals("server"), seed_globals("server"):
        first = torch.rand(2)
        worker = threading.Thread(target=draw)
        worker.start()
        worker.join(0.05)
        assert worker.is_alive()  # it waits
        with lend_generators():
            worker.join(20)
        assert not worker.is_alive()
        assert torch.equal(torch.stack([first, torch.rand(2)]), torch.stack(expected))
    draw()
    assert torch.equal(draws[0], draws[1])
