"""Who holds what: how the data of a run are shared out, and which part of a data set that is."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from fedsim.experiments.build import Experiment
from fedsim.reporting.charts import Cell, heat_map
from fedsim.reporting.holdings import Holdings, plain
from fedsim.reporting.html import grouped

CLIENTS, CLASSES = 30, 26
"""Most clients shown, and most classes that get a column each."""


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How the data are shared out.

    Attributes:
        used: which part of the data set clients hold, in a sentence.
        table: clients by classes.
        left: how many clients it leaves out.
    """

    used: str
    table: Markup
    left: int


def sharing(experiment: Experiment, attacked: Collection[int]) -> Sharing:
    """What each client holds; of many, those that were attacked and the first ones.

    Raises:
        FedsimError: the data set is not there.
    """
    holdings = Holdings(config=experiment.config, data=experiment.data, seconds=0.0)
    count = experiment.config.federation.clients
    first = [client for client in range(count) if client not in attacked]
    shown = sorted([client for client in range(count) if client in attacked][:CLIENTS])
    shown = sorted(shown + first[: CLIENTS - len(shown)])
    columns, rows = _of_classes(holdings) if holdings.dataset.num_classes else _of_targets(holdings)
    groups = _groups(holdings)
    names = [_name(client, groups, attacked) for client in shown]
    title = "Examples of each client" + (
        "; the stronger the colour, the larger their share of what it holds" if holdings.dataset.num_classes else ""
    )
    corner = "client (group)" if groups else "client"
    table = heat_map(title, names, columns, [rows[client] for client in shown], corner=corner)
    return Sharing(used=_used(holdings), table=table, left=count - len(shown))


def _used(holdings: Holdings) -> str:
    dataset, of = holdings.dataset, len(holdings.dataset.train)
    train = sum(len(one.train) for one in holdings.clients)
    held_out = sum(len(one.held_out) for one in holdings.clients)
    percent = 100 * (train + held_out) / of
    some = f"{percent:.1f}" if percent >= 0.1 else f"{percent:.2g}"
    part = (
        f"all {grouped(of)}" if train + held_out == of else f"{grouped(train + held_out)} of {grouped(of)} ({some} %)"
    )
    tests = f", {grouped(held_out)} of them to test on" if held_out else ""
    return (
        f"Of the data set {dataset.name}, clients hold {part} training examples{tests}. Its "
        f"{grouped(len(dataset.test))} test examples are public."
    )


def _of_classes(holdings: Holdings) -> tuple[list[str], list[list[Cell]]]:
    """Columns, and the cells of each client."""
    counts, dataset = holdings.counts, holdings.dataset
    shares = counts / counts.sum(1, keepdims=True)
    names = list(map(plain, dataset.class_names or tuple(map(str, range(dataset.num_classes)))))
    if len(names) > CLASSES:
        few = [
            [*_sizes(holdings, client), Cell(text=str((own > 0).sum())), Cell(text=f"{own.max() / own.sum():.0%}")]
            for client, own in enumerate(counts)
        ]
        return ["trains on", "holds out", "classes", "largest class"], few
    rows = [
        _sizes(holdings, client)
        + [Cell(text=str(n) if n else "", shade=s if n else math.nan) for n, s in zip(own, share, strict=True)]
        for client, (own, share) in enumerate(zip(counts.tolist(), shares.tolist(), strict=True))
    ]
    return ["trains on", "holds out", *names], rows


def _of_targets(holdings: Holdings) -> tuple[list[str], list[list[Cell]]]:
    """The same of a regression."""
    targets = [np.asarray(holdings.targets(one.all)) for one in holdings.clients]
    rows = [
        [*_sizes(holdings, client), *(Cell(text=f"{value:.4g}") for value in (own.mean(), own.std()))]
        for client, own in enumerate(targets)
    ]
    return ["trains on", "holds out", "mean target", "standard deviation"], rows


def _sizes(holdings: Holdings, client: int) -> list[Cell]:
    one = holdings.clients[client]
    return [Cell(text=grouped(len(one.train))), Cell(text=grouped(len(one.held_out)))]


def _groups(holdings: Holdings) -> list[str]:
    """What the natural group of each client is called; nothing where it is none, or called like the client."""
    groups = [one.group for one in holdings.clients]
    named = any(group not in ("", str(client)) for client, group in enumerate(groups))
    return [plain(group) for group in groups] if named else []


def _name(client: int, groups: Sequence[str], attacked: Collection[int]) -> str:
    named = f"{client} ({groups[client]})" if groups else str(client)
    return f"{named}, attacked" if client in attacked else named
