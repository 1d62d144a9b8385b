"""Rows of tables: `feature`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
