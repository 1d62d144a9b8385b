"""Main function of a worker process; `fedsim.base.workers` starts such processes."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Literal, TextIO

from fedsim.base.worker_messages import (
    ErrorMessage,
    LogMessage,
    Message,
    ProgressMessage,
    ResultMessage,
    encode_message,
)

Forks = Literal["never", "before-setup", "after-setup"]
"""Where a worker forks for each request, see `serve`."""
_PR_SET_PDEATHSIG = 1
_ANSWERED = 99
"""Exit code of a fork that has answered its request; foreign code in it may end it with others, also with 0."""


def interpreter_command(line: Connection) -> list[str]:
    """Return the command of a fresh interpreter that calls `serve`.

    It reads its import path from `line` first. Unlike a process of `multiprocessing`, it does not
    import the main module, which may be a script that would run once more.
    """
    start = (
        "import json, sys; from multiprocessing.connection import Connection; "
        "parent, line = int(sys.argv.pop()), Connection(int(sys.argv.pop())); "
        "sys.path[:], logger, forks = json.loads(line.recv_bytes()); "
        f"from {__name__} import serve; serve(line, parent, logger, forks)"
    )
    return [sys.executable, "-P", "-c", start, str(line.fileno()), str(os.getpid())]


def encode_start(import_path: Sequence[str], logger: str, forks: Forks) -> bytes:
    """Return what the command that `interpreter_command` returns reads first.

    Args:
        logger: name of the logger whose warnings are sent to the parent.
        forks: see `serve`.
    """
    return json.dumps([list(import_path), logger, forks]).encode()


def serve(line: Connection, parent: int, logger: str, forks: Forks) -> None:
    """Answer requests until an empty one comes.

    Each request may be answered by a fork of its own, so that none finds what the code of another one left in memory.
    Locks and threads do not survive a fork, so that all hangs which a set-up made with threads. One that started
    threads is therefore repeated in a fork for each request, as it is with `forks = "before-setup"`, which accelerators
    need; otherwise a fork sets up, and forks for each request.
    """
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, and then ends us
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    lock = threading.Lock()  # several threads may warn at once

    def send(message: Message) -> None:
        content = encode_message(message)
        with lock:
            line.send_bytes(content)

    def progress(iteration: int, iterations: int, values: Mapping[str, float]) -> None:
        numbers = {str(name): float(value) for name, value in values.items()}
        send(ProgressMessage(int(iteration), int(iterations), numbers))

    logging.getLogger(logger).addHandler(_LogSender(send))
    has_answered = False
    with ExitStack() as stack, suppress(EOFError):
        if forks != "never":
            _show_warnings_once(stack.enter_context(tempfile.TemporaryFile("a+")))
        setup, prepare, work, is_fork = line.recv_bytes(), None, None, False
        while not has_answered and (request := line.recv_bytes()):
            try:
                # The set-up is inside, so that its errors are reported as those of the request.
                if prepare is None:
                    prepare, arguments = pickle.loads(setup)
                if work is None and forks != "never":
                    is_fork = _fork_and_wait()
                    if not is_fork:
                        continue
                if work is None:
                    work = stack.enter_context(prepare(*arguments))
                if forks == "after-setup" and _has_one_thread() and not _fork_and_wait():
                    continue
                send(ResultMessage(work(pickle.loads(request), progress)))
            except BaseException as error:  # also sys.exit, which may end only this request
                send(ErrorMessage.from_error(error))
            has_answered = is_fork
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # As processes of `multiprocessing` do: an orderly end of torch takes a second.
    os._exit(_ANSWERED if has_answered else 0)


def _fork_and_wait() -> bool:
    """Fork this process; return True in the fork, and False here once that has ended with `_ANSWERED`.

    Where it ended otherwise, this process does the same, and whoever waits for an answer learns of what it died.
    """
    own_id = os.getpid()
    child = os.fork()
    if not child:
        end_with_parent(own_id)
        return True
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == _ANSWERED:
        return False
    if code < 0:
        os.kill(own_id, -code)
    os._exit(max(code, 0))


def _has_one_thread() -> bool:
    """Return whether this process is known to have one thread, also of those that Python does not know, as OpenMP's."""
    threads = Path("/proc/self/task")
    return threads.exists() and len(list(threads.iterdir())) == 1


def _show_warnings_once(shown: IO[str]) -> None:
    """Have no fork of this process show a warning of Python that another one has shown.

    Args:
        shown: a file, opened to append and to read, in which forks tell one another what they showed.
    """
    show = warnings.showwarning

    def show_new(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        warning = json.dumps([category.__name__, filename, lineno, str(message)])
        shown.seek(0)
        if warning not in shown.read().splitlines():
            print(warning, file=shown, flush=True)
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = show_new


def end_with_parent(parent: int) -> None:
    """Have this process killed once `parent`, which started it, has ended in any way."""
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0:
        if os.getppid() != parent:  # the parent ended before the call
            os._exit(1)
        return
    threading.Thread(target=_end_without_parent, args=(parent,), daemon=True).start()


def _end_without_parent(parent: int) -> None:
    """End this process once its parent has ended; for systems that do not do it themselves.

    A process that loses its parent gets another one.
    """
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


class _LogSender(logging.Handler):
    """Handler that sends warnings to the parent process."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        super().__init__(logging.WARNING)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        try:
            self._send(LogMessage.from_record(record))
        except Exception:  # its arguments do not fit its text, say; the work goes on
            self.handleError(record)
