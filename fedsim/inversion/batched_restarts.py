"""Batched restarts: restarts of several victims in one call of the network.

An accelerator computes many restarts of a small network in the time of one, because most of that
time goes into starting its kernels. A CPU gains nothing by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fedsim.base.errors import first_line
from fedsim.interfaces.attack import warn
from fedsim.inversion.descent import Curves, Step
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.problem_tensors import problem_facts, problem_tensors, replace_tensors, tree_shapes
from fedsim.inversion.restart import InversionTask, IterationInputs, Restart, objective_terms, report_curves
from fedsim.inversion.stacked_restarts import StackedRestarts, stack_values
from fedsim.training.convolution_products import use_products

MEMORY_BUDGET = 1 << 32
"""Largest number of bytes that one call may take where the device does not tell its free memory."""
_SHARE_OF_FREE_MEMORY = 0.5
"""Largest share of a GPU's free memory that one call may take."""
_TOLERANCE = 1e-3
"""Largest difference of a batched result from that of a restart alone, relative to its size."""
_LEAST_SIZE = 1e-3
"""Smaller sizes count as this one: gradients that are all rounding have no size of their own."""


def batching_pays(device: torch.device) -> bool:
    """Tell whether a batch of restarts takes less time than one restart after the other."""
    return device.type != "cpu"


def memory_budget(device: torch.device) -> int:
    """Return how many bytes one call may take: half of what is free on a GPU."""
    if device.type != "cuda":
        return MEMORY_BUDGET
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(_SHARE_OF_FREE_MEMORY * free)


@dataclass(kw_only=True, eq=False)
class BatchEntry:
    """Victim whose restarts may be batched, with one another and with those of other victims.

    Attributes:
        task: the victim's inversion.
        solo_results: by restart, what evaluating it by itself gives before the first iteration.
        bytes_per_restart: about how much memory a restart takes in a call.
    """

    task: InversionTask
    solo_results: Sequence[list[Tensor]]
    bytes_per_restart: int

    @classmethod
    def from_task(cls, task: InversionTask) -> BatchEntry:
        """Evaluate each restart by itself, by the operations of a call, and measure its memory."""
        first, *others = (partial(task.restart_evaluation(restart), 0) for restart in task.restarts)
        with use_products(task.problem.labels.device):
            saved_bytes, first_result = _measure_saved_bytes(first)
            results = [first_result, *(evaluate() for evaluate in others)]
        return cls(task=task, solo_results=results, bytes_per_restart=saved_bytes + _tensor_bytes(task))

    @property
    def device(self) -> torch.device:
        """Return the device of the attack."""
        return self.task.problem.labels.device

    @cached_property
    def leaves(self) -> list[Tensor]:
        """Return the tensors that may differ from those of other victims in a call."""
        from torch.utils._pytree import tree_leaves

        return tree_leaves(_task_tensors(self.task))

    @cached_property
    def batch_key(self) -> tuple[Any, ...]:
        """Return what has to be equal for all victims of a call."""
        recipe, problem = self.task.recipe, self.task.problem
        restart = self.task.restarts[0]
        return (
            (recipe.update_model, recipe.distance, tuple(recipe.priors), recipe.parametrisation),
            (recipe.label_step_size, id(problem.auxiliary)),
            (recipe.optimizer, recipe.step_size, recipe.signed, restart.schedule_values()),
            (repr(problem.model), problem.loss, type(problem.scaling), *problem_facts(problem)),
            tree_shapes(self.leaves),
            tree_shapes([*restart.values().values()]),
        )


def fit_in_memory(entries: Sequence[BatchEntry]) -> bool:
    """Tell whether all these restarts fit in the memory at once.

    A single victim always does, because its restarts may be split over several calls.
    """
    total = sum(entry.bytes_per_restart * len(entry.task.restarts) for entry in entries)
    return len(entries) == 1 or total <= memory_budget(entries[0].device)


def batched_steps(entries: Sequence[BatchEntry]) -> list[list[Step] | None]:
    """Return for each victim the steps of its restarts, batched as far as the memory allows.

    Returns:
        None for a victim that is to be computed by itself: if no other is of its kind, if no two
        restarts fit in the memory, or if the model, or a known defense, cannot be batched or gives
        other values then, which is logged.
    """
    steps_by_entry: dict[BatchEntry, list[Step]] = {}
    for group in _group_by_key(entries):
        slots = []
        for entry in group:
            slots += [(entry, restart) for restart in range(len(entry.task.restarts))]
        batch_size = memory_budget(group[0].device) // max(entry.bytes_per_restart for entry in group)
        if min(batch_size, len(slots)) < 2:
            continue
        starts = range(0, len(slots), batch_size)
        calls = [_BatchedCall(slots[start : start + batch_size]) for start in starts]
        # Leave out the victims that cannot be batched.
        faults: dict[BatchEntry, str] = {}
        for call in calls:
            faults.update(call.faults())
        for entry, cause in faults.items():
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


