"""Short federations of jobs.toml: accuracy after stated rounds beside the guess of the most frequent class."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fedsim.api.reproduce.papers import read_toml
from fedsim.base.errors import DataError
from fedsim.federation.config import Config
from fedsim.federation.experiment import Experiment
from fedsim.federation.open_run import OpenRun
from fedsim.federation.run_folder import read_rows
from fedsim.federation.simulation import run_federation
from fedsim.federation.table_validation import validate_tables
from studies.running import STUDIES, Row

BASE: dict[str, dict[str, Any]] = {
    "partition": {"name": "iid"},
    "training": {"local_epochs": 1, "batch_size": 20, "learning_rate": 0.05},
    "federation": {"clients": 10, "rounds": 10, "seed": 1, "evaluate_every": 5},
    "recording": {"rounds": []},
    "adversary": {"when": "never"},
}


@cache
def read_jobs() -> dict[str, dict[str, Any]]:
    """Read the experiments."""
    jobs = {}
    for job, tables in read_toml(STUDIES / "networks" / "jobs.toml")["job"].items():
        jobs[job] = {name: {"name": table} if isinstance(table, str) else table for name, table in tables.items()}
    return jobs


def cells() -> Iterator[Row]:
    """Yield all jobs."""
    for job in read_jobs():
        yield {"job": job}


def measure(job: str) -> Row | list[Row]:
    """Run one job: what guessing gets and what the model gets, seconds of loading and of the run."""
    tables = read_jobs()[job]
    for name in ("training", "federation"):
        tables = tables | {name: BASE[name] | tables.get(name, {})}
    config, started = validate_tables(Config, BASE | tables, job), time.monotonic()
    try:
        data = Experiment(config).dataset
    except DataError as error:
        print(f"{job} is left out: {error}")
        return []
    loaded = time.monotonic() - started
    with tempfile.TemporaryDirectory() as out:
        started, folder = time.monotonic(), OpenRun(Path(out) / "run")
        run_federation(config, folder)
        seconds = time.monotonic() - started
        rows = {int(row["round"]): row for row in read_rows(folder.metrics) if row["client"] == "server"}
    last = config.federation.rounds
    shown = sorted({number for number in (5, 10, 20) if number < last} | {last})
    if data.num_classes:
        guess = f"{100 * torch.bincount(data.test.labels).max().item() / len(data.test):.1f} %"
        reached = ", ".join(f"{100 * float(rows[number]['accuracy']):.1f} % ({number})" for number in shown)
    else:
        guess = f"MSE {data.test.labels.var().item():.3f}"
        reached = ", ".join(f"MSE {float(rows[number]['loss']):.3f} ({number})" for number in shown)
    return {"guess": guess, "reached": reached, "loading": round(loaded, 1), "seconds": round(seconds)}
