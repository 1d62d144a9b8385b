"""LMRA's Propositions 1, 3 and 4 in federations; the tables of docs/studies/papers/lmra.md.

Ten clients of some 40 examples each fit a linear regression of d weights. Targets are linear in standard normal inputs
and a hidden column of two values, with noise; each client has coefficients of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.audit.audit import Audit, open_audit
from fedsim.audit.finding_files import load_finding
from fedsim.interfaces.findings import Inference, LocalModel
from fedsim.recording.wire_format import State
from studies.running import RUNS, Row, keep_records, run_or_resume
from studies.writing import column_values, group_rows, markdown_table, select_rows

CLIENTS, EXAMPLES = 10, 40
TRAINED_SHARE = 0.8
"""Share of a client's examples that it trains on; the others are test data."""
THOUSANDTH = 1e-3
FULL = 1000
"""Batch size beyond any client's number of examples."""


def draw_examples(weights: int, seed: int) -> Iterator[str]:
    """Yield the lines of a table of all clients' examples, for a regression of so many weights."""
    features = weights - 2  # the two values of the hidden column have a weight each, which makes a constant
    rng = np.random.default_rng((features, seed))
    yield ",".join(["client", *(f"x{place}" for place in range(features)), "hidden", "y"])
    for client in range(CLIENTS):
        coefficients = rng.normal(size=features)
        inputs = rng.normal(size=(round(EXAMPLES / TRAINED_SHARE), features)) + 0.3 * rng.normal(size=features)
        hidden = rng.integers(0, 2, len(inputs))
        targets = inputs @ coefficients + 3 * hidden + rng.normal() + rng.normal(size=len(inputs)) / 2
        for values, category, target in zip(inputs, hidden, targets, strict=True):
            yield ",".join(map(str, [f"c{client}", *values, "yes" if category else "no", target]))


def measure(
    seed: int, attack: str, participants: int, batch_size: int | str, weights: int, messages: int | str
) -> list[Row]:
    """Return what an attack on each client of one federation gets, as a row for each quantity."""
    count = 3 * weights if messages == "3 d" else int(messages)
    examples = keep_records(RUNS / "lmra_linear" / f"{weights}-{seed}.csv", draw_examples(weights, seed))
    tables: dict[str, Any] = {
        "data": {"name": "csv", "path": str(examples), "target": "y", "task": "regression", "group": "client"},
        "partition": {"name": "natural"},
        "model": {"name": "linear", "bias": False},
        "training": {
            "local_steps": 3,
            "batch_size": FULL if batch_size == "full" else batch_size,
            "learning_rate": 0.05,
        },
        "strategy": {"name": "fedavg", "fraction_train": participants / CLIENTS},
        "federation": {
            "engine": "serial",
            "clients": CLIENTS,
            "rounds": count * CLIENTS // participants,
            "evaluate_every": 0,
            "seed": seed,
        },
        "adversary": {"victims": "all", "rounds": "all", "knowledge": {"partial_records": "hidden"}},
        "attack": [{"name": attack} | ({"source": "optimal"} if attack == "aia-model" else {})],
    }
    path = RUNS / "lmra_linear" / f"{attack}-{participants}-{batch_size}-{weights}-{count}-{seed}"
    run_or_resume(tables, path)
    audit = open_audit(path, None)
    measured = infer_hidden_column(audit) if attack == "aia-model" else measure_distances(audit)
    return [
        {"client": client, "quantity": quantity, "value": value}
        for client, values in measured.items()
        for quantity, value in values.items()
    ]


def flatten(state: State) -> Tensor:
    """Return all weights of a model."""
    return torch.cat([tensor.flatten().double() for tensor in state.values()])


def read_findings(audit: Audit) -> Iterator[tuple[int, Any]]:
    """Yield each client with what was claimed of it."""
    for path in sorted(audit.folder.findings.glob("*/*.safetensors")):
        finding, about = load_finding(path)
        yield int(str(about["victim"])), finding


def measure_distances(audit: Audit) -> dict[int, dict[str, float]]:
    """Return for each client the distances of two models to its optimum, over that one's norm, and counts."""
    measured = {}
    for client, finding in read_findings(audit):
        assert isinstance(finding, LocalModel)
        updates, optimum = list(audit.transcript.updates(client)), flatten(audit.optimum(client))
        measured[client] = {
            "messages received": float(len(updates)),
            "directions": float(finding.trace["determined_directions"]),
            "claimed": float((flatten(finding.state) - optimum).norm() / optimum.norm()),
            "last-returned": float((flatten(updates[-1].after) - optimum).norm() / optimum.norm()),
        }
    return measured


def infer_hidden_column(audit: Audit) -> dict[int, dict[str, float]]:
    """Return for each client the share of records whose column Eq. 3 infers, and the bound 1 - 4 E / theta[s]^2."""
    assert audit.experiment is not None
    data, column = audit.experiment.data, audit.experiment.dataset.column("hidden")
    measured = {}
    for client, finding in read_findings(audit):
        assert isinstance(finding, Inference)
        inputs, targets = data.train(client)
        weights = flatten(audit.optimum(client))
        first, second = weights[column.features]
        error = (data.to_model(inputs).double() @ weights - targets).square().mean()
        measured[client] = {
            "inferred": float((finding.predictions == column.values(inputs)).double().mean()),
            "bound": float(1 - 4 * error / (second - first) ** 2),
        }
    return measured


def tables(rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the table of distances and that of Proposition 4."""
    lines = []
    by_setting = group_rows(
        select_rows(rows, attack="lmra-linear"), "participants", "batch_size", "weights", "messages"
    )
    for (participants, batch_size, weights, _), cell in by_setting.items():
        quantities = group_rows(cell, "quantity")
        received, directions, claimed, returned = (
            column_values(quantities[name,], "value")
            for name in ("messages received", "directions", "claimed", "last-returned")
        )
        lines.append([
            "all" if participants == "10" else f"{participants} of {CLIENTS}",
            batch_size,
            weights,
            format_range(received, ".0f"),
            format_range(directions, ".0f"),
            *(f"{format_distance(np.median(far))} ({format_distance(far.max())})" for far in (claimed, returned)),
            f"{np.sum(claimed < returned)} of {len(claimed)}",
        ])  # fmt: skip
    head = ["clients a round", "batch", "d", "messages of a client", "directions", "`lmra-linear`", "last-returned"]
    of_column = select_rows(rows, attack="aia-model")
    inferred, bound = (column_values(select_rows(of_column, quantity=name), "value") for name in ("inferred", "bound"))
    columns = [format_range(inferred, ".3f"), f"{np.sum(inferred == 1)} of {len(inferred)}", format_range(bound, ".3f")]
    return {
        "distances": markdown_table([*head, "nearer"], lines),
        "hidden column": markdown_table(["records inferred", "all records", "bound"], [columns]),
    }


def format_distance(value: float) -> str:
    """Format a distance with two digits.

    >>> format_distance(0.000049), format_distance(0.6), format_distance(1.2), format_distance(15.0)
    ('5e-5', '.60', '1.2', '15')
    """
    if value < THOUSANDTH:
        return f"{value:.0e}".replace("e-0", "e-")
    return f"{value:#.2g}".removeprefix("0").removesuffix(".")


def format_range(values: NDArray[np.float64], form: str) -> str:
    """Format the least and the largest value; one of them where they are equal."""
    return " to ".join(dict.fromkeys(f"{value:{form}}" for value in (values.min(), values.max())))
