"""Federations come before their cells, nobody waits at the end, and memory is not exceeded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fedsim.sweeps.queue import JobQueue, SweepJob


def cell(federation: str, name: str) -> Any:
    return SimpleNamespace(federation=federation, key=f"{federation}{name}")


A, B = [cell("a", str(n)) for n in range(3)], [cell("b", str(n)) for n in range(3)]


def drained(queue: JobQueue, at_once: int) -> list[str]:
    """The order in which `at_once` workers that are all equally fast begin."""
    order, busy = [], list[SweepJob]()
    while queue or busy:
        while queue and len(busy) < at_once:
            busy.append(queue.popleft())
            order.append(("F" if busy[-1].federates else "") + busy[-1].cell.key)
        queue.record_end(busy.pop(0), well=True)
    return order


def test_a_cell_waits_for_its_federation_and_attacks_go_on_while_the_next_one_is_run() -> None:
    order = drained(JobQueue([A[0], B[0]], [*A, *B], workers=2, memory=10), 2)
    assert order == ["Fa0", "Fb0", "a0", "a1", "a2", "b0", "b1", "b2"]
    order = drained(JobQueue([A[0], B[0]], [*A, *B], workers=1, memory=10), 1)
    assert order == ["Fa0", "a0", "a1", "a2", "Fb0", "b0", "b1", "b2"]


def test_cells_of_a_federation_that_is_there_wait_for_nothing() -> None:
    assert drained(JobQueue([], A, workers=2, memory=10), 2) == ["a0", "a1", "a2"]


def test_cells_whose_federation_failed_are_told_and_the_others_go_on() -> None:
    queue = JobQueue([A[0], B[0]], [*A, *B], workers=2, memory=10)
    first, second = queue.popleft(), queue.popleft()
    assert queue.record_end(first, well=False) == A
    assert not queue  # b is still under way
    assert queue.record_end(second, well=True) == []
    assert drained(queue, 2) == ["b0", "b1", "b2"]


def test_no_more_jobs_are_begun_than_fit_into_memory_and_one_always_is() -> None:
    queue = JobQueue([], A, workers=3, memory=10)
    queue.record_memory(6)
    first = queue.popleft()
    assert not queue
    queue.record_end(first, well=True)
    assert queue
    queue.record_memory(100)
    assert queue


def test_jobs_that_are_added_when_the_first_are_done_wait_for_their_own_federation() -> None:
    queue = JobQueue([A[0]], A[:1], workers=2, memory=10)
    assert drained(queue, 2) == ["Fa0", "a0"]
    assert not queue
    queue.add([B[0]], [*A[1:], *B[:1]])
    assert drained(queue, 2) == ["a1", "Fb0", "a2", "b0"]
