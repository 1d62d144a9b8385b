"""SPEAR with independent components on several rounds of a client with the same examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from adversaries.exact.layer import FirstLayer, read_first_layer, stack_layers
from adversaries.exact.spear_ica import SpearIca
from fedsim.base.errors import AttackError
from fedsim.interfaces.attack import ALL, Progress, RoundsNeeded, Target
from fedsim.interfaces.findings import Finding


@dataclass(frozen=True, kw_only=True)
class SpearIcaRounds(SpearIca):
    """`spear-ica` on the updates of several rounds at once.

    All updates of a client that trains on the same examples are made of the same inputs. So the
    units of the first layer are stacked over the rounds, as if the layer were wider
    (`stack_layers`), and columns that are not determined by the zeros of one round are by those of
    several.

    Args:
        passes, patience, draws: as of `spear-ica`.

    References:
        [Dimitrov2024] (SPEAR); [Kariyappa2023].
        Differs: as `spear-ica`, and it reads several rounds together.
    """

    rounds_needed: ClassVar[RoundsNeeded] = ALL

    def _run(self, target: Target, progress: Progress) -> Finding:
        try:
            return super()._run(target, progress)
        except AttackError as error:
            raise AttackError(f"{error}; if the client's examples change, read one round with 'spear-ica'") from error

    def _layer(self, target: Target) -> FirstLayer:
        layers = []
        for number in target.participation_rounds():
            layers.append(read_first_layer(target.read_update(number), target.knowledge))
        return stack_layers(layers)
