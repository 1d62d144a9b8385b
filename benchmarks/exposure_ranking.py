"""Do measures rank the clients of a real federation by what SME gets from them?

24 clients with few classes each (Dirichlet), E local epochs, attacked in rounds 1 and 20. Each measures what it sends
(`update`), and as LAVP and the angular Lipschitz paper do, the gradient of all its data at the broadcast model
(`gradient`). What leaks is the mean PSNR of SME's images. `python benchmarks/exposure_ranking.py --data-dir DIR` takes
about 10 minutes of one core, writes benchmarks/results/exposure-ranking.csv and shows Spearman's correlation over
clients, with 95 % bootstrap intervals; its sign is turned so that 1 means that the measure ranks them rightly.
`--table` shows what is there.
"""

from __future__ import annotations

import argparse
import csv
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from defense_study import without_slow_metrics
from numpy.typing import NDArray
from scipy.stats import rankdata

import fedsim
from fedsim.audit.audit import Audit, open_audit
from fedsim.exposure.measure import Measure
from fedsim.federation.config import AttackFile, validate_tables
from fedsim.plugins import registry
from fedsim.training.local_round import LocalRound

RESULTS = Path(__file__).parent / "results" / "exposure-ranking.csv"
CLIENTS, EXAMPLES, RESAMPLED = 24, 8, 2000
EPOCHS, ROUNDS = (1, 3, 10), (1, 20)
MEASURES: Mapping[str, dict[str, Any]] = {
    "gradient-norm": {},
    "sensitivity": {"noises": 20},
    "lipschitz": {"noises": 20},
    "angular-lipschitz": {"noises": 20},
    "lavp": {"steps": 20},
    "expected-error": {},
}
ATTACK = {"name": "sme", "iterations": 100, "step_size": 0.1, "tv_weight": 0.001}
COLUMNS = ("epochs", "round", "client", "of", "measure", "quantity", "larger_means", "value", "psnr")
Row = Mapping[str, Any]


def tables(epochs: int) -> dict[str, Any]:
    """An experiment."""
    return {
        "data": {"name": "mnist"},
        "partition": {"name": "dirichlet", "alpha": 0.5, "min_examples": EXAMPLES, "samples_per_client": EXAMPLES},
        "model": {"name": "mlp", "hidden": [100]},
        "training": {"local_epochs": epochs, "batch_size": 4, "learning_rate": 0.1 / epochs},
        "federation": {
            "engine": "serial",
            "clients": CLIENTS,
            "rounds": max(ROUNDS),
            "seed": 1,
            "evaluate_every": max(ROUNDS),
        },
        "recording": {"rounds": list(ROUNDS)},
        "adversary": {"when": "never"},
    }


def rows(epochs: int) -> Iterator[dict[str, Any]]:
    """Of each round, client, kind of what is measured, measure and quantity, the value and what SME gets."""
    with tempfile.TemporaryDirectory() as folder, without_slow_metrics():
        run = fedsim.run(tables(epochs), out=Path(folder) / "run")
        adversary = {"victims": "all", "rounds": list(ROUNDS), "workers": 1}
        audit = open_audit(
            run.path, validate_tables(AttackFile, {"adversary": adversary, "attack": [ATTACK]}, "ranking")
        )
        if failures := audit.run():
            raise RuntimeError("; ".join(failures))
        psnr = {(int(r["round"]), int(r["victim"])): r["value"] for r in audit.score() if r["metric"] == "psnr"}
        for number in ROUNDS:
            for client in run.transcript.clients(number):
                about = {"epochs": epochs, "round": number, "client": client}
                for row in exposure_rows(audit, run.transcript.update(number, client).before, number, client):
                    yield {**about, **row, "psnr": short(psnr[number, client])}


def exposure_rows(audit: Audit, before: Any, number: int, client: int) -> Iterator[dict[str, Any]]:
    """What measures say of a client that was sent `before`: of its update, and of one gradient of all its data."""
    experiment = audit.experiment
    assert experiment is not None
    (share,) = experiment.local_data([client], number, experiment.training)
    local = LocalRound.create(
        experiment.model_with_state(before), share, experiment.training, experiment.dataset.task.loss
    )
    batch = local.model, local.loss, local.inputs, local.labels
    for name, settings in MEASURES.items():
        measure: Measure = registry.build("measures", name, settings, name)
        values = {
            "update": measure.compute(*batch, training=local.training, order=local.order),
            "gradient": measure.compute(*batch),
        }
        for of, found in values.items():
            for quantity, value in found.items():
                about = {"of": of, "measure": name, "quantity": quantity}
                yield {**about, "larger_means": measure.quantities[quantity], "value": short(value)}


def short(value: float) -> float:
    """With the digits that ranks need."""
    return float(f"{value:.6g}")


def main() -> None:
    """Do it, and show it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("FEDSIM_DATA"))
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    if not chosen.table:
        torch.set_num_threads(1)
        os.environ["FEDSIM_DATA"] = str(chosen.data_dir)
        with chosen.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            for epochs in EPOCHS:
                writer.writerows(rows(epochs))
                file.flush()
    with chosen.out.open() as file:
        print(table(list(csv.DictReader(file))))


def table(found: Sequence[Row]) -> str:
    """A line for each quantity, a column for each cell."""
    cells = [(epochs, number) for epochs in EPOCHS for number in ROUNDS]
    lines = [
        "| measured | quantity | " + " | ".join(f"E = {epochs}, round {number}" for epochs, number in cells) + " |",
        "|---|---|" + "---|" * len(cells),
    ]
    names = list(dict.fromkeys((row["of"], row["measure"], row["quantity"]) for row in found))
    for of, measure, quantity in sorted(names, key=lambda name: name[0] != "update"):
        told = []
        for epochs, number in cells:
            here = [
                row
                for row in found
                if (row["of"], row["measure"], row["quantity"]) == (of, measure, quantity)
                and (row["epochs"], row["round"]) == (str(epochs), str(number))
            ]
            told.append(correlation(here))
        lines.append(f"| {of} | {measure} {quantity} | " + " | ".join(told) + " |")
    return "\n".join(lines)


def correlation(found: Sequence[Row]) -> str:
    """Spearman's, with its interval."""
    if not found:
        return ""
    sign = 1 if found[0]["larger_means"] == "more" else -1
    pairs = np.array([(sign * float(row["value"]), float(row["psnr"])) for row in found])
    random = np.random.default_rng(0)
    drawn = [spearman(pairs[random.integers(len(pairs), size=len(pairs))]) for _ in range(RESAMPLED)]
    low, high = np.nanquantile(drawn, (0.025, 0.975))
    return f"{spearman(pairs):+.2f} [{low:+.2f}, {high:+.2f}]"


def spearman(pairs: NDArray[np.float64]) -> float:
    """Correlation of the ranks of two columns."""
    ranks = rankdata(pairs, axis=0)
    return float(np.corrcoef(ranks.T)[0, 1])


if __name__ == "__main__":
    main()
