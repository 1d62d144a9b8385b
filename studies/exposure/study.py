"""What measures say of clients beside what SME gets from them; the table of docs/studies/exposure.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from fedsim.audit.audit import Audit
from fedsim.exposure.measure import Measure
from fedsim.plugins import registry
from fedsim.training.local_round import LocalRound
from studies.messages import attack_federation
from studies.running import Row
from studies.writing import draw_places, format_drawn, markdown_table, select_rows, spearman_of_rows

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


def measure(epochs: int) -> list[Row]:
    """Return a row for each round, client, kind of message, measure and quantity: its value and what SME gets."""
    experiment = {
        "data": {"name": "mnist"},
        "partition": {"name": "dirichlet", "alpha": 0.5, "min_examples": EXAMPLES, "samples_per_client": EXAMPLES},
        "model": {"name": "mlp", "hidden": [100]},
        "training": {"local_epochs": epochs, "batch_size": 4, "learning_rate": 0.1 / epochs},
        "federation": {"engine": "serial", "clients": CLIENTS, "rounds": 20, "seed": 1, "evaluate_every": 20},
        "adversary": {"when": "never"},
    }
    with attack_federation(experiment, [ATTACK], ROUNDS) as (run, audit):
        psnr = {(int(s["round"]), int(s["victim"])): s["value"] for s in audit.score() if s["metric"] == "psnr"}
        rows = []
        for number in ROUNDS:
            for client in run.transcript.clients(number):
                before = run.transcript.update(number, client).before
                for row in exposure_rows(audit, before, number, client):
                    rows.append({"round": number, "client": client, **row, "psnr": psnr[number, client]})
        return rows


def exposure_rows(audit: Audit, before: Any, number: int, client: int) -> Iterator[Row]:
    """Yield what measures say of a client that was sent `before`: of its update, and of one gradient."""
    experiment = audit.experiment
    assert experiment is not None
    (share,) = experiment.local_data([client], number, experiment.training)
    model, loss = experiment.model_with_state(before), experiment.dataset.task.loss
    local = LocalRound.create(model, share, experiment.training, loss)
    batch = local.model, local.loss, local.inputs, local.labels
    for name, settings in MEASURES.items():
        by: Measure = registry.build("measures", name, settings, name)
        update = by.compute(*batch, training=local.training, order=local.order)
        for message, values in (("update", update), ("gradient", by.compute(*batch))):
            for quantity, value in values.items():
                about = {"of": message, "measure": name, "quantity": quantity}
                yield about | {"larger_means": by.quantities[quantity], "value": value}


def tables(rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return Spearman's correlation over clients; its sign is turned so that 1 means that the ranks are right."""
    cells = list(product(EPOCHS, ROUNDS))
    names = dict.fromkeys((row["of"], row["measure"], row["quantity"]) for row in rows)
    lines = []
    for of, name, quantity in sorted(names, key=lambda name: name[0] != "update"):
        same = select_rows(rows, of=of, measure=name, quantity=quantity)
        by_cell = [select_rows(same, epochs=epochs, round=number) for epochs, number in cells]
        lines.append([of, f"{name} {quantity}", *map(format_correlation, by_cell)])
    head = ["measured", "quantity", *(f"E = {epochs}, round {number}" for epochs, number in cells)]
    return {"ranking": markdown_table(head, lines)}


def format_correlation(rows: Sequence[Mapping[str, str]]) -> str:
    """Format the correlation with its interval, by drawing clients anew."""
    if not rows:
        return ""
    sign = 1 if rows[0]["larger_means"] == "more" else -1
    pairs = np.array([(sign * float(row["value"]), float(row["psnr"])) for row in rows])
    drawn = pairs[draw_places(len(pairs), RESAMPLED)]
    with np.errstate(invalid="ignore"):  # a draw of one client alone has no correlation
        return format_drawn(spearman_of_rows(drawn[..., 0], drawn[..., 1]), "{:+.2f} [{:+.2f}, {:+.2f}]")
