"""SPEAR with independent components on several rounds of a client with the same examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from adversaries.exact.layer import FirstLayer, read_first_layer, stack_layers
from adversaries.exact.spear_ica import SpearIca
from fedsim.base.errors import AttackError
from fedsim.interfaces.attack import Knowledge, Progress, single_update
from fedsim.interfaces.findings import Finding
from fedsim.inversion.local_updates import participation_rounds
from fedsim.recording.transcript import Transcript


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
        Dimitrov et al.: SPEAR, NeurIPS 2024; Kariyappa et al.: Cocktail Party Attack, ICML 2023.
        Differs: as `spear-ica`, and it reads several rounds together.
    """

    temporal: ClassVar[bool] = True

    def _run(
        self, transcript: Transcript, knowledge: Knowledge, victim: int, rng: torch.Generator, progress: Progress
    ) -> Finding:
        try:
            return super()._run(transcript, knowledge, victim, rng, progress)
        except AttackError as error:
            raise AttackError(f"{error}; if the client's examples change, read one round with 'spear-ica'") from error

    def _layer(self, transcript: Transcript, knowledge: Knowledge, victim: int) -> FirstLayer:
        layers = []
        for number in participation_rounds(transcript, victim):
            update = single_update(transcript.restrict_to([number]), victim)
            layers.append(read_first_layer(update, knowledge))
        return stack_layers(layers)
