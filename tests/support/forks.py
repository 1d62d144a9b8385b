"""Forks of the test's process in place of fresh interpreters, which would import torch again for seconds."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from tests.support.processes import wait_until

_PACKAGES = ("fedsim", "strategies", "adversaries", "clients")


class Fork:
    """Fork of this process that calls `act`, as the child that `subprocess.Popen` would give."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._code: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            with _end_of_process():
                act()

    def poll(self) -> int | None:
        """Return the exit code, as `subprocess.Popen` gives it; None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def send_signal(self, number: int) -> None:
        """Send a signal to it, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Ask it to end, unless it has ended."""
        self.send_signal(signal.SIGTERM)


class ForkedCommand(Fork):
    """`fedsim WORDS...` in a fork of this process; what it prints goes to files in `folder`."""

    def __init__(self, *words: str | Path, folder: Path, before: Callable[[], object] = lambda: None) -> None:
        self._files = folder / "stdout", folder / "stderr"
        super().__init__(lambda: self._call(["fedsim", *map(str, words)], before))

    def _call(self, arguments: list[str], before: Callable[[], object]) -> None:
        for number, file in enumerate(self._files, start=1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        _begin_anew()
        sys.argv = arguments
        before()
        from fedsim.cli.main import main
        from fedsim.cli.options import console

        console.width = 400  # it read COLUMNS when it was made, which may have been before the fork
        main()

    def finish(self, seconds: float = 120) -> tuple[int, str, str]:
        """Wait for it; return its exit code and what it printed."""
        try:
            wait_until(lambda: self.poll() is not None, seconds)
        finally:
            self.kill()
        return self.poll() or 0, *(file.read_text() for file in self._files)


def fork_python(
    code: str,
    *,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    forget: Sequence[str] = (),
    seconds: float = 240,
) -> subprocess.CompletedProcess[str]:
    """Run code in a fork that imports fedsim, its plug-ins and the packages of `forget` anew.

    It stands for `python -c CODE` with that environment in place of this one; libraries that are not
    forgotten are imported already, which takes a new interpreter seconds.
    """

    def act() -> None:
        for number, file in enumerate(files, start=1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
        _begin_anew()
        os.chdir(cwd or ".")
        if environment is not None:
            os.environ.clear()
            os.environ.update(environment)
        _forget_packages([*_PACKAGES, *forget])
        exec(code, {"__name__": "__main__"})

    with TemporaryDirectory() as folder:
        files = Path(folder, "stdout"), Path(folder, "stderr")
        fork = Fork(act)
        try:
            wait_until(lambda: fork.poll() is not None, seconds)
        finally:
            fork.kill()
        return subprocess.CompletedProcess(code, fork.poll() or 0, *(file.read_text() for file in files))


def fork_fedsim(
    *words: str | Path, cwd: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `fedsim WORDS...` in a fork that imports fedsim and its plug-ins anew, by this environment."""

    def forget_fedsim() -> None:
        os.environ.update(environment or {})
        os.chdir(cwd)
        # What a new interpreter makes of PYTHONPATH.
        sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        _forget_modules()
        _forget_packages(_PACKAGES)
        from fedsim.base import workers

        workers.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": ForkedInterpreter})  # type: ignore[assignment]

    with TemporaryDirectory() as folder:
        command = ForkedCommand(*words, folder=Path(folder), before=forget_fedsim)
        return subprocess.CompletedProcess(["fedsim", *map(str, words)], *command.finish(240))


class ForkedInterpreter(Fork):
    """Fork of this process in place of `subprocess.Popen([python, "-P", "-c", code, ...])`.

    It runs the same code by the same import path, environment, folder, files and session, but need not
    import torch again, which takes seconds. It forgets modules that are neither of the project nor
    installed. What it holds in memory is that of this process; a test of what a fresh interpreter
    does not know has to start one.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        pass_fds: Sequence[int],
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdout: int | None = None,
        start_new_session: bool = False,
        **_: Any,
    ) -> None:
        assert command[:3] == [sys.executable, "-P", "-c"]
        ends = os.pipe() if stdout == subprocess.PIPE else None

        def run_code() -> None:
            if start_new_session:
                os.setsid()
            _set_files(ends, pass_fds)
            os.chdir(cwd or ".")
            if env is not None:
                os.environ.clear()
                os.environ.update(env)
            _begin_anew()
            _forget_modules()
            sys.argv = ["-c", *command[4:]]
            exec(command[3], {"__name__": "__main__"})

        super().__init__(run_code)
        self.stdout: Any = None
        if ends is not None:
            os.close(ends[1])
            self.stdout = os.fdopen(ends[0], "rb", buffering=0)


@contextlib.contextmanager
def _end_of_process() -> Iterator[None]:
    """End the process after the block, whatever happens in it; nothing of the test goes on in the fork."""
    code = 1
    try:
        yield
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _set_files(ends: tuple[int, int] | None, kept: Sequence[int]) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if ends is not None:
        os.dup2(ends[1], 1)
        os.dup2(ends[1], 2)
    first = 3
    for number in sorted(kept):
        os.closerange(first, number)
        first = number + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))


def _begin_anew() -> None:
    """Undo what pytest has done to this process."""
    # Its files show nothing of what the fork prints.
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    warnings.simplefilter("ignore")  # they are errors in tests
    for name in ["", *logging.root.manager.loggerDict]:
        logging.getLogger(name).handlers.clear()


def _forget_modules() -> None:
    project = str(Path(__file__).parents[2])
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and not file.startswith((project, sys.prefix, sys.base_prefix)):
            del sys.modules[name]


def _forget_packages(names: Iterable[str]) -> None:
    importlib.invalidate_caches()
    for name in [name for name in sys.modules if name.partition(".")[0] in names]:
        del sys.modules[name]
