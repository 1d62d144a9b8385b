"""Runs on the Ray engine: the same bytes as without it, and what goes wrong there. All share one Ray."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fedsim.federation.engines.ray
from fedsim.base.errors import RunError
from fedsim.federation.config import Config
from fedsim.recording.transcript import Transcript
from tests.integration import test_client_memory, test_engines, test_exposure_runs, test_fedsgd, test_gate
from tests.integration.test_payloads import sparse_and_quantised
from tests.integration.test_ray import PLUGINS, assert_one_sentence
from tests.integration.test_secure_aggregation import secure
from tests.support.counted_setups import ReplyReads, make_noting_config, read_notes
from tests.support.experiments import make_tiny_config, run_serial
from tests.support.processes import find_descendants
from tests.support.ray import share_ray
from tests.support.runs import assert_same_runs

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("shared_ray")]


@pytest.fixture(scope="module")
def shared_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """Two actors, which can import the plug-ins below, and a user whose own Ray asks for no token."""
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "deadly_plugins.py").write_text(textwrap.dedent(PLUGINS))
    (folder / "remembering_plugins.py").write_text(textwrap.dedent(test_client_memory.PLUGINS))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        for name in ("deadly_plugins", "remembering_plugins"):
            patch.delitem(sys.modules, name, raising=False)
        patch.setenv("RAY_AUTH_MODE", "disabled")
        with share_ray(2) as actors:
            yield actors


def on_ray(config: Config, actors: int) -> Config:
    federation = config.federation.model_copy(update={"engine": "ray", "actors": actors})
    return config.model_copy(update={"federation": federation})


def measuring() -> Config:
    norm = test_exposure_runs.NORM
    return test_exposure_runs.measuring({**norm, "label": "norm"}, {**norm, "every": 2})


@pytest.mark.thorough
def test_an_actor_plays_clients_without_what_takes_long_to_import(shared_ray: list[Any], tmp_path: Path) -> None:
    """Before other tests: what they bring along may import anything."""
    import ray

    run_serial(make_tiny_config(federation={"engine": "ray", "actors": 1, "rounds": 1}), tmp_path / "run")
    answer = shared_ray[0].run.remote(lambda: lambda message, context: set(sys.modules), None, "", None)
    modules = ray.get(answer)[1]
    assert {"clients.app", "torch"} <= modules
    assert not modules & {"flwr.simulation", "sqlalchemy", "sklearn", "scipy", "pandas"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("make_config", "actors"),
    [
        pytest.param(test_engines.busy, 1, id="everything on 1"),
        pytest.param(test_engines.busy, 2, id="everything on 2", marks=pytest.mark.thorough),
        pytest.param(test_client_memory.remembering, 2, id="memories on 2", marks=pytest.mark.thorough),
        pytest.param(test_fedsgd.busy, 2, id="gradients", marks=pytest.mark.slow),
        pytest.param(test_gate.many, 2, id="gates", marks=pytest.mark.slow),
        pytest.param(secure, 2, id="secure aggregation", marks=pytest.mark.slow),
        pytest.param(sparse_and_quantised, 2, id="sparse and quantised", marks=pytest.mark.slow),
        pytest.param(measuring, 2, id="measures of exposure", marks=pytest.mark.slow),
    ],
)
def test_ray_writes_the_same_bytes_as_serial(make_config: Callable[[], Config], actors: int, tmp_path: Path) -> None:
    serial = run_serial(make_config(), tmp_path / "serial")
    ray = run_serial(on_ray(make_config(), actors), tmp_path / "ray")
    assert_same_runs(ray, serial)


@pytest.mark.thorough
def test_each_process_makes_data_once_and_recorder_and_strategy_read_each_reply_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = ReplyReads(monkeypatch)
    run_serial(on_ray(make_noting_config(tmp_path / "note"), 2), tmp_path / "run")
    notes = read_notes(tmp_path / "note")
    assert 2 <= len(notes) <= 3  # this process, and the actors
    networks = sorted(counts["network"] for counts in notes.values())
    assert networks == [1] * (len(notes) - 1) + [2]  # this process makes a second one, for a check of the first
    assert all(counts["data"] == 1 for counts in notes.values())
    assert reads.counts() == [2] * (2 * 4 * 4)  # by recorder and strategy; rounds, clients, arrays


@pytest.mark.thorough
def test_a_killed_actor_comes_back_and_nobody_is_missed(tmp_path: Path) -> None:
    undisturbed = run_serial(make_tiny_config(federation={"vectorise": False}), tmp_path / "undisturbed")
    defense = {"name": "deadly_plugins:DiesOnce", "note": str(tmp_path / "note")}
    config = make_tiny_config(federation={"engine": "ray", "actors": 2, "vectorise": False}, defense=[defense])
    disturbed = run_serial(config, tmp_path / "run")
    assert (tmp_path / "note").exists()
    assert Transcript(disturbed.path).hash() == Transcript(undisturbed.path).hash()


@pytest.mark.thorough
def test_a_failing_round_is_the_same_one_sentence_as_on_serial(tmp_path: Path) -> None:
    config = make_tiny_config(federation={"engine": "ray", "actors": 1, "straggler_probability": 0.9999999})
    with pytest.raises(RunError, match=r"round 1: all 4 clients failed .*straggler") as caught:
        run_serial(config, tmp_path / "run")
    assert_one_sentence(caught.value)


@pytest.mark.thorough
def test_gpus_that_ray_does_not_find_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = make_tiny_config(federation={"engine": "ray", "actors": 1, "device": "cuda", "gpus_per_actor": 0.25})
    with pytest.raises(RunError, match=r"federation.gpus_per_actor: 0.25 asked for, but Ray finds 0 GPUs") as caught:
        run_serial(config, tmp_path / "run")
    assert_one_sentence(caught.value)


INTRUDER = """
import sys
import ray
from ray._private import ray_constants
ray_constants.ENABLE_RAY_CLUSTER = sys.argv[1] != "127.0.0.1"  # otherwise Ray leaves loopback by itself
try:
    ray.init(address=":".join(sys.argv[1:3]), logging_level=40)
    print("ran as", ray.get(ray.remote(lambda: "one of yours").remote()))
