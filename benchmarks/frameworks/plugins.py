"""The jobs' data and networks as plug-ins of fedsim, named by `module:Class` in the experiment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from fedsim.base.task import Task
from fedsim.data import Dataset, Examples
from frameworks.jobs import CLASSES, JOBS, SCALE


@dataclass(frozen=True, kw_only=True)
class Images:
    """Synthetic images for `clients` clients of `job`."""

    job: str
    clients: int

    def load(self, folder: Path | None) -> Dataset:
        """See `DatasetPlugin`."""
        raw, labels = (tensor.flatten(0, 1) for tensor in JOBS[self.job].images(self.clients))
        train = Examples(raw=raw, labels=labels, scale=SCALE)
        test = Examples(raw=raw[:1], labels=labels[:1], scale=SCALE)
        return Dataset(
            name="synthetic", train=train, test=test, num_classes=CLASSES, source="generated", licence="none needed"
        )


@dataclass(frozen=True, kw_only=True)
class Network:
    """The network of `job`."""

    job: str

    def build(self, task: Task) -> nn.Module:
        """See `ModelPlugin`."""
        return JOBS[self.job].network()