@dataclass(eq=False)
class _BatchedCall:
    """Restarts that are computed in one call of the network.

    In an iteration each restart's `Step` is called once, before the next iteration begins. The
    first one computes and moves all restarts and keeps the others' curves, which their steps then
    return. A restart that has ended no longer calls its step, so its curves are still there in the
    next iteration, and it is left out. If memory runs out, the restarts are computed in halves from
    then on.

    Attributes:
        slots: the restarts, each as a victim and the index of one of its restarts.
    """

    slots: Sequence[tuple[BatchEntry, int]]
    _active_slots: list[int] = field(init=False, default_factory=list)
    _stacked_restarts: StackedRestarts | None = field(init=False, default=None)
    _curves_by_slot: dict[int, Curves] = field(init=False, default_factory=dict)
    _leaves_cache: tuple[list[int], dict[int, Tensor]] = field(init=False, default=([], {}))
    _batch_size: int = field(init=False)

    def __post_init__(self) -> None:
        self._batch_size = len(self.slots)

    @cached_property
    def _first_task(self) -> InversionTask:
        """Return the task whose recipe and problem serve all restarts."""
        task = self.slots[0][0].task
        return replace(task, problem=replace(task.problem, uses_func_transforms=True))

    @cached_property
    def _differing_leaves(self) -> list[int]:
        """Return the indices of the leaves that are not equal for all victims."""
        victims = dict.fromkeys(entry for entry, _ in self.slots)
        if len(victims) == 1:
            return []
        equal = []
        for tensors in zip(*(entry.leaves for entry in victims), strict=True):
            stack = torch.stack(tensors)
            equal.append((stack == stack[0]).all())
        same_for_all = torch.stack(equal).tolist()
        return [index for index, same in enumerate(same_for_all) if not same]

    def step(self, slot: int) -> Step:
        """Return the step of one restart, which is computed in this call from now on."""
        self._active_slots.append(slot)
        restart = self._restart(slot)

        def step(iteration: int) -> Curves:
            if slot not in self._curves_by_slot:
                self._curves_by_slot.update(self._advance(iteration))
            restart.project()
            return self._curves_by_slot.pop(slot)

        return step

    def faults(self) -> dict[BatchEntry, str]:
        """Return the victims that cannot be batched, with the cause, before the first iteration."""
        slots = list(range(len(self.slots)))
        try:
            values = stack_values([self._restart(slot) for slot in slots])
            columns = self._compute_in_parts(slots, values, 0)
        except (RuntimeError, NotImplementedError) as error:
            return {entry: f" ({first_line(error)})" for entry, _ in self.slots}
        # Compare with each restart computed by itself.
        agreements = []
        for batched, (entry, restart) in zip(zip(*columns, strict=True), self.slots, strict=True):
            agreements.append(torch.stack([*map(_agree, batched, entry.solo_results[restart])]).all())
        cause = "; several at once gave other values"
        faults = {}
        for (entry, _), agrees in zip(self.slots, torch.stack(agreements).tolist(), strict=True):
            if not agrees:
                faults[entry] = cause
        return faults

    def _restart(self, slot: int) -> Restart:
        entry, restart = self.slots[slot]
        return entry.task.restarts[restart]

    def _advance(self, iteration: int) -> dict[int, Curves]:
        """Move all restarts that have not ended; return their curves by slot."""
        slots = [slot for slot in self._active_slots if slot not in self._curves_by_slot]
        restarts, recipe = [self._restart(slot) for slot in slots], self._first_task.recipe
        if self._stacked_restarts is None:
            self._stacked_restarts = StackedRestarts(recipe, restarts)
        stack = self._stacked_restarts
        stack.keep_restarts(restarts)
        results = self._compute_in_parts(slots, stack.values, iteration)
        objective, distance, l_sim, *gradients = results
        means = stack.variable_means()
        stack.step(iteration, dict(zip(restarts[0].gradient_names(iteration), gradients, strict=True)))
        curves = {}
        for row, slot in enumerate(slots):
            row_means = {name: values[row] for name, values in means.items()}
            curves[slot] = report_curves(recipe, objective[row], distance[row], l_sim[row], row_means)
        return curves

    def _compute_in_parts(self, slots: list[int], values: dict[str, Tensor], iteration: int) -> list[Tensor]:
        """Call `compute` for as many restarts at once as the memory allows; join the results."""
        while True:
            try:
                parts = []
                for start in range(0, len(slots), self._batch_size):
                    part = slice(start, start + self._batch_size)
                    part_values = {name: tensor[part] for name, tensor in values.items()}
                    parts.append(self.compute(slots[part], part_values, iteration))
                if len(parts) == 1:
                    return parts[0]
                return [torch.cat(rows) for rows in zip(*parts, strict=True)]
            except torch.OutOfMemoryError as error:
                batch_size = min(self._batch_size, len(slots))
                if batch_size < 2:
                    raise
                cause = first_line(error)
            # Only outside of `except` is the memory free that the error's traceback held.
            self._batch_size, self._leaves_cache = (batch_size + 1) // 2, ([], {})
            warn(
                f"{self.slots[slots[0]][0].task.problem.where}: the memory does not last for "
                f"{batch_size} restarts at once, so it is {self._batch_size} from now on ({cause})"
            )

    def compute(self, slots: list[int], values: dict[str, Tensor], iteration: int) -> list[Tensor]:
        """Compute what `objective_and_gradients` does for several restarts, one row for each.

        Args:
            slots: of the restarts.
            values: by name, `restart ...`.
            iteration: of all of them.
        """
        restarts = [self._restart(slot) for slot in slots]
        recipe, names = self._first_task.recipe, restarts[0].gradient_names(iteration)
        values = {name: value.detach().requires_grad_(name in names) for name, value in values.items()}
        iteration_inputs, axes = _stack_iteration_inputs(restarts, iteration)

        def terms(
            values: dict[str, Tensor], leaves: dict[int, Tensor], iteration_inputs: IterationInputs
        ) -> tuple[Tensor, Tensor, Tensor]:
            problem, target = self._with_leaves(leaves)
            return objective_terms(recipe, problem, values, iteration_inputs, target)

        leaves = self._stacked_leaves(slots)
        with self._first_task.precision_context(), use_products(values["dummy"].device):
            objective, distance, l_sim = vmap(terms, (0, 0, axes))(values, leaves, iteration_inputs)
            inputs = [values[name] for name in names]
            gradients = torch.autograd.grad(objective.sum(), inputs, materialize_grads=True)
        return [objective.detach(), distance, l_sim, *gradients]

    def _stacked_leaves(self, slots: list[int]) -> dict[int, Tensor]:
        """Return by index the leaves in which victims differ, one row for each restart."""
        if self._leaves_cache[0] != slots:
            entries = [self.slots[slot][0] for slot in slots]
            leaves = {}
            for index in self._differing_leaves:
                leaves[index] = torch.stack([entry.leaves[index] for entry in entries])
            self._leaves_cache = slots, leaves
        return self._leaves_cache[1]

    def _with_leaves(self, leaves: dict[int, Tensor]) -> tuple[InversionProblem, list[Tensor]]:
        """Return problem and target of the first victim, with some leaves replaced."""
        from torch.utils._pytree import tree_flatten, tree_unflatten

        first_leaves, outline = tree_flatten(_task_tensors(self._first_task))
        replaced = [leaves.get(index, leaf) for index, leaf in enumerate(first_leaves)]
        tensors, target = tree_unflatten(replaced, outline)
        return replace_tensors(self._first_task.problem, tensors), target


