"""The engine 'flower': the same bytes from SuperNodes, errors in one sentence, and no process left behind."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from flwr.app import Context, RecordDict

from clients.app import app as client_app
from fedsim.base.errors import InstallationError, RunError
from fedsim.base.progress import listen_to_progress
from fedsim.federation.config import Config
from fedsim.federation.engines import deployed, flower
from fedsim.federation.engines.deployed import ServerAppRelay, serverapp_log
from fedsim.federation.engines.processes import Processes, find_executable
from fedsim.federation.engines.serial import InProcessGrid
from fedsim.recording.transcript import Transcript
from tests.support.experiments import make_tiny_config, run_serial
from tests.support.processes import wait_until
from tests.support.runs import assert_same_runs

Process = tuple[int, str]

CLI = "from fedsim.cli.main import main; main()"
SETTINGS: dict[str, Any] = {"experiment": "{}", "out": "out", "resume": False}


def processes() -> dict[int, tuple[int, str, str]]:
    """Parent, start time and arguments by process id; without those that ended and nobody waited for."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, parent, *rest = (folder / "stat").read_text().rpartition(")")[2].split()
                arguments = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if state not in "ZX":
                found[int(folder.name)] = int(parent), rest[17], arguments
    return found


def offspring(pid: int) -> dict[Process, str]:
    """Arguments of everything that `pid` started, and what that started, and so on."""
    table = processes()
    found: dict[Process, str] = {}
    generation = {pid}
    while generation:
        generation = {child for child, (parent, _, _) in table.items() if parent in generation}
        found |= {(child, table[child][1]): table[child][2] for child in generation}
    return found


def alive(known: dict[Process, str]) -> dict[Process, str]:
    table = processes()
    return {one: what for one, what in known.items() if one[0] in table and table[one[0]][1] == one[1]}


# Without Flower's commands.


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path / "logs"


def test_a_pointer_names_components_and_holds_no_code(tmp_path: Path) -> None:
    settings = {"experiment": '{"data": "\\"quoted\\""}', "out": "/runs/x", "resume": True}
    flower.write_pointer(tmp_path / "app", settings)
    assert [path.name for path in (tmp_path / "app").rglob("*")] == ["pyproject.toml"]
    app = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert app["components"] == {"serverapp": "fedsim.federation.engines.deployed:app", "clientapp": "clients.app:app"}
    assert app["config"] == settings


def test_missing_commands_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InstallationError, match=r"^'flwr' is not installed beside .*pip install"):
        flower.launch(SETTINGS, tmp_path / "run", supernodes=2)


def stand_ins(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Put shell scripts in the place of Flower's commands."""
    for name, text in scripts.items():
        path = folder / ("flwr" if name == "flwr" else f"flower-{name}")
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    monkeypatch.setattr(flower, "find_executable", lambda name: str(folder / name))


def test_a_superlink_that_dies_at_start_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins(tmp_path, monkeypatch, superlink="echo '\033[91mERROR\033[0m: no room'; echo on the disk; exit 3")
    before = offspring(os.getpid())
    with pytest.raises(RunError, match=r"^superlink ended \(ERROR: no room on the disk\); see .*superlink\.log$"):
        flower.launch(SETTINGS, tmp_path / "run", supernodes=2)
    assert offspring(os.getpid()) == before


@pytest.mark.thorough
def test_a_supernode_that_dies_at_start_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "health").write_text("ok")
    serve = f'while [ "$1" != --port ]; do shift; done; exec {sys.executable} -m http.server --bind 127.0.0.1 "$2"'
    stand_ins(
        tmp_path,
        monkeypatch,
        superlink=f"cd {tmp_path}; {serve}",
        superexec="sleep 60",
        supernode="case \"$*\" in *partition-id=1*) echo bad key; exit 1;; esac; echo 'SuperNode ID: 7'; sleep 60",
    )
    before = offspring(os.getpid())
    with pytest.raises(RunError, match=r"^supernode-1 ended \(bad key\); see"):
        flower.launch(SETTINGS, tmp_path / "run", supernodes=2)
    assert offspring(os.getpid()) == before
    assert not (tmp_path / "run" / "deployment" / "flower-home").exists()


