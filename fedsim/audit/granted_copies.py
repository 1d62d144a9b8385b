"""Notice claimed examples that are copies of a victim's records, which the attack was granted."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.base.errors import AttackError
from fedsim.interfaces.findings import Finding, Reconstruction, Texts
from fedsim.interfaces.knowledge import Knowledge

_FACTS_OF_VICTIMS = ("records", "candidates", "known_candidates")
"""Facts among whose records are some of the victim's."""
_ROUNDING = 1e-5
"""Largest difference of a copy's values, which came from units of the model, in the units of findings."""


def check_no_copies(finding: Finding, knowledge: Knowledge, where: str) -> None:
    """Raise AttackError where claimed examples are records of the victim that the attack was granted.

    They would count as recovered from the message, which says nothing of them.
    """
    if not isinstance(finding, Reconstruction | Texts):
        return
    claimed = finding.tokens if isinstance(finding, Texts) else finding.data
    for fact in _FACTS_OF_VICTIMS:
        if fact not in knowledge.tables:
            continue
        records = knowledge.tables[fact].inputs.cpu()
        if isinstance(finding, Reconstruction):
            if knowledge.value_range is None:
                continue
            axes = [-1] + [1] * (records.ndim - 2)
            low, high = (torch.as_tensor(end).reshape(axes) for end in knowledge.value_range)
            records = (records - low) / (high - low)
        if records.shape[1:] == claimed.shape[1:] and (count := _count_copies(claimed, records)):
            raise AttackError(
                f"{where}: {count} of {len(claimed)} claimed examples are records that the attack was granted as "
                f"'{fact}', so they were not recovered from the message; claim only what follows from the message"
            )


def _count_copies(claimed: Tensor, records: Tensor) -> int:
    """Return how many of the claimed examples are among the records."""
    rows, others = claimed.flatten(1).double(), records.flatten(1).double()
    nearest = torch.cdist(rows, others).argmin(1)
    return int(((rows - others[nearest]).abs().amax(1) < _ROUNDING).sum())
