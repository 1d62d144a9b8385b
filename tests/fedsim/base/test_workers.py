"""Processes beside this one: each item fails alone, and nothing outlives who started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import fedsim.base.workers
from fedsim.base.errors import AttackCrash, DataError
from fedsim.base.worker_messages import (
    ErrorMessage,
    LogMessage,
    Message,
    ProgressMessage,
    ResultMessage,
    decode_message,
    encode_message,
)
from fedsim.base.workers import Worker, background_worker, cause_of_death, run_in_processes
from tests.support.processes import find_descendants, is_alive

pytestmark = pytest.mark.usefixtures("fresh_interpreters")

WORK = """
import ctypes, logging, os, signal, sys, time
from contextlib import contextmanager
from fedsim.base.errors import DataError

class Theirs(Exception):
    def __init__(self, one, two):
        super().__init__(one)

def work(item, progress):
    folder, _, what = item.partition("|")
    progress(1, 2, {"objective": 0.5})
    with open(f"{folder}/{what}-{os.getpid()}", "w"):
        pass
    if what.startswith("hangs"):
        time.sleep(600)
    if what == "ignores SIGTERM":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    if what == "os._exit":
        os._exit(7)
    if what == "sys.exit":
        sys.exit(0)
    if what.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, what))
    if what == "closes":
        os.closerange(3, 1000)
        time.sleep(600)
    if what.startswith("warns"):
        log = logging.getLogger("fedsim.adversaries.theirs")
        log.info("nobody asked")
        log.warning("%s of %d%%", what, 5)
    if what == "logs a crash":
        try:
            raise KeyError("of theirs")
        except KeyError:
            logging.getLogger("fedsim.theirs").exception("crashed")
    if what == "returns an object":
        return Theirs
    if what == "theirs":
        raise Theirs("first line\\nsecond", 2)
    if what == "sentence":
        raise DataError("a: sentence")

@contextmanager
def prepare(refuse=False):
    if refuse:
        sys.exit("no")
    yield work
"""
SCRIPT = """
import sys
from fedsim.base.workers import run_in_processes
from work_of_strangers import prepare

print("started", flush=True)
for _ in run_in_processes([f"{sys.argv[1]}|{item}" for item in sys.argv[2:]], 2, prepare, (), lambda *_: None):
    pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where items leave a file named after them and their process; `work_of_strangers` can be imported."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "work_of_strangers.py").write_text(WORK)
    monkeypatch.syspath_prepend(tmp_path / "code")
    sys.modules.pop("work_of_strangers", None)
    (tmp_path / "left").mkdir()
    return tmp_path / "left"


def prepare() -> object:
    import work_of_strangers  # type: ignore[import-not-found]

    return work_of_strangers.prepare


def outcomes(folder: Path, *items: str, workers: int = 1, refuse: bool = False) -> dict[str, BaseException | None]:
    named = [f"{folder}|{item}" for item in items]
    done = run_in_processes(named, workers, prepare(), (refuse,), lambda *_: None)  # type: ignore[arg-type]
    return {item.partition("|")[2]: error for item, error in done}


def pids(folder: Path) -> dict[str, int]:
    return {p.name.rpartition("-")[0]: int(p.name.rpartition("-")[2]) for p in folder.iterdir()}


@pytest.fixture
def gone() -> Callable[[list[int]], bool]:
    """Whether all of these processes end within seconds."""

    def wait_for_end(processes: list[int]) -> bool:
        deadline, left = time.monotonic() + 5, processes
        while left and time.monotonic() < deadline:
            left = [pid for pid in left if is_alive(pid)]
            time.sleep(0.05)
        return not left

    return wait_for_end


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="who is whose child is told by /proc")


def test_a_worker_that_dies_fails_its_own_item_and_says_how(folder: Path) -> None:
    got = outcomes(folder, "os._exit", "fine", "SIGSEGV", "SIGKILL", "also fine")
    assert {item: str(error) if error else "" for item, error in got.items()} == {
        "os._exit": "its process ended itself, with exit code 7",
        "fine": "",
        "SIGSEGV": "its process was killed by SIGSEGV",
        "SIGKILL": "its process was killed by SIGKILL, as the system does when memory runs out; lower "
        "adversary.workers",
        "also fine": "",
    }
    assert isinstance(got["SIGSEGV"], AttackCrash)


def test_other_items_go_on_while_one_dies(folder: Path) -> None:
    got = outcomes(folder, "SIGKILL", "fine", "also fine", workers=2)
    assert [item for item, error in got.items() if error] == ["SIGKILL"]


def test_what_a_stranger_raises_arrives_as_a_sentence_with_its_traceback(folder: Path) -> None:
    """Its class does not survive pickling, and `sys.exit` ends neither the process nor us."""
    got = outcomes(folder, "theirs", "sys.exit", "sentence", "fine")
    assert str(got["theirs"]) == "Theirs: first line"
    assert 'raise Theirs("first line' in str(got["theirs"].__cause__)  # type: ignore[union-attr]
    assert str(got["sys.exit"]).startswith("SystemExit: 0")
    assert isinstance(got["sentence"], DataError)
    assert str(got["sentence"]) == "a: sentence"
    assert got["fine"] is None
    assert len(set(pids(folder).values())) == 1  # all in the same process