except (OSError, RuntimeError, ray.exceptions.RayError) as error:
    print("kept out:", type(error).__name__)
"""


def listening(pids: Iterable[int]) -> list[tuple[str, int]]:
    """Address and port of each TCP socket that these processes listen at."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            inodes |= {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()}
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                raw, port = fields[1].split(":")
                words = struct.pack(f"={len(raw) // 8}I", *(int(raw[k : k + 8], 16) for k in range(0, len(raw), 8)))
                found.append((socket.inet_ntop(family, words).removeprefix("::ffff:"), int(port, 16)))
    return found


@pytest.mark.thorough
def test_nobody_else_gets_into_the_ray_that_is_started_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every socket is on loopback, where other users of this machine may come from, so a token is wanted there."""
    sockets: list[tuple[str, int]] = []
    said: list[str] = []
    compare = fedsim.federation.engines.ray._count_actors

    def look(*arguments: Any) -> int:  # our own run goes on beside this
        import ray

        gcs = int(ray.get_runtime_context().gcs_address.rsplit(":", 1)[1])
        family = [os.getpid(), *find_descendants(os.getpid())]
        sockets.extend(listening(family))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        command = [sys.executable, "-W", "ignore", "-c", INTRUDER, "127.0.0.1", str(gcs)]
        environment["RAY_NUM_REDIS_GET_RETRIES"] = "1"
        said.append(subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60).stdout)
        return compare(*arguments)

    monkeypatch.setattr(fedsim.federation.engines.ray, "_count_actors", look)
    run = run_serial(make_tiny_config(federation={"engine": "ray", "actors": 1}), tmp_path / "run")
    assert Transcript(run.path).rounds == [1, 2]
    assert len(sockets) >= 4, "Ray's processes should be among them"
    assert {address for address, _ in sockets} == {"127.0.0.1"}
    assert all(words.startswith("kept out") for words in said), said
