"""Victims that a batched call computes otherwise than they are by themselves.

A network may mix the rows of a call, draw numbers, keep a state, or be what its description does not say. So before the
first iteration

1. objective, distance and L_sim of each restart, by its victim's own model, are compared with those of the call;
2. all that the call computes is compared with the same from other calls: half as many restarts in another order;
3. the first and the last restart are computed by themselves, with all gradients, of those whose victim can be attacked;
4. the distance's gradient of each victim has to be finite and not zero.

If 1 to 3 find any difference, each restart of the call is computed by itself and compared. If 4 does, the victim is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from fedsim.base.errors import first_line, is_device_failure, is_memory_error
from fedsim.inversion.batched_call import BatchedCall, BatchEntry

_TOLERANCE = 1e-3
"""Largest difference of a batched result from that of a restart alone, relative to its size."""
_TERM_TOLERANCE = 2e-5
"""The same of objective, distance and L_sim. Of random dummy data they are close to 1 for any model: where gradients
differed by 1e-2, they differed by 1e-3. What rounding is taken for a fault costs time and no more."""
_LEAST_SIZE = 1e-3
"""Smaller sizes count as this one: gradients that are all rounding have no size of their own."""
_OTHER_VALUES = "; several at once gave other values"
_NO_GRADIENT = "; several at once gave no gradient of the distance"


def find_faults(call: BatchedCall) -> dict[BatchEntry, str | None]:
    """Return the victims of a call that are to be computed by themselves, before the first iteration.

    Returns:
        By victim the end of a sentence that says why, or None where the victim cannot be attacked by itself either,
        as its attack says then.
    """
    faults: dict[BatchEntry, str | None] = {}
    samples = _choose_samples(call, faults)
    try:
        *columns, distance_gradients = call.compute_start()
        reordered = call.compute_start_reordered()
    except Exception as error:
        if _is_device_lost(error):
            raise
        return {entry: faults.get(entry, f" ({first_line(error)})") for entry, _ in call.slots}
    own_terms = torch.stack([entry.start_terms()[restart] for entry, restart in call.slots])
    agreements = [rows_agree(column, other) for column, other in zip(columns, reordered, strict=True)]
    for column, terms in zip(columns, own_terms.unbind(1), strict=False):
        agreements.append(rows_agree(column, terms, _TERM_TOLERANCE))
    has_gradient = _rows_have_gradient(columns[1], distance_gradients)
    all_agree, usable = torch.stack([torch.stack(agreements).all(0), has_gradient]).tolist()
    if not all(all_agree) or not all(_agree_alone(call, columns, samples)):
        _compare_with_each_alone(call, columns, faults)
    for (entry, restart), is_usable in zip(call.slots, usable, strict=True):
        if restart == 0 and not is_usable and entry not in faults:
            faults[entry] = _NO_GRADIENT if succeeds(entry.task.check_gradient) else None
    return faults


def _choose_samples(call: BatchedCall, faults: dict[BatchEntry, str | None]) -> list[int]:
    """Return the first and the last restart whose victim can be attacked; add the victims that cannot to `faults`.

    A victim that cannot, or whose objective is not finite, would show nothing of what the call does to the others.
    """
    samples = set()
    slots = range(len(call.slots))
    for order in (slots, reversed(slots)):
        for slot in order:
            entry, restart = call.slots[slot]
            if entry in faults:
                continue
            if not succeeds(partial(entry.solo_result, restart)) or not succeeds(entry.task.check_gradient):
                faults[entry] = None
            elif bool(torch.stack(entry.solo_result(restart)[:3]).isfinite().all()):
                samples.add(slot)
                break
    return sorted(samples)


def succeeds(compute: Callable[[], object]) -> bool:
    """Return whether something computed for one victim raises nothing; if it does, the attack on it will, too."""
    try:
        compute()
    except Exception as error:
        if _is_device_lost(error):
            raise
        return False
    return True


def _is_device_lost(error: Exception) -> bool:
    return is_device_failure(error) and not is_memory_error(error)


def _compare_with_each_alone(
    call: BatchedCall, columns: Sequence[Tensor], faults: dict[BatchEntry, str | None]
) -> None:
    """Add to `faults` the victims any of whose restarts differs from the same restart by itself."""
    for entry, restart in call.slots:
        if entry not in faults and not succeeds(partial(entry.solo_result, restart)):
            faults[entry] = None
    slots = [slot for slot, (entry, _) in enumerate(call.slots) if entry not in faults]
    for slot, agrees in zip(slots, _agree_alone(call, columns, slots), strict=True):
        if not agrees:
            faults[call.slots[slot][0]] = _OTHER_VALUES


def _agree_alone(call: BatchedCall, columns: Sequence[Tensor], slots: Sequence[int]) -> list[bool]:
    """Return for restarts whether the call gives what they give by themselves."""
    agreements = []
    for slot in slots:
        entry, restart = call.slots[slot]
        results = zip(columns, entry.solo_result(restart), strict=True)
        agreements.append(torch.stack([rows_agree(column[slot, None], solo[None]) for column, solo in results]).all())
    return torch.stack(agreements).tolist() if agreements else []


def rows_agree(rows: Tensor, others: Tensor, tolerance: float = _TOLERANCE) -> Tensor:
    """Return for each row whether two results differ by rounding only, or neither is finite."""
    rows, others = rows.reshape(len(rows), -1), others.reshape(len(others), -1)
    limit = tolerance * others.norm(dim=1).clamp_min(_LEAST_SIZE)
    same: Tensor = (rows - others).norm(dim=1) <= limit
    return same | ~(rows.isfinite().all(1) | others.isfinite().all(1))


def _rows_have_gradient(distances: Tensor, gradients: Tensor) -> Tensor:
    """Return for each row whether the distance has a gradient; where it is not finite itself, the attack says so."""
    gradients = gradients.reshape(len(gradients), -1)
    return ~distances.isfinite() | (gradients.any(1) & gradients.isfinite().all(1))
