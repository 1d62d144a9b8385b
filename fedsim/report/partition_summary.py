"""Summary of a data set and its partition among clients, as `fedsim data` shows it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.markup import escape
from rich.table import Table

from fedsim.base.errors import ConfigError, DataError, format_percent
from fedsim.data import Dataset
from fedsim.data.partitions import Indices
from fedsim.data.partitions.natural import Natural
from fedsim.federation.config import Config
from fedsim.federation.data_folder import find_data_folder
from fedsim.federation.experiment import Experiment
from fedsim.federation.experiment_file import load_config, read_toml
from fedsim.federation.federated_data import FederatedData
from fedsim.federation.table_validation import validate_tables
from fedsim.modalities import find_modality
from fedsim.plugins import registry

_ROWS = 20
"""Most clients that the table lists one by one."""
_MAX_NATURAL_CLIENTS = 1000
"""Largest number of clients of a natural partition if none is given."""


@dataclass(frozen=True, kw_only=True)
class ClientExamples:
    """Examples of one client.

    Attributes:
        group: the natural group that the client is; empty where it is none.
        train: indices into the training set of the examples it trains on.
        held_out: likewise, of those it tests on.
    """

    group: str
    train: Indices
    held_out: Indices

    @property
    def all_indices(self) -> Indices:
        """Indices of all its examples, those it trains on first."""
        return np.concatenate([self.train, self.held_out])


@dataclass(frozen=True, kw_only=True)
class PartitionSummary:
    """Data set that is partitioned among clients."""

    config: Config
    data: FederatedData
    seconds: float

    @property
    def dataset(self) -> Dataset:
        """The data set that is partitioned."""
        return self.data.dataset

    @cached_property
    def clients(self) -> list[ClientExamples]:
        """Examples of each client; clients that only test come last."""
        clients = [self._read_indices(client) for client in range(self.num_clients)]
        if not self.has_groups:
            return clients
        groups = [self._group(client.all_indices) for client in clients]
        if not all(groups):
            return clients
        return [replace(client, group=group) for client, group in zip(clients, groups, strict=True)]

    @property
    def has_groups(self) -> bool:
        """Return whether the data set has natural groups, which clients may be."""
        return self.dataset.train.groups is not None

    @property
    def num_clients(self) -> int:
        """Return the number of clients, those that only test too."""
        return self.data.clients + len(self.data.test_client_indices)

    def read_client(self, client: int) -> ClientExamples:
        """Return the examples of a client; without natural groups, those of others are not read."""
        return self.clients[client] if self.has_groups else self._read_indices(client)

    def _read_indices(self, client: int) -> ClientExamples:
        if client < self.data.clients:
            train, held_out = self.data.indices(client)
        else:
            train, held_out = np.empty(0, np.int64), self.data.test_client_indices[client - self.data.clients]
        return ClientExamples(group="", train=train, held_out=held_out)

    def _group(self, index: Indices) -> str:
        """Return the natural group that all these examples are of; empty where they are of several."""
        groups = self.dataset.train.groups
        if groups is None:
            return ""
        owners = np.unique(groups.numpy()[index])
        return self.dataset.group_names[int(owners[0])] if len(owners) == 1 else ""

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """Number of examples `client class`, or `client label` of several labels; of masks, those with such pixels."""
        return self.count_classes(range(self.num_clients))

    def count_classes(self, clients: Iterable[int]) -> NDArray[np.int64]:
        """Return as `counts` the numbers of some clients."""
        labels = self.dataset.train.labels.numpy()
        held = [labels[self.read_client(client).all_indices] for client in clients]
        if number := self.dataset.mask_classes:
            has_class = [[(masks == pixel_class).any((1, 2)).sum() for pixel_class in range(number)] for masks in held]
            return np.array(has_class, np.int64)
        if self.dataset.num_labels:
            return np.stack([rows.sum(0, dtype=np.int64) for rows in held])
        return np.stack([np.bincount(classes, minlength=self.dataset.num_classes) for classes in held])

    def targets(self, index: Indices) -> NDArray[np.float64]:
        """Return targets of a regression in their own unit; of several numbers as they are, in rows."""
        mean, deviation = self.dataset.target
        return self.dataset.train.labels.numpy()[index].astype(np.float64) * deviation + mean


def load_partition_summary(
    name: str, overrides: Iterable[str], *, fetch: bool = False, trust: bool = False
) -> PartitionSummary:
    """Load a data set and partition it.

    Args:
        name: a data set, or an experiment file (`.toml`).
        overrides: `key=value` settings of an experiment. Of a data set by name, the partition is `natural` by default
            where there are natural groups, with one client for each (at most 1000), and else `iid` with 10 clients.
    """
    if name.endswith(".toml"):
        config = load_config(Path(name), overrides, trust=trust)
        return _load_partition(Experiment(config), fetch)
    registry.load("datasets", name)
    tables = read_toml(Path(os.devnull), overrides)  # the settings alone are the experiment
    table = tables.setdefault("data", {})
    if isinstance(table, dict) and table.setdefault("name", name) != name:
        raise ConfigError(f"--set data.name={table['name']}: the data set is '{name}' already; leave this out")
    return _load_partition(Experiment(validate_tables(Config, tables, "--set")), fetch, tables)


def _load_partition(
    experiment: Experiment, fetch: bool, tables: dict[str, dict[str, object]] | None = None
) -> PartitionSummary:
    """Load the data set of an experiment and partition it.

    Args:
        tables: settings that lack defaults which depend on the data set; None where there are none to fill in.
    """
    if fetch:
        _download(experiment.config.data.name)
    start = time.perf_counter()
    dataset = experiment.dataset
    seconds = time.perf_counter() - start
    if tables is not None:
        experiment = Experiment(validate_tables(Config, _with_defaults(tables, dataset), "--set"))
        experiment.dataset = dataset
    summary = PartitionSummary(config=experiment.config, data=experiment.data, seconds=seconds)
    assert summary.clients  # computes them, so that errors of the partition are raised here
    return summary


def _download(name: str) -> None:
    from fedsim.data.download import download

    folder = find_data_folder()
    if folder is None:
        raise DataError("data: a download needs a data folder to go to; give --data-dir DIR or set FEDSIM_DATA")
    download(name, folder)


def _with_defaults(tables: dict[str, dict[str, object]], dataset: Dataset) -> dict[str, dict[str, object]]:
    """Return `tables` with a partition, and with a client for each natural group where that is the partition."""
    grouped = dataset.train.groups is not None
    partition = {"name": "natural" if grouped else "iid", **tables.get("partition", {})}
    completed = {**tables, "partition": partition}
    federation = tables.get("federation", {})
    table = validate_tables(Config, completed, "--set").partition
    plugin = registry.build("partitions", table.name, table.settings, "partition")
    if grouped and "clients" not in federation and isinstance(plugin, Natural):
        train = 1 - (table.test_fraction if table.test_by == "client" else 0)
        clients = int(min(len(plugin.group_members(dataset)), _MAX_NATURAL_CLIENTS) * train)
        completed["federation"] = {**federation, "clients": max(1, clients)}
    return completed


def dataset_table(summary: PartitionSummary) -> Table:
    """Return a table of facts about the data set."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for fact, value in _facts(summary):
        table.add_row(fact, escape(value))
    return table


