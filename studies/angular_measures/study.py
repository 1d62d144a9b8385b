"""What the measures say of the clients of studies/angular."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from studies.angular.study import CELL, client_of
from studies.messages import measure_message
from studies.running import Row

MEASURES: dict[str, dict[str, dict[str, Any]]] = {
    "gradient-norm": {"gradient-norm": {"name": "gradient-norm"}},
    "lipschitz": {name: {"name": name, "noises": 200} for name in ("lipschitz", "angular-lipschitz")},
    "expected-error": {"expected-error": {"name": "expected-error"}},
}
"""Tables of the measures of a cell; both of `lipschitz` share the gradients of their noises."""


def is_row_of(row: Mapping[str, str], cell: Row) -> bool:
    """Return whether a row is of one of the values of a measure."""
    return row["measure"].startswith(cell["label"]) and all(row[name] == str(cell[name]) for name in CELL)


def measure(label: str, batch: int, epoch: int, model: str, mode: str) -> list[Row]:
    """Return a row for each value of one measure."""
    client = client_of(model, epoch, mode, batch)
    return measure_message(MEASURES[label], client.network, client.experiment.loss, client.inputs, client.labels)
