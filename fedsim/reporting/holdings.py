"""Who holds what: what `fedsim data` says of a data set and its partition. The picture is in `holdings_picture`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.markup import escape
from rich.table import Table

from fedsim.datasets import Dataset
from fedsim.errors import ConfigError, DataError
from fedsim.experiments.build import Experiment, data_folder
from fedsim.experiments.config import Config, check
from fedsim.experiments.federated_data import FederatedData
from fedsim.experiments.reading import load_config, read_toml
from fedsim.partitions import Indices
from fedsim.partitions.natural import Natural
from fedsim.plugins import registry

_ROWS = 20
"""Clients that the table names; of more it gives the first ones and the quartiles."""
_MOST_CLIENTS = 1000
"""Natural groups that are shown when nobody says how many clients there are."""


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What one client holds.

    Attributes:
        group: the natural group that it is; empty where it is none.
        train: what it trains on, indices into the training set.
        held_out: what it tests on.
    """

    group: str
    train: Indices
    held_out: Indices

    @property
    def all(self) -> Indices:
        """Both together."""
        return np.concatenate([self.train, self.held_out])


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """A data set shared out among clients, as it is shown.

    Attributes:
        config: the experiment that says how.
        data: what came of it.
        seconds: what it took to load the data set.
    """

    config: Config
    data: FederatedData
    seconds: float

    @property
    def dataset(self) -> Dataset:
        """What is shared out."""
        return self.data.dataset

    @cached_property
    def clients(self) -> list[Holding]:
        """One a client, those who only test last."""
        parts = [self.data.indices(client) for client in range(self.data.clients)]
        parts += [(np.empty(0, np.int64), held_out) for held_out in self.data.clients_who_test]
        groups = [self._group(np.concatenate(own)) for own in parts]
        known = all(groups)
        return [
            Holding(group=group if known else "", train=train, held_out=held_out)
            for group, (train, held_out) in zip(groups, parts, strict=True)
        ]

    def _group(self, index: Indices) -> str:
        """The natural group that these examples, and no others, are of."""
        groups = self.dataset.train.groups
        if groups is None:
            return ""
        owners = np.unique(groups.numpy()[index])
        return self.dataset.group_names[int(owners[0])] if len(owners) == 1 else ""

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """`client class`, examples; of a classification."""
        labels = self.dataset.train.labels.numpy()
        classes = self.dataset.num_classes
        return np.stack([np.bincount(labels[one.all], minlength=classes) for one in self.clients])

    def targets(self, index: Indices) -> NDArray[np.float64]:
        """The targets of a regression in their own unit."""
        mean, deviation = self.dataset.target
        return self.dataset.train.labels.numpy()[index].astype(np.float64) * deviation + mean


def survey(name: str, overrides: Iterable[str] = (), *, fetch: bool = False, trust: bool = False) -> Holdings:
    """Load a data set and share it out.

    Args:
        name: a data set, or an experiment file (`.toml`).
        overrides: `key=value` settings of an experiment. Of a data set by name, the partition is
            `natural` by default where there are natural groups, with a client for each (the most
            are 1000), and else `iid` with 10 clients.
        fetch: download what is missing first.
        trust: import code that a file in a run folder names.

    Raises:
        ConfigError: a setting does not hold.
        DataError: the data set is missing or damaged, or cannot be downloaded.
        PluginError: nothing has this name.
    """
    if name.endswith(".toml"):
        config = load_config(Path(name), overrides, trust=trust)
        return _survey(Experiment(config), fetch)
    registry.load("datasets", name)
    tables = read_toml(Path(os.devnull), overrides)  # the settings alone are the experiment
    table = tables.setdefault("data", {})
    if isinstance(table, dict) and table.setdefault("name", name) != name:
        raise ConfigError(f"--set data.name={table['name']}: the data set is '{name}' already; leave this out")
    return _survey(Experiment(check(Config, tables, "--set")), fetch, tables)


def _survey(experiment: Experiment, fetch: bool, tables: dict[str, dict[str, object]] | None = None) -> Holdings:
    if fetch:
        _download(experiment.config.data.name)
    start = time.perf_counter()
    dataset = experiment.dataset
    seconds = time.perf_counter() - start
    if tables is not None:
        experiment = Experiment(check(Config, _with_defaults(tables, dataset), "--set"))
        experiment.dataset = dataset
    holdings = Holdings(config=experiment.config, data=experiment.data, seconds=seconds)
    assert holdings.clients
    return holdings


def _download(name: str) -> None:
    from fedsim.datasets.download import download

    folder = data_folder()
    if folder is None:
        raise DataError("data: a download needs a data folder to go to; give --data-dir DIR or set FEDSIM_DATA")
    download(name, folder)


def _with_defaults(tables: dict[str, dict[str, object]], dataset: Dataset) -> dict[str, dict[str, object]]:
    """`tables` with a partition, and with a client for each natural group where that is the partition."""
    grouped = dataset.train.groups is not None
    partition = {"name": "natural" if grouped else "iid", **tables.get("partition", {})}
    completed = {**tables, "partition": partition}
    federation = tables.get("federation", {})
    table = check(Config, completed, "--set").partition
    plugin = registry.build("partitions", table.name, table.settings, "partition")
    if grouped and "clients" not in federation and isinstance(plugin, Natural):
        train = 1 - (table.test_fraction if table.test_by == "client" else 0)
        clients = int(min(len(plugin.members(dataset)), _MOST_CLIENTS) * train)
        completed["federation"] = {**federation, "clients": max(1, clients)}
    return completed


