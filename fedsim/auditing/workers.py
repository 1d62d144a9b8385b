"""Processes that end when this one does: many attacks at once, or one while the round loop goes on.

Each works on one thread, so that they do not slow one another down. On a CPU that is faster than one process of many
threads, and than vectorising convolutions over victims, which turns them into grouped ones.
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

from fedsim import errors
from fedsim.errors import AttackCrash, FedsimError

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Next = TypeVar("Next", covariant=True)
Work = Callable[[Any, Callable[[int, int, Mapping[str, float]], None]], object]
"""Takes an item and a progress callback."""
Prepare = Callable[..., AbstractContextManager[Work]]

_PR_SET_PDEATHSIG = 1
_GRACE = 3.0
"""Seconds that a process has to end before it is killed."""


class Waiting(Protocol[Next]):
    """Items to work on, as in a deque; what can be begun may depend on what is done."""

    def __bool__(self) -> bool:
        """Whether an item can be begun now; where none can and none is under way, all work is done."""

    def popleft(self) -> Next:
        """The next item."""


def in_processes(
    items: Sequence[Item] | Waiting[Item],
    workers: int,
    prepare: Prepare,
    arguments: tuple[Any, ...],
    report: Callable[[Item, int, int, Mapping[str, float]], None],
) -> Iterator[tuple[Item, BaseException | None]]:
    """Work on each item in one of `workers` processes; yield it, and what it raised, once it is done.

    A process that dies fails its item alone; the others go on in a fresh one.

    Args:
        prepare: called once in each process with `arguments`; what it gives on entering does the work.
        report: told here of the progress of each item.
    """
    waiting, busy = deque(items) if isinstance(items, Sequence) else items, dict[Worker, Item]()
    crew: list[Worker] = []
    idle: list[Worker] = []
    at_once = True
    try:
        while waiting or busy:
            while waiting and len(busy) < workers:
                idle = [worker for worker in idle if worker.alive]
                if not idle:
                    idle.append(Worker(prepare, arguments))
                    crew += idle
                worker = idle.pop()
                busy[worker] = waiting.popleft()
                worker.give(busy[worker])
            wait([worker.line for worker in busy], timeout=0.5)
            for worker, item in list(busy.items()):
                for news in worker.news():
                    if isinstance(news, tuple):
                        report(item, *news)
                        continue
                    idle.append(worker)
                    del busy[worker]
                    yield item, news
                    break
        at_once = False
    finally:
        _end(crew, at_once=at_once)


@contextmanager
def beside(prepare: Prepare, arguments: tuple[Any, ...]) -> Iterator[Callable[[Any], None]]:
    """A function that hands an item to a process and does not wait for it; on leaving, all are done.

    What fails there is logged. Whoever leaves by an error or an interrupt ends the process.
    """
    worker = Worker(prepare, arguments)
    at_once = True

    def hear() -> None:
        for news in worker.news():
            if isinstance(news, BaseException):
                log.warning("while the round loop goes on: %s; it is tried again at the end of the run", news)

    def give(item: Any) -> None:
        if worker.alive:
            hear()
            worker.give(item)

    try:
        yield give
        worker.dismiss()
        while worker.alive:
            wait([worker.line], timeout=0.5)
            hear()
        hear()  # it may have died before anybody listened
        at_once = False
    finally:
        _end([worker], at_once=at_once)


class Worker:
    """A process that works on what it is given, one after the other, and ends when this process does."""

    def __init__(self, prepare: Prepare, arguments: tuple[Any, ...]) -> None:
        self.line, theirs = Pipe()
        with _uninterrupted():
            self._process = subprocess.Popen(
                interpreter(__name__, theirs), stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        theirs.close()
        self._dismissed = self._mourned = False
        self._send(json.dumps([str(Path(folder).resolve()) for folder in sys.path]).encode())
        self._send(pickle.dumps((prepare, arguments)))

    @property
    def alive(self) -> bool:
        """Whether it can still work."""
        return self._process.poll() is None

    def give(self, item: Any) -> None:
        """Have it work on `item`, once it has done what it was given before."""
        self._send(pickle.dumps(item))

    def dismiss(self) -> None:
        """Have it end, once it has done what it was given."""
        self._dismissed = True
        self._send(b"")

    def news(self) -> Iterator[tuple[int, int, Mapping[str, float]] | FedsimError | None]:
        """What it has said since: progress; of each item that is done, what it raised or None; its own death, once.

        What it warned of is logged here.
        """
        alive = self.alive  # asked first: what it said before it died is heard before
        try:
            while self.line.poll():
                said = self.line.recv()
                if isinstance(said, logging.LogRecord):
                    logging.getLogger(said.name).handle(said)
                else:
                    yield raised(*said) if said is not None and isinstance(said[0], str) else said
        except (EOFError, OSError):
            self._ends_within(_GRACE)
            alive = False
        code = self._process.poll()
        if not (alive or self._mourned or (self._dismissed and code == 0)):
            self._mourned = True
            self.end(kill=True)  # one that closed its line and lives can do nothing more
            self._ends_within(_GRACE)
            yield AttackCrash(f"its process {cause_of_death(code)}")

    def end(self, *, kill: bool) -> None:
        """Ask it to end, or make it."""
        self._process.kill() if kill else self._process.terminate()

    def bury(self, seconds: float) -> bool:
        """Whether it is gone, within so many seconds, and nothing of it is left here."""
        if not self._ends_within(seconds):
            return False
        self.line.close()
        return True

    def _ends_within(self, seconds: float) -> bool:
        """Not by `join`, which waits for ever for one that has closed all its files."""
        deadline = time.monotonic() + seconds
        while self.alive and time.monotonic() < deadline:
            time.sleep(0.01)
        return not self.alive

    def _send(self, message: bytes) -> None:
        with suppress(OSError):  # it is dead, which its news will say
            self.line.send_bytes(message)


def interpreter(module: str, line: Connection) -> list[str]:
    """The command of a fresh interpreter that reads its import path from `line` and then calls `serve` of `module`.

    Unlike a process of `multiprocessing`, it does not import the main module, which may be a script that would run
    once more.
    """
    start = (
        "import json, sys; from multiprocessing.connection import Connection; "
        "parent, line = int(sys.argv.pop()), Connection(int(sys.argv.pop())); "
        f"sys.path[:] = json.loads(line.recv_bytes()); from {module} import serve; serve(line, parent)"
    )
    return [sys.executable, "-P", "-c", start, str(line.fileno()), str(os.getpid())]


def cause_of_death(code: int | None) -> str:
    """What the exit code of a process that should have lived says, in the form of `subprocess.Popen`."""
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


def end_with(parent: int) -> None:
    """Have this process killed once `parent`, which started it, is gone, however that ended."""
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0:
        if os.getppid() != parent:  # it was gone before we asked
            os._exit(1)
        return
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def describe(error: BaseException) -> tuple[str, str, str]:
    """An error for another process: its nearest class among ours, its sentence, and its traceback as text.

    It may be of a class that the other process cannot import.
    """
    kind = next((cls.__name__ for cls in type(error).__mro__ if cls.__module__ == errors.__name__), "AttackCrash")
    sentence = str(error) if isinstance(error, FedsimError) else f"{type(error).__name__}: {errors.first_line(error)}"
    return kind, sentence, "".join(traceback.format_exception(error))


def raised(kind: str, sentence: str, trace: str) -> FedsimError:
    """The inverse of `describe`."""
    found = getattr(errors, kind, None)
    ours = isinstance(found, type) and issubclass(found, FedsimError)
    error: FedsimError = found(sentence) if ours else AttackCrash(sentence)  # type: ignore[misc]
    error.__cause__ = _Elsewhere(f"\n{trace}")
    return error


class _Elsewhere(Exception):
    """Carries the traceback of another process into the log."""


def serve(line: Connection, parent: int) -> None:
    """What a worker does all its life."""
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C, and then ends us
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])

    def progress(iteration: int, iterations: int, values: Mapping[str, float]) -> None:
        line.send((int(iteration), int(iterations), {str(name): float(value) for name, value in values.items()}))

    logging.getLogger("fedsim").addHandler(_ToParent(line))
    with ExitStack() as stack, suppress(EOFError):
        order, work = line.recv_bytes(), None
        while given := line.recv_bytes():
            try:
                if work is None:
                    prepare, arguments = pickle.loads(order)
                    work = stack.enter_context(prepare(*arguments))
                work(pickle.loads(given), progress)
            except BaseException as error:  # also sys.exit, which may end nothing but this item
                line.send(describe(error))
            else:
                line.send(None)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # as processes of `multiprocessing` do: to take apart all that torch loads lasts a second


class _ToParent(QueueHandler):
    """Hands warnings to the process that started this one, whose log shows and keeps them."""

    queue: Any  # a Connection

    def __init__(self, line: Connection) -> None:
        super().__init__(line)  # type: ignore[arg-type]
        self.setLevel(logging.WARNING)

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """A copy that can be sent: the sentence, and apart from it the traceback, which a screen leaves out."""
        sent = copy.copy(record)
        sent.msg, sent.args = record.getMessage(), None
        if record.exc_info:
            sent.exc_text = logging.Formatter().formatException(record.exc_info)
        sent.exc_info = sent.stack_info = None
        return sent

    def enqueue(self, record: logging.LogRecord) -> None:
        """See QueueHandler."""
        self.queue.send(record)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """A process started here does not hear Ctrl-C while it comes up; this one hears it afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(crew: Sequence[Worker], *, at_once: bool) -> None:
    """End all of `crew`: when their work is done, or at once."""
    for worker in crew:
        worker.end(kill=False) if at_once else worker.dismiss()
    deadline = time.monotonic() + _GRACE
    stubborn = [worker for worker in crew if not worker.bury(max(0.0, deadline - time.monotonic()))]
    for worker in stubborn:
        worker.end(kill=True)
    for worker in stubborn:
        worker.bury(_GRACE)


def _watch(parent: int) -> None:
    """Where the system does not tell: who lost its parent gets another one."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
