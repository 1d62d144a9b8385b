"""Child processes that end when this process ends: by return, by error, by Ctrl-C or by kill -9."""

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

from fedsim.base.errors import InstallationError, RunError
from fedsim.federation.engines import watchdog

_COLOUR_CODE = re.compile(r"\x1b\[[0-9;]*m")
_PAUSE = 0.05
"""Seconds between two looks at a process."""


@dataclass(frozen=True)
class CommandProcess:
    """Process of one command, in its own session and process group, led by a watchdog."""

    name: str
    log: Path
    leader: subprocess.Popen[bytes]

    @property
    def exit_code(self) -> int | None:
        """Exit code as `subprocess.Popen` gives it; None while the command runs.

        The process is not reaped, so that its id stays reserved until `Processes` ends.
        """
        status = os.waitid(os.P_PID, self.leader.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is None:
            return None
        return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status

    @property
    def has_ended(self) -> bool:
        """True if the command has ended."""
        return self.exit_code is not None

    def read_output(self) -> str:
        """Return all output so far, without colours."""
        return _COLOUR_CODE.sub("", self.log.read_text(encoding="utf-8", errors="replace"))

    def last_error(self) -> str:
        """Return the last error of the output, or else its last line, to explain a failure."""
        lines = [" ".join(line.split()) for line in self.read_output().splitlines() if line.strip()]
        error_lines = [number for number, line in enumerate(lines) if "ERROR" in line]
        evidence = lines[error_lines[-1] :][:3] if error_lines else lines[-1:]
        return " ".join(evidence) or "it wrote nothing"


class Processes:
    """Start commands and, as a context manager, end every one of them with all that they started.

    Args:
        logs: folder for one `NAME.log` each; must exist.
        environment: environment variables of the commands.
        grace: seconds between SIGTERM and SIGKILL.
    """

    def __init__(self, logs: Path, environment: Mapping[str, str], grace: float = 5.0) -> None:
        self._logs = logs
        self._environment = environment
        self._grace = grace
        self._started: list[CommandProcess] = []

    def start(self, name: str, command: Sequence[str]) -> CommandProcess:
        """Start `command`; its output goes to `NAME.log`."""
        log = self._logs / f"{name}.log"
        with log.open("wb") as output:
            leader = subprocess.Popen(
                [sys.executable, "-I", "-S", watchdog.__file__, *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        self._started.append(CommandProcess(name, log, leader))
        return self._started[-1]

    def call(self, name: str, command: Sequence[str], seconds: float) -> str:
        """Run `command` to its end and return its output."""
        started = self.start(name, command)
        deadline = time.monotonic() + seconds
        while not started.has_ended:
            if time.monotonic() > deadline:
                raise RunError(f"{name}: no end after {seconds:.0f} s; see {started.log}")
            time.sleep(_PAUSE)
        code = started.exit_code
        self.end(started)
        if code != 0:
            raise RunError(f"{name}: failed ({started.last_error()}); see {started.log}")
        return started.read_output()

    def end(self, started: CommandProcess) -> None:
        """Kill a command that is not needed any more, with all that it started."""
        self._started.remove(started)
        _signal_group(started, signal.SIGKILL)
        _reap(started)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        """Send SIGTERM to every group, the last started first; after the grace period SIGKILL."""
        for process in reversed(self._started):
            _signal_group(process, signal.SIGTERM)
        deadline = time.monotonic() + self._grace
        while time.monotonic() < deadline and not all(process.has_ended for process in self._started):
            time.sleep(_PAUSE)
        for process in self._started:
            _signal_group(process, signal.SIGKILL)  # the group may outlive its leader
        for process in self._started:
            _reap(process)
        self._started = []


def _signal_group(process: CommandProcess, number: signal.Signals) -> None:
    # The group's id cannot belong to anybody else until its leader is reaped.
    with suppress(ProcessLookupError):
        os.killpg(process.leader.pid, number)


def _reap(process: CommandProcess) -> None:
    process.leader.wait()
    assert process.leader.stdin is not None
    process.leader.stdin.close()


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGTERM in this context, so that context managers clean up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise KeyboardInterrupt

    earlier_handler = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier_handler)


def find_executable(name: str) -> str:
    """Return the path of a command: in the folder of this Python, or else on the PATH."""
    path = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if path is None:
        raise InstallationError(f"'{name}' is not installed beside {sys.executable}; pip install 'flwr[simulation]'")
    return path