def description(holdings: Holdings) -> Table:
    """What the data set is, a fact a line."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for fact, value in _facts(holdings):
        table.add_row(fact, escape(value))
    return table


def _facts(holdings: Holdings) -> list[tuple[str, str]]:
    dataset = holdings.dataset
    return [
        ("data set", f"{dataset.name}, loaded in {holdings.seconds:.2f} s"),
        ("source", dataset.source),
        ("licence", dataset.licence),
        ("inputs", _inputs(dataset)),
        ("to learn", _goal(dataset)),
        ("examples", f"{_thousands(len(dataset.train))} to train, {_thousands(len(dataset.test))} to test"),
        ("groups", _groups(dataset)),
        ("partition", _partition(holdings)),
    ]


def _inputs(dataset: Dataset) -> str:
    task = dataset.task
    shape = " x ".join(map(str, task.input_shape))
    if task.kind == "text":
        return f"texts of {shape} tokens out of {_thousands(task.vocabulary)}"
    low, high = dataset.value_range
    what = f"images of {shape} (channels, height, width)" if task.kind == "image" else f"rows of {shape} features"
    return f"{what}, values from {low:.4g} to {high:.4g}"


def _goal(dataset: Dataset) -> str:
    if not dataset.num_classes:
        mean, deviation = dataset.target
        return f"a number (regression); mean {_figure(mean)}, standard deviation {_figure(deviation)}"
    names = dataset.class_names
    shown = ", ".join(map(plain, names[:6])) + (", ..." if len(names) > 6 else "")
    return f"{dataset.num_classes} classes" + (f": {shown}" if shown else "")


def _groups(dataset: Dataset) -> str:
    if dataset.train.groups is None:
        return "nobody knows whose the examples are"
    sizes = np.bincount(dataset.train.groups.numpy())
    sizes = sizes[sizes > 0]
    least, most = _thousands(sizes.min()), _thousands(sizes.max())
    each = f"{least} to {most}" if least != most else least
    return f"{_thousands(len(sizes))} to whom training examples belong by nature, {each} each"


def _partition(holdings: Holdings) -> str:
    held = np.concatenate([one.all for one in holdings.clients])
    different = len(np.unique(held))
    training, testing = holdings.data.clients, len(holdings.data.clients_who_test)
    clients = f"{training} clients" + (f" that train and {testing} that test" if testing else "")
    shared = f", some by several ({_thousands(len(held))} in all)" if different < len(held) else ""
    return (
        f"{holdings.config.partition.name}, {clients}, which hold {_thousands(different)} "
        f"of {_thousands(len(holdings.dataset.train))} training examples{shared}"
    )


def plain(name: str) -> str:
    """`name` on one line and visible: a class of texts may be a line break or a blank."""
    return name if name.isprintable() and name.strip() else repr(name)


def client_table(holdings: Holdings) -> Table:
    """A row a client, and what lies between the extremes; narrow enough for 80 columns."""
    columns = ("N", "held out", *(("classes", "largest class") if holdings.dataset.num_classes else ("mean", "sd")))
    grouped = bool(holdings.clients[0].group)
    table = Table("client")
    if grouped:
        table.add_column("group", no_wrap=True, overflow="ellipsis", max_width=20)
    for column in columns:
        table.add_column(column, justify="right")
    rows = _numbers(holdings)
    for client, one in enumerate(holdings.clients[:_ROWS]):
        table.add_row(str(client), *([escape(plain(one.group))] if grouped else []), *_cells(holdings, rows[client]))
    if len(rows) > _ROWS:
        table.add_row(f"{_thousands(len(rows) - _ROWS)} more", style="dim")
    if len(rows) > 1:
        table.add_section()
        for name, function in (("smallest", np.nanmin), ("median", np.nanmedian), ("largest", np.nanmax)):
            table.add_row(name, *[""] * grouped, *_cells(holdings, function(rows, axis=0)), style="bold")
    return table


def _numbers(holdings: Holdings) -> NDArray[np.float64]:
    """`client number`: N, held out, and classes and the largest one's share, or mean and deviation of the targets.

    Where some clients train and others test, what the others do is NaN.
    """
    sizes = np.array([(len(one.train), len(one.held_out)) for one in holdings.clients], float)
    if holdings.data.clients_who_test:
        sizes[sizes == 0] = np.nan
    if holdings.dataset.num_classes:
        counts = holdings.counts
        about = np.stack([(counts > 0).sum(1), counts.max(1) / counts.sum(1)], 1)
    else:
        targets = [holdings.targets(one.all) for one in holdings.clients]
        about = np.array([(own.mean(), own.std()) for own in targets])
    return np.concatenate([sizes, about], 1)


def _cells(holdings: Holdings, row: Sequence[float] | NDArray[np.float64]) -> list[str]:
    train, held_out, first, second = (float(number) for number in row)
    if holdings.dataset.num_classes:
        return [_thousands(train), _thousands(held_out), f"{first:g}", f"{second:.0%}"]
    return [_thousands(train), _thousands(held_out), _figure(first), _figure(second)]


def _thousands(number: float) -> str:
    return "-" if np.isnan(number) else f"{number:,.0f}".replace(",", " ")


def _figure(number: float) -> str:
    """Four digits, and never an exponent that a price does not need."""
    return _thousands(number) if 1000 <= abs(number) < 1e9 else f"{number:.4g}"
