"""Worker processes that end when this process does: several at once, or one in the background.

Each works on one thread, so that they do not slow one another down. On a CPU that is faster than
one process of many threads, and than vectorising convolutions over victims, which turns them into
grouped ones.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fedsim.base.errors import AttackCrash, FedsimError
from fedsim.base.worker_messages import (
    ErrorMessage,
    LogMessage,
    Message,
    ProgressMessage,
    ResultMessage,
    decode_message,
)
from fedsim.base.worker_process import Forks, encode_start, interpreter_command

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Next = TypeVar("Next", covariant=True)
Work = Callable[[Any, Callable[[int, int, Mapping[str, float]], None]], object]
"""Function that works on an item and returns what JSON can hold, or None; its second argument is a
progress callback."""
PrepareWork = Callable[..., AbstractContextManager[Work]]
"""Function that sets a worker process up and gives the function that works on items."""

_GRACE = 3.0
"""Seconds that a process gets to end before it is killed."""


class Waiting(Protocol[Next]):
    """Queue of items to work on; which items are ready may depend on those that are done."""

    def __bool__(self) -> bool:
        """Return whether an item is ready; all work is done where none is and none is under way."""

    def popleft(self) -> Next:
        """Return the next item."""


def run_in_processes(
    items: Sequence[Item] | Waiting[Item],
    workers: int,
    prepare: PrepareWork,
    arguments: tuple[Any, ...],
    report: Callable[[Item, int, int, Mapping[str, float]], None],
) -> Iterator[tuple[Item, BaseException | None]]:
    """Work on each item in one of `workers` processes; yield it with what it raised, or None.

    Where a process dies, only its item fails; a fresh process takes over.

    Args:
        prepare: called once in each process with `arguments`; a context manager that gives the
            function which does the work.
        report: called in this process with the progress of each item.
    """
    waiting = deque(items) if isinstance(items, Sequence) else items
    busy = dict[Worker, Item]()
    started: list[Worker] = []
    idle: list[Worker] = []
    at_once = True
    try:
        while waiting or busy:
            # Give items to idle workers; start a worker where all are busy.
            while waiting and len(busy) < workers:
                idle = [worker for worker in idle if worker.is_alive]
                if not idle:
                    idle.append(Worker(prepare, arguments))
                    started += idle
                worker = idle.pop()
                busy[worker] = waiting.popleft()
                worker.submit(busy[worker])
            wait([worker.line for worker in busy], timeout=0.5)
            # Pass progress on, and yield each item that is done.
            for worker, item in list(busy.items()):
                for message in worker.poll_messages():
                    match message:
                        case ProgressMessage():
                            report(item, message.iteration, message.iterations, message.values)
                        case LogMessage():
                            message.log_again()
                        case ResultMessage() | ErrorMessage():
                            idle.append(worker)
                            del busy[worker]
                            yield item, _error_of(message)
                            break
        at_once = False
    finally:
        _end_workers(started, at_once=at_once)


@contextmanager
def background_worker(prepare: PrepareWork, arguments: tuple[Any, ...]) -> Iterator[Callable[[Any], None]]:
    """Give a function that submits an item to a background process and does not wait for it.

    On leaving, all items are done. What fails in the process is logged. Leaving by an error or an
    interrupt ends the process.
    """
    worker = Worker(prepare, arguments)
    at_once = True

    def log_messages() -> None:
        for message in worker.poll_messages():
            match message:
                case LogMessage():
                    message.log_again()
                case ErrorMessage():
                    log.warning(
                        "while the round loop goes on: %s; it is tried again at the end of the run",
                        message.sentence,
                    )

    def submit(item: Any) -> None:
        if worker.is_alive:
            log_messages()
            worker.submit(item)

    try:
        yield submit
        worker.dismiss()
        while worker.is_alive:
            wait([worker.line], timeout=0.5)
            log_messages()
        log_messages()  # it may have died before the loop began
        at_once = False
    finally:
        _end_workers([worker], at_once=at_once)


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Bare surroundings of a worker that runs foreign code; nothing in them leads to our folders.

    It is in a session of its own, so that Ctrl-C does not reach it and all that it starts ends with
    it. What it prints goes to our standard error through a pipe, because an open file of ours would
    lead to our folders. It sends the warnings of all loggers.

    Attributes:
        folder: its working directory.
        environment: its environment variables.
        import_path: its `sys.path`.
    """

    folder: Path
    environment: Mapping[str, str]
    import_path: Sequence[str]