def _facts(summary: PartitionSummary) -> list[tuple[str, str]]:
    dataset = summary.dataset
    return [
        ("data set", f"{dataset.name}, loaded in {summary.seconds:.2f} s"),
        ("source", dataset.source),
        ("licence", dataset.licence),
        ("inputs", _inputs(dataset)),
        ("to learn", _goal(dataset)),
        ("examples", f"{_thousands(len(dataset.train))} to train, {_thousands(len(dataset.test))} to test"),
        ("groups", _groups(dataset)),
        ("partition", _partition(summary)),
    ]


def _inputs(dataset: Dataset) -> str:
    task = dataset.task
    shape = " x ".join(map(str, task.input_shape))
    modality = find_modality(task.modality)
    axes = f"({', '.join(modality.axes)})" if len(modality.axes) > 1 else f"{modality.axes[0]}s"
    subject = f"{modality.plural} of {shape} {axes}"
    if modality.has_tokens:
        return f"{subject} out of {_thousands(task.vocabulary)}"
    low, high = dataset.value_range
    return f"{subject}, values from {low:.4g} to {high:.4g}"


def _goal(dataset: Dataset) -> str:
    if not (dataset.num_classes or dataset.task.target_shape):
        mean, deviation = dataset.target
        return f"a number (regression); mean {_figure(mean)}, standard deviation {_figure(deviation)}"
    names = dataset.class_names
    listing = ", ".join(map(printable_name, names[:6])) + (", ..." if len(names) > 6 else "")
    return dataset.task.describe_goal() + (f": {listing}" if listing else "")


