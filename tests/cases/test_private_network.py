"""What the engine `flower` starts is out of reach of other users of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsim.base.errors import RunError
from fedsim.federation.engines import flower
from fedsim.federation.engines.private_network import PrivateNetwork
from fedsim.federation.engines.processes import Processes

NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
SERVER = "import socket; s = socket.create_server(('127.0.0.1', 8000)); print('up', flush=True)\nwhile 1: s.accept()"
CONNECT = [sys.executable, "-I", "-S", "-c", "import socket; socket.create_connection(('127.0.0.1', 8000), 2)"]


def works(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture
def network(tmp_path: Path) -> Iterator[PrivateNetwork]:
    with Processes(tmp_path, os.environ) as processes:
        network = PrivateNetwork(processes, sys.executable)
        server = processes.start("server", network.command([sys.executable, "-c", SERVER]))
        deadline = time.monotonic() + 30
        while "up" not in server.read_output():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield network


def test_a_server_in_a_private_network_is_reached_from_inside_only(network: PrivateNetwork) -> None:
    assert works(network.command(CONNECT))
    assert not works(CONNECT)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_cannot_enter_a_private_network(network: PrivateNetwork) -> None:
    assert works([*NOBODY, "true"])
    assert not works([*NOBODY, *CONNECT])
    assert not works([*NOBODY, *network.command(["true"])])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_a_user_without_rights_makes_a_private_network() -> None:
    code = (
        "import os, pathlib, subprocess, sys\n"
        "from fedsim.federation.engines.private_network import PrivateNetwork\n"
        "from fedsim.federation.engines.processes import Processes\n"
        "with Processes(pathlib.Path(sys.argv[1]), os.environ) as processes:\n"
        "    command = PrivateNetwork(processes, sys.executable).command(['id', '-u'])\n"
        "    print(*subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(flower.__file__).parents[3])}
    python = "/usr/bin/python3"  # the one that runs this may lie where no other user can read it
    if not works([*NOBODY, python, "-c", "import tomllib"]):
        pytest.skip("there is no Python 3.11 for all users")
    with tempfile.TemporaryDirectory() as folder:  # no other user can enter pytest's
        Path(folder).chmod(0o777)
        ended = subprocess.run(
            [*NOBODY, python, "-c", code, folder],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            cwd="/",
        )
    assert ended.stdout.strip() == "65534", ended.stderr


def test_a_system_without_namespaces_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {"unshare": "echo unshare failed: not permitted >&2; exit 1", "nsenter": "exit 1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    settings = {"experiment": "{}", "out": "out", "resume": False}
    with pytest.raises(
        RunError, match=r"^federation\.engine: 'flower' keeps .* \(unshare failed: not permitted\); let"
    ):
        flower.launch(settings, tmp_path / "run", supernodes=1)