def _task_tensors(task: InversionTask) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the tensors in which victims may differ."""
    return problem_tensors(task.problem), list(task.target)


def _stack_iteration_inputs(
    restarts: Sequence[Restart], iteration: int
) -> tuple[IterationInputs, tuple[None, int | None]]:
    """Return distance factor and consensus, and the axis of the restarts in each.

    All restarts have the same factor, and those of one victim share their consensus.
    """
    distance_factor, consensus = restarts[0].iteration_inputs(iteration)
    if all(restart.consensus is consensus for restart in restarts):
        return (distance_factor, consensus), (None, None)
    stack = torch.stack([restart.consensus for restart in restarts])
    return (distance_factor, stack), (None, 0)


def _agree(batched: Tensor, solo: Tensor) -> Tensor:
    """Tell whether two results differ by rounding only, or neither is finite."""
    limit = _TOLERANCE * solo.norm().clamp_min(_LEAST_SIZE)
    same: Tensor = (batched - solo).norm() <= limit
    return same | ~(batched.isfinite().all() | solo.isfinite().all())


def _tensor_bytes(task: InversionTask) -> int:
    from torch.utils._pytree import tree_leaves

    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(_task_tensors(task)))


def _measure_saved_bytes(compute: Callable[[], list[Tensor]]) -> tuple[int, list[Tensor]]:
    """Return the bytes that the passes of `compute` save, about its memory, and its result.

    Several operations save the same unfolded inputs, which count once.
    """
    saved_storages: dict[int, torch.UntypedStorage] = {}

    def note_storage(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved_storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note_storage, lambda tensor: tensor):
        result = compute()
    return sum(storage.nbytes() for storage in saved_storages.values()), result