def _groups(dataset: Dataset) -> str:
    if dataset.train.groups is None:
        return "unknown"
    sizes = np.bincount(dataset.train.groups.numpy())
    sizes = sizes[sizes > 0]
    smallest, largest = _thousands(sizes.min()), _thousands(sizes.max())
    size_range = f"{smallest} to {largest}" if smallest != largest else smallest
    return f"{_thousands(len(sizes))} to whom training examples belong by nature, {size_range} each"


def _partition(summary: PartitionSummary) -> str:
    examples = np.concatenate([client.all_indices for client in summary.clients])
    num_distinct = len(np.unique(examples))
    training, testing = summary.data.clients, len(summary.data.test_client_indices)
    clients = f"{training} clients" + (f" that train and {testing} that test" if testing else "")
    shared = f", some by several ({_thousands(len(examples))} in all)" if num_distinct < len(examples) else ""
    return (
        f"{summary.config.partition.name}, {clients}, which hold {_thousands(num_distinct)} "
        f"of {_thousands(len(summary.dataset.train))} training examples{shared}"
    )


def printable_name(name: str) -> str:
    r"""Return `name` on one line and visible: a class of texts may be a line break or a blank.

    >>> printable_name("cat"), printable_name("\n")
    ('cat', "'\\n'")
    """
    return name if name.isprintable() and name.strip() else repr(name)


def client_table(summary: PartitionSummary) -> Table:
    """Return a table with a row for each client, and the smallest, median and largest; narrow enough for 80 columns."""
    label_columns = {
        "classes": ("classes", "largest class"),
        "labels": ("labels", "most frequent"),
        "masks": ("pixel classes", "in most"),
        "numbers": ("mean", "sd") if summary.dataset.num_targets == 1 else ("mean of all", "sd of all"),
    }[summary.dataset.task.goal]
    grouped = bool(summary.clients[0].group)
    # A client may train on few of its examples, which have fewer classes.
    both = "The last two columns are of all examples of a client, those that it holds out among them."
    table = Table("client", caption=both if summary.data.clients_hold_out else None)
    if grouped:
        table.add_column("group", no_wrap=True, overflow="ellipsis", max_width=20)
    for column in ("N", "held out", *label_columns):
        table.add_column(column, justify="right")
    # The first clients.
    rows = _numbers(summary)
    for number, client in enumerate(summary.clients[:_ROWS]):
        group = [escape(printable_name(client.group))] if grouped else []
        table.add_row(str(number), *group, *_cells(summary, rows[number]))
    if len(rows) > _ROWS:
        table.add_row(f"{_thousands(len(rows) - _ROWS)} more", style="dim")
    # Statistics over all clients.
    if len(rows) > 1:
        table.add_section()
        for name, statistic in (("smallest", np.nanmin), ("median", np.nanmedian), ("largest", np.nanmax)):
            table.add_row(name, *[""] * grouped, *_cells(summary, statistic(rows, axis=0)), style="bold")
    return table


def _numbers(summary: PartitionSummary) -> NDArray[np.float64]:
    """Compute `client number`: N, held out, and classes and the largest one's share, or mean and sd of the targets.

    Several labels count as classes do, each as a share of the examples that have it.

    Where some clients train and others test, a size that a client does not have is NaN.
    """
    sizes = np.array([(len(client.train), len(client.held_out)) for client in summary.clients], float)
    if summary.data.test_client_indices:
        sizes[sizes == 0] = np.nan
    if summary.dataset.task.goal != "numbers":
        counts, held = summary.counts, np.array([len(client.all_indices) for client in summary.clients])
        label_statistics = np.stack([(counts > 0).sum(1), counts.max(1) / held], 1)
    else:
        targets = [summary.targets(client.all_indices) for client in summary.clients]
        label_statistics = np.array([(values.mean(), values.std()) for values in targets])
    return np.concatenate([sizes, label_statistics], 1)


def _cells(summary: PartitionSummary, row: Sequence[float] | NDArray[np.float64]) -> list[str]:
    train, held_out, first, second = (float(number) for number in row)
    if summary.dataset.task.goal != "numbers":
        return [_thousands(train), _thousands(held_out), f"{first:g}", format_percent(second, ".0f")]
    return [_thousands(train), _thousands(held_out), _figure(first), _figure(second)]


def _thousands(number: float) -> str:
    return "-" if np.isnan(number) else f"{number:,.0f}".replace(",", " ")


def _figure(number: float) -> str:
    """Format with four digits, and without an exponent where a price needs none."""
    return _thousands(number) if 1000 <= abs(number) < 1e9 else f"{number:.4g}"
