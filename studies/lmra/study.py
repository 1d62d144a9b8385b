"""Optimal local models of all clients of one of LMRA's federations, compared as vectors of all parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedsim.api.reproduce.recipes import find_recipe
from fedsim.audit.audit import open_audit
from fedsim.base.randomness import use_one_thread
from fedsim.federation.config import AttackFile
from fedsim.federation.table_validation import validate_tables
from fedsim.recording.wire_format import State
from studies.running import RUNS, Row, run_or_resume

LABELS = {"adult": "Adult", "leaf-synthetic": "Leaf Synthetic", "att-faces": "AT&T", "flight-prices": "flights"}


def read_experiment(data: str) -> dict[str, Any]:
    """Return the experiment of the paper's Table 1, without attacks."""
    recipe = find_recipe("lmra", "table1-lmra")
    assert recipe is not None
    axes = recipe.tables["sweep"]["axes"]
    tables = {"recording": dict(recipe.tables["recording"]), "adversary": {"when": "never"}}
    for name in ("data", "partition", "model", "training", "federation"):
        [table] = [value for value in axes[name] if value["label"] == LABELS[data]]
        tables[name] = {key: value for key, value in table.items() if key != "label"}
    tables["federation"] |= {"engine": "serial", "seed": 1}
    return tables


def measure(data: str) -> list[Row]:
    """Return for each client its examples, and distances of its optimum relative to a norm.

    `global` is to the global model of the last recorded round, over that one's norm; `start` is of w_0 and
    `other start` of the optimum from other random weights, over its own; then those of its optimum to each client's.
    """
    path = RUNS / "lmra" / data
    transcript = run_or_resume(read_experiment(data), path).transcript
    audit = open_audit(path, validate_tables(AttackFile, {"attack": [{"name": "shared-model"}]}, "lmra"))
    experiment = audit.experiment
    assert experiment is not None
    names = [name for name, _ in experiment.model.named_parameters()]

    def flatten(state: State) -> Tensor:
        return torch.cat([state[name].flatten().double() for name in names])

    last = transcript.rounds[-1]
    server = flatten(transcript.update(last, transcript.clients(last)[0]).before)
    start, clients = flatten(experiment.initial_state()), range(experiment.config.federation.clients)
    with use_one_thread():
        optima = [flatten(audit.optimum(client)) for client in clients]
        others = [flatten(audit.optimum(client, other_start=True)) for client in clients]
    rows = []
    for client, optimum in enumerate(optima):
        row: Row = {
            "client": client,
            "examples": len(experiment.data.train(client)[1]),
            "global": float((optimum - server).norm() / server.norm()),
            "start": float((optimum - start).norm() / optimum.norm()),
            "other start": float((optimum - others[client]).norm() / optimum.norm()),
        }
        for other, other_optimum in enumerate(optima):
            row[f"client {other}"] = float((optimum - other_optimum).norm() / other_optimum.norm())
        rows.append(row)
    return rows
