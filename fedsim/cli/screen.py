"""Progress on a terminal while a command works: a live line for each phase, or now and then a plain one."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Hashable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from fedsim.base.progress import ROUNDS

PAUSE = 5.0
"""Fewest seconds between two plain lines, and between two lines about rounds."""
_LONG_PAUSE = 30.0
"""Seconds after which a plain line is due, however little was done."""
_STEP = 0.1
"""Share of a phase after which a plain line is due."""
_CLIENT, _NUMBER = re.compile(r"\bclient \d"), re.compile(r"\d+(\.\d+)?")
"""What names a client in a sentence, and what differs between clients."""
_ESTIMATE_FROM = 0.05
"""Share of a phase from which the time left is shown; before, one-time work such as compilation is most of it."""


class PhaseDisplay:
    """Display of the phases of a command: live on a terminal, elsewhere as a line now and then.

    A phase of several items, such as an attack on several updates, may have `parts` that are under
    way.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = phase_bars(console)
        self._phases: dict[str, _Phase] = {}
        self._last = time.monotonic()

    def __enter__(self) -> PhaseDisplay:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def show_progress(self, work: str, done: int, total: int) -> None:
        """Show that `done` of `total` steps of the phase `work` are done."""
        if done == 0 or work not in self._phases:
            self._begin(work, total)
        phase = self._phases[work]
        phase.done, phase.total = done, total
        self._show(phase)

    def show_part(self, what: str, item: Hashable, iteration: int, iterations: int) -> None:
        """Note that `item` of the phase `what` is under way, and how many of its iterations are done."""
        if (phase := self._phases.get(what)) is not None:
            phase.parts[item] = iteration / max(iterations, 1)
            phase.iterations = f", iteration {iteration} of {iterations}" if iteration < iterations else ""
            self._show(phase)

    def _begin(self, what: str, total: int) -> None:
        old_phase = self._phases.get(what)
        task = old_phase.task if old_phase else self._bars.add_task(what, total=total, done=0)
        self._bars.reset(task, total=total, visible=True)
        self._phases[what] = _Phase(what, task)

    def _show(self, phase: _Phase) -> None:
        shown = phase.shown_share
        is_running = phase.done < phase.total
        self._bars.update(phase.task, completed=shown, total=phase.total, done=phase.done, visible=is_running)
        if not self._console.is_terminal and shown and is_running:
            self._print_line(phase, time.monotonic())

    def _print_line(self, phase: _Phase, now: float) -> None:
        """Print how far a phase is, unless too little happened since the last line."""
        shown = phase.shown_share
        is_due = shown >= phase.last_printed + _STEP * phase.total or now >= self._last + _LONG_PAUSE
        if now <= self._last + PAUSE or not is_due:
            return
        self._last, phase.last_printed = now, shown
        text = f"{phase.what}: {phase.done} of {phase.total}{phase.iterations}"
        if shown >= _ESTIMATE_FROM * phase.total:
            minutes, seconds = divmod(round((now - phase.began) * (phase.total / shown - 1)), 60)
            text += f", about {minutes}:{seconds:02d} left"
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class _Phase:
    """Progress of a phase.

    Attributes:
        parts: by item under way the share of it that is done.
        iterations: of the item that was heard of last, as a part of a sentence; empty where it is done.
        last_printed: what was done at the last plain line, in items.
    """

    def __init__(self, what: str, task: TaskID) -> None:
        self.what, self.task = what, task
        self.began = time.monotonic()
        self.done, self.total = 0, 0
        self.parts: dict[Hashable, float] = {}
        self.iterations, self.last_printed = "", 0.0
        self._max_shown = 0.0

    @property
    def shown_share(self) -> float:
        """Items that are done, with those under way in part; it never decreases."""
        under_way = sum(share for share in self.parts.values() if share < 1)
        self._max_shown = max(self._max_shown, min(self.done + under_way, self.total))
        return self._max_shown


def phase_bars(console: Console) -> Progress:
    """Return progress lines that fit into 80 columns, with the time left; nothing remains of them at the end."""
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


class VictimFilter(logging.Filter):
    """Filter that shows what is said of several clients, rounds or seeds once; `log.txt` has it of each."""

    def __init__(self) -> None:
        super().__init__()
        self._shown_sentences: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to show `record`."""
        message = record.getMessage()
        if record.levelno < logging.WARNING or not _CLIENT.search(message):
            return True
        sentence = _NUMBER.sub("", message)
        is_new = sentence not in self._shown_sentences
        self._shown_sentences.add(sentence)
        return is_new


class RoundFilter(logging.Filter):
    """Filter that lets a line about a round through every few seconds, and that of the last round."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to show `record`."""
        if record.name != ROUNDS:
            return True
        round_of_total = re.match(r"round (\d+)/(\d+)\b", record.getMessage())
        if time.monotonic() < self._next and not (round_of_total and round_of_total[1] == round_of_total[2]):
            return False
        self._next = time.monotonic() + PAUSE
        return True
