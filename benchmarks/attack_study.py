"""What studies of attacks on recorded runs share: a run is made or found again, attacked, and its scores are kept."""

from __future__ import annotations

import argparse
import csv
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import fedsim
from fedsim.audit.audit import open_audit
from fedsim.base.errors import ConfigError
from fedsim.federation.config import AttackFile, validate_tables


def run(path: Path, experiment: dict[str, Any]) -> fedsim.Run:
    """The run of `experiment`, which is made if it is not there."""
    try:
        return fedsim.open(path)
    except ConfigError:
        return fedsim.run(experiment, out=path)


def accuracy(made: fedsim.Run) -> float:
    """Of the global model after the last round."""
    rows = made.metrics
    return float(rows[rows["client"] == "server"]["accuracy"].dropna().iloc[-1])


def attacked(
    made: fedsim.Run, adversary: Mapping[str, Any], attacks: Mapping[str, Mapping[str, Any]], when: str
) -> Iterator[dict[str, Any]]:
    """The scores of attacks in one process, each under its title alone.

    Args:
        attacks: tables of the attacks, by title.
        when: what tells them from others on the same run.
    """
    file = {
        "adversary": {"workers": 1, **adversary},
        "attack": [{**table, "label": f"{title}, {when}"} for title, table in attacks.items()],
    }
    audit = open_audit(made.path, validate_tables(AttackFile, file, "attacks"), made.path)
    if failures := audit.run():
        raise SystemExit("\n".join(failures))
    for row in audit.score():
        title, found, more = row["attack"].partition(f", {when}")
        if found:  # what knows the defenses is called adaptive at the end
            yield row | {"attack": title + more}


def cells(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a study keeps of a score: whose it is, by which attack, and beside what."""
    return {
        "attack": row["attack"],
        "metric": row["metric"],
        "client": row["victim"],
        "value": f"{row['value']:.4f}",
        "floor": f"{row['floor']:.4f}",
    }


def arguments(about: str | None, *flags: str) -> argparse.Namespace:
    """What the command line says, `data_dir` and `out`; one thread, and the data where it says."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--out", type=Path, required=True)
    for flag in flags:
        parser.add_argument(flag, action="store_true")
    given = parser.parse_args()
    os.environ["FEDSIM_DATA"] = given.data_dir
    torch.set_num_threads(1)
    return given


def keep(
    rows: Iterable[dict[str, Any]], path: Path, columns: Sequence[str], show: Callable[[list[dict[str, Any]]], None]
) -> None:
    """Write all rows, once they are measured, and show them."""
    known = list(rows)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(known)
    show(known)
