"""Victims that go on in step: each takes a turn, then the next one."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping

from fedsim.attacks import FAILURES, Order, Outcome
from fedsim.findings import Finding


def taking_turns(turns: Mapping[Order, Generator[None, None, Finding]]) -> Iterator[tuple[Order, Outcome]]:
    """Have each take its turns, all in step, and give what comes of each as soon as it ends.

    What one raises ends it alone.
    """
    left = dict(turns)
    while left:
        for order in list(left):
            try:
                with order.turn():
                    next(left[order])
            except StopIteration as end:
                del left[order]
                yield order, end.value
            except FAILURES as error:
                del left[order]
                yield order, error
