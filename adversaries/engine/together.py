"""Restarts of several victims in one call of the network.

An accelerator computes many restarts of a small network in the time of one, most of which goes into starting its
kernels. A CPU gains nothing by it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from adversaries.engine.descent import Curves, Step
from adversaries.engine.parts import numbers_of, shapes_of, tensors_of, with_tensors
from adversaries.engine.restart import Around, Matching, Restart, curves_of, terms_of
from adversaries.engine.rows import Rows, stacked
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


@dataclass(kw_only=True, eq=False)
class Entry:
    """A victim whose restarts may be computed at once, and with those of others.

    Attributes:
        own: by restart, what it is computed by itself before the first iteration.
        bytes: about how much memory a restart takes in a call.
    """

    matching: Matching
    own: Sequence[list[Tensor]]
    bytes: int

    @classmethod
    def of(cls, matching: Matching) -> Entry:
        """With what is computed of each restart by itself."""
        first, *others = (partial(matching.alone(restart), 0) for restart in matching.restarts)
        kept, own = _kept_and_result(first)
        return cls(matching=matching, own=[own, *(compute() for compute in others)], bytes=kept + _bytes_of(matching))

    @cached_property
    def leaves(self) -> list[Tensor]:
        """The tensors that may differ from those of other victims in a call."""
        from torch.utils._pytree import tree_leaves

        return tree_leaves(_differing(self.matching))

    @cached_property
    def kind(self) -> tuple[Any, ...]:
        """What has to be equal in all victims of a call."""
        recipe, scene = self.matching.recipe, self.matching.scene
        return (
            (recipe.place, recipe.distance, tuple(recipe.priors), recipe.joint_labels),
            (recipe.optimizer, recipe.step_size, recipe.signed, self.matching.restarts[0].course()),
            (repr(scene.model), scene.loss, type(scene.units), *numbers_of(scene)),
            shapes_of(self.leaves),
            shapes_of([*self.matching.restarts[0].values().values()]),
        )


def fit(entries: Sequence[Entry]) -> bool:
    """Whether the memory lasts for all of these at once, or there is but one, whose restarts may be parted."""
    return len(entries) == 1 or sum(entry.bytes * len(entry.matching.restarts) for entry in entries) <= BUDGET


def at_once(entries: Sequence[Entry]) -> list[list[Step] | None]:
    """For each victim the steps of its restarts, computed for as many at once as are alike and the memory allows.

    Returns:
        None for a victim that is to be computed by itself: where nothing is like it, where no two restarts fit into the
        memory, and where the model, or a defense that is known, cannot be computed for several at once or gives other
        values then, which is told.
    """
    found: dict[Entry, list[Step]] = {}
    for alike in _alike(entries):
        places = [(entry, restart) for entry in alike for restart in range(len(entry.matching.restarts))]
        many = BUDGET // max(entry.bytes for entry in alike)
        if min(many, len(places)) < 2:
            continue
        calls = [_Call(places[start : start + many]) for start in range(0, len(places), many)]
        faults = {entry: why for call in calls for entry, why in call.faults().items()}
        for entry, why in faults.items():
            with entry.matching.turn():
                log.warning("%s: restarts are computed one after the other%s", entry.matching.scene.where, why)
        for call in calls:
            for place, (entry, _) in enumerate(call.places):
                if entry not in faults:
                    found.setdefault(entry, []).append(call.step(place))
    return [found.get(entry) for entry in entries]


def _alike(entries: Sequence[Entry]) -> list[list[Entry]]:
    """In groups of those that can be computed in one call."""
    groups: list[list[Entry]] = []
    for entry in entries:
        group = next((group for group in groups if group[0].kind == entry.kind), None)
        if group is None:
            groups.append([entry])
        else:
            group.append(entry)
    return groups


@dataclass(eq=False)
class _Call:
    """Restarts that are computed at once, each with its victim.

    Each of them asks once in an iteration, before any of them moves, and the first one that asks has all of them
    computed and moved. A restart that no longer asks is at its end; what waits for it says so, and it is left out then.
    Where the memory turns out not to last for all, it is halves that are computed at once from then on.
    """

    places: Sequence[tuple[Entry, int]]
    _taken: list[int] = field(init=False, default_factory=list)
    _rows: Rows | None = field(init=False, default=None)
    _waiting: dict[int, Curves] = field(init=False, default_factory=dict)
    _stacked: tuple[list[int], dict[int, Tensor]] = field(init=False, default=([], {}))
    _most: int = field(init=False)

    def __post_init__(self) -> None:
        self._most = len(self.places)

    @cached_property
    def _first(self) -> Matching:
        """The victim whose recipe and scene serve all."""
        first = self.places[0][0].matching
        return replace(first, scene=replace(first.scene, transformed=True))

    @cached_property
    def _differ(self) -> list[int]:
        """The places among the leaves at which those of the victims are not all equal."""
        victims = dict.fromkeys(entry for entry, _ in self.places)
        if len(victims) == 1:
            return []
        stacks = (torch.stack(tensors) for tensors in zip(*(entry.leaves for entry in victims), strict=True))
        same = torch.stack([(stack == stack[0]).all() for stack in stacks]).tolist()
        return [place for place, equal in enumerate(same) if not equal]

    def step(self, place: int) -> Step:
        """Of one restart, which is computed here from now on."""
        self._taken.append(place)
        restart = self._restart(place)

        def step(iteration: int) -> Curves:
            if place not in self._waiting:
                self._waiting.update(self._moved(iteration))
            restart.project()
            return self._waiting.pop(place)

        return step

    def faults(self) -> dict[Entry, str]:
        """Before the first iteration, the victims that cannot be computed here, and why."""
        everyone = list(range(len(self.places)))
        try:
            found = self._computed(everyone, stacked([self._restart(place) for place in everyone]), 0)
        except (RuntimeError, NotImplementedError) as error:
            return {entry: f" ({first_line(error)})" for entry, _ in self.places}
        pairs = [
            (row, entry.own[restart])
            for row, (entry, restart) in zip(zip(*found, strict=True), self.places, strict=True)
        ]
        same = torch.stack([torch.stack([*map(_agree, row, own)]).all() for row, own in pairs]).tolist()
        told = "; several at once gave other values"
        return {entry: told for (entry, _), alike in zip(self.places, same, strict=True) if not alike}

    def _restart(self, place: int) -> Restart:
        entry, restart = self.places[place]
        return entry.matching.restarts[restart]

    def _moved(self, iteration: int) -> dict[int, Curves]:
        """Move all for whom nothing waits, and give what the report shows of each."""
        left = [place for place in self._taken if place not in self._waiting]
        restarts, recipe = [self._restart(place) for place in left], self._first.recipe
        if self._rows is None:
            self._rows = Rows(recipe, restarts)
        self._rows.only(restarts)
        objective, distance, l_sim, *slopes = self._computed(left, self._rows.values, iteration)
        own = self._rows.means()
        self._rows.move(iteration, dict(zip(restarts[0].moving(iteration), slopes, strict=True)))
        return {
            place: curves_of(recipe, objective[row], distance[row], l_sim[row], {n: t[row] for n, t in own.items()})
            for row, place in enumerate(left)
        }

    def _computed(self, left: list[int], values: dict[str, Tensor], iteration: int) -> list[Tensor]:
        """As `compute`, in as many parts as the memory asks for."""
        while True:
            starts = range(0, len(left), self._most)
            try:
                parts = [
                    self.compute(left[some], {name: tensor[some] for name, tensor in values.items()}, iteration)
                    for some in (slice(start, start + self._most) for start in starts)
                ]
                return parts[0] if len(parts) == 1 else [torch.cat(rows) for rows in zip(*parts, strict=True)]
            except torch.OutOfMemoryError as error:
                if (many := min(self._most, len(left))) < 2:
                    raise
                why = first_line(error)
            self._most, self._stacked = (many + 1) // 2, ([], {})  # here, what the error held on to is free
            where = self.places[left[0]][0].matching.scene.where
            log.warning(
                "%s: the memory does not last for %d restarts at once, so it is %d from now on (%s)",
                where,
                many,
                self._most,
                why,
            )

    def compute(self, left: list[int], values: dict[str, Tensor], iteration: int) -> list[Tensor]:
        """As `objective_of`, a row for each place that is left."""
        restarts = [self._restart(place) for place in left]
        recipe, moving = self._first.recipe, restarts[0].moving(iteration)
        values = {name: value.detach().requires_grad_(name in moving) for name, value in values.items()}
        around, axes = _around(restarts, iteration)

        def terms(
            values: dict[str, Tensor], tensors: dict[int, Tensor], around: Around
        ) -> tuple[Tensor, Tensor, Tensor]:
            scene, target = self._with(tensors)
            return terms_of(recipe, scene, values, around, target)

        with self._first.computing():
            objective, distance, l_sim = vmap(terms, (0, 0, axes))(values, self._tensors(left), around)
            slopes = torch.autograd.grad(objective.sum(), [values[name] for name in moving], materialize_grads=True)
        return [objective.detach(), distance, l_sim, *slopes]

    def _tensors(self, left: list[int]) -> dict[int, Tensor]:
        """By their places among the leaves, those in which victims differ, a row for each restart that is left."""
        if self._stacked[0] != left:
            entries = [self.places[place][0] for place in left]
            self._stacked = left, {at: torch.stack([entry.leaves[at] for entry in entries]) for at in self._differ}
        return self._stacked[1]

    def _with(self, tensors: dict[int, Tensor]) -> tuple[Scene, list[Tensor]]:
        """The scene and the target of the first victim, with these of their leaves exchanged."""
        from torch.utils._pytree import tree_flatten, tree_unflatten

        leaves, outline = tree_flatten(_differing(self._first))
        scene, target = tree_unflatten([tensors.get(at, leaf) for at, leaf in enumerate(leaves)], outline)
        return with_tensors(self._first.scene, scene), target


def _differing(matching: Matching) -> tuple[dict[str, Any], list[Tensor]]:
    """The tensors in which victims may differ."""
    return tensors_of(matching.scene), list(matching.target)


def _around(restarts: Sequence[Restart], iteration: int) -> tuple[Around, tuple[None, int | None]]:
    """The emphasis, which all have in common, and the consensus; and the axis of the restarts in each."""
    emphasis, consensus = restarts[0].around(iteration)
    if all(restart.consensus is consensus for restart in restarts):
        return (emphasis, consensus), (None, None)
    return (emphasis, torch.stack([restart.consensus for restart in restarts])), (None, 0)


def _agree(some: Tensor, other: Tensor) -> Tensor:
    """Whether they differ by rounding alone, or neither is finite."""
    same: Tensor = (some - other).norm() <= _AGREEMENT * other.norm().clamp_min(_NOTHING)
    return same | ~(some.isfinite().all() | other.isfinite().all())


def _bytes_of(matching: Matching) -> int:
    from torch.utils._pytree import tree_leaves

    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(_differing(matching)))


def _kept_and_result(compute: Callable[[], list[Tensor]]) -> tuple[int, list[Tensor]]:
    """About how much memory `compute` takes, which is what its passes keep, and what it returns."""
    kept = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        found = compute()
    return kept, found
