"""Worker processes that end when this process does: several at once, or one in the background.

Each works on one thread, so that they do not slow one another down. On a CPU that is faster than
one process of many threads, and than vectorising convolutions over victims, which turns them into
grouped ones.
"""

from __future__ import annotations

import copy
import ctypes
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from logging.handlers import QueueHandler
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fedsim.base import errors
from fedsim.base.errors import AttackCrash, FedsimError

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Next = TypeVar("Next", covariant=True)
Work = Callable[[Any, Callable[[int, int, Mapping[str, float]], None]], object]
"""Function that works on an item; its second argument is a progress callback."""
PrepareWork = Callable[..., AbstractContextManager[Work]]
"""Function that sets a worker process up and gives the function that works on items."""

_PR_SET_PDEATHSIG = 1
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
                    if isinstance(message, tuple):
                        report(item, *message)
                        continue
                    idle.append(worker)
                    del busy[worker]
                    yield item, message
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

    def log_errors() -> None:
        for message in worker.poll_messages():
            if isinstance(message, BaseException):
                log.warning(
                    "while the round loop goes on: %s; it is tried again at the end of the run",
                    message,
                )

    def submit(item: Any) -> None:
        if worker.is_alive:
            log_errors()
            worker.submit(item)

    try:
        yield submit
        worker.dismiss()
        while worker.is_alive:
            wait([worker.line], timeout=0.5)
            log_errors()
        log_errors()  # it may have died before the loop began
        at_once = False
    finally:
        _end_workers([worker], at_once=at_once)


class Worker:
    """Process that works on items one after the other, and ends when this process does."""

    def __init__(self, prepare: PrepareWork, arguments: tuple[Any, ...]) -> None:
        self.line, worker_end = Pipe()
        with _blocked_interrupts():
            self._process = subprocess.Popen(
                interpreter_command(__name__, worker_end),
                stdin=subprocess.DEVNULL,
                pass_fds=[worker_end.fileno()],
            )
        worker_end.close()
        self._is_dismissed = self._is_death_reported = False
        self._send(json.dumps([str(Path(folder).resolve()) for folder in sys.path]).encode())
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

    def poll_messages(self) -> Iterator[tuple[int, int, Mapping[str, float]] | FedsimError | None]:
        """Yield what the process has sent since the last call, and log its warnings here.

        Yields:
            Progress as a tuple; for each item that is done what it raised, or None; an AttackCrash,
            once, where the process died.
        """
        alive = self.is_alive  # asked first, so that what it sent before it died is read before
        try:
            while self.line.poll():
                message = self.line.recv()
                if isinstance(message, logging.LogRecord):
                    logging.getLogger(message.name).handle(message)
                elif message is not None and isinstance(message[0], str):
                    yield restore_error(*message)
                else:
                    yield message
        except (EOFError, OSError):
            self._ends_within(_GRACE)
            alive = False
        code = self._process.poll()
        ended_as_asked = self._is_dismissed and code == 0
        if not (alive or self._is_death_reported or ended_as_asked):
            self._is_death_reported = True
            self.end(kill=True)  # one that closed its connection and lives can do nothing more
            self._ends_within(_GRACE)
            yield AttackCrash(f"its process {cause_of_death(code)}")

    def end(self, *, kill: bool) -> None:
        """Terminate the process, or kill it."""
        self._process.kill() if kill else self._process.terminate()

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


def interpreter_command(module: str, line: Connection) -> list[str]:
    """Return the command of a fresh interpreter that calls `serve` of `module`.

    It reads its import path from `line` first. Unlike a process of `multiprocessing`, it does not
    import the main module, which may be a script that would run once more.
    """
    start = (
        "import json, sys; from multiprocessing.connection import Connection; "
        "parent, line = int(sys.argv.pop()), Connection(int(sys.argv.pop())); "
        f"sys.path[:] = json.loads(line.recv_bytes()); from {module} import serve; serve(line, parent)"
    )
    return [sys.executable, "-P", "-c", start, str(line.fileno()), str(os.getpid())]


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


def end_with_parent(parent: int) -> None:
    """Have this process killed once `parent`, which started it, has ended in any way."""
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0:
        if os.getppid() != parent:  # the parent ended before the call
            os._exit(1)
        return
    threading.Thread(target=_end_without_parent, args=(parent,), daemon=True).start()


def describe_error(error: BaseException) -> tuple[str, str, str]:
    """Describe an error for another process, which may not be able to import its class.

    Returns:
        The name of its nearest base class among ours, its sentence, and its traceback as text.
    """
    our_classes = [cls.__name__ for cls in type(error).__mro__ if cls.__module__ == errors.__name__]
    kind = our_classes[0] if our_classes else "AttackCrash"
    sentence = f"{type(error).__name__}: {errors.first_line(error)}"
    if isinstance(error, FedsimError):
        sentence = str(error)
    return kind, sentence, "".join(traceback.format_exception(error))


def restore_error(kind: str, sentence: str, trace: str) -> FedsimError:
    """Make an error from the description by `describe_error`."""
    error_class = getattr(errors, kind, None)
    error: FedsimError = AttackCrash(sentence)
    if isinstance(error_class, type) and issubclass(error_class, FedsimError):
        error = error_class(sentence)
    error.__cause__ = _RemoteTraceback(f"\n{trace}")
    return error


class _RemoteTraceback(Exception):
    """Traceback of another process, as text for the log."""


def serve(line: Connection, parent: int) -> None:
    """Work on items until an empty message comes; this is the main function of a worker process."""
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, and then ends us
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])

    def progress(iteration: int, iterations: int, values: Mapping[str, float]) -> None:
        line.send(
            (
                int(iteration),
                int(iterations),
                {str(name): float(value) for name, value in values.items()},
            )
        )

    logging.getLogger("fedsim").addHandler(_ToParent(line))
    with ExitStack() as stack, suppress(EOFError):
        setup, work = line.recv_bytes(), None
        while item := line.recv_bytes():
            try:
                # The set-up is inside, so that its errors are reported as those of the item.
                if work is None:
                    prepare, arguments = pickle.loads(setup)
                    work = stack.enter_context(prepare(*arguments))
                work(pickle.loads(item), progress)
            except BaseException as error:  # also sys.exit, which may end only this item
                line.send(describe_error(error))
            else:
                line.send(None)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # as processes of `multiprocessing` do: an orderly end of torch takes a second


class _ToParent(QueueHandler):
    """Handler that sends warnings to the parent process, whose log shows and keeps them."""

    queue: Any  # a Connection

    def __init__(self, line: Connection) -> None:
        super().__init__(line)  # type: ignore[arg-type]
        self.setLevel(logging.WARNING)

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Return a copy that can be pickled, with the traceback as text.

        The traceback stays separate from the sentence, because a screen leaves it out.
        """
        sendable = copy.copy(record)
        sendable.msg, sendable.args = record.getMessage(), None
        if record.exc_info:
            sendable.exc_text = logging.Formatter().formatException(record.exc_info)
        sendable.exc_info = sendable.stack_info = None
        return sendable

    def enqueue(self, record: logging.LogRecord) -> None:
        """See QueueHandler."""
        self.queue.send(record)


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


def _end_without_parent(parent: int) -> None:
    """End this process once its parent has ended; for systems that do not do it themselves.

    A process that loses its parent gets another one.
    """
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
