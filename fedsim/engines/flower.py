"""The Flower engine: a SuperLink and SuperNodes, as on real hosts, here or wherever they run already.

What is submitted is a pointer, an app without code: every host runs the fedsim installed there.
The SuperLink is started with `--isolation process` and a SuperExec beside it, so that no process
leaves the groups that `Processes` ends. All of them are in a `PrivateNetwork`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli_w

from fedsim.engines.deployed import Relay, said
from fedsim.engines.private_network import PrivateNetwork
from fedsim.engines.processes import Processes, Started, executable, termination_is_interruption
from fedsim.errors import RunError

log = logging.getLogger(__name__)

_LOCAL = "fedsim"
# Free in a network that is nobody else's; SuperNode k takes the k-th port after the SuperLink's.
_HOST, _PORT = "127.0.0.1", 8000
_HEALTH = f"import urllib.request; urllib.request.urlopen('http://{_HOST}:{_PORT}/health', timeout=2)"
_PATIENCE = 120.0
_PAUSE = 0.1
_BETWEEN_STREAMS = 2.0
_ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05",
    "FLWR_LOG_LEVEL": "INFO",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}


def launch(settings: Mapping[str, Any], folder: Path, *, supernodes: int, address: str | None = None) -> None:
    """Run the app on SuperNodes of this machine, or on the SuperLink that is called `address`.

    What is started here no other user of this machine can reach, and it reaches no network.

    Args:
        settings: the run_config: `experiment`, `out`, `resume`.
        folder: the run folder; logs go to `deployment` in it.
        supernodes: how many to start.
        address: a connection in Flower's own configuration, `config.toml` in FLWR_HOME. Then nothing
            is started, and the SuperLink must see the run folder under the same path.

    Raises:
        InstallationError: Flower's commands are not installed.
        RunError: the deployment could not be started, this system lets no `PrivateNetwork` be made, or the run failed.
    """
    logs = said(folder.resolve()).parent
    home = logs / "flower-home"
    with suppress(FileNotFoundError):
        shutil.rmtree(logs)  # of the run that is now resumed
    home.mkdir(parents=True)
    environment = {**os.environ, **_ENVIRONMENT, "PATH": os.pathsep.join([_beside(), os.environ.get("PATH", "")])}
    if address is None:
        environment |= {"FLWR_HOME": str(home), "NO_PROXY": _HOST, "no_proxy": _HOST}
    try:
        with termination_is_interruption(), Processes(logs, environment) as processes:
            relay = Relay(said(folder))
            flwr = [executable("flwr")]
            servers: list[Started] = []
            if address is None:
                network = PrivateNetwork(processes, sys.executable)
                servers = _start(processes, network, home, supernodes)
                flwr = network.command(flwr)
            write_pointer(home / "app", settings)
            _follow(processes, servers, relay, flwr, address or _LOCAL, home / "app")
    finally:
        shutil.rmtree(home, ignore_errors=True)


def write_pointer(app: Path, settings: Mapping[str, Any]) -> None:
    """Write an app that holds no code, only the names of installed components and `settings`."""
    app.mkdir(parents=True)
    tables = {
        "project": {"name": "fedsim-pointer", "version": "1.0.0", "license": "Apache-2.0", "dependencies": []},
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "fedsim",
                    "components": {"serverapp": "fedsim.engines.deployed:app", "clientapp": "clients.app:app"},
                    "config": dict(settings),
                }
            }
        },
    }
    (app / "pyproject.toml").write_text(tomli_w.dumps(tables), encoding="utf-8")


def _start(processes: Processes, network: PrivateNetwork, home: Path, supernodes: int) -> list[Started]:
    """Start a SuperLink with its SuperExec and, once it answers, the SuperNodes."""
    address = f"{_HOST}:{_PORT}"
    connection = {"superlink": {"default": _LOCAL, _LOCAL: {"address": address, "insecure": True}}}
    (home / "config.toml").write_text(tomli_w.dumps(connection), encoding="utf-8")
    log.info("starting a SuperLink and %d SuperNodes, in a network of their own", supernodes)

    def start(name: str, command: str, *options: str) -> Started:
        return processes.start(name, network.command([executable(command), "--insecure", *options]))

    link = start("superlink", "flower-superlink", "--isolation", "process", "--host", _HOST, "--port", str(_PORT))
    is_healthy = network.command([sys.executable, "-I", "-S", "-c", _HEALTH])
    _wait_for(
        lambda: subprocess.run(is_healthy, check=False, capture_output=True).returncode == 0,
        [link],
        "the SuperLink does not answer",
    )
    runner = start("superexec", "flower-superexec", "--runtime-api-address", address)
    nodes = []
    for k in range(supernodes):
        listens = ("--host", _HOST, "--port", str(_PORT + 1 + k))
        config = f"partition-id={k} num-partitions={supernodes}"
        nodes.append(
            start(f"supernode-{k}", "flower-supernode", "--superlink", address, *listens, "--node-config", config)
        )
    servers = [link, runner, *nodes]
    _wait_for(
        lambda: all("SuperNode ID:" in n.said() for n in nodes), servers, "not every SuperNode reached the SuperLink"
    )
    return servers


def _wait_for(ready: Callable[[], bool], servers: Sequence[Started], complaint: str) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not ready():
        for server in servers:
            _check_alive(server)
        if time.monotonic() > deadline:
            raise RunError(f"{complaint} after {_PATIENCE:.0f} s; see {servers[0].log.parent}")
        time.sleep(_PAUSE)


def _follow(
    processes: Processes,
    servers: Sequence[Started],
    relay: Relay,
    flwr: Sequence[str],
    connection: str,
    app: Path,
) -> None:
    """Submit `app` by the command `flwr`, say what it says, and return when it is done."""
    answer = _json(processes.call("submit", [*flwr, "run", str(app), connection, "--format", "json"], _PATIENCE))
    if not answer.get("success"):
        raise RunError(f"flwr run: {answer.get('error-message', answer)}")
    run = str(answer["run-id"])
    try:
        _wait_for_end(processes, servers, relay, flwr, connection, run)
    except BaseException:
        if not servers:  # the SuperLink of somebody else goes on; the run shall not, if it has not ended
            with suppress(RunError):
                processes.call("stop", [*flwr, "stop", run, connection], _PATIENCE)
        raise


def _wait_for_end(
    processes: Processes,
    servers: Sequence[Started],
    relay: Relay,
    flwr: Sequence[str],
    connection: str,
    run: str,
) -> None:
    alive = {server.name: server for server in servers}
    answered = time.monotonic()
    while True:
        stream = processes.start("run", [*flwr, "log", run, connection, "--stream"])  # ends with the run
        while not stream.ended:
            relay()
            _check(alive)
            time.sleep(_PAUSE)
        processes.end(stream)
        text = processes.call("status", [*flwr, "ls", connection, "--run-id", run, "--format", "json"], _PATIENCE)
        answer = _json(text)
        if not answer.get("success"):  # the network may come back, and the run goes on meanwhile
            if time.monotonic() > answered + _PATIENCE:
                raise RunError(f"the SuperLink does not answer: {answer.get('error-message', answer)}")
            time.sleep(_BETWEEN_STREAMS)
            continue
        answered = time.monotonic()
        (listed,) = answer["runs"]
        status, why = listed["status"], listed.get("status-details", "N/A")
        relay()
        if status == "finished:completed":
            return
        if status.startswith("finished"):
            hint = "" if servers else "; the SuperLink must see the run folder under the same path"
            raise RunError(relay.error or f"the run ended as '{status}' ({why}); see {stream.log.parent}{hint}")
        time.sleep(_BETWEEN_STREAMS)  # the connection broke, not the run


def _check(alive: dict[str, Started]) -> None:
    """The run ends without its SuperLink, and without its last SuperNode; one SuperNode less is a warning."""
    for name, server in list(alive.items()):
        if not name.startswith("supernode"):
            _check_alive(server)
        elif server.ended:
            del alive[name]
            if not any(other.startswith("supernode") for other in alive):
                _check_alive(server)
            log.warning("%s ended (%s); the run goes on without it", name, server.last_words())


def _check_alive(server: Started) -> None:
    if server.ended:
        raise RunError(f"{server.name} ended ({server.last_words()}); see {server.log}")


def _json(text: str) -> dict[str, Any]:
    """The JSON object that `flwr` printed, after whatever notices it printed before."""
    found = re.search(r"^\{.*\}\s*$", text, re.DOTALL | re.MULTILINE)
    if found is None:
        raise RunError(f"flwr: expected JSON, got '{text.strip()[:200]}'")
    answer: dict[str, Any] = json.loads(found[0])
    return answer


def _beside() -> str:
    return str(Path(sys.executable).parent)
