"""What the measures say of the clients of studies/angular."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.exposure.angular_lipschitz import AngularLipschitz
from fedsim.exposure.expected_error import ExpectedError
from fedsim.exposure.gradient_norm import GradientNorm
from fedsim.exposure.lipschitz import Lipschitz
from fedsim.exposure.measure import Meaning, Measure
from fedsim.exposure.noises import NoiseEffects, NoiseMeasure
from studies.angular.study import CELL, client_of
from studies.running import Row

BOTH: Mapping[str, NoiseMeasure] = {"lipschitz": Lipschitz(), "angular-lipschitz": AngularLipschitz()}


@dataclass(frozen=True, kw_only=True)
class BothLipschitz(NoiseMeasure):
    """L-tilde and L^cos of the same noises, so that each gradient is taken once and not twice."""

    noises: int = 200
    quantities: ClassVar[Mapping[str, Meaning]] = {
        f"{name}.{quantity}": meaning for name, one in BOTH.items() for quantity, meaning in one.quantities.items()
    }

    def _compare_messages(self, moves: NoiseEffects) -> Tensor:
        return torch.stack([measure._compare_messages(moves) for measure in BOTH.values()], 1)

    def _summarise_changes(self, changes: Tensor) -> Mapping[str, Tensor]:
        values: list[Tensor] = []
        for measure, of_measure in zip(BOTH.values(), changes.T, strict=True):
            values += measure._summarise_changes(of_measure).values()
        return dict(zip(self.quantities, values, strict=True))


MEASURES: Mapping[str, tuple[str, Measure]] = {
    "gradient-norm": ("gradient-norm.", GradientNorm()),
    "lipschitz": ("", BothLipschitz()),
    "expected-error": ("expected-error.", ExpectedError()),
}
"""What the names of the quantities begin with, and the measure."""


def is_row_of(row: Mapping[str, str], cell: Row) -> bool:
    """Tell whether a row is of one of the values of a measure."""
    return row["measure"].startswith(cell["label"]) and all(row[name] == str(cell[name]) for name in CELL)


def measure(label: str, batch: int, epoch: int, model: str, mode: str) -> list[Row]:
    """Return a row for each value of one measure."""
    client = client_of(model, epoch, mode, batch)
    prefix, by = MEASURES[label]
    values = by.compute(client.network, client.experiment.loss, client.inputs, client.labels)
    return [{"measure": f"{prefix}{name}", "value": value} for name, value in values.items()]
