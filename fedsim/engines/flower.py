"""The Flower engine: a SuperLink and SuperNodes, as on real hosts, here or wherever they run already.

What is submitted is a pointer, an app without code: every host runs the fedsim installed there.
The SuperLink is started with `--isolation process` and a SuperExec beside it, so that no process
leaves the groups that `Processes` ends.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli_w

from fedsim.engines.deployed import Relay, said
from fedsim.engines.processes import Processes, Started, executable, termination_is_interruption
from fedsim.errors import RunError

log = logging.getLogger(__name__)

_LOCAL = "fedsim"
_HOST = "127.0.0.1"
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


def launch(
    settings: Mapping[str, Any], folder: Path, *, supernodes: int, port: int | None = None, address: str | None = None
) -> None:
    """Run the app on SuperNodes of this machine, or on the SuperLink that is called `address`.

    Args:
        settings: the run_config: `experiment`, `out`, `resume`.
        folder: the run folder; logs go to `deployment` in it.
        supernodes: how many to start.
        port: of the SuperLink, on loopback; a free one by default.
        address: a connection in Flower's own configuration, `config.toml` in FLWR_HOME. Then nothing
            is started, and the SuperLink must see the run folder under the same path.

    Raises:
        InstallationError: Flower's commands are not installed.
        RunError: the deployment could not be started, or the run failed.
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
            servers = [] if address else _start(processes, home, supernodes, port)
            write_pointer(home / "app", settings)
            _follow(processes, servers, relay, address or _LOCAL, home / "app")
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


def _start(processes: Processes, home: Path, supernodes: int, port: int | None) -> list[Started]:
    """A SuperLink with its SuperExec and, once it answers, the SuperNodes, all on loopback."""
    if port is not None and not _is_free(port):
        raise RunError(f"federation.port: {port} on {_HOST} is in use; choose another, or leave it out for a free one")
    free = _free_ports(supernodes + 1)
    port = port or free[-1]
    address = f"{_HOST}:{port}"
    connection = {"superlink": {"default": _LOCAL, _LOCAL: {"address": address, "insecure": True}}}
    (home / "config.toml").write_text(tomli_w.dumps(connection), encoding="utf-8")
    log.info("starting a SuperLink on %s and %d SuperNodes", address, supernodes)
    link = processes.start(
        "superlink",
        [executable("flower-superlink"), "--insecure", "--isolation", "process", "--host", _HOST, "--port", str(port)],
    )
    _wait_for(lambda: _healthy(f"http://{address}/health"), [link], "the SuperLink does not answer")
    runner = processes.start(
        "superexec", [executable("flower-superexec"), "--insecure", "--runtime-api-address", address]
    )
    node = [executable("flower-supernode"), "--insecure", "--superlink", address, "--host", _HOST]
    nodes = [
        processes.start(
            f"supernode-{k}",
            [*node, "--port", str(free[k]), "--node-config", f"partition-id={k} num-partitions={supernodes}"],
        )
        for k in range(supernodes)
    ]
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


def _follow(processes: Processes, servers: Sequence[Started], relay: Relay, connection: str, app: Path) -> None:
    """Submit `app`, say what it says, and return when it is done."""
    flwr = executable("flwr")
    answer = _json(processes.call("submit", [flwr, "run", str(app), connection, "--format", "json"], _PATIENCE))
    if not answer.get("success"):
        raise RunError(f"flwr run: {answer.get('error-message', answer)}")
    run = str(answer["run-id"])
    try:
        _wait_for_end(processes, servers, relay, connection, run)
    except BaseException:
        if not servers:  # the SuperLink of somebody else goes on; the run shall not, if it has not ended
            with suppress(RunError):
                processes.call("stop", [flwr, "stop", run, connection], _PATIENCE)
        raise


def _wait_for_end(processes: Processes, servers: Sequence[Started], relay: Relay, connection: str, run: str) -> None:
    flwr = executable("flwr")
    alive = {server.name: server for server in servers}
    answered = time.monotonic()
    while True:
        stream = processes.start("run", [flwr, "log", run, connection, "--stream"])  # ends with the run
        while not stream.ended:
            relay()
            _check(alive)
            time.sleep(_PAUSE)
        processes.end(stream)
        text = processes.call("status", [flwr, "ls", connection, "--run-id", run, "--format", "json"], _PATIENCE)
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


def _healthy(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=2):
            return True
    except OSError:
        return False


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError:
            return False
    return True


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind((_HOST, 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def _beside() -> str:
    return str(Path(sys.executable).parent)
