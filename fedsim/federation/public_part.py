"""Data set of simulated clients: public examples of another data set, on which they train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fedsim.data import Dataset, Examples
from fedsim.plugins import registry


@dataclass(frozen=True, kw_only=True)
class PublicPart:
    """Public examples of a data set, which simulated clients train on as others do on theirs.

    Models are fed with inputs that are standardised as those of the whole data set.

    Args:
        of: the `[data]` table of the whole data set.
        split: which of its parts the examples are of, `train` or `test`.
        indices: of the examples that simulated clients hold.
    """

    of: dict[str, Any]
    split: Literal["train", "test"]
    indices: Sequence[int]

    def load(self, folder: Path | None) -> Dataset:
        """Load the whole data set and take the examples."""
        settings = {key: value for key, value in self.of.items() if key != "name"}
        whole: Dataset = registry.build("datasets", self.of["name"], settings, "data.of").load(folder)
        examples = whole.test if self.split == "test" else whole.train
        is_held = torch.zeros(len(examples), dtype=torch.bool)
        is_held[torch.tensor(self.indices)] = True
        test = _take(examples, ~is_held) if self.split == "test" else whole.test
        part = replace(whole, train=_take(examples, is_held), test=test)
        # These are cached properties, and would be computed of the part.
        vars(part).update(moments=whole.moments, input_bounds=whole.input_bounds)
        return part


def _take(examples: Examples, mask: Tensor) -> Examples:
    groups = None if examples.groups is None else examples.groups[mask]
    return replace(examples, raw=examples.raw[mask], labels=examples.labels[mask], groups=groups)
