"""Adult's people, and clients who have women in one of two shares."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedsim.data import Dataset
from fedsim.data.partitions import Indices
from fedsim.data.tables import Csv
from studies.running import RUNS, keep_records

EXAMPLES, RICH = 64, 16
"""Of each client, and how many of them earn more than 50 000 dollars, so that income tells nothing of sex."""
COLUMNS = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation"),
    *("relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country", "income"),
)


@dataclass(frozen=True, kw_only=True)
class AdultPeople:
    """Both files of Adult; people of whom something is unknown are left out, and whose husband or wife somebody is.

    Args:
        sex_is_fed: sex is a feature; else it is the group of each person, which no model is fed with.
    """

    sex_is_fed: bool = False

    def load(self, folder: Path | None) -> Dataset:
        """See `DatasetPlugin`."""
        assert folder is not None
        rows = []
        for name in ("adult.data", "adult.test"):
            for line in (folder / "adult" / name).read_text().splitlines():
                if line and line[0] != "|" and "?" not in line:
                    rows.append(line.rstrip(".").split(", "))
        path = keep_records(RUNS / "properties" / "adult.csv", [",".join(row) for row in (COLUMNS, *rows)])
        group = None if self.sex_is_fed else "sex"
        drop = ("fnlwgt", "education-num", "relationship")
        return Csv(path=str(path), target="income", drop=drop, group=group).load(None)


@dataclass(frozen=True, kw_only=True)
class WomenInTurn:
    """Clients in turn with the smaller and the larger share of women, each with as many rich people.

    Args:
        shares: of women.
        seed: of the draw.
    """

    shares: tuple[float, float] = (0.0, 0.5)
    seed: int = 0

    def assign(self, dataset: Dataset, clients: int, rng: np.random.Generator) -> list[Indices]:
        """See `Partition`."""
        train, draw = dataset.train, np.random.default_rng(self.seed)
        if train.groups is None:
            female = dataset.column("sex").values(train.inputs()).numpy() == 0
        else:
            female = train.groups.numpy() == dataset.group_names.index("Female")
        people = {}
        for rich in (0, 1):
            for woman in (False, True):
                alike = np.flatnonzero((train.labels.numpy() == rich) & (female == woman))
                people[rich, woman] = list(draw.permutation(alike))
        clients_data = []
        for client in range(clients):
            chosen = []
            for rich, count in enumerate((EXAMPLES - RICH, RICH)):
                women = round(self.shares[client % 2] * count)
                for woman, number in ((True, women), (False, count - women)):
                    chosen += [people[rich, woman].pop() for _ in range(number)]
            clients_data.append(np.array(chosen, dtype=np.int64))
        return clients_data
