"""What each client keeps from round to round, while the nodes that play it forget it.

A client finds what it kept in its `Context.state`, and leaves there what it wants to find the next time. On a
SuperNode that plays one client, Flower keeps that state; where nodes play many, the cohort's messages carry it there
and back, behind the strategy's back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

from flwr.app import ArrayRecord, RecordDict
from numpy.typing import NDArray

from fedsim.engines.arrays import Held

MEMORY = "memory/"
"""In the messages between a cohort's nodes and its grid, the names of records that are memory begin so."""

Kept = dict[str, dict[str, NDArray[Any]]]
"""What one client keeps: arrays by name, in records by their name in `Context.state`."""


class ClientMemory:
    """The memory of all clients of a federation, as of the last reply of each that was accepted.

    It holds arrays instead of Flower's records, which refer to themselves and so are freed late.

    Args:
        kept: what clients kept so far, by client; taken over, and changed as rounds go on.
    """

    def __init__(self, kept: dict[int, Kept] | None = None) -> None:
        self.kept: dict[int, Kept] = {} if kept is None else kept
        self._brought: dict[int, Mapping[str, ArrayRecord]] = {}

    def packed(self, clients: Iterable[int]) -> dict[str, ArrayRecord]:
        """The memory of `clients` as records of a message, without copies."""
        return {
            f"{MEMORY}{client}/{key}": _record(arrays)
            for client in clients
            for key, arrays in self.kept.get(client, {}).items()
        }

    def size(self, clients: Iterable[int]) -> int:
        """How many bytes `clients` keep."""
        if not self.kept:
            return 0
        return sum(a.nbytes for c in clients for arrays in self.kept.get(c, {}).values() for a in arrays.values())

    def bring(self, client: int, answer: MutableMapping[str, Any]) -> None:
        """Take out of `answer` what the client wants to keep; it counts once its reply is accepted, see `accept`."""
        names = [name for name in answer if name.startswith(MEMORY)]
        self._brought[client] = {name.removeprefix(MEMORY): answer.pop(name) for name in names}

    def came_from(self, client: int) -> bool:
        """Whether anything to keep came with the last reply of `client`, as it does with silence by choice."""
        return bool(self._brought.get(client))

    def accept(self, client: int) -> None:
        """Let what came with the last reply of `client` replace what it kept before; nothing is a memory, too."""
        brought = self._brought.pop(client)
        self.kept.pop(client, None)
        if brought:
            # Copies: the arrays of a reply may be in a file, or in the middle of a larger piece of memory.
            self.kept[client] = {key: {n: a.numpy() for n, a in record.items()} for key, record in brought.items()}

    def taken(self, key: str) -> dict[int, dict[str, NDArray[Any]]]:
        """What each client keeps under `key`, by client ascending; it is kept no longer."""
        found = {client: records.pop(key) for client, records in sorted(self.kept.items()) if key in records}
        for client in found:
            if not self.kept[client]:
                del self.kept[client]
        return found


def states_in(content: Mapping[str, Any]) -> dict[int, dict[str, ArrayRecord]]:
    """The memory of each client in a message that was `packed`."""
    states: dict[int, dict[str, ArrayRecord]] = {}
    for name, record in content.items():
        if name.startswith(MEMORY):
            client, _, key = name.removeprefix(MEMORY).partition("/")
            states.setdefault(int(client), {})[key] = record
    return states


def with_state(reply: Mapping[str, Any], state: RecordDict) -> Mapping[str, Any]:
    """A client's `reply` with what its `state` holds now.

    Raises:
        ValueError: something in `state` is no record of arrays, or `reply` has a name that is for memory alone.
    """
    if taken := [name for name in reply if name.startswith(MEMORY)]:
        raise ValueError(f"it sent a record called '{taken[0]}', but such names are for its memory; use another")
    for key, record in state.items():
        if not isinstance(record, ArrayRecord):
            raise ValueError(f"it keeps '{key}' as a {type(record).__name__}, expected an ArrayRecord")
    return {**reply, **{f"{MEMORY}{key}": record for key, record in state.items()}} if state else reply


def _record(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    record = ArrayRecord()  # given a dict, its constructor would turn each array into bytes
    for name, values in arrays.items():
        record[name] = Held(values)
    return record
