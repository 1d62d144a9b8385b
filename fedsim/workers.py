"""Many attacks at once: processes of one thread each, which do not slow one another down.

On a CPU that is faster than one process of many threads, and than vectorising convolutions over
victims, which turns them into grouped ones.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from fedsim.errors import AttackCrash, AttackError, FedsimError

Item = TypeVar("Item")

_state: tuple[Callable[[Any, Any], None], Any, Any] | None = None


def in_processes(
    items: Sequence[Item],
    workers: int,
    prepare: Callable[..., Callable[[Item, Any], None]],
    arguments: tuple[Any, ...],
    report: Callable[[Item, int, int, Mapping[str, float]], None],
) -> Iterator[tuple[Item, BaseException | None]]:
    """Work on each item in one of `workers` processes; yield it, and what it raised, once it is done.

    Args:
        prepare: called once in each process with `arguments`; returns the function that takes an
            item and a progress callback.
        report: told here of the progress of each item.
    """
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        with _uninterrupted():
            manager = stack.enter_context(context.Manager())
            queue, stop = manager.Queue(), manager.Event()
            pool = stack.enter_context(ProcessPoolExecutor(workers, context, _start, (prepare, arguments, queue, stop)))
            pending: dict[Future[None], Item] = {
                pool.submit(_work, place, item): item for place, item in enumerate(items)
            }
        try:
            while pending:
                done, _ = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
                while not queue.empty():
                    place, iteration, iterations, values = queue.get()
                    report(items[place], iteration, iterations, values)
                for future in done:
                    yield pending.pop(future), _told(future.exception())
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Processes started here inherit that Ctrl-C is not for them: the parent hears it, and then says stop."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _told(error: BaseException | None) -> BaseException | None:
    if isinstance(error, BrokenProcessPool):
        return AttackError("a worker process died, most likely for want of memory; lower adversary.workers and go on")
    return error


def _start(
    prepare: Callable[..., Callable[[Any, Any], None]], arguments: tuple[Any, ...], queue: Any, stop: Any
) -> None:
    global _state
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _state = prepare(*arguments), queue, stop


def _work(place: int, item: Any) -> None:
    assert _state is not None
    work, queue, stop = _state

    def progress(iteration: int, iterations: int, values: Mapping[str, float]) -> None:
        queue.put((place, iteration, iterations, values))
        if stop.is_set():
            raise KeyboardInterrupt

    try:
        work(item, progress)
    except FedsimError:
        raise
    except Exception as error:  # a stranger's exception may not survive the way back; its traceback does, as text
        raise AttackCrash(f"{type(error).__name__}: {error}") from error
