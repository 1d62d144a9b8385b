"""Processes of other programs that end when we end: by return, by error, by Ctrl-C or by kill -9."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from fedsim.engines import guard
from fedsim.errors import InstallationError, RunError

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PAUSE = 0.05


@dataclass(frozen=True)
class Started:
    """One command, in a session and process group of its own, under a guard that leads the group."""

    name: str
    log: Path
    leader: subprocess.Popen[bytes]

    @property
    def exit_code(self) -> int | None:
        """As of `subprocess.Popen`, but the process id stays ours until `Processes` ends; None while it runs."""
        ended = os.waitid(os.P_PID, self.leader.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    @property
    def ended(self) -> bool:
        """Whether the command has ended."""
        return self.exit_code is not None

    def said(self) -> str:
        """What it has written so far, without colours."""
        return _COLOUR.sub("", self.log.read_text(encoding="utf-8", errors="replace"))

    def last_words(self) -> str:
        """Its last error, or else the last thing that it wrote: evidence for a complaint."""
        lines = [" ".join(line.split()) for line in self.said().splitlines() if line.strip()]
        errors = [place for place, line in enumerate(lines) if "ERROR" in line]
        return " ".join(lines[errors[-1] :][:3] if errors else lines[-1:]) or "it wrote nothing"


class Processes:
    """Starts commands and, as a context manager, ends every one of them with all that they started.

    Args:
        logs: folder for one `NAME.log` each; must exist.
        environment: of the commands.
        grace: seconds between SIGTERM and SIGKILL.
    """

    def __init__(self, logs: Path, environment: Mapping[str, str], grace: float = 5.0) -> None:
        self._logs = logs
        self._environment = environment
        self._grace = grace
        self._started: list[Started] = []

    def start(self, name: str, command: Sequence[str]) -> Started:
        """Start `command`; what it says goes to `NAME.log`."""
        log = self._logs / f"{name}.log"
        with log.open("wb") as output:
            leader = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        self._started.append(Started(name, log, leader))
        return self._started[-1]

    def call(self, name: str, command: Sequence[str], seconds: float) -> str:
        """Run `command` to its end and return what it said.

        Raises:
            RunError: it failed, or took longer than `seconds`.
        """
        started = self.start(name, command)
        deadline = time.monotonic() + seconds
        while not started.ended:
            if time.monotonic() > deadline:
                raise RunError(f"{name}: no end after {seconds:.0f} s; see {started.log}")
            time.sleep(_PAUSE)
        code = started.exit_code
        self.end(started)
        if code != 0:
            raise RunError(f"{name}: failed ({started.last_words()}); see {started.log}")
        return started.said()

    def end(self, started: Started) -> None:
        """End a command that is not needed any more, with all that it started."""
        self._started.remove(started)
        _signal(started, signal.SIGKILL)
        _bury(started)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        """SIGTERM to every group, the last started first; after the grace period SIGKILL."""
        for started in reversed(self._started):
            _signal(started, signal.SIGTERM)
        deadline = time.monotonic() + self._grace
        while time.monotonic() < deadline and not all(started.ended for started in self._started):
            time.sleep(_PAUSE)
        for started in self._started:
            _signal(started, signal.SIGKILL)  # also where the leader ended: others of its group may live
        for started in self._started:
            _bury(started)
        self._started = []


def _signal(started: Started, number: signal.Signals) -> None:
    """To the whole group, whose number is ours for as long as its leader was not waited for."""
    with suppress(ProcessLookupError):
        os.killpg(started.leader.pid, number)


def _bury(started: Started) -> None:
    started.leader.wait()
    assert started.leader.stdin is not None
    started.leader.stdin.close()


@contextmanager
def termination_is_interruption() -> Iterator[None]:
    """Within, SIGTERM raises KeyboardInterrupt as Ctrl-C does, so that context managers clean up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def executable(name: str) -> str:
    """The command beside this Python, or else on the PATH.

    Raises:
        InstallationError: it is in neither place.
    """
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        raise InstallationError(f"'{name}' is not installed beside {sys.executable}; pip install 'flwr[simulation]'")
    return found
