"""The optimisation loop of all attacks that descend: steps, divergence, patience and snapshots.

An attack contributes what its paper says: the objective with its gradients, and what is done to the
values after a step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from fedsim.base.errors import AttackError
from fedsim.interfaces.attack import Progress, warn
from fedsim.training.optimizers import Optimizer

log = logging.getLogger(__name__)

Curves = Mapping[str, Tensor]
"""One scalar for each curve, the `objective` among them."""
Step = Callable[[int], Curves]
"""Function that changes the values once. It takes the number of steps before this one and returns
the curves' values before the step."""
_Result = TypeVar("_Result")
Schedule = Callable[[int, int], float]
"""`(iteration, iterations) -> factor` of all step sizes."""


@dataclass(kw_only=True, eq=False)
class Trial:
    """One random start of an attack.

    Attributes:
        step: see `Step`.
        point: returns the present values of what is sought.
        curves: by name, the value before each step.
        snapshots: by the number of steps taken, the values at that moment.
        to_snapshot: turns the values into a snapshot; must not return the values themselves.
    """

    step: Step
    point: Callable[[], Tensor]
    to_snapshot: Callable[[Tensor], Tensor] = torch.clone
    curves: dict[str, list[Tensor]] = field(default_factory=dict)
    snapshots: dict[int, Tensor] = field(default_factory=dict)

    @property
    def objective(self) -> float:
        """Return the latest value of the objective."""
        return self.latest_value("objective")

    def latest_value(self, name: str) -> float:
        """Return the last value of a curve."""
        return self.curves[name][-1].item()

    @property
    def has_diverged(self) -> bool:
        """Return whether the objective or the values are not finite."""
        return not (math.isfinite(self.objective) and bool(self.point().isfinite().all()))

    def trace(self) -> dict[str, Tensor]:
        """Return all curves by name, each `iteration`."""
        return {name: torch.stack(curve).float().cpu() for name, curve in self.curves.items()}

    def advance(self, iteration: int) -> None:
        """Take one step and append to the curves."""
        for name, value in self.step(iteration).items():
            self.curves.setdefault(name, []).append(value)

    def take_snapshot(self, iteration: int) -> None:
        """Keep a snapshot of the values after `iteration` steps."""
        self.snapshots[iteration] = self.to_snapshot(self.point().detach())


def make_optimizer_step(
    optimizer: Optimizer | torch.optim.Optimizer,
    compute_gradients: Callable[[int], Curves],
    *,
    factor: Callable[[int], float] = lambda iteration: 1.0,
    project: Callable[[], object] = lambda: None,
) -> Step:
    """Return a `Step` that takes one step of an optimizer.

    Args:
        compute_gradients: sets the `grad` of what is optimised and returns the curves' values.
            L-BFGS calls it several times a step; the values of the first call count.
        factor: of all step sizes, by iteration.
        project: called after each step, as to clamp the values to their range.
    """
    sizes = [group["lr"] for group in optimizer.param_groups]

    def step(iteration: int) -> Curves:
        evaluations: list[Curves] = []

        def closure() -> Tensor:
            values = compute_gradients(iteration)
            if not evaluations:
                copies = {name: value.detach().clone() for name, value in values.items()}
                evaluations.append(copies)
            return values["objective"].detach()

        for group, size in zip(optimizer.param_groups, sizes, strict=True):
            group["lr"] = size * factor(iteration)
        optimizer.step(closure)  # type: ignore[arg-type]
        project()
        return evaluations[0]

    return step


def descend(
    trials: Sequence[Trial],
    iterations: int,
    progress: Progress,
    *,
    where: str,
    patience: int = 0,
    snapshots: Sequence[float] = (),
) -> list[Trial]:
    """Run all trials to the end; return those that did not diverge, which may be none.

    The arguments are those of `iterate_descent`.
    """
    return run_to_end(
        iterate_descent(trials, iterations, progress, where=where, patience=patience, snapshots=snapshots)
    )


