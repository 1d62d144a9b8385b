"""The records of the study of a regression: a category that no number tells moves the target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedsim.data import Dataset
from fedsim.data.tables import Csv
from studies.running import RUNS, keep_records

CLIENTS, RECORDS, NUMBERS = 8, 50, 4


@dataclass(frozen=True, kw_only=True)
class HiddenCategory:
    """Four numbers, a category of two, and a target that is linear in them by weights of each client's own.

    Args:
        effect: the weight of the category, plus or minus.
        seed: of the records.
    """

    effect: float = 1.0
    seed: int = 1

    def load(self, folder: Path | None) -> Dataset:
        """See `DatasetPlugin`."""
        rng, rows = np.random.default_rng(self.seed), ["client,a,b,c,d,secret,y"]
        for client in range(CLIENTS):
            weights, weight, shift = rng.normal(size=NUMBERS), self.effect * rng.choice([-1, 1]), rng.normal()
            inputs, secret = rng.normal(size=(RECORDS, NUMBERS)), rng.integers(2, size=RECORDS)
            targets = inputs @ weights + weight * secret + shift + 0.5 * rng.normal(size=RECORDS)
            for numbers, category, target in zip(inputs, secret, targets, strict=True):
                rows.append(",".join([str(client), *map(str, numbers), ("no", "yes")[category], str(target)]))
        path = keep_records(RUNS / "regression" / f"{self.effect}-{self.seed}.csv", rows)
        return Csv(path=str(path), target="y", task="regression", group="client").load(None)
