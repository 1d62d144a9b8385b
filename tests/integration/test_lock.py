"""One process at a time writes into a run folder, and a killed one leaves nothing that blocks."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import fedsim
from fedsim.base.errors import ConfigError, RunError
from fedsim.federation import lock
from fedsim.federation.integrity import compare_with_manifest
from fedsim.federation.open_run import OpenRun
from tests.support.commands import Call
from tests.support.experiments import make_tiny_config, run_serial

HOLDER = """
import os, subprocess, sys, time
from pathlib import Path
from fedsim.federation.lock import lock_folder
with lock_folder(Path(sys.argv[1])):
    started = subprocess.Popen(["sleep", "30"])
    forked = os.fork()
    if not forked:
        time.sleep(30)
        os._exit(0)
    print(started.pid, forked, flush=True)
    time.sleep(30)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Any:
    """A process that holds `run`, and two that it started: by fork, and as another program."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    children = [int(word) for word in process.stdout.readline().split()]
    yield process
    process.kill()
    process.wait()
    for child in children:
        os.kill(child, signal.SIGKILL)


def test_a_second_process_is_told_who_holds_the_folder(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    sentence = rf"run: process {holder.pid} on '.*' is writing to it; wait until"
    with pytest.raises(ConfigError, match=sentence) as caught, lock.lock_folder(run):
        pass
    assert "\n" not in str(caught.value)
    assert f"process {holder.pid}" in lock.describe_lock_holder(run)


def test_a_killed_holder_blocks_nobody_though_its_children_live(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "run" / "lock").is_file()
    deadline = time.monotonic() + 10  # a child lets go when it first runs, which may be after its parent's end
    while lock.describe_lock_holder(tmp_path / "run") and time.monotonic() < deadline:
        time.sleep(0.05)
    with lock.lock_folder(tmp_path / "run"):
        pass
    assert not (tmp_path / "run" / "lock").exists()


def test_resuming_a_run_that_is_held_touches_nothing(tmp_path: Path) -> None:
    run = run_serial(make_tiny_config(), tmp_path / "run")
    (run.path / ".metrics.csv.0123.tmp").write_text("half written by the other")
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    held = os.open(run.path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match="another process is writing to it"):
        run_serial(make_tiny_config(federation={"rounds": 3}), run.path, resume=True)
    os.close(held)
    (run.path / "lock").unlink()
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before


def test_a_second_opening_by_the_same_process_is_refused_in_one_sentence(tmp_path: Path) -> None:
    run, other = OpenRun(tmp_path / "run"), OpenRun(tmp_path / "run")
    with run.hold_lock(), run.hold_lock():  # the same value may
        sentence = "run: this process is writing to it already; wait until that has ended"
        with pytest.raises(ConfigError, match=sentence) as caught, other.hold_lock():
            pass
        assert "\n" not in str(caught.value)
        assert (tmp_path / "run" / "lock").is_file()
    assert not (tmp_path / "run").exists(), "an empty folder that was made for the lock alone goes again"
    with other.hold_lock():
        pass


def test_an_attack_from_within_a_run_is_refused_and_the_run_goes_on(tmp_path: Path) -> None:
    refused = list[str]()

    def attack_meanwhile(what: str, done: int, total: int) -> None:
        if (tmp_path / "run" / "transcript").is_dir() and not refused:
            with pytest.raises(ConfigError, match="this process is writing to it already") as caught:
                fedsim.open(tmp_path / "run").report()
            refused.append(str(caught.value))

    made = fedsim.run(make_tiny_config(), tmp_path / "run", progress=attack_meanwhile)
    assert len(refused) == 1
    assert compare_with_manifest(OpenRun(made.path)).differences == []


def test_a_full_disk_is_not_blamed_on_permissions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(lock, "_acquire_lock", fail)
    with pytest.raises(RunError, match=r"No space left on device\); make room, or copy it"), lock.lock_folder(tmp_path):
        pass


def test_what_is_raised_within_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), lock.lock_folder(tmp_path, "us"), lock.lock_folder(tmp_path, "us"):
        (tmp_path / "none").read_text()
    with lock.lock_folder(tmp_path):
        pass


def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with lock.lock_folder(tmp_path):
        assert "its file system knows no locks (No locks available)" in caplog.text


@pytest.mark.parametrize("command", ["attack", "report", "run --resume", "geometry", "expose"])
def test_every_command_that_writes_asks_for_the_lock(command: str, tmp_path: Path, call: Call) -> None:
    run = run_serial(make_tiny_config(attack=[{"name": "shared-model"}]), tmp_path / "run")
    held = os.open(run.path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    started = time.monotonic()
    done = call(*command.split(), run.path)
    os.close(held)
    assert done.returncode == 2
    assert "is writing to it; wait until it has ended" in done.stderr
    assert time.monotonic() - started < 20


def test_what_a_killed_command_left_half_written_goes_with_the_next_one(tmp_path: Path) -> None:
    run = run_serial(make_tiny_config(), tmp_path / "run")
    (finding_folder := run.findings / "sme").mkdir(parents=True)
    leftovers = [folder / f".half.{'0' * 12}.tmp" for folder in (run.path, run.transcript, finding_folder)]
    for leftover in leftovers:
        leftover.write_text("half written")
    with OpenRun(run.path).hold_lock():
        assert not any(leftover.exists() for leftover in leftovers)
    # An app that records without the lock may be at work.
    run.experiment.unlink()
    leftovers[1].write_text("half written")
    with OpenRun(run.path).hold_lock():
        assert leftovers[1].exists()
