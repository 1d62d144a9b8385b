"""Optimal local models of all clients of one of LMRA's federations, compared as vectors of all parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedsim.api.reproduce.recipes import find_recipe
from fedsim.audit.audit import open_audit
from fedsim.base.randomness import use_one_thread
from fedsim.federation.config import AttackFile
from fedsim.federation.table_validation import validate_tables
from fedsim.recording.wire_format import State, Update
from studies.running import RUNS, Row, Study, read_rows, run_or_resume
from studies.writing import group_rows, kept_result, markdown_table

LABELS = {"adult": "Adult", "leaf-synthetic": "Leaf Synthetic", "att-faces": "AT&T", "flight-prices": "flights"}
PHDS = {"0", "1", "2"}
"""Clients of Adult who hold the people with PhDs."""
ROUNDING = 1e-12
"""Share of the largest singular value below which a direction is none."""
Rows = Sequence[Mapping[str, str]]


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

    `global` is to the global model of the last recorded round, over that one's norm; `start` is of w_0, `span` of the
    nearest combination of all models that it received and returned, and `other start` of the optimum from other random
    weights, over its own; then those of its optimum to each client's.
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
            "span": distance_to_span(optimum, transcript.updates(client), flatten) / float(optimum.norm()),
            "other start": float((optimum - others[client]).norm() / optimum.norm()),
        }
        for other, other_optimum in enumerate(optima):
            row[f"client {other}"] = float((optimum - other_optimum).norm() / other_optimum.norm())
        rows.append(row)
    return rows


def distance_to_span(optimum: Tensor, updates: Iterable[Update], flatten: Callable[[State], Tensor]) -> float:
    """Return the distance of a model to the affine span of all models in the messages of a client."""
    models = torch.stack([flatten(state) for update in updates for state in (update.before, update.after)])
    mean = models.mean(0)
    _, sizes, directions = torch.linalg.svd(models - mean, full_matrices=False)
    basis = directions[sizes > ROUNDING * sizes[0]]
    rest = optimum - mean
    return float((rest - basis.T @ (basis @ rest)).norm())


def tables(rows: Rows) -> dict[str, str]:
    """Return the table of the page, with the least and the largest distance of the clients of each group."""
    lines = []
    for (data,), clients in group_rows(rows, "data").items():
        groups = {LABELS[data]: {row["client"] for row in clients}}
        if data == "adult":
            groups = {"Adult, PhDs": PHDS, "Adult, others": groups["Adult"] - PHDS}
        for title, group in groups.items():
            members = [row for row in clients if row["client"] in group]
            optima = {"of the same group": group, "of the other": {row["client"] for row in clients} - group}
            texts = [
                format_range([row[f"client {other}"] for row in members for other in others - {row["client"]}])
                for others in optima.values()
            ]
            known = [
                format_range([row[name] for row in members]) for name in ("global", "start", "span", "other start")
            ]
            lines.append([title, str(len(members)), *known, *texts])
    head = [
        "",
        "clients",
        "global model",
        "w_0",
        "span of messages",
        "other start",
        "others' optima",
        "of the other group",
    ]
    return {"": markdown_table(head, lines)}


def format_range(values: Sequence[str]) -> str:
    """Format the least and the largest of some distances; empty where there are none.

    >>> format_range(["0.2301", "0.2612"]), format_range([])
    ('.230 to .261', '')
    """
    numbers = sorted(map(float, values))
    return " to ".join(f"{number:.3f}".lstrip("0") for number in numbers[:: max(len(numbers) - 1, 1)])


def figures() -> dict[str, Any]:
    """Return our figures in the place of the paper's Table 2, in percent."""
    clients = {}
    for row in read_rows(Study.open("lmra").results):
        if row["data"] == "flight-prices":
            distance = f"{100 * float(row['global']):.0f}"
            clients[f"client {row['client']}"] = {"distance": distance, "examples": row["examples"]}
    command = "python -m studies lmra  # six minutes of one core"
    return {"paper": "lmra", "kept": [kept_result("table2", "flight-prices", command, clients, "Seed 1.")]}