FLWR = """
case $1 in
  run) test "$3" = elsewhere || exit 9; echo 'a notice'; echo '{"success": %s, "run-id": "7", "error-message": "no"}' ;;
  log) sleep 0.1; %s ;;
  ls) echo '{"success": true, "runs": [{"status": "%s", "status-details": "why not"}]}' ;;
  stop) echo stopped $2 ;;
esac
"""


RUNNING = '{"success": true, "runs": [{"status": "running", "status-details": "N/A"}]}'


def elsewhere(folder: Path) -> None:
    flower.launch(SETTINGS, folder, supernodes=2, address="elsewhere")


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (
            "finished:failed",
            r"^the run ended as 'finished:failed' \(why not\); see .*; the SuperLink must see the run folder under",
        ),
        pytest.param("finished:stopped", r"^the run ended as 'finished:stopped'", marks=pytest.mark.thorough),
    ],
)
def test_only_the_status_says_whether_a_run_failed(
    status: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_ins(tmp_path, monkeypatch, flwr=FLWR % ("true", "", status))
    with pytest.raises(RunError, match=expected):
        elsewhere(tmp_path / "run")


def test_a_run_that_was_not_started_did_not_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins(tmp_path, monkeypatch, flwr=FLWR % ("true", "", "finished:completed"))
    elsewhere(tmp_path / "run")
    stand_ins(tmp_path, monkeypatch, flwr=FLWR % ("false", "", "finished:completed"))
    with pytest.raises(RunError, match=r"^flwr run: no$"):
        elsewhere(tmp_path / "run")


@pytest.mark.parametrize(
    "hiccup", ['{"success": false, "error-message": "no route"}', pytest.param(RUNNING, marks=pytest.mark.thorough)]
)
def test_a_connection_that_breaks_does_not_end_the_run(
    hiccup: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flower, "_BETWEEN_STREAMS", 0.1)
    once = f"if mkdir {tmp_path}/asked 2>/dev/null; then echo '{hiccup}'; exit; fi"
    script = (FLWR % ("true", "", "finished:completed")).replace("  ls) ", f"  ls) {once}; ")
    stand_ins(tmp_path, monkeypatch, flwr=script)
    elsewhere(tmp_path / "run")
    assert (tmp_path / "asked").is_dir()
    assert not (tmp_path / "run" / "deployment" / "stop.log").exists()


def test_a_superlink_that_is_gone_for_good_ends_the_run_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flower, "_BETWEEN_STREAMS", 0.1)
    monkeypatch.setattr(flower, "_PATIENCE", 2.0)  # also for each command, on a busy machine
    script = (FLWR % ("true", "", "")).replace(
        "  ls) ", """  ls) echo '{"success": false, "error-message": "no route"}'; exit; """
    )
    stand_ins(tmp_path, monkeypatch, flwr=script)
    with pytest.raises(RunError, match=r"^the SuperLink does not answer: no route$"):
        elsewhere(tmp_path / "run")


def test_an_interruption_stops_the_run_on_the_superlink_of_somebody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_ins(tmp_path, monkeypatch, flwr=FLWR % ("true", f"kill {os.getpid()}; sleep 60", "running"))
    with pytest.raises(KeyboardInterrupt):
        elsewhere(tmp_path / "run")
    assert (tmp_path / "run" / "deployment" / "stop.log").read_text() == "stopped 7\n"


STUBBORN = "trap '' TERM; sh -c \"trap '' TERM; sleep 100\" & echo started; wait"


def test_a_command_that_ignores_sigterm_is_killed_with_its_children(logs: Path) -> None:
    before = offspring(os.getpid())
    with Processes(logs, os.environ, grace=0.2) as group:
        stubborn = group.start("stubborn", ["sh", "-c", STUBBORN])
        wait_until(
            lambda: "started" in stubborn.read_output() and len(offspring(os.getpid()) | before) >= 4 + len(before)
        )
        known = {one: what for one, what in offspring(os.getpid()).items() if one not in before}
    wait_until(lambda: not alive(known), 5)


