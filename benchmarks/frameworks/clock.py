"""CPU and wall time of a federation's rounds, without imports, start-up and the first rounds."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MARK = "FEDSIM_BENCHMARK"
"""An environment variable whose value is this run's own; every process of the run inherits it."""

_TICK = os.sysconf("SC_CLK_TCK")


class Clock:
    """Is told when a round is over; reads the time after `warm_up` rounds and after the last one.

    With no warm-up it reads the time at once, so imports and start-up count.
    """

    def __init__(self) -> None:
        self.rounds = self.warm_up = self.seen = 0
        self.first = self.cpu = self.driver = self.wall = 0.0
        self._clients = 0.0

    def set(self, rounds: int, warm_up: int) -> None:
        """Measure the rounds from `warm_up` to `rounds`."""
        self.rounds, self.warm_up, self.seen = rounds, warm_up, 0
        if not warm_up:
            self._start()

    @contextmanager
    def training(self) -> Iterator[None]:
        """Take what happens in this context for the work of a client, although it is done in the driver's process."""
        started = time.process_time()
        yield
        self._clients += time.process_time() - started

    def round_over(self) -> None:
        """Note that the server has the new global model."""
        self.seen += 1
        if self.seen == 1:
            self.first = time.monotonic()
        if self.seen == self.warm_up:
            self._start()
        if self.seen == self.rounds:
            self.wall += time.monotonic()
            self.driver += time.process_time()
            self.cpu += self.driver + _other_seconds()
            self.driver -= self._clients

    def _start(self) -> None:
        self._clients = 0.0
        self.cpu = -_other_seconds()
        self.driver = -time.process_time()  # last, and first at the end: what the reading costs is not measured
        self.wall = -time.monotonic()


CLOCK = Clock()


def _other_seconds() -> float:
    """Return CPU seconds of every other process of this run, dead children included.

    Ray starts daemons that start the actors, and not every process is a descendant of this one; so
    they are known by the mark in their environment. A process's children count once it has waited
    for them. The kernel counts these in ticks, of 10 ms as a rule.
    """
    mark = f"{MARK}={os.environ.get(MARK)}".encode()
    reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = reaped.ru_utime + reaped.ru_stime
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                seconds += sum(map(int, fields[11:15])) / _TICK  # utime stime cutime cstime
        except OSError:  # somebody else's, or gone
            continue
    return seconds
