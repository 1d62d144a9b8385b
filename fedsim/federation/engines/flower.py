"""The Flower engine: a SuperLink and SuperNodes, on this machine or where they run already.

The submitted app is a pointer without code: every host runs the fedsim installed there. The
SuperLink is started with `--isolation process` and its own SuperExec, so that no process leaves the
groups that `Processes` ends. All of them are in a `PrivateNetwork`.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import tomli_w

from fedsim.base.errors import RunError
from fedsim.federation.engines.deployed import ServerAppRelay, serverapp_log
from fedsim.federation.engines.engine import Engine, FederationJob
from fedsim.federation.engines.private_network import PrivateNetwork
from fedsim.federation.engines.processes import CommandProcess, Processes, find_executable, sigterm_as_interrupt
from fedsim.federation.federation_tables import FederationTable

log = logging.getLogger(__name__)

_CONNECTION_NAME = "fedsim"
_COMMANDS = ("flwr", "flower-superlink", "flower-superexec", "flower-supernode")
"""Commands of Flower that run a deployment on this machine."""
# These ports are free in a private network; SuperNode k takes the k-th port after the SuperLink's.
_HOST, _PORT = "127.0.0.1", 8000
_HEALTH_CHECK = f"import urllib.request; urllib.request.urlopen('http://{_HOST}:{_PORT}/health', timeout=2)"
_PATIENCE = 120.0
"""Seconds for a start, and for an answer of the SuperLink."""
_PAUSE = 0.1
_BETWEEN_STREAMS = 2.0
"""Seconds before the log of a run is followed again after its stream has ended."""
_ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05",
    "FLWR_LOG_LEVEL": "INFO",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True, kw_only=True)
class FlowerEngine(Engine):
    """Deploy Flower: a SuperLink, and SuperNodes that play the clients.

    Both start with the run, in a separate network, and end with it, unless `federation.address`
    names a SuperLink that runs already. `federation.supernodes` is the number of SuperNodes.
    """

    splits_rounds: ClassVar[bool] = False  # a SuperNode starts a process for each message

    def check(self, job: FederationJob) -> None:
        """Raise an error where one of Flower's commands is missing, or a GPU of this machine."""
        commands = ["flwr"] if job.config.federation.address else _COMMANDS
        for command in commands:
            find_executable(command)
        if job.config.federation.address is None:
            job.experiment.device()

    def least_nodes(self, federation: FederationTable) -> int:
        """Return the number of SuperNodes."""
        return federation.supernodes

    def carry(self, job: FederationJob) -> None:
        """Run all rounds in a ServerApp that a SuperLink starts."""
        federation = job.config.federation
        launch(job.run_config, job.folder, supernodes=federation.supernodes, address=federation.address)


def launch(settings: Mapping[str, Any], folder: Path, *, supernodes: int, address: str | None = None) -> None:
    """Run the app on SuperNodes of this machine, or on the SuperLink that is called `address`.

    No other user of this machine can reach the processes that are started, and they reach no
    network.

    Args:
        settings: the run_config: `experiment`, `out`, `resume`.
        folder: the run folder; logs go to `deployment` in it.
        supernodes: how many to start.
        address: a connection in Flower's own configuration, `config.toml` in FLWR_HOME. Then
            nothing is started, and the SuperLink must see the run folder under the same path.

    Raises:
        InstallationError: Flower's commands are not installed.
        RunError: the deployment could not be started, this system lets no `PrivateNetwork` be made,
            or the run failed.
    """
    logs = serverapp_log(folder.resolve()).parent
    home = logs / "flower-home"
    with suppress(FileNotFoundError):
        shutil.rmtree(logs)  # of the run that is now resumed
    home.mkdir(parents=True)
    python_folder = str(Path(sys.executable).parent)
    search_path = os.pathsep.join([python_folder, os.environ.get("PATH", "")])
    environment = {**os.environ, **_ENVIRONMENT, "PATH": search_path}
    if address is None:
        environment |= {"FLWR_HOME": str(home), "NO_PROXY": _HOST, "no_proxy": _HOST}
    try:
        with sigterm_as_interrupt(), Processes(logs, environment) as processes:
            relay = ServerAppRelay(folder)
            flwr = [find_executable("flwr")]
            servers: list[CommandProcess] = []
            if address is None:
                network = PrivateNetwork(processes, sys.executable)
                servers = _start_deployment(processes, network, home, supernodes)
                flwr = network.command(flwr)
            write_pointer(home / "app", settings)
            _run_app(processes, servers, relay, flwr, address or _CONNECTION_NAME, home / "app")
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
                    "components": {
                        "serverapp": "fedsim.federation.engines.deployed:app",
                        "clientapp": "clients.app:app",
                    },
                    "config": dict(settings),
                }
            }
        },
    }
    (app / "pyproject.toml").write_text(tomli_w.dumps(tables), encoding="utf-8")


