"""Pitfalls of the setting: data, partition, local training and the attacked rounds."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from fedsim.data import Dataset, Examples
from fedsim.federation.config import AttackFile, Config
from fedsim.federation.federation_tables import PartitionTable
from fedsim.federation.resolve import resolve
from fedsim.pitfalls.design import EvaluationDesign, attacked_rounds, recorded_rounds
from fedsim.pitfalls.pitfall import PitfallRule, Symptom, Untried
from fedsim.plugins import registry

_SMALL_IMAGE = 28 * 28
"""Most pixels of an easy image: those of MNIST."""
_LONGER = 10
"""Local steps, and rounds of a federation, in counter-experiments."""


class EasyData(PitfallRule):
    """No data but small grey images."""

    name = "easy-data"
    title = "small grey images only, such as MNIST or digits"
    reason = "They are the easiest images to recover, and to classify under a defense."

    def find(self, design: EvaluationDesign) -> Symptom | Untried | None:
        """Return the data sets where all are easy."""
        configs = [config for config, _ in design.attacked_configs]
        datasets = [design.dataset(config) for config in configs]
        if not configs or any(dataset is not None and not _is_easy(dataset) for dataset in datasets):
            return None
        if None in datasets:
            return Untried(why=design.explain_no_dataset(configs[datasets.index(None)]))
        names = ", ".join(dict.fromkeys(config.data.name for config in configs))
        changes: dict[str, Any] = {"data": {"name": "cifar10"}}
        if not suits_any_data(configs[0].partition):
            changes["partition"] = _uneven_partition(configs[0], num_classes=10)
        return Symptom(detail=f"{names}: one channel and at most 28 x 28 pixels.", changes=changes)


def _is_easy(dataset: Dataset) -> bool:
    channels, *axes = dataset.task.input_shape
    return dataset.task.modality == "image" and channels == 1 and axes[0] * axes[1] <= _SMALL_IMAGE


class EqualClients(PitfallRule):
    """No partition but one that gives each client the same mixture."""

    name = "iid-only"
    title = "iid partition only"
    reason = "Real clients have heterogeneous data, which changes messages, floors and the cost of defenses."

    def find(self, design: EvaluationDesign) -> Symptom | None:
        """Return the partition where all clients get the same mixture."""
        configs = [config for config, _ in design.attacked_configs]
        if not configs or not all(mixes_equally(config.partition) for config in configs):
            return None
        dataset = design.dataset(configs[0])
        partition = _uneven_partition(configs[0], num_classes=dataset.num_classes if dataset else 1)
        return Symptom(
            detail=f"{configs[0].partition.name} gives each client the same mixture of classes.",
            changes={"partition": partition},
        )


def _uneven_partition(config: Config, num_classes: int) -> dict[str, Any]:
    """Return a [partition] table of uneven clients; other keys than the plug-in's own stay."""
    choice = {"name": "dirichlet", "alpha": 0.5} if num_classes else {"name": "quantity-skew"}
    own_keys = config.partition.model_dump(exclude_defaults=True, exclude={"name", *config.partition.settings})
    return choice | own_keys


class LittleLocalWork(PitfallRule):
    """No clients but those that train for one epoch or step."""

    name = "one-epoch"
    title = "one local epoch or one step only"
    reason = "Updates of fewer steps are easier to invert."

    def find(self, design: EvaluationDesign) -> Symptom | None:
        """Return the number of steps or epochs where all clients train for one."""
        configs = [config for config, _ in design.attacked_configs]
        tables = [config.training for config in configs]
        if not configs or any(1 not in (table.local_epochs, table.local_steps) for table in tables):
            return None
        if tables[0].local_epochs == 1:
            return Symptom(
                detail="Clients train for one epoch (training.local_epochs = 1).",
                changes={"training": {"local_epochs": 5}},
            )
        changes: dict[str, Any] = {"training": {"local_steps": _LONGER}}
        # A client that sends a gradient takes no further steps.
        if resolve(configs[0]).training.sends == "gradient":
            changes = {"strategy": {"name": "fedavg"}, "training": {"local_steps": _LONGER, "sends": "weights"}}
        return Symptom(detail="Clients take one step (training.local_steps = 1).", changes=changes)


class FreshWeights(PitfallRule):
    """No attack but on round 1, whose weights are random."""

    name = "fresh-weights"
    title = "fresh weights only: attacks see round 1 alone"
    reason = (
        "Gradients at random weights mostly reveal more than later ones, but less to matching where BatchNorm "
        "normalises by the batch."
    )

    def find(self, design: EvaluationDesign) -> Symptom | None:
        """Return the attacked round where it is the first and the model starts untrained."""
        specs = [spec for spec, _ in design.attacked_specs]
        if not specs or not all(_attacks_fresh_weights(spec) for spec in specs):
            return None
        spec = specs[0]
        if not isinstance(spec, Config):
            return Symptom(
                detail="The first recorded round alone is attacked (adversary.rounds).",
                changes={"adversary": {"rounds": "all"}},
            )
        return Symptom(
            detail="Round 1 alone is attacked, and model.start names no trained weights.",
            changes=_attack_last_round(spec),
        )


def _attacks_fresh_weights(spec: AttackFile) -> bool:
    if not isinstance(spec, Config):
        return spec.adversary.rounds in (None, [1])
    return spec.model.start is None and attacked_rounds(spec) == [1]


def _attack_last_round(config: Config) -> dict[str, Any]:
    """Return changes with which the last round is recorded and attacked as well."""
    last = recorded_rounds(config)[-1]
    if last > 1:
        return {"adversary": {"rounds": [1, last]}}
    last = max(config.federation.rounds, _LONGER)
    return {
        "federation": {"rounds": last},
        "recording": {"rounds": [1, last], "every": 1},
        "adversary": {"rounds": [1, last]},
    }


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
