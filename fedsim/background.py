"""Writing beside the round loop: one thread, in order."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_all
from typing import Any


class Background:
    """Does one thing after the other in a thread of its own.

    The first error is raised by the next `wait`; what was queued behind it is dropped, so nothing is
    built on a write that failed.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fedsim-background")
        self._pending: list[Future[None]] = []
        self._broken = False

    def submit(self, function: Callable[..., None], *arguments: Any) -> None:
        """Queue `function(*arguments)`."""
        self._pending.append(self._thread.submit(self._do, function, *arguments))

    def wait(self) -> None:
        """Return once everything queued is done; raise what it raised."""
        wait_for_all(self._pending)  # else what stands behind an error could find the flag lowered, and run
        done, self._pending, self._broken = self._pending, [], False
        for future in done:
            future.result()

    def _do(self, function: Callable[..., None], *arguments: Any) -> None:
        if self._broken:
            return
        try:
            function(*arguments)
        except BaseException:
            self._broken = True
            raise
