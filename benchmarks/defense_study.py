"""What each defense leaves to SME and IG, made without and with knowledge of it, and what it costs in accuracy.

One federation a cell, through the round loop; ten of its clients are attacked in round 1. `python
benchmarks/defense_study.py --data-dir DIR` takes about an hour of one core, keeps what is done in
benchmarks/results/defenses.csv and goes on from it; `--cells top-k mixup` does those whose name begins so, `--again`
anew. `python benchmarks/defense_tables.py` shows what was found.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import fedsim
from fedsim.audit.audit import Audit, open_audit
from fedsim.audit.plan import TitledAttacks
from fedsim.base.errors import FedsimError
from fedsim.federation.build import Experiment
from fedsim.federation.config import AttackFile, validate_tables

RESULTS = Path(__file__).parent / "results" / "defenses.csv"
VICTIMS, DELTA = 10, 1e-5
SCORES = ("attack", "victim", "metric", "value", "floor", "floor_guess")
COLUMNS = ("cell", "key", "knows", "accuracy", "epsilon", "bytes", "failed", *SCORES)
METRICS = ("psnr", "ssim")
BASE: dict[str, Any] = {
    "data": {"name": "mnist"},
    "partition": {"name": "iid", "samples_per_client": 8},
    "model": {"name": "mlp", "hidden": [100]},
    "training": {"local_epochs": 1, "batch_size": 4, "learning_rate": 0.1},
    "federation": {"engine": "serial", "clients": 50, "rounds": 50, "seed": 1, "evaluate_every": 50},
    "recording": {"rounds": [1]},
    "adversary": {"when": "never"},
}
HOW = {"iterations": 200, "step_size": 0.1, "tv_weight": 0.001}
ATTACKS = [{"name": "sme", **HOW}, {"name": "inverting-gradients", "label": "ig", **HOW}]
"""Of the settings that were tried on three clients without a defense, those by which IG comes closest."""
NONE, FREE = "none", "settings"


@dataclass(frozen=True)
class Cell:
    """One federation.

    Attributes:
        name: the defense and its strength.
        set: what differs from `BASE`, table by table.
    """

    name: str
    set: Mapping[str, Any] = field(default_factory=dict)

    @property
    def experiment(self) -> dict[str, Any]:
        """The tables of its file."""
        tables = {name: dict(table) for name, table in BASE.items()}
        for name, table in self.set.items():
            tables[name] = tables.get(name, {}) | table if isinstance(table, Mapping) else table
        return tables

    def key(self, *, knows: bool) -> str:
        """Of its settings and those of the attacks."""
        text = json.dumps([self.experiment, ATTACKS, VICTIMS, knows], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


def cells() -> Iterator[Cell]:
    """All of them, each defense from weak to strong."""
    yield Cell(NONE)
    for noise in (0.002, 0.006, 0.02):
        yield defended(f"update-noise {noise:g}", "update-noise", clip=0.5, noise_multiplier=noise)
    for noise in (0.01, 0.1, 1.0):
        yield defended(f"dp-sgd {noise:g}", "dp-sgd", clip=4.0, noise_multiplier=noise)
    for share in (0.5, 0.1, 0.01):
        yield defended(f"top-k {share:g}", "top-k", fraction=share)
    for share in (0.4, 0.8, 0.95):
        yield defended(f"random-mask {share:g}", "random-mask", masked=share)
    for told, layers in (("biases", ["*.bias"]), ("last layer", ["3.*"]), ("first layer", ["1.*"])):
        yield defended(f"layer-freeze {told}", "layer-freeze", layers=layers)
    yield defended("quantise fp16", "quantise", scheme="fp16")
    for bits in (8, 4):
        yield defended(f"quantise qsgd {bits}", "quantise", scheme="qsgd", bits=bits)
    for scheme in ("ternary", "sign"):
        yield defended(f"quantise {scheme}", "quantise", scheme=scheme)
    for share in (0.3, 0.9, 0.99):
        yield defended(f"gradient-prune {share:g}", "gradient-prune", pruned=share)
    for alpha in (0.2, 1.0):
        yield defended(f"mixup {alpha:g}", "mixup", alpha=alpha)
    yield defended("mixup pairs", "mixup")
    for count in (2, 3, 4):
        yield defended(f"instahide {count}", "instahide", k=count)
    yield defended("augmentation shifts", "augmentation", padding=2, flip=0.0)
    yield defended("augmentation and flips", "augmentation", padding=4, flip=0.5)
    turned = {"name": "RandomRotation", "degrees": 30}
    yield defended("augmentation and turns", "augmentation", padding=4, flip=0.5, transforms=[turned])
    for share in (0.2, 0.4, 0.8):
        yield defended(f"soteria {share:g}", "soteria", pruned=share)
    for scale in (0.8, 8.0, 80.0):
        yield defended(f"outpost {scale:g}", "outpost", noise_scale=scale)
    for size in (2, 5, 10):
        yield Cell(f"secure-aggregation {size}", {"secure_aggregation": {"groups": size}})
    for factor in (2, 4):
        sizes = {"partition": {"samples_per_client": 8 * factor}, "training": {"batch_size": 4 * factor}}
        yield Cell(f"{FREE} B {4 * factor} of N {8 * factor}", sizes)
    for epochs in (2, 5, 10):
        yield Cell(f"{FREE} E {epochs}", {"training": {"local_epochs": epochs}})
    for share in (0.1, 0.3, 0.6):
        yield Cell(f"{FREE} label smoothing {share:g}", {"training": {"label_smoothing": share}})
    yield Cell(f"{FREE} a fifth sampled", {"strategy": {"name": "fedavg", "fraction_train": 0.2}})
    yield Cell(f"{FREE} 10 rounds", {"federation": {"rounds": 10, "evaluate_every": 10}})
    for statistics in ("shared", "withheld"):
        tables = {"model": {"batch_norm": True}, "training": {"batch_norm_statistics": statistics}}
        yield Cell(f"{FREE} BatchNorm {statistics}", tables)


def defended(name: str, defense: str, **settings: Any) -> Cell:
    """A cell of one defense."""
    return Cell(name, {"defense": [{"name": defense, **settings}]})


class OnlyAdaptive(Audit):
    """The attacks that know the defenses, without the naive ones, which were made before."""

    @cached_property
    def attacks(self) -> TitledAttacks:
        """See Audit."""
        return [(table, attack) for table, attack in super().attacks if attack.adaptive]


def measure_cell(cell: Cell, data_dir: Path, *, knows: bool) -> list[dict[str, Any]]:
    """A row for each attack, victim and metric; one without a score where every attack refused."""
    torch.set_num_threads(1)
    os.environ["FEDSIM_DATA"] = str(data_dir)
    tables = cell.experiment
    if knows:  # accuracy is measured beside the naive attacks; round 1 is the same however many follow
        tables["federation"] |= {"rounds": 1, "evaluate_every": 0}
    with tempfile.TemporaryDirectory() as folder, without_slow_metrics():
        run = fedsim.run(tables, out=Path(folder) / "run")
        victims = run.transcript.clients(1)[:VICTIMS]
        adversary = {"victims": victims, "rounds": [1], "workers": 1, "knowledge": {"defenses": knows}}
        audit = open_audit(
            run.path, validate_tables(AttackFile, {"adversary": adversary, "attack": ATTACKS}, cell.name)
        )
        if knows:
            audit = OnlyAdaptive(**{name: getattr(audit, name) for name in audit.__dataclass_fields__})
        failures = audit.run()
        rows = [
            {name: short(row[name]) for name in SCORES} for row in audit.score(failures) if row["metric"] in METRICS
        ]
        about = {"cell": cell.name, "key": cell.key(knows=knows), "knows": knows, "failed": "; ".join(failures)}
        if not knows:
            metrics = run.metrics
            about["accuracy"] = float(metrics[metrics["client"] == "server"]["accuracy"].dropna().iloc[-1])
            about["epsilon"] = short(epsilon(audit.experiment))
        about["bytes"] = run.transcript.upload_sizes(1)[victims[0]]
        return [about | row for row in rows] or [about]


def short(value: Any) -> Any:
    """A number with the digits that a table can use."""
    return round(value, 4) if isinstance(value, float) else value


def epsilon(experiment: Experiment | None) -> float | str:
    """What is proved of client 0 over the whole run; empty where nothing is."""
    assert experiment is not None
    client = experiment.setting.participation(0)
    proved = [defense.guarantee(client, DELTA) for defense in experiment.client_defenses(0)]
    return next((found.epsilon for found in proved if found is not None), "")


@contextmanager
def without_slow_metrics() -> Iterator[None]:
    """The study has no use for LPIPS and L_sim, which take longer than the attack."""
    with (
        patch("fedsim.audit.evaluation.scoring.lpips_distances", lambda *_: "not part of the study"),
        patch("fedsim.audit.evaluation.reconstructions._attacked_update", lambda *_: None),
    ):
        yield


def main() -> None:
    """Do what is not done yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("FEDSIM_DATA"))
    parser.add_argument("--cells", nargs="*", default=[""])
    parser.add_argument("--again", action="store_true", help="these cells, though they are done")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    done = {row["key"] for row in read(chosen.out)}
    wanted = [cell for cell in cells() if cell.name.startswith(tuple(chosen.cells))]
    both = [(cell, False) for cell in wanted] + [(cell, True) for cell in wanted if "defense" in cell.set]
    todo = [(cell, knows) for cell, knows in both if chosen.again or cell.key(knows=knows) not in done]
    failed: list[str] = []
    with ProcessPoolExecutor(chosen.workers, mp_context=get_context("spawn")) as pool:
        jobs = {pool.submit(measure_cell, cell, chosen.data_dir, knows=knows): cell for cell, knows in todo}
        for job in as_completed(jobs):
            try:
                found = job.result()
            except FedsimError as error:
                failed.append(f"{jobs[job].name}: {error}")
                print(failed[-1], flush=True)
                continue
            write(chosen.out, found)
            print(summary(found), flush=True)
    if failed:
        sys.exit("\n".join(failed))


def summary(rows: list[dict[str, Any]]) -> str:
    """The main figures of a cell in one line."""
    told = [rows[0]["cell"], "adaptive" if rows[0]["knows"] else f"naive, accuracy {rows[0]['accuracy']:.3f}"]
    for attack in dict.fromkeys(row.get("attack", "") for row in rows):
        found = [row for row in rows if row.get("attack") == attack and row["metric"] == "psnr"] if attack else []
        gains = [float(row["value"]) - float(row["floor"]) for row in found]
        told.append(f"{attack} {sum(gains) / len(gains):+.2f} dB" if gains else "refused")
    return ", ".join(told)


def read(path: Path) -> list[dict[str, str]]:
    """All rows of earlier runs."""
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def write(path: Path, found: list[dict[str, Any]]) -> None:
    """Put rows in the place of those of the same cell and adversary."""
    same = (found[0]["cell"], str(found[0]["knows"]))
    kept = [row for row in read(path) if (row["cell"], row["knows"]) != same]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*kept, *found])


if __name__ == "__main__":
    main()