def test_a_command_that_ended_leaves_no_children(logs: Path) -> None:
    with Processes(logs, os.environ, grace=0.2) as group:
        short = group.start("short", ["sh", "-c", "sleep 100 & echo $!"])
        wait_until(lambda: short.has_ended)
        child = int(short.read_output())
        assert child in processes()
    wait_until(lambda: child not in processes(), 5)


def test_commands_end_when_their_owner_is_killed_without_warning(logs: Path) -> None:
    code = (
        "import os, pathlib, sys, time; from fedsim.federation.engines.processes import Processes\n"
        "with Processes(pathlib.Path(sys.argv[1]), os.environ) as group:\n"
        "    group.start('stubborn', ['sh', '-c', sys.argv[2]]); time.sleep(100)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, str(logs), STUBBORN])
    wait_until(lambda: len(offspring(owner.pid)) >= 4)
    known = offspring(owner.pid)
    owner.kill()
    owner.wait()
    wait_until(lambda: not alive(known), 5)


def test_a_call_that_fails_is_quoted(logs: Path) -> None:
    with Processes(logs, os.environ) as group:
        assert group.call("good", ["echo", "yes"], 30).strip() == "yes"
        with pytest.raises(RunError, match=r"^bad: failed \(no such thing\); see"):
            group.call("bad", ["sh", "-c", "echo no such thing; exit 1"], 30)
        with pytest.raises(RunError, match=r"^slow: no end after 0 s"):
            group.call("slow", ["sleep", "100"], 0.3)


def test_what_the_serverapp_says_is_said_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = serverapp_log(tmp_path)
    file.parent.mkdir()
    relay = ServerAppRelay(tmp_path)
    relay()
    file.write_text("2026-01-01 10:00:00,000 INFO fedsim.strategies.app: round 1/2: acc")
    with caplog.at_level(logging.INFO, logger="fedsim"):
        relay()
        assert caplog.record_tuples == []
        with file.open("a") as more:
            more.write(
                "uracy 0.5\n2026-01-01 10:00:01,000 ERROR fedsim.federation.engines.deployed: round 2: all "
                "4 clients failed\n"
            )
        relay()
        relay()
    assert caplog.record_tuples == [("fedsim.strategies.app", logging.INFO, "round 1/2: accuracy 0.5")]
    assert relay.error == "round 2: all 4 clients failed"


def test_the_serverapp_leaves_its_last_error_in_the_run_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_tiny_config(federation={"rounds": 2, "straggler_probability": 0.999999, "supernodes": 1})
    serverapp_log(tmp_path).parent.mkdir()
    settings: Any = {"experiment": config.model_dump_json(), "out": str(tmp_path), "resume": False}
    with pytest.raises(RunError, match="all 4 clients failed"):
        deployed.main(InProcessGrid(client_app), Context(1, 1, {}, RecordDict(), settings))
    relay = ServerAppRelay(tmp_path)
    told: list[tuple[str, int, int]] = []
    with listen_to_progress(lambda *step: told.append(step)):
        relay()
    assert re.match(r"round 1: all 4 clients failed \(client \d: straggler", relay.error)
    assert told[:2] == [("rounds", 0, 2), ("clients", 0, 4)]
    assert "round 1, clients 0, 1, 2, 3: straggler: did not return in round 1" in caplog.messages


# With them: some 20 s to the first round and 10 s a round, for each message is a new process.


def start(config: Config, folder: Path, *more: str) -> subprocess.Popen[str]:
    file = folder.parent / f"{folder.name}.toml"
    tables = config.model_dump(mode="json", exclude_none=True)
    file.write_text(tomli_w.dumps({key: value for key, value in tables.items() if value != []}))
    return run_cli("run", str(file), "--out", str(folder), *more)


def run_cli(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", CLI, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "400"},
    )


def watch(driver: subprocess.Popen[str], until: Callable[[], bool], seconds: float = 240) -> dict[Process, str]:
    """Everything that was seen among the driver's offspring until something holds."""
    known: dict[Process, str] = {}
    deadline = time.monotonic() + seconds
    while not until():
        # Of a process that is about to end, the arguments are gone already.
        known |= {one: what for one, what in offspring(driver.pid).items() if what or one not in known}
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return known


def rounds(folder: Path) -> int:
    return len(list((folder / "transcript").glob("round-*")))


def on_flower(config: Config, **keys: Any) -> Config:
    federation = config.federation.model_copy(update={"engine": "flower", "supernodes": 2, "timeout": 120.0, **keys})
    return config.model_copy(update={"federation": federation})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_same_seed_gives_the_same_bytes_from_supernodes(tmp_path: Path) -> None:
    config = make_tiny_config(
        federation={"clients": 5, "straggler_probability": 0.3, "vectorise": False},  # else one SuperNode does it all
        strategy={"name": "fedadam", "fraction_train": 0.8},
        partition={"test_fraction": 0.2},
        model={"dropout": 0.2},
        defense=[{"name": "update-noise", "clip": 1.0, "noise_multiplier": 0.01}],
    )
    folder = tmp_path / "run"
    driver = start(on_flower(config), folder)
    known = watch(driver, lambda: driver.poll() is not None)
    out, err = driver.communicate()
    assert driver.returncode == 0, out + err
    commands = " ".join(known.values())
    for name in ("flower-superlink", "flower-supernode", "flower-superexec", "flwr-serverapp", "flwr-clientapp"):
        assert name in commands, "nothing to see in what is left"
    assert alive(known) == {}
    assert_same_runs(folder, run_serial(config, tmp_path / "serial").path)
    assert "round 2/2: accuracy" in out
    assert "round 2/2: accuracy" in (folder / "log.txt").read_text()
    names = {path.name for path in (folder / "deployment").iterdir()}
    assert names >= {"superlink.log", "superexec.log", "supernode-0.log", "supernode-1.log", "serverapp.log"}
    assert "flower-home" not in names


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_failed_run_is_the_serverapps_sentence(tmp_path: Path) -> None:
    driver = start(on_flower(make_tiny_config(federation={"straggler_probability": 0.999999})), tmp_path / "run")
    known = watch(driver, lambda: driver.poll() is not None)
    _, err = driver.communicate()
    assert driver.returncode == 1
    assert re.match(r"fedsim: round 1: all 4 clients failed \(client \d: straggler: did not return in round 1\)", err)
    assert err.count("\n") == 1
    assert alive(known) == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_goes_on_without_a_supernode_that_was_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    driver = start(on_flower(make_tiny_config(federation={"rounds": 3, "vectorise": False})), folder)
    known = watch(driver, lambda: rounds(folder) >= 1 or driver.poll() is not None)
    killed = {os.getpgid(one[0]) for one, what in alive(known).items() if "partition-id=1 " in what}
    assert len(killed) == 1
    os.killpg(killed.pop(), signal.SIGKILL)
    known |= watch(driver, lambda: driver.poll() is not None)
    out, err = driver.communicate()
    assert driver.returncode == 0, err
    assert "supernode-1 ended" in out
    transcript = Transcript(folder)
    assert transcript.rounds == [1, 2, 3]
    assert len(transcript.clients(1)) == 4
    assert len(transcript.clients(3)) >= 2
    assert len(transcript.clients(3)) + len(transcript.header(3).failures) == 4
    assert alive(known) == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_everything_ends_with_the_driver_however_it_ends_and_the_run_resumes(
    number: signal.Signals, tmp_path: Path
) -> None:
    config = make_tiny_config()
    folder = tmp_path / "run"
    driver = start(on_flower(config), folder)
    known = watch(driver, lambda: rounds(folder) >= 1 or driver.poll() is not None)
    driver.send_signal(number)
    _, err = driver.communicate(timeout=30)
    wait_until(lambda: not alive(known), 5)
    if number != signal.SIGKILL:
        assert driver.returncode == 1
        assert err == "fedsim: interrupted; `fedsim run --resume RUN` continues the run\n"
        assert not (folder / "deployment" / "flower-home").exists()
        return
    resumed = run_cli("run", "--resume", str(folder))
    known = watch(resumed, lambda: resumed.poll() is not None)
    assert resumed.returncode == 0, resumed.communicate()
    assert alive(known) == {}
    assert_same_runs(folder, run_serial(config, tmp_path / "serial").path)


def test_flowers_commands_are_found_beside_this_python() -> None:
    assert Path(find_executable("flower-superlink")).parent == Path(sys.executable).parent