def test_what_work_warns_of_is_logged_here_and_nowhere_else(
    folder: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also of the one that works while the round loop goes on."""
    assert set(outcomes(folder, "warns once", "warns twice", workers=2).values()) == {None}
    with background_worker(prepare(), ()) as give:  # type: ignore[arg-type]
        give(f"{folder}|warns as well")
    told = [(record.name, record.levelname, record.getMessage()) for record in caplog.records]
    assert sorted(told) == [
        ("fedsim.adversaries.theirs", "WARNING", f"warns {what} of 5%") for what in ("as well", "once", "twice")
    ]
    assert capfd.readouterr().err == ""


def test_a_traceback_arrives_beside_its_sentence(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert outcomes(folder, "logs a crash") == {"logs a crash": None}
    [record] = caplog.records
    assert (record.levelname, record.getMessage()) == ("ERROR", "crashed")
    assert "KeyError: 'of theirs'" in str(record.exc_text)
    again = LogMessage.from_record(record)  # as where a worker has workers of its own
    assert again.traceback == record.exc_text
    assert decode_message(encode_message(again)) == again


def test_a_result_that_no_message_can_hold_fails_its_item(folder: Path) -> None:
    got = outcomes(folder, "returns an object", "fine")
    assert str(got["returns an object"]).startswith("TypeError: Object of type type is not JSON")
    assert got["fine"] is None


def test_a_worker_that_cannot_begin_fails_its_items(folder: Path) -> None:
    got = outcomes(folder, "fine", "also fine", refuse=True)
    assert [str(error) for error in got.values()] == ["SystemExit: no"] * 2


def test_a_worker_that_closes_its_line_does_not_hold_us_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedsim.base.workers, "_GRACE", 0.2)
    got = outcomes(folder, "closes", "fine")
    assert {item: str(error or "") for item, error in got.items()} == {
        "closes": "its process does not answer any more",
        "fine": "",
    }


@needs_proc
def test_whoever_stops_listening_leaves_no_process_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that ignores what it is asked."""
    monkeypatch.setattr(fedsim.base.workers, "_GRACE", 0.5)
    items = [f"{folder}|{item}" for item in ("fine", "ignores SIGTERM", "hangs")]
    work = run_in_processes(items, 3, prepare(), (), lambda *_: None)  # type: ignore[arg-type]
    next(work)
    while len(pids(folder)) < 3:
        time.sleep(0.01)
    work.close()
    assert not [pid for pid in pids(folder).values() if is_alive(pid)]


@needs_proc
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)]
)
def test_workers_end_when_their_parent_does(
    folder: Path, number: signal.Signals, gone: Callable[[list[int]], bool]
) -> None:
    """However it ends, with them deep in something that never calls back; no other is begun."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), *(f"hangs {n}" for n in range(4))],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        deadline = time.monotonic() + 60
        while len(pids(folder)) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        started = find_descendants(process.pid)
        assert len(pids(folder)) == 2
        assert set(pids(folder).values()) <= set(started)
        process.send_signal(number)
        assert process.wait(10) != 0
        assert gone(started)
        assert set(pids(folder)) == {"hangs 0", "hangs 1"}
    finally:
        process.kill()


def test_a_script_without_a_main_guard_runs_once(folder: Path, tmp_path: Path) -> None:
    """Its workers do not import it."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(folder), "one", "two"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "started\n", "")
    assert set(pids(folder)) == {"one", "two"}


@pytest.mark.thorough
def test_where_the_system_does_not_tell_a_worker_looks_for_itself(gone: Callable[[list[int]], bool]) -> None:
    """In an interpreter that takes itself for one on another system."""
    code = (
        "import subprocess, sys, time\n"
        'child = \'import sys; sys.platform = "other"; '
        "from fedsim.base.worker_process import end_with_parent; import os, time; "
        "end_with_parent(os.getppid()); print(os.getpid(), flush=True); time.sleep(600)'\n"
        "subprocess.Popen([sys.executable, '-c', child])\n"
        "time.sleep(600)\n"
    )
    path = os.pathsep.join(filter(None, sys.path))
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    assert gone([pid])
    parent.stdout.close()


def test_one_beside_does_all_that_it_was_given(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with background_worker(prepare(), ()) as give:  # type: ignore[arg-type]
        for item in ("fine", "sentence", "also fine"):
            give(f"{folder}|{item}")
    assert set(pids(folder)) == {"fine", "sentence", "also fine"}
    assert caplog.messages == ["while the round loop goes on: a: sentence; it is tried again at the end of the run"]


def test_one_beside_that_dies_is_told_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with background_worker(prepare(), ()) as give:  # type: ignore[arg-type]
        give(f"{folder}|os._exit")
        time.sleep(0.1)
        give(f"{folder}|fine")
    assert caplog.messages == [
        "while the round loop goes on: its process ended itself, with exit code 7; "
        "it is tried again at the end of the run"
    ]


@needs_proc
def test_an_error_in_the_round_loop_ends_the_one_beside(folder: Path) -> None:
    def fail() -> None:
        with background_worker(prepare(), ()) as give:  # type: ignore[arg-type]
            give(f"{folder}|hangs")
            while not pids(folder):
                time.sleep(0.01)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not is_alive(pids(folder)["hangs"])


def test_memory_is_named_for_sigkill_alone() -> None:
    codes = {-signal.SIGKILL: True, -signal.SIGSEGV: False, -signal.SIGABRT: False, 0: False, 3: False, -200: False}
    assert {code: "memory" in cause_of_death(code) for code in codes} == codes
    assert cause_of_death(-200) == "was killed by signal 200"


def test_an_item_that_cannot_be_read_over_there_fails_alone(folder: Path) -> None:
    worker = Worker(prepare(), ())  # type: ignore[arg-type]
    worker._send(b"no pickle")
    worker.submit(f"{folder}|fine")
    told: list[Message] = []
    while len(told) < 3:
        told += worker.poll_messages()
    worker.end(kill=True)
    assert worker.reap(5)
    error, progress, result = told
    assert isinstance(error, ErrorMessage)
    assert "UnpicklingError" in error.sentence
    assert progress == ProgressMessage(1, 2, {"objective": 0.5})
    assert result == ResultMessage(None)