def run_to_end(turns: Generator[None, None, _Result]) -> _Result:
    """Run a generator to its end and return its value.

    >>> def count():
    ...     yield
    ...     return 1
    >>> run_to_end(count())
    1
    """
    while True:
        try:
            next(turns)
        except StopIteration as end:
            result: _Result = end.value
            return result


def iterate_descent(
    trials: Sequence[Trial],
    iterations: int,
    progress: Progress,
    *,
    where: str,
    patience: int = 0,
    snapshots: Sequence[float] = (),
    before_iteration: Callable[[Sequence[Trial]], None] = lambda trials: None,
) -> Generator[None, None, list[Trial]]:
    """Run all trials, one iteration for each `next`; return those that did not diverge.

    The generator yields after an iteration is prepared and before any trial moves in it. So of
    several generators that are advanced in turn, all are prepared when the first one moves.

    The objective is read a hundred times, or after each step if there is patience, because reading
    it waits for the device. A trial whose objective or values are not finite then is dropped.

    Args:
        patience: stop if the smallest objective has not fallen by 1 % in so many steps; 0 never.
        snapshots: fractions of the iterations after which values are kept. If there are any, the
            last values are kept as well.
        before_iteration: called before each iteration with the remaining trials.
    """
    remaining = list(trials)
    snapshot_iterations = {round(part * iterations) for part in snapshots}
    best, stalled_steps = math.inf, 0
    for iteration in range(iterations):
        before_iteration(remaining)
        # Keep snapshots.
        if iteration in snapshot_iterations:
            for trial in remaining:
                trial.take_snapshot(iteration)
        yield
        # Move each trial one step.
        for trial in remaining:
            trial.advance(iteration)
        # Drop diverged trials.
        if iteration % max(1, iterations // 100) == 0 or iteration == iterations - 1:
            remaining = _drop_diverged(remaining, where, iteration)
            if not remaining:
                return []
            progress(iteration + 1, iterations, _lowest_values(remaining))
        # Stop when the objective no longer falls.
        if patience:
            lowest = min(trial.objective for trial in remaining)
            if lowest < 0.99 * best:
                best, stalled_steps = lowest, 0
            else:
                stalled_steps += 1
            if stalled_steps >= patience:
                log.info(
                    "%s: stopped after %d iterations, the objective stays at %.4g",
                    where,
                    iteration + 1,
                    lowest,
                )
                progress(iterations, iterations, _lowest_values(remaining))
                remaining = _drop_diverged(remaining, where, iteration)
                break
    if snapshot_iterations:
        for trial in remaining:
            trial.take_snapshot(iteration + 1)
    return remaining


def _lowest_values(trials: Sequence[Trial]) -> dict[str, float]:
    """Return by curve the smallest of the trials' latest values."""
    return {name: min(trial.latest_value(name) for trial in trials) for name in trials[0].curves}


def _drop_diverged(trials: list[Trial], where: str, iteration: int) -> list[Trial]:
    remaining = [trial for trial in trials if not trial.has_diverged]
    if remaining and len(remaining) < len(trials):
        count = len(trials) - len(remaining)
        warn(f"{where}: {count} restarts diverged by iteration {iteration}")
    return remaining


def divergence_error(trials: Sequence[Trial], where: str, setting: str) -> AttackError:
    """Return the error of an attack whose trials have all diverged.

    Args:
        setting: the name of the attack's step size.
    """
    first = trials[0]
    value = "infinite" if math.isinf(first.objective) else "NaN"
    if not any(math.isfinite(trial.curves["objective"][0]) for trial in trials):
        return AttackError(
            f"{where}: the objective is {value} before the first step, whatever the attack's "
            f"{setting}: at these weights, most likely too large, the model makes NaN or infinite "
            "values; choose another round or victim"
        )
    iteration = len(first.curves["objective"]) - 1
    return AttackError(f"{where}: the objective became {value} at iteration {iteration}; lower the attack's {setting}")


def offset_progress(progress: Progress, done: int, total: int) -> Progress:
    """Return a `progress` for a later part of an attack.

    Args:
        done: number of iterations before this part.
        total: number of iterations of all parts.
    """
    return lambda iteration, _, values: progress(done + iteration, total, values)