class Worker:
    """Process that works on items one after the other, and ends when this process does.

    Args:
        prepare: called in the process with `arguments`; a context manager that gives the function
            which does the work.
        surroundings: in place of those of this process.
        forks: where the process forks for each item, so that no item finds in memory what work on an earlier one left
            there; after the set-up, items must not use an accelerator that the set-up has used.
    """

    def __init__(
        self,
        prepare: PrepareWork,
        arguments: tuple[Any, ...],
        surroundings: Surroundings | None = None,
        *,
        forks: Forks = "never",
    ) -> None:
        self.line, worker_end = Pipe()
        self._owns_session = surroundings is not None
        options: dict[str, Any] = {}
        import_path, logger = [str(Path(folder).resolve()) for folder in sys.path], "fedsim"
        if surroundings is not None:
            import_path, logger = list(surroundings.import_path), ""
            options = {
                "cwd": surroundings.folder,
                "env": surroundings.environment,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.STDOUT,
                "bufsize": 0,
                "start_new_session": True,
            }
        with _blocked_interrupts():
            self._process = subprocess.Popen(
                interpreter_command(worker_end),
                stdin=subprocess.DEVNULL,
                pass_fds=[worker_end.fileno()],
                **options,
            )
        worker_end.close()
        if self._process.stdout is not None:
            threading.Thread(target=_forward_output, args=(self._process.stdout,), daemon=True).start()
        self._is_dismissed = self._is_death_reported = False
        self._send(encode_start(import_path, logger, forks))
        self._send(pickle.dumps((prepare, arguments)))

    @property
    def is_alive(self) -> bool:
        """Whether the process can still work."""
        return self._process.poll() is None

    def submit(self, item: Any) -> None:
        """Have the process work on `item` after the items that it got before."""
        self._send(pickle.dumps(item))

    def dismiss(self) -> None:
        """Have the process end after the items that it got."""
        self._is_dismissed = True
        self._send(b"")

    def poll_messages(self) -> Iterator[Message]:
        """Yield what the process has sent since the last call.

        Each item ends in a result or an error. An AttackCrash comes, once, where the process died.
        """
        alive = self.is_alive  # asked first, so that what it sent before it died is read before
        try:
            while self.line.poll():
                yield decode_message(self.line.recv_bytes())
        except (EOFError, OSError):
            self._ends_within(_GRACE)
            alive = False
        code = self._process.poll()
        ended_as_asked = self._is_dismissed and code == 0
        if not (alive or self._is_death_reported or ended_as_asked):
            self._is_death_reported = True
            self.end(kill=True)  # one that closed its connection and lives can do nothing more
            self._ends_within(_GRACE)
            yield ErrorMessage(AttackCrash.__name__, f"its process {cause_of_death(code)}")

    def end(self, *, kill: bool) -> None:
        """Terminate the process, or kill it; in a session of its own, kill all that it started."""
        if self._owns_session:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        elif kill:
            self._process.kill()
        else:
            self._process.terminate()

    def reap(self, seconds: float) -> bool:
        """Wait for the process to end, and close the connection; return whether it ended."""
        if not self._ends_within(seconds):
            return False
        self.line.close()
        return True

    def _ends_within(self, seconds: float) -> bool:
        """Return whether the process ends within `seconds`.

        It polls: waiting for the process blocks for ever where it has closed all its files.
        """
        deadline = time.monotonic() + seconds
        while self.is_alive and time.monotonic() < deadline:
            time.sleep(0.01)
        return not self.is_alive

    def _send(self, message: bytes) -> None:
        with suppress(OSError):  # the process is dead, which `poll_messages` will report
            self.line.send_bytes(message)


def cause_of_death(code: int | None) -> str:
    """Say in words how a process ended that should have lived.

    Args:
        code: exit code as `subprocess.Popen` gives it, negative for a signal; None where the
            process lives but does not answer.

    >>> cause_of_death(2)
    'ended itself, with exit code 2'
    """
    if code is None:
        return "does not answer any more"
    if code >= 0:
        return f"ended itself, with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = ", as the system does when memory runs out; lower adversary.workers" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


@contextmanager
def _blocked_interrupts() -> Iterator[None]:
    """Keep Ctrl-C from a process while it starts; this process gets it afterwards."""
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


def _end_workers(workers: Sequence[Worker], *, at_once: bool) -> None:
    """End all `workers`, at once or when their work is done; kill those that do not end in time."""
    for worker in workers:
        worker.end(kill=False) if at_once else worker.dismiss()
    deadline = time.monotonic() + _GRACE
    running = [w for w in workers if not w.reap(max(0.0, deadline - time.monotonic()))]
    for worker in running:
        worker.end(kill=True)
    for worker in running:
        worker.reap(_GRACE)


def _error_of(message: ResultMessage | ErrorMessage) -> FedsimError | None:
    """Return the error in which an item ended; None where it was done."""
    return message.to_error() if isinstance(message, ErrorMessage) else None


def _forward_output(output: Any) -> None:
    """Write what a process prints to our standard error."""
    with suppress(OSError, ValueError):
        while text := output.read(1 << 16):
            sys.stderr.write(text.decode(errors="replace"))
            sys.stderr.flush()
