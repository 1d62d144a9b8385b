"""Batched restarts: restarts of several victims in one call of the network.

An accelerator computes many restarts of a small network in the time of one, because most of that
time goes into starting its kernels. A CPU gains nothing by it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedsim.interfaces.attack import warn
from fedsim.inversion.batch_faults import find_faults, succeeds
from fedsim.inversion.batched_call import BatchedCall, BatchEntry
from fedsim.inversion.descent import Step

MEMORY_BUDGET = 1 << 32
"""Largest number of bytes that one call may take where the device does not tell its free memory."""
_SHARE_OF_FREE_MEMORY = 0.5
"""Largest share of a GPU's free memory that one call may take."""


def batching_is_faster(device: torch.device) -> bool:
    """Return whether a batch of restarts takes less time than one restart after the other."""
    return device.type != "cpu"


def memory_budget(device: torch.device) -> int:
    """Return how many bytes one call may take: half of what is free on a GPU."""
    if device.type != "cuda":
        return MEMORY_BUDGET
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(_SHARE_OF_FREE_MEMORY * free)


def fit_in_memory(entries: Sequence[BatchEntry]) -> bool:
    """Return whether all these restarts fit in the memory at once.

    A single victim always does, because its restarts may be split over several calls.
    """
    total = sum(entry.bytes_per_restart * len(entry.task.restarts) for entry in entries)
    return len(entries) == 1 or total <= memory_budget(entries[0].device)


def batched_steps(entries: Sequence[BatchEntry]) -> list[list[Step] | None]:
    """Return for each victim the steps of its restarts, batched as far as the memory allows.

    Returns:
        None for a victim that is to be computed by itself: if no other is of its kind, if no two
        restarts fit in the memory, or if the model, or a known defense, cannot be batched or gives
        other values then, which is logged; or if it cannot be attacked, as its attack alone says.
    """
    steps_by_entry: dict[BatchEntry, list[Step]] = {}
    for group in _group_by_key(entries):
        batch_size = memory_budget(group[0].device) // max(entry.bytes_per_restart for entry in group)
        if min(batch_size, sum(len(entry.task.restarts) for entry in group)) < 2:
            continue
        slots = []
        for entry in group:
            if succeeds(entry.start_terms):
                slots += [(entry, restart) for restart in range(len(entry.task.restarts))]
        if len(slots) < 2:
            continue
        starts = range(0, len(slots), batch_size)
        calls = [BatchedCall(slots[start : start + batch_size]) for start in starts]
        # Leave out the victims that cannot be batched.
        faults: dict[BatchEntry, str | None] = {}
        for call in calls:
            faults.update(find_faults(call))
        for entry, cause in faults.items():
            if cause is not None:
                with entry.task.victim_context():
                    warn(f"{entry.task.problem.where}: restarts are computed one after the other{cause}")
        for call in calls:
            for slot, (entry, _) in enumerate(call.slots):
                if entry not in faults:
                    steps_by_entry.setdefault(entry, []).append(call.step(slot))
    return [steps_by_entry.get(entry) for entry in entries]


def _group_by_key(entries: Sequence[BatchEntry]) -> list[list[BatchEntry]]:
    """Group victims that can be computed in one call."""
    groups: list[list[BatchEntry]] = []
    for entry in entries:
        for group in groups:
            if group[0].batch_key == entry.batch_key:
                group.append(entry)
                break
        else:
            groups.append([entry])
    return groups
