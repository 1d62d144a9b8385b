"""Processor time of learned inversion by network, of which docs/studies/priors.md tells."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fedsim
from fedsim.audit.audit import open_audit
from fedsim.audit.evaluation.identification import IDENTIFIED
from fedsim.audit.evaluation.statistics import mean_and_margin
from fedsim.base.errors import ConfigError
from fedsim.federation.config import AttackFile
from fedsim.federation.table_validation import validate_tables
from studies.running import Row
from studies.writing import column_values, group_rows, markdown_table, select_rows

VICTIMS = list(range(10))
NETWORKS: dict[tuple[str, str], dict[str, Any]] = {
    ("MLP", "mnist"): {"name": "mlp", "hidden": [100]},
    ("MLP", "cifar10"): {"name": "mlp", "hidden": [100]},
    ("LeNet", "mnist"): {"name": "lenet"},
    ("LeNet", "cifar10"): {"name": "lenet"},
    ("SME's CNN", "mnist"): {"name": "sme-cnn"},
    ("SME's CNN", "cifar10"): {"name": "sme-cnn", "channels": [64, 128], "hidden": 200},
}


def measure(data: str, network: str) -> list[Row]:
    """Attack the victims in this process, and return a row for each victim and metric.

    `training` is the processor time that the first victim takes longer than the others, which share its network;
    `attack` is what each of the others takes.
    """
    tables: dict[str, Any] = {
        "data": {"name": data},
        "partition": {"name": "iid", "samples_per_client": 8},
        "model": NETWORKS[network, data],
        "training": {"local_epochs": 1, "batch_size": 4, "learning_rate": 0.1},
        "federation": {"engine": "serial", "clients": 50, "rounds": 1, "seed": 1},
        "recording": {"rounds": [1]},
    }
    with tempfile.TemporaryDirectory() as folder:
        run = fedsim.run(tables, out=Path(folder) / "run")
        first, _ = attack_victims(run, VICTIMS[:1])
        rest, scores = attack_victims(run, VICTIMS)  # the finding about the first victim is kept
    others = rest / (len(VICTIMS) - 1)
    times = {"training": first - others, "attack": others}
    kept = [row for row in scores if row["metric"] in ("psnr", IDENTIFIED)]
    return [{name: row[name] for name in ("victim", "metric", "value", "floor")} | times for row in kept]


def attack_victims(run: fedsim.Run, victims: Sequence[int]) -> tuple[float, list[Row]]:
    """Attack those victims that were not attacked before; return the processor time and the scores of all."""
    adversary = {"victims": victims, "rounds": [1], "auxiliary": 5000, "knowledge": {"auxiliary": True}, "workers": 1}
    spec = validate_tables(AttackFile, {"adversary": adversary, "attack": [{"name": "learned-inversion"}]}, "study")
    audit = open_audit(run.path, spec, trust=True)
    started = time.process_time()
    failures = audit.run()
    taken = time.process_time() - started
    scores = audit.score(failures)
    if failures:
        raise ConfigError(f"studies/learned_time: {failures[0]}")
    return taken, scores


def tables(rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return a line for each network: seconds, how many dB claims are beyond the floor, and the share identified."""
    lines = []
    for (data, network), cell in group_rows(rows, "data", "network").items():
        psnr = select_rows(cell, metric="psnr")
        gains = {(row["victim"], "1"): float(row["value"]) - float(row["floor"]) for row in psnr}
        mean, margin = mean_and_margin(gains)
        identified = column_values(select_rows(cell, metric=IDENTIFIED), "value").mean()
        seconds = [
            f"{column_values(cell[:1], name)[0]:.{digits}f}" for name, digits in (("training", 0), ("attack", 1))
        ]
        lines.append([data, network, *seconds, f"{mean:+.1f} ± {margin:.1f}", f"{100 * identified:.0f} %"])
    head = ["data", "network", "training (s)", "each client (s)", "dB beyond the floor", "identified"]
    return {"": markdown_table(head, lines)}
