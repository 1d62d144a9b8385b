"""The one loop of all attacks that optimise: steps, divergence, patience, progress and snapshots.

An attack writes what its paper says: the objective with its slopes, and what is done to the values after a step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from fedsim.attacks import Progress
from fedsim.errors import AttackError
from fedsim.training.optimizers import Optimizer

log = logging.getLogger("fedsim." + __name__)

Curves = Mapping[str, Tensor]
"""One scalar for each curve, the `objective` among them."""
Step = Callable[[int], Curves]
"""Moves the values once; takes the number of steps before this one, returns the curves' values before the step."""
_Found = TypeVar("_Found")
Schedule = Callable[[int, int], float]
"""`(iteration, iterations) -> factor` of all step sizes."""


@dataclass(kw_only=True, eq=False)
class Trial:
    """One start of an attack.

    Attributes:
        step: see `Step`.
        point: returns the present values of what is sought.
        curves: by name, the value before each step.
        snapshots: by the number of steps taken, the values at that moment.
        shown: how values are kept in `snapshots`; must not return the values themselves.
    """

    step: Step
    point: Callable[[], Tensor]
    shown: Callable[[Tensor], Tensor] = torch.clone
    curves: dict[str, list[Tensor]] = field(default_factory=dict)
    snapshots: dict[int, Tensor] = field(default_factory=dict)

    @property
    def objective(self) -> float:
        """Its latest value."""
        return self.latest("objective")

    def latest(self, name: str) -> float:
        """The last value of a curve."""
        return self.curves[name][-1].item()

    @property
    def diverged(self) -> bool:
        """Whether the objective or the values are not finite."""
        return not (math.isfinite(self.objective) and bool(self.point().isfinite().all()))

    def trace(self) -> dict[str, Tensor]:
        """All curves, `iteration` each."""
        return {name: torch.stack(curve).float().cpu() for name, curve in self.curves.items()}

    def move(self, iteration: int) -> None:
        """One step."""
        for name, value in self.step(iteration).items():
            self.curves.setdefault(name, []).append(value)

    def keep(self, iteration: int) -> None:
        """Keep the values as they are after `iteration` steps."""
        self.snapshots[iteration] = self.shown(self.point().detach())


def steps_of(
    optimizer: Optimizer | torch.optim.Optimizer,
    slopes: Callable[[int], Curves],
    *,
    factor: Callable[[int], float] = lambda iteration: 1.0,
    project: Callable[[], object] = lambda: None,
) -> Step:
    """Steps of an optimizer.

    Args:
        slopes: leaves slopes in the `grad` of what is optimised and returns the curves' values; L-BFGS calls it
            several times a step, of which the first is noted.
        factor: of all step sizes, by iteration.
        project: what is done to the values after a step.
    """
    sizes = [group["lr"] for group in optimizer.param_groups]

    def step(iteration: int) -> Curves:
        noted: list[Curves] = []

        def closure() -> Tensor:
            values = slopes(iteration)
            if not noted:
                noted.append({name: value.detach().clone() for name, value in values.items()})
            return values["objective"].detach()

        for group, size in zip(optimizer.param_groups, sizes, strict=True):
            group["lr"] = size * factor(iteration)
        optimizer.step(closure)  # type: ignore[arg-type]
        project()
        return noted[0]

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
    """As `descending`, to the end."""
    return ended(descending(trials, iterations, progress, where=where, patience=patience, snapshots=snapshots))


def ended(turns: Generator[None, None, _Found]) -> _Found:
    """What a generator returns, once it has taken all its turns one after the other."""
    while True:
        try:
            next(turns)
        except StopIteration as end:
            found: _Found = end.value
            return found


def descending(
    trials: Sequence[Trial],
    iterations: int,
    progress: Progress,
    *,
    where: str,
    patience: int = 0,
    snapshots: Sequence[float] = (),
    before: Callable[[Sequence[Trial]], None] = lambda trials: None,
) -> Generator[None, None, list[Trial]]:
    """Move all trials together, an iteration a turn, and return those that did not diverge, which may be none.

    A turn ends where an iteration is prepared and nothing has moved in it yet. So generators that take turns are all
    at the same iteration when the first of them moves.

    The objective is read a hundred times, or after each step where there is patience: reading it waits for the
    device. A trial whose objective or values are not finite at that moment is dropped.

    Args:
        patience: stop when the smallest objective has not fallen by a hundredth of itself for so many steps; 0 never.
        snapshots: fractions of the iterations after which values are kept; with any, the last values are kept too.
        before: called before each iteration with the trials that are left.
    """
    left = list(trials)
    keep = {round(part * iterations) for part in snapshots}
    best, since = math.inf, 0
    for iteration in range(iterations):
        before(left)
        for trial in left if iteration in keep else ():
            trial.keep(iteration)
        yield
        for trial in left:
            trial.move(iteration)
        if iteration % max(1, iterations // 100) == 0 or iteration == iterations - 1:
            left = _sound(left, where, iteration)
            if not left:
                return []
            progress(iteration + 1, iterations, _lowest(left))
        if patience:
            now = min(trial.objective for trial in left)
            best, since = (now, 0) if now < 0.99 * best else (best, since + 1)
            if since >= patience:
                log.info("%s: stopped after %d iterations, the objective stays at %.4g", where, iteration + 1, now)
                progress(iterations, iterations, _lowest(left))
                left = _sound(left, where, iteration)
                break
    for trial in left if keep else ():
        trial.keep(iteration + 1)
    return left


def _lowest(trials: Sequence[Trial]) -> dict[str, float]:
    """Of each curve, the smallest of the latest values."""
    return {name: min(trial.latest(name) for trial in trials) for name in trials[0].curves}


def _sound(trials: list[Trial], where: str, iteration: int) -> list[Trial]:
    """Those that did not diverge."""
    left = [trial for trial in trials if not trial.diverged]
    if left and len(left) < len(trials):
        log.warning("%s: %d restarts diverged by iteration %d", where, len(trials) - len(left), iteration)
    return left


def diverged(trials: Sequence[Trial], where: str, setting: str) -> AttackError:
    """The error of an attack whose trials have all diverged.

    Args:
        setting: the attack's step size, by name.
    """
    lost = trials[0]
    told = "infinite" if math.isinf(lost.objective) else "NaN"
    if not any(math.isfinite(trial.curves["objective"][0]) for trial in trials):
        return AttackError(
            f"{where}: the objective is {told} before the first step, whatever the attack's {setting}: at these "
            "weights, most likely too large, the model makes NaN or infinite values; choose another round or victim"
        )
    iteration = len(lost.curves["objective"]) - 1
    return AttackError(f"{where}: the objective became {told} at iteration {iteration}; lower the attack's {setting}")


def following(progress: Progress, done: int, total: int) -> Progress:
    """A `progress` for a later part of an attack: `done` iterations came before it, all parts have `total`."""
    return lambda iteration, _, values: progress(done + iteration, total, values)
