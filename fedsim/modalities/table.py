"""Rows of tables: `feature`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.interfaces.modality import GuessMaterial, Modality
from fedsim.modalities.guesses import general_guesses


@dataclass(frozen=True)
class TableModality(Modality):
    """Rows of tables; a column of categories is one feature for each of them.

    Where the columns are known, the share of right values is judged too, with guesses of its own.
    """

    axes = ("feature",)
    noun = "row"
    plural = "rows"
    shown_as = "rows"

    def guess_examples(self, material: GuessMaterial) -> Mapping[str, Tensor]:
        """Return the general guesses."""
        return general_guesses(material)

    def similarity(self, claimed: Tensor, examples: Tensor) -> Tensor:
        """Return minus the distance of each pair, features in standard deviations of the examples.

        A feature that is the same in all of these examples tells none of them from another.
        """
        deviations = examples.std(0, correction=0)
        varying = deviations > 0
        claimed, examples = (rows[:, varying] / deviations[varying] for rows in (claimed, examples))
        return -torch.cdist(claimed, examples)