def _start_deployment(
    processes: Processes, network: PrivateNetwork, home: Path, supernodes: int
) -> list[CommandProcess]:
    """Start a SuperLink with its SuperExec and, once it answers, the SuperNodes."""
    address = f"{_HOST}:{_PORT}"
    connection = {"superlink": {"default": _CONNECTION_NAME, _CONNECTION_NAME: {"address": address, "insecure": True}}}
    (home / "config.toml").write_text(tomli_w.dumps(connection), encoding="utf-8")
    log.info("starting a SuperLink and %d SuperNodes, in a separate network", supernodes)

    def start(name: str, command: str, *options: str) -> CommandProcess:
        return processes.start(name, network.command([find_executable(command), "--insecure", *options]))

    superlink = start("superlink", "flower-superlink", "--isolation", "process", "--host", _HOST, "--port", str(_PORT))
    health_check = network.command([sys.executable, "-I", "-S", "-c", _HEALTH_CHECK])
    _wait_until(
        lambda: subprocess.run(health_check, check=False, capture_output=True).returncode == 0,
        [superlink],
        "the SuperLink does not answer",
    )
    superexec = start("superexec", "flower-superexec", "--runtime-api-address", address)
    nodes = []
    for k in range(supernodes):
        listens = ("--host", _HOST, "--port", str(_PORT + 1 + k))
        config = f"partition-id={k} num-partitions={supernodes}"
        node = start(f"supernode-{k}", "flower-supernode", "--superlink", address, *listens, "--node-config", config)
        nodes.append(node)
    servers = [superlink, superexec, *nodes]
    _wait_until(
        lambda: all("SuperNode ID:" in node.read_output() for node in nodes),
        servers,
        "not every SuperNode reached the SuperLink",
    )
    return servers


def _wait_until(is_ready: Callable[[], bool], servers: Sequence[CommandProcess], complaint: str) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not is_ready():
        for server in servers:
            _check_alive(server)
        if time.monotonic() > deadline:
            raise RunError(f"{complaint} after {_PATIENCE:.0f} s; see {servers[0].log.parent}")
        time.sleep(_PAUSE)


def _run_app(
    processes: Processes,
    servers: Sequence[CommandProcess],
    relay: ServerAppRelay,
    flwr: Sequence[str],
    connection: str,
    app: Path,
) -> None:
    """Submit `app` by the command `flwr`, relay its log lines, and return when it has ended."""
    output = processes.call("submit", [*flwr, "run", str(app), connection, "--format", "json"], _PATIENCE)
    answer = _parse_json(output)
    if not answer.get("success"):
        raise RunError(f"flwr run: {answer.get('error-message', answer)}")
    run = str(answer["run-id"])
    try:
        _wait_for_end(processes, servers, relay, flwr, connection, run)
    except BaseException:
        if not servers:  # a SuperLink that we did not start goes on, and would finish the run
            with suppress(RunError):
                processes.call("stop", [*flwr, "stop", run, connection], _PATIENCE)
        raise


def _wait_for_end(
    processes: Processes,
    servers: Sequence[CommandProcess],
    relay: ServerAppRelay,
    flwr: Sequence[str],
    connection: str,
    run: str,
) -> None:
    alive = {server.name: server for server in servers}
    last_answer = time.monotonic()
    while True:
        # Follow the log stream, which ends with the run or with the connection.
        stream = processes.start("run", [*flwr, "log", run, connection, "--stream"])
        while not stream.has_ended:
            relay()
            _check_servers(alive)
            time.sleep(_PAUSE)
        processes.end(stream)

        # Ask which of the two has ended.
        output = processes.call("status", [*flwr, "ls", connection, "--run-id", run, "--format", "json"], _PATIENCE)
        answer = _parse_json(output)
        if not answer.get("success"):  # the network may come back, and the run goes on meanwhile
            if time.monotonic() > last_answer + _PATIENCE:
                raise RunError(f"the SuperLink does not answer: {answer.get('error-message', answer)}")
            time.sleep(_BETWEEN_STREAMS)
            continue
        last_answer = time.monotonic()
        (entry,) = answer["runs"]
        status, details = entry["status"], entry.get("status-details", "N/A")
        relay()
        if status == "finished:completed":
            return
        if status.startswith("finished"):
            hint = "" if servers else "; the SuperLink must see the run folder under the same path"
            raise RunError(relay.error or f"the run ended as '{status}' ({details}); see {stream.log.parent}{hint}")
        time.sleep(_BETWEEN_STREAMS)


def _check_servers(alive: dict[str, CommandProcess]) -> None:
    """Drop SuperNodes that have ended from `alive`, with a warning."""
    for name, server in list(alive.items()):
        if not name.startswith("supernode"):
            _check_alive(server)
        elif server.has_ended:
            del alive[name]
            if not any(name.startswith("supernode") for name in alive):
                _check_alive(server)
            log.warning("%s ended (%s); the run goes on without it", name, server.last_error())


def _check_alive(server: CommandProcess) -> None:
    if server.has_ended:
        raise RunError(f"{server.name} ended ({server.last_error()}); see {server.log}")


def _parse_json(output: str) -> dict[str, Any]:
    """Return the JSON object at the end of the output of `flwr`, which may print notices before."""
    match = re.search(r"^\{.*\}\s*$", output, re.DOTALL | re.MULTILINE)
    if match is None:
        raise RunError(f"flwr: expected JSON, got '{output.strip()[:200]}'")
    answer: dict[str, Any] = json.loads(match[0])
    return answer
