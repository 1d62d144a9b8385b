"""What a terminal shows while a command works: a live line for each phase, or now and then a plain one."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Hashable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from fedsim.progress import ROUNDS, heard

PAUSE = 5.0
"""Seconds between two plain lines, and between two lines about rounds."""
_KNOWN = 0.05
"""Share of a phase after which the time left is told; before, what happens once, as a compilation, is most of it."""


class Phases(logging.Handler):
    """Shows what `fedsim.progress` tells: live on a terminal, elsewhere as a line every few seconds.

    A phase of several items, such as an attack on several updates, may have `parts` that are under way.
    """

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._bars = phase_bars(console)
        self._phases: dict[str, _Phase] = {}
        self._last = time.monotonic()

    def __enter__(self) -> Phases:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def emit(self, record: logging.LogRecord) -> None:
        """Show one step."""
        if (step := heard(record.getMessage())) is None:
            return
        what, done, total = step
        if done == 0 or what not in self._phases:
            self._begin(what, total)
        phase = self._phases[what]
        phase.done, phase.total = done, total
        self._show(phase)

    def part(self, what: str, item: Hashable, share: float) -> None:
        """Of the items of `what` that are under way, `item` is done by this share."""
        if (phase := self._phases.get(what)) is not None:
            phase.parts[item] = share
            self._show(phase)

    def _begin(self, what: str, total: int) -> None:
        before = self._phases.get(what)
        task = before.task if before else self._bars.add_task(what, total=total, done=0)
        self._bars.reset(task, total=total, visible=True)
        self._phases[what] = _Phase(what, task)

    def _show(self, phase: _Phase) -> None:
        shown = phase.shown
        going_on = phase.done < phase.total
        self._bars.update(phase.task, completed=shown, total=phase.total, done=phase.done, visible=going_on)
        now = time.monotonic()
        if not self._console.is_terminal and shown and phase.done < phase.total and now > self._last + PAUSE:
            self._last = now
            text = f"{phase.what}: {phase.done} of {phase.total}"
            if shown >= _KNOWN * phase.total:
                minutes, seconds = divmod(round((now - phase.began) * (phase.total / shown - 1)), 60)
                text += f", about {minutes}:{seconds:02d} left"
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class _Phase:
    """How far a phase has come."""

    def __init__(self, what: str, task: TaskID) -> None:
        self.what, self.task = what, task
        self.began = time.monotonic()
        self.done, self.total = 0, 0
        self.parts: dict[Hashable, float] = {}
        self._most = 0.0

    @property
    def shown(self) -> float:
        """Items that are done, with those under way in part; it never goes back."""
        under_way = sum(share for share in self.parts.values() if share < 1)
        self._most = max(self._most, min(self.done + under_way, self.total))
        return self._most


def phase_bars(console: Console) -> Progress:
    """Lines that fit into 80 columns, the time left before all else; nothing remains of them at the end."""
    return Progress(
        TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
        BarColumn(bar_width=16),
        TextColumn("{task.fields[done]}/{task.total:.0f}", table_column=Column(no_wrap=True)),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
        TextColumn("left", table_column=Column(no_wrap=True)),
        console=console,
        speed_estimate_period=600,  # a step may take minutes
        expand=True,
        transient=True,
    )


class Seldom(logging.Filter):
    """Lets a line about a round through every few seconds, and that of the last round."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to show `record`."""
        if record.name != ROUNDS:
            return True
        found = re.match(r"round (\d+)/(\d+)\b", record.getMessage())
        if time.monotonic() < self._next and not (found and found[1] == found[2]):
            return False
        self._next = time.monotonic() + PAUSE
        return True
