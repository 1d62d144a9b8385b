"""Columns of the ledger that say which mechanism a client's messages of a round have passed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedsim.interfaces.mechanism import Mechanism

_COLUMNS = (
    "unit", "neighbours", "noise", "noise_scale", "noise_rate", "releases", "noise_distance", "noise_dimension",
)  # fmt: skip
"""Empty where a defense declares no mechanism."""


def describe_mechanism(mechanism: Mechanism | None) -> dict[str, Any]:
    """Return the columns of a mechanism."""
    if mechanism is None:
        return dict.fromkeys(_COLUMNS, "")
    values = (
        mechanism.unit,
        mechanism.neighbours,
        mechanism.noise,
        mechanism.scale,
        mechanism.rate,
        mechanism.releases,
        mechanism.distance or "",
        mechanism.dimension or "",
    )
    return dict(zip(_COLUMNS, values, strict=True))


def read_mechanism(row: Mapping[str, Any]) -> Mechanism | None:
    """Return the mechanism of a row's round; None where its defense declares none."""
    if not row["noise"]:
        return None
    return Mechanism(
        noise=row["noise"],
        scale=float(row["noise_scale"]),
        releases=int(row["releases"]),
        rate=float(row["noise_rate"]),
        unit=row["unit"],
        neighbours=row["neighbours"],
        distance=float(row["noise_distance"]) if row["noise_distance"] else None,
        dimension=int(row["noise_dimension"]) if row["noise_dimension"] else None,
    )
