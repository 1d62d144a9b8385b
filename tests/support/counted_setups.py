"""Data and a network that note in a file which process made them, and a count of how often replies are read."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fedsim.base.task import Task
from fedsim.data import Dataset
from fedsim.data.digits import Digits
from fedsim.federation.config import Config
from fedsim.federation.engines.arrays import LazyArray, ReplySpool
from fedsim.training.models.mlp import Mlp
from tests.support.experiments import make_tiny_config


@dataclass(frozen=True, kw_only=True)
class NotedDigits:
    """Digits; each process that loads them adds a line to the file `note`."""

    note: str

    def load(self, folder: Path | None) -> Dataset:
        """See `DatasetPlugin`."""
        _note(self.note, "data")
        return Digits().load(folder)


@dataclass(frozen=True, kw_only=True)
class NotedNetwork:
    """A small network; each process that builds it adds a line to the file `note`."""

    note: str

    def build(self, task: Task) -> nn.Module:
        """See `ModelPlugin`."""
        _note(self.note, "network")
        return Mlp(hidden=(16,)).build(task)


def make_noting_config(note: Path, **tables: Any) -> Config:
    """Return the tiny experiment, with data and a network that write into the file `note`."""
    data = {"name": f"{__name__}:NotedDigits", "note": str(note)}
    model = {"name": f"{__name__}:NotedNetwork", "note": str(note)}
    return make_tiny_config(data=data, model=model, attack=[], **tables)


def read_notes(note: Path) -> dict[int, Counter[str]]:
    """Return for each process how often it loaded the data and built the network."""
    counts: dict[int, Counter[str]] = {}
    for line in note.read_text().splitlines():
        process, what = line.split()
        counts.setdefault(int(process), Counter())[what] += 1
    return counts


class ReplyReads:
    """Count of how often each array of a reply is read in this process while a test runs, copied or not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Arrays, not their ids, so that none gets the id of one that is gone.
        self._replies: list[LazyArray] = []
        self._reads: list[LazyArray] = []
        store, view = ReplySpool.store, LazyArray.view

        def note_reply(spool: ReplySpool, record: Any) -> None:
            self._replies += record.values()
            num_reads = len(self._reads)
            store(spool, record)
            del self._reads[num_reads:]  # the spool asks for sizes alone

        def note_read(array: LazyArray) -> Any:
            self._reads.append(array)
            return view(array)

        monkeypatch.setattr(ReplySpool, "store", note_reply)
        monkeypatch.setattr(LazyArray, "view", note_read)

    def counts(self) -> list[int]:
        """Return the number of reads of each array."""
        reads = Counter(map(id, self._reads))
        return [reads[key] for key in dict.fromkeys(map(id, self._replies))]


def _note(note: str, what: str) -> None:
    with Path(note).open("a") as file:
        file.write(f"{os.getpid()} {what}\n")
