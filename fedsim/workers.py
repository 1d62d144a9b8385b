"""Many attacks at once: processes of one thread each, which do not slow one another down.

On a CPU that is faster than one process of many threads, and than vectorising convolutions over
victims, which turns them into grouped ones.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any, TypeVar

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
    with context.Manager() as manager:
        queue, stop = manager.Queue(), manager.Event()
        with ProcessPoolExecutor(workers, context, _start, (prepare, arguments, queue, stop)) as pool:
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
                        yield pending.pop(future), future.exception()
            except BaseException:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def _start(
    prepare: Callable[..., Callable[[Any, Any], None]], arguments: tuple[Any, ...], queue: Any, stop: Any
) -> None:
    global _state
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then says stop
    _state = prepare(*arguments), queue, stop


def _work(place: int, item: Any) -> None:
    assert _state is not None
    work, queue, stop = _state

    def progress(iteration: int, iterations: int, values: Mapping[str, float]) -> None:
        queue.put((place, iteration, iterations, values))
        if stop.is_set():
            raise KeyboardInterrupt

    work(item, progress)
