"""One call of the network for restarts of several victims: which may share it, and what it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fedsim.base.errors import first_line
from fedsim.interfaces.attack import warn
from fedsim.inversion.compiled_objective import objective_key
from fedsim.inversion.descent import Curves, Step
from fedsim.inversion.inversion_task import InversionTask
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.problem_tensors import problem_tensors, replace_tensors
from fedsim.inversion.restart import IterationInputs, Restart, objective_terms, report_curves
from fedsim.inversion.stacked_restarts import StackedRestarts, stack_values
from fedsim.training.convolution_products import use_products


@dataclass(kw_only=True, eq=False)
class BatchEntry:
    """Victim whose restarts may be batched, with one another and with those of other victims.

    Attributes:
        task: the victim's inversion.
        bytes_per_restart: about how much memory a restart takes in a call.
    """

    task: InversionTask
    bytes_per_restart: int = 0
    _solo_results: dict[int, list[Tensor]] = field(init=False, default_factory=dict)
    _start_terms: list[Tensor] = field(init=False, default_factory=list)

    @classmethod
    def from_task(cls, task: InversionTask, others: Sequence[BatchEntry] = ()) -> BatchEntry:
        """Measure the memory of a restart, unless one of `others` is alike, whose restarts take as much."""
        entry = cls(task=task)
        alike = next((other for other in others if other.batch_key == entry.batch_key), None)
        if alike is not None:
            entry.bytes_per_restart = alike.bytes_per_restart
        else:
            saved_bytes, entry._solo_results[0] = _measure_saved_bytes(lambda: entry._compute_alone(0))
            entry.bytes_per_restart = saved_bytes + _tensor_bytes(task)
        return entry

    def solo_result(self, restart: int) -> list[Tensor]:
        """Return what a restart gives by itself before the first iteration, by the operations of a call."""
        if restart not in self._solo_results:
            self._solo_results[restart] = self._compute_alone(restart)
        return self._solo_results[restart]

    def _compute_alone(self, restart: int) -> list[Tensor]:
        with use_products(self.device):
            return self.task.restart_evaluation(self.task.restarts[restart])(0)

    def start_terms(self) -> list[Tensor]:
        """Return objective, distance and L_sim of each restart by itself at its start.

        They take one backward pass, and are all that the victim's own model, loss, defenses and facts decide.
        """
        if not self._start_terms:
            with use_products(self.device):
                self._start_terms += [torch.stack(self.task.start_terms(restart)) for restart in self.task.restarts]
        return self._start_terms

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
        recipe, restart = self.task.recipe, self.task.restarts[0]
        return (
            objective_key(recipe, self.task.problem, restart.values(), self.task.target),
            (recipe.label_step_size, self.task.half_precision),
            (recipe.optimizer, recipe.step_size, recipe.signed, restart.schedule_values()),
        )


@dataclass(eq=False)
class BatchedCall:
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

    def compute_start(self) -> list[Tensor]:
        """Compute all restarts before the first iteration; return what `compute` does, and the distance's gradient."""
        return self._compute_start_of(list(range(len(self.slots))), True)

    def compute_start_reordered(self) -> list[Tensor]:
        """Compute what `compute` does by two calls, each of every second restart and from the last to the first."""
        slots = list(range(len(self.slots)))
        halves = [half[::-1] for half in (slots[1::2], slots[::2]) if half]
        parts = [self._compute_start_of(half, False) for half in halves]
        order = torch.tensor([slot for half in halves for slot in half]).argsort().to(parts[0][0].device)
        return [torch.cat(rows).index_select(0, order) for rows in zip(*parts, strict=True)]

    def _compute_start_of(self, slots: list[int], distance_gradient: bool) -> list[Tensor]:
        values = stack_values([self._restart(slot) for slot in slots])
        return self._compute_in_parts(slots, values, 0, distance_gradient)

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

    def _compute_in_parts(
        self, slots: list[int], values: dict[str, Tensor], iteration: int, *options: bool
    ) -> list[Tensor]:
        """Call `compute` for as many restarts at once as the memory allows; join the results."""
        while True:
            try:
                parts = []
                for start in range(0, len(slots), self._batch_size):
                    part = slice(start, start + self._batch_size)
                    part_values = {name: tensor[part] for name, tensor in values.items()}
                    parts.append(self.compute(slots[part], part_values, iteration, *options))
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

    def compute(
        self, slots: list[int], values: dict[str, Tensor], iteration: int, distance_gradient: bool = False
    ) -> list[Tensor]:
        """Compute what `objective_and_gradients` does for several restarts, one row for each.

        Args:
            values: by name, `restart ...`.
            distance_gradient: append the gradient of the distance, without priors, in the value `dummy`.
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
            inputs, further = [values[name] for name in names], list[Tensor]()
            if distance_gradient and distance.requires_grad:
                further += torch.autograd.grad(distance.sum(), inputs[:1], retain_graph=True, materialize_grads=True)
            elif distance_gradient:
                further.append(torch.zeros_like(inputs[0]))
            gradients = torch.autograd.grad(objective.sum(), inputs, materialize_grads=True)
        return [objective.detach(), distance.detach(), l_sim, *gradients, *further]

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
