"""Entry of an index of runs: what a run or sweep was, how it ended and what leaked."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import datetime
from urllib.parse import quote

FINISHED, FAILED, UNFINISHED, RUNNING = "finished", "failed", "unfinished", "running"
DAMAGED = "damaged"


@dataclass(kw_only=True)
class IndexEntry:
    """Run or sweep in an index; what is not known is empty, or NaN.

    Attributes:
        name: path below the folder of the index.
        page: name of its page in its folder; empty where there is none.
        time: seconds since 1970 when it was begun.
        training: E or T, and B.
        sentence: what leaked, as its page says first.
        accuracy: that of the shared model at the server's last evaluation; of a sweep, the best of all cells.
        no_learning: why its model counts as one that has not learnt.
        state: `FINISHED`, `FAILED`, `UNFINISHED` or `RUNNING`.
    """

    name: str
    kind: str = "run"
    page: str = ""
    time: float = math.nan
    data: str = ""
    model: str = ""
    clients: str = ""
    rounds: str = ""
    training: str = ""
    defenses: str = ""
    attacks: str = ""
    verdict: str = ""
    sentence: str = ""
    accuracy: float = math.nan
    guess: float = math.nan
    no_learning: str = ""
    state: str = ""
    reasons: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    version: str = ""

    @property
    def address(self) -> str:
        """Return the address of its page relative to the index; empty where it has none."""
        return quote(f"{self.name}/{self.page}") if self.page else ""

    @property
    def time_text(self) -> str:
        """Return its time in the time zone of this machine; empty where it is not known."""
        return "" if math.isnan(self.time) else f"{datetime.fromtimestamp(self.time).astimezone():%Y-%m-%d %H:%M}"

    @property
    def shown_state(self) -> str:
        """Return its state in a word; damage comes first."""
        return DAMAGED if self.problems else self.state
