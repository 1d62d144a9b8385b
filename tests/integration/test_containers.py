"""The container files: valid, and every service's command works, as a process on loopback instead of a container."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from graphlib import TopologicalSorter
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import yaml

from fedsim.federation.engines.processes import CommandProcess, Processes
from fedsim.federation.run_folder import RunFolder
from fedsim.recording.transcript import Transcript
from tests.support.experiments import make_tiny_config, run_serial
from tests.support.processes import wait_until

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
PLAIN = {"superlink", "supernode-1", "supernode-2", "submit"}
SECURE = {"superlink-tls", "supernode-1-tls", "supernode-2-tls", "register-tls", "submit-tls"}


def instructions(name: str) -> list[list[str]]:
    return [line.split()[1:] for line in DOCKERFILE.splitlines() if line.startswith(f"{name} ")]


def image_environment() -> dict[str, str]:
    return {key: value for words in instructions("ENV") for key, _, value in (word.partition("=") for word in words)}


# As files.


def test_the_compose_file_follows_the_specification(tmp_path: Path) -> None:
    (tmp_path / "wrong.yml").write_text("services: {a: {image: b, healthcheck: {tests: []}}}")
    files = [str(ROOT / "docker-compose.yml"), str(tmp_path / "wrong.yml")]
    command = [sys.executable, "-m", "check_jsonschema", "-o", "json", "--builtin-schema", "vendor.compose-spec"]
    checked = subprocess.run([*command, *files], capture_output=True, text=True, check=False)
    assert checked.returncode == 1, checked.stderr
    report = json.loads(checked.stdout)
    assert {error["filename"] for error in report["errors"]} == {files[1]}
    assert report["parse_errors"] == []


def test_every_service_belongs_to_one_topology_and_waits_for_its_own() -> None:
    assert set(SERVICES) == PLAIN | SECURE
    for topology in (PLAIN, SECURE):
        for name in topology:
            service = SERVICES[name]
            assert service["image"] == "fedsim:local"
            assert set(service.get("depends_on", {})) <= topology
            # Who is started by name, and then its dependencies, share a profile.
            assert all(
                set(service["profiles"]) <= set(SERVICES[other]["profiles"]) for other in service.get("depends_on", {})
            )


def test_only_the_superlink_with_tls_publishes_its_port_and_that_on_loopback() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published == {"superlink-tls": ["${FEDSIM_PUBLISH:-127.0.0.1}:8000:8000"]}
    assert instructions("EXPOSE") == [["8000"]]


def test_the_plain_services_share_a_loopback_that_nobody_else_reaches() -> None:
    modes = {name: SERVICES[name]["network_mode"] for name in PLAIN}
    assert modes.pop("superlink") == "none"
    assert set(modes.values()) == {"service:superlink"}
    # They listen side by side, so on different ports, each of which its health check asks.
    nodes = [SERVICES[name] for name in sorted(PLAIN) if name.startswith("supernode")]
    ports = [word.removeprefix("--port=") for node in nodes for word in node["command"] if word.startswith("--port=")]
    assert len(set(ports)) == len(nodes)
    assert all(f":{port}/" in " ".join(node["healthcheck"]["test"]) for node, port in zip(nodes, ports, strict=True))


def test_services_that_last_outlive_a_restart() -> None:
    lasting = {name for name, service in SERVICES.items() if service.get("restart") == "unless-stopped"}
    assert lasting == {name for name in SERVICES if name.startswith("super")}
    for name in ("superlink", "superlink-tls"):
        assert "--database=/state/superlink.db" in SERVICES[name]["command"]
        assert any(volume.endswith(":/state") for volume in mounted(SERVICES[name]))
    # Whoever shares the loopback of a container loses it when that restarts.
    sharing = [SERVICES[name] for name in lasting if SERVICES[name].get("network_mode") == "service:superlink"]
    assert sharing
    assert all(service["depends_on"]["superlink"]["restart"] for service in sharing)


def test_the_image_holds_what_it_copies_and_what_services_name() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    sources = {word for words in instructions("COPY") for word in words[:-1] if not word.startswith("--")}
    for source in sources:
        assert (ROOT / source).exists()
        assert f"!{source}" in ignored
    commands = {entry.name for entry in entry_points(group="console_scripts")}
    for service in SERVICES.values():
        first, *others = service["command"]
        assert first in commands | {"sh"}
        assert all(word in sources for word in others if word.startswith("deploy/"))
    assert "examples/quickstart.toml" in sources


def test_nobody_is_root_and_the_shared_folders_are_that_users() -> None:
    assert instructions("USER") == [["fedsim"]]
    assert "install -d -o fedsim -g fedsim /runs /state /data" in DOCKERFILE
    mounts = {volume.split(":")[1] for service in SERVICES.values() for volume in mounted(service)}
    assert {"/runs", "/data"} <= mounts
    assert all(mount.startswith(("/runs", "/state", "/data", "/certificates/")) for mount in mounts)


def mounted(service: Mapping[str, Any]) -> list[str]:
    return [interpolate(volume, {}) for volume in service.get("volumes", [])]


def test_connections_name_services_and_the_supernodes_data_is_where_the_image_looks() -> None:
    connections = tomllib.loads((ROOT / "deploy" / "connections.toml").read_text())["superlink"]
    assert connections["compose"] == {"address": "127.0.0.1:8000", "insecure": True}
    assert connections["compose-tls"]["address"] == "superlink-tls:8000"
    environment = image_environment()
    assert environment["FEDSIM_DATA"] == "/data"
    assert ["--chown=fedsim:fedsim", "deploy/connections.toml", environment["FLWR_HOME"] + "/config.toml"] in (
        instructions("COPY")
    )


def test_the_pinned_torch_is_the_one_that_the_image_installs() -> None:
    pinned = (ROOT / "constraints.txt").read_text()
    assert "grep -E '^(torch|torchvision)==' constraints.txt" in DOCKERFILE
    assert re.search(r"^torch==", pinned, re.MULTILINE)
    assert re.search(r"^torchvision==", pinned, re.MULTILINE)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for tool in ("openssl", "ssh-keygen"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    folder = tmp_path_factory.mktemp("deploy") / "certificates"
    script = ROOT / "deploy" / "make-certificates.sh"
    subprocess.run(["sh", script, folder, "3", "fl.example.org", "10.0.0.5"], check=True, capture_output=True)
    return folder


@pytest.mark.thorough
def test_certificates_are_where_services_mount_them_and_keys_are_private(certificates: Path) -> None:
    mounts = [volume.split(":")[0] for service in SERVICES.values() for volume in mounted(service)]
    for mount in mounts:
        if mount.startswith("./deploy/certificates/"):
            assert (certificates / mount.removeprefix("./deploy/certificates/")).exists()
    assert all((file.stat().st_mode & 0o077) == 0 for file in certificates.rglob("*key"))
    shown = subprocess.run(
        ["openssl", "x509", "-in", certificates / "superlink" / "superlink.crt", "-noout", "-text"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in ("DNS:superlink-tls", "IP Address:127.0.0.1", "DNS:fl.example.org", "IP Address:10.0.0.5"):
        assert name in shown


# As processes.


def interpolate(text: str, variables: Mapping[str, str]) -> str:
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: variables.get(found[1], found[2]), text)


class Loopback:
    """Plays Compose for some services: hosts become 127.0.0.1, ports free ones, mounted folders temporary ones."""

    def __init__(self, folder: Path, certificates: Path | None, variables: Mapping[str, str]) -> None:
        self.runs, self.logs = folder / "runs", folder / "logs"
        home, state = folder / "home", folder / "state"
        for new in (self.runs, self.logs, home, state):
            new.mkdir()
        self._variables = variables
        self._port = free_port()
        self._paths = {"/runs": str(self.runs), "/state": str(state), "/certificates": str(certificates)}
        (home / "config.toml").write_text(self.here((ROOT / "deploy" / "connections.toml").read_text(), self._port))
        own = {"FLWR_HOME": str(home), "FEDSIM_DATA": os.environ.get("FEDSIM_DATA", ""), "COLUMNS": "400"}
        beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self.environment = {**os.environ, "FLWR_LOG_LEVEL": "INFO", **image_environment(), **own, "PATH": beside}

    def here(self, text: str, runtime_port: int) -> str:
        text = interpolate(text, self._variables)
        for pattern, new in {
            r"superlink-tls:8000|127\.0\.0\.1:8000": f"127.0.0.1:{self._port}",
            r"\b8000\b": str(self._port),
            r"\b909[45]\b": str(runtime_port),
            r"0\.0\.0\.0": "127.0.0.1",
        }.items():
            text = re.sub(pattern, new, text)
        for old, new in self._paths.items():
            text = re.sub(rf"{old}(?=/|$)", new, text)
        return text

    def up(self, group: Processes, target: str) -> dict[str, CommandProcess]:
        """Start `target` after all that it depends on, as far as it says."""
        needed: dict[str, dict[str, str]] = {}

        def need(name: str) -> None:
            depends = SERVICES[name].get("depends_on", {})
            needed[name] = {other: how["condition"] for other, how in depends.items()}
            for other in depends:
                need(other)

        need(target)
        started: dict[str, CommandProcess] = {}
        tests: dict[str, list[str]] = {}
        for name in TopologicalSorter({name: set(others) for name, others in needed.items()}).static_order():
            for other, condition in needed[name].items():
                if condition == "service_healthy":
                    wait_until(lambda other=other: self._passes(tests[other]) or started[other].has_ended, 240)
                    assert not started[other].has_ended, started[other].read_output()
                else:
                    assert condition == "service_completed_successfully"
                    wait_until(lambda other=other: started[other].has_ended, 240)
                    assert started[other].exit_code == 0, started[other].read_output()
            runtime_port = free_port()
            command = [self.here(word, runtime_port) for word in SERVICES[name]["command"]]
            kind, *test = SERVICES[name].get("healthcheck", {}).get("test", ["CMD"])
            assert kind == "CMD"
            tests[name] = [self.here(word, runtime_port) for word in test]
            started[name] = group.start(name, command)
        return started

    def _passes(self, test: list[str]) -> bool:
        return subprocess.run(test, env=self.environment, check=False, capture_output=True).returncode == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
        return number


@pytest.fixture
def tiny_file(tmp_path: Path) -> Path:
    tables = make_tiny_config(federation={"timeout": 120.0}).model_dump(mode="json", exclude_none=True)
    file = tmp_path / "tiny.toml"
    file.write_text(tomli_w.dumps({key: value for key, value in tables.items() if value != []}))
    return file


def assert_submitted(world: Loopback, submit: CommandProcess, reference: RunFolder) -> None:
    wait_until(lambda: submit.has_ended, 240)
    assert submit.exit_code == 0, submit.read_output()
    assert "round 2/2: accuracy" in submit.read_output()
    assert (world.runs / "tiny" / "report.html").is_file()
    assert Transcript(world.runs / "tiny").hash() == Transcript(reference.path).hash()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_plain_services_run_an_experiment(tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    reference = run_serial(make_tiny_config(), tmp_path / "serial")
    world = Loopback(tmp_path, None, {"FEDSIM_EXPERIMENT": str(tiny_file), "FEDSIM_RUN": "tiny"})
    with Processes(world.logs, world.environment) as group:
        services = world.up(group, "submit")
        assert set(services) == PLAIN
        assert_submitted(world, services["submit"], reference)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tls_services_run_an_experiment_and_refuse_who_is_not_registered(
    tiny_file: Path, certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    reference = run_serial(make_tiny_config(), tmp_path / "serial")
    world = Loopback(tmp_path, certificates, {"FEDSIM_EXPERIMENT": str(tiny_file), "FEDSIM_RUN": "tiny"})
    with Processes(world.logs, world.environment) as group:
        services = world.up(group, "submit-tls")
        assert set(services) == SECURE
        for name, key in {
            "stranger": "--auth-supernode-private-key=/certificates/supernode-3/key",
            "nobody": "",
        }.items():
            words = [word for word in SERVICES["supernode-1-tls"]["command"] if "private-key" not in word]
            command = [world.here(word, port) for port in [free_port()] for word in [*words, *filter(None, [key])]]
            refused = group.start(name, command)
            wait_until(lambda refused=refused: refused.has_ended, 240)
            assert refused.exit_code != 0
            assert "SuperNode ID" not in refused.read_output()
            assert "Failed to" in refused.last_error(), refused.read_output()
        assert_submitted(world, services["submit-tls"], reference)
