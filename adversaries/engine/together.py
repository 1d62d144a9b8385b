"""Several restarts in one call of the network.

An accelerator computes many restarts of a small network in the time of one, most of which goes into starting its
kernels. A CPU gains nothing by it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.func import vmap

from adversaries.engine.recipe import Recipe
from adversaries.engine.restart import Around, Evaluate, Moving, Restart, objective_of, terms_of
from adversaries.scene import Scene
from fedsim.errors import first_line

log = logging.getLogger("fedsim." + __name__)

BUDGET = 1 << 32
"""Bytes of memory that one call may take."""
_AGREEMENT = 1e-3
"""By how much what is computed for several at once may differ from what is computed for one, relative to its size."""
_NOTHING = 1e-3
"""Sizes below it count as this: slopes that are all rounding have no size of their own."""


def pays(device: torch.device) -> bool:
    """Whether several restarts at once take less time than one after the other."""
    return device.type != "cpu"


def at_once(
    recipe: Recipe,
    scene: Scene,
    target: list[Tensor],
    restarts: Sequence[Restart],
    computing: Callable[[], AbstractContextManager[object]],
) -> list[Evaluate] | None:
    """For each restart of a scene what `Restart.trial` asks, computed for as many at once as the memory allows.

    Args:
        target: what gradients are compared with.
        computing: entered around each call, as for another precision.

    Returns:
        None where the model, or a defense that is known, cannot be computed for several at once, which is told; and
        where no two restarts fit into the memory.
    """
    around = scene.before[0].new_ones(()), torch.zeros_like(restarts[0].dummy)
    moving = tuple(restarts[0].values())

    def alone() -> list[Tensor]:
        with computing():
            return objective_of(recipe, scene, restarts[0].values(), around, target, moving)

    size, own = _bytes_and_result(alone)
    if (many := BUDGET // size) < 2:
        return None
    parts = [restarts[start : start + many] for start in range(0, len(restarts), many)]
    calls = [_Call(recipe, replace(scene, transformed=True), target, part, computing) for part in parts]
    try:
        found = calls[0].compute(around, moving)[0]
    except (RuntimeError, NotImplementedError) as error:
        log.warning("%s: restarts are computed one after the other (%s)", scene.where, first_line(error))
        return None
    if not all(map(_agree, found, own)):
        log.warning("%s: restarts are computed one after the other; several at once gave other values", scene.where)
        return None
    return [call.evaluator(place) for call in calls for place in range(len(call.restarts))]


@dataclass(eq=False)
class _Call:
    """Restarts that are computed at once.

    Each of them asks once in an iteration, before it moves, and the first one that asks has all of them computed. A
    restart that no longer asks has diverged; what waits for it says so, and it is not computed again.
    """

    recipe: Recipe
    scene: Scene
    target: list[Tensor]
    restarts: Sequence[Restart]
    computing: Callable[[], AbstractContextManager[object]]
    _waiting: dict[int, list[Tensor]] = field(init=False, default_factory=dict)

    def evaluator(self, place: int) -> Evaluate:
        """Of one restart."""

        def evaluate(values: dict[str, Tensor], around: Around, moving: Moving) -> list[Tensor]:
            if place not in self._waiting:
                self._waiting.update(self.compute(around, moving))
            return self._waiting.pop(place)

        return evaluate

    def compute(self, around: Around, moving: Moving) -> dict[int, list[Tensor]]:
        """As `objective_of`, by the places of the restarts that nothing waits for."""
        left = [place for place in range(len(self.restarts)) if place not in self._waiting]
        each = [self.restarts[place].values() for place in left]
        values = {name: torch.stack([one[name] for one in each]).requires_grad_(name in moving) for name in each[0]}

        def terms(values: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            return terms_of(self.recipe, self.scene, values, around, self.target)

        with self.computing():
            objective, distance, l_sim = vmap(terms)(values)
            slopes = torch.autograd.grad(objective.sum(), [values[name] for name in moving], materialize_grads=True)
        rows = zip(*(tensor.unbind() for tensor in (objective.detach(), distance, l_sim, *slopes)), strict=True)
        return dict(zip(left, map(list, rows), strict=True))


def _agree(some: Tensor, other: Tensor) -> bool:
    """Whether they differ by rounding alone, or neither is finite."""
    same = (some - other).norm() <= _AGREEMENT * other.norm().clamp_min(_NOTHING)
    return bool(same | ~(some.isfinite().all() | other.isfinite().all()))


def _bytes_and_result(compute: Callable[[], list[Tensor]]) -> tuple[int, list[Tensor]]:
    """About how much memory `compute` takes, which is what its passes keep, and what it returns."""
    kept = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        found = compute()
    return max(1, kept), found
