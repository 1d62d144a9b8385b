"""Panel of what was run, and of how the data are partitioned among clients."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from statistics import fmean
from typing import Any

import numpy as np
from markupsafe import Markup

from fedsim.base.errors import FedsimError, format_percent
from fedsim.federation.experiment import Experiment
from fedsim.federation.run_folder import RunFolder, read_rows
from fedsim.interfaces.panel import Panel
from fedsim.report.charts import HeatMapCell, draw_heat_map
from fedsim.report.html import group_digits, render_fragment
from fedsim.report.partition_summary import PartitionSummary, printable_name
from fedsim.report.reported_run import ReportedRun
from fedsim.report.run_facts import defense_promises, run_facts

MAX_CLIENTS, MAX_CLASSES = 30, 26
"""Most clients that are shown, and most classes that get a column each."""


class RunPanel(Panel):
    """Say which data, model and training were run, what defenses promise, and who holds what."""

    title = "What was run"
    link = "The run"
    order = 100

    def render(self, run: ReportedRun) -> Markup:
        """Return the facts term by term, promises, shares of the data, and the geometry of updates."""
        return render_fragment(
            "run.html.j2",
            facts=run_facts(run) | {"Integrity": run.integrity},
            promises=defense_promises(run),
            sharing=_sharing(run),
            geometry=_geometry(run.folder),
        )


def _sharing(run: ReportedRun) -> SharingTable | None:
    """Return the partition of the data, with the attacked clients marked; None if it is unknown."""
    if run.experiment is None:
        return None
    attacked = {int(str(finding.about["victim"])) for finding in run.findings}
    with suppress(FedsimError):  # the data set is missing, which a note says already
        return sharing_table(run.experiment, attacked)
    return None


def _geometry(folder: RunFolder) -> dict[str, Any] | None:
    """Summarise what `fedsim geometry` wrote; None if it did not run."""
    rows = read_rows(folder.geometry, ("round", "client"))
    if not rows:
        return None
    statistics = []
    for name in rows[0]:
        if name not in ("round", "client"):
            values = [float(row[name]) for row in rows]
            statistics.append((name, (fmean(values), min(values), max(values))))
    return {"count": len(rows), "rows": statistics}


@dataclass(frozen=True, kw_only=True)
class SharingTable:
    """Partition of the data, as the page shows it.

    Attributes:
        summary: a sentence that says which part of the data set clients hold.
        omitted_clients: how many clients the table leaves out.
    """

    summary: str
    table: Markup
    omitted_clients: int


def sharing_table(experiment: Experiment, attacked: Collection[int]) -> SharingTable:
    """Return what each client holds; of many clients, those that were attacked and the first ones."""
    partition = PartitionSummary(config=experiment.config, data=experiment.data, seconds=0.0)
    has_classes = partition.dataset.task.goal != "numbers"
    # Choose which clients are shown.
    num_clients = experiment.config.federation.clients
    clients = sorted(client for client in attacked if client < num_clients)[:MAX_CLIENTS]
    not_attacked = (client for client in range(num_clients) if client not in attacked)
    clients = sorted([*clients, *islice(not_attacked, MAX_CLIENTS - len(clients))])
    # Make the table of these.
    columns, rows = (_class_cells if has_classes else _target_cells)(partition, clients)
    groups = _groups(partition)
    names = [_name(client, groups, attacked) for client in clients]
    title = "Examples of each client" + (", with those that it holds out" if partition.data.clients_hold_out else "")
    if has_classes:
        title += "; a stronger colour means a larger share of the client's examples"
    corner = "client (group)" if groups else "client"
    table = draw_heat_map(title, names, columns, rows, corner=corner)
    return SharingTable(summary=_summary(partition), table=table, omitted_clients=num_clients - len(clients))


def _summary(partition: PartitionSummary) -> str:
    dataset, total = partition.dataset, len(partition.dataset.train)
    train, held_out = sum(partition.data.counts), partition.data.held_out_size
    if train + held_out == total:
        part = f"all {group_digits(total)}"
    else:
        share = (train + held_out) / total
        share_text = format_percent(share, ".1f" if share >= 1e-3 else ".2g")
        part = f"{group_digits(train + held_out)} of {group_digits(total)} ({share_text})"
    tests = f", {group_digits(held_out)} of them to test on" if held_out else ""
    return (
        f"Of the data set {dataset.name}, clients hold {part} training examples{tests}. Its "
        f"{group_digits(len(dataset.test))} test examples are public."
    )


def _class_cells(partition: PartitionSummary, clients: Sequence[int]) -> tuple[list[str], list[list[HeatMapCell]]]:
    """Return the columns of a classification or of several labels, and the cells of each of `clients`."""
    dataset = partition.dataset
    counts = partition.count_classes(clients)
    shares = counts / np.array([[len(partition.read_client(client).all_indices)] for client in clients])
    names = list(map(printable_name, dataset.class_names or tuple(map(str, range(dataset.task.outputs)))))
    rows = []
    if len(names) > MAX_CLASSES:
        for client, class_counts, class_shares in zip(clients, counts, shares, strict=True):
            num_classes = HeatMapCell(text=str((class_counts > 0).sum()))
            largest = HeatMapCell(text=format_percent(class_shares.max(), ".0f"))
            rows.append([*_sizes(partition, client), num_classes, largest])
        kinds = {
            "labels": ["labels", "most frequent label"],
            "masks": ["classes of pixels", "class in most masks"],
        }.get(dataset.task.goal, ["classes", "largest class"])
        return ["trains on", "holds out", *kinds], rows
    for client, class_counts, class_shares in zip(clients, counts.tolist(), shares.tolist(), strict=True):
        cells = _sizes(partition, client)
        for count, share in zip(class_counts, class_shares, strict=True):
            cells.append(HeatMapCell(text=str(count) if count else "", shade=share if count else math.nan))
        rows.append(cells)
    return ["trains on", "holds out", *names], rows


def _target_cells(partition: PartitionSummary, clients: Sequence[int]) -> tuple[list[str], list[list[HeatMapCell]]]:
    """Return the columns of a regression, and the cells of each of `clients`."""
    rows = []
    for client in clients:
        targets = np.asarray(partition.targets(partition.read_client(client).all_indices))
        statistics = [HeatMapCell(text=f"{value:.4g}") for value in (targets.mean(), targets.std())]
        rows.append([*_sizes(partition, client), *statistics])
    mean = "mean target" if partition.dataset.num_targets == 1 else "mean of all targets"
    return ["trains on", "holds out", mean, "standard deviation"], rows


def _sizes(partition: PartitionSummary, number: int) -> list[HeatMapCell]:
    client = partition.read_client(number)
    return [HeatMapCell(text=group_digits(len(client.train))), HeatMapCell(text=group_digits(len(client.held_out)))]


def _groups(partition: PartitionSummary) -> list[str]:
    """Return the natural group of each client; nothing where there are none, or they are called like the clients."""
    if not partition.has_groups:
        return []
    groups = [client.group for client in partition.clients]
    have_names = any(group not in ("", str(client)) for client, group in enumerate(groups))
    return [printable_name(group) for group in groups] if have_names else []


def _name(client: int, groups: Sequence[str], attacked: Collection[int]) -> str:
    name = f"{client} ({groups[client]})" if groups else str(client)
    return f"{name}, attacked" if client in attacked else name
