"""Find partitions that give all clients the same mixture, by what they make of sorted examples."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from fedsim.data import Dataset, Examples
from fedsim.federation.federation_tables import PartitionTable
from fedsim.plugins import registry

_CLIENTS, _CLASSES, _EXAMPLES = 8, 4, 3200
_LARGEST_MEAN_SQUARE = 3.0
"""Mean over clients and classes of the squared difference of a count from that of equal mixtures,
divided by that: it is at most 1 where examples are drawn blindly."""


def mixes_equally(table: PartitionTable) -> bool:
    """Return whether clients get the same number of examples of each class, but for chance.

    A partition that suits some data sets alone, such as one by person, counts as one that does not.
    """
    return _mixes_equally(table.model_dump_json())


def suits_any_data(table: PartitionTable) -> bool:
    """Return whether a partition needs no groups, columns or files that only some data sets have."""
    return _count_classes(table, has_groups=False) is not None


@cache
def _mixes_equally(table: str) -> bool:
    counts = _count_classes(PartitionTable.model_validate_json(table), has_groups=True)
    if counts is None:
        return False
    expected = max(counts.sum() / counts.size, 1)
    return bool(((counts - expected) ** 2).mean() / expected < _LARGEST_MEAN_SQUARE)


def _count_classes(table: PartitionTable, *, has_groups: bool) -> np.ndarray | None:
    """Return how many examples of each class clients get of sorted data, `client class`."""
    labels = torch.arange(_EXAMPLES) * _CLASSES // _EXAMPLES
    groups = torch.arange(_EXAMPLES) * _CLIENTS // _EXAMPLES if has_groups else None
    raw = torch.zeros(_EXAMPLES, 1, 8, 8, dtype=torch.uint8)
    examples = Examples(raw=raw, labels=labels, scale=1.0, groups=groups)
    names = tuple(map(str, range(_CLIENTS))) if has_groups else ()
    dataset = Dataset(
        name="probe",
        train=examples,
        test=examples,
        num_classes=_CLASSES,
        source="",
        licence="",
        group_names=names,
        modality="image",
    )
    try:
        partition = registry.build("partitions", table.name, table.settings, "partition")
        shares = partition.assign(dataset, _CLIENTS, np.random.default_rng(0))
    except (Exception, SystemExit):  # it is made for other data
        return None
    return np.stack([np.bincount(labels.numpy()[share], minlength=_CLASSES) for share in shares])
