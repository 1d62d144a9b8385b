"""The loop over a victim's rounds that goes on after a round of which an attack can make nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from fedsim.base.errors import AttackError
from fedsim.interfaces.attack import warn

ResultT = TypeVar("ResultT")


def compute_by_round(rounds: Sequence[int], compute: Callable[[int], ResultT]) -> Iterator[tuple[int, ResultT]]:
    """Yield each round with what `compute` returns of it, and warn of each round that it refuses.

    Raises:
        AttackError: it refuses every round; the error is that of the first.
    """
    errors = []
    for number in rounds:
        try:
            result = compute(number)
        except AttackError as error:  # such as of an update that is NaN
            errors.append(error)
            continue
        yield number, result
    if errors and len(errors) == len(rounds):
        raise errors[0]
    for reason in errors:
        warn(f"a round is left out: {reason}")
