"""State that each client keeps from round to round, although the nodes that play clients forget it.

A client finds its state in `Context.state`, and leaves there what it wants to find the next time.
On a SuperNode that plays one client, Flower keeps that state. Where nodes play many clients, the
cohort's messages carry it there and back, and the strategy never sees it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

from flwr.app import ArrayRecord, RecordDict
from numpy.typing import NDArray

from fedsim.federation.engines.arrays import LazyArray

STATE_PREFIX = "memory/"
"""Prefix of the names of state records, in messages between a cohort's nodes and its grid."""

ClientState = dict[str, dict[str, NDArray[Any]]]
"""State of one client: arrays by name, in records by their name in `Context.state`."""


class ClientStateStore:
    """States of all clients of a federation, as of the last reply of each that was accepted.

    It holds arrays instead of Flower's records, which refer to themselves and so are freed late.

    Args:
        states: states so far, by client; changed in place as rounds go on.
    """

    def __init__(self, states: dict[int, ClientState] | None = None) -> None:
        self.states: dict[int, ClientState] = {} if states is None else states
        self._pending: dict[int, Mapping[str, ArrayRecord]] = {}

    def pack(self, clients: Iterable[int]) -> dict[str, ArrayRecord]:
        """Return the states of `clients` as records of a message, without copies."""
        records = {}
        for client in clients:
            for key, arrays in self.states.get(client, {}).items():
                records[f"{STATE_PREFIX}{client}/{key}"] = _make_record(arrays)
        return records

    def count_bytes(self, clients: Iterable[int]) -> int:
        """Return how many bytes the states of `clients` take."""
        if not self.states:
            return 0
        size = 0
        for client in clients:
            for arrays in self.states.get(client, {}).values():
                size += sum(array.nbytes for array in arrays.values())
        return size

    def extract(self, client: int, answer: MutableMapping[str, Any]) -> None:
        """Remove the client's new state from its answer; it counts once `commit` is called."""
        names = [name for name in answer if name.startswith(STATE_PREFIX)]
        self._pending[client] = {name.removeprefix(STATE_PREFIX): answer.pop(name) for name in names}

    def has_pending(self, client: int) -> bool:
        """Return whether the last reply of `client` brought a state.

        It does where the client chose to be silent, and does not where it failed.
        """
        return bool(self._pending.get(client))

    def commit(self, client: int) -> None:
        """Replace the state of `client` by that of its last reply, which may be empty."""
        pending = self._pending.pop(client)
        self.states.pop(client, None)
        if not pending:
            return
        # Copies: the arrays of a reply may be in a file, or part of a larger piece of memory.
        state: ClientState = {}
        for key, record in pending.items():
            state[key] = {name: array.numpy() for name, array in record.items()}
        self.states[client] = state

    def pop_record(self, key: str) -> dict[int, dict[str, NDArray[Any]]]:
        """Remove the record `key` from all states, and return it by client, ascending."""
        records = {}
        for client, state in sorted(self.states.items()):
            if key in state:
                records[client] = state.pop(key)
        for client in records:
            if not self.states[client]:
                del self.states[client]
        return records


def read_states(content: Mapping[str, Any]) -> dict[int, dict[str, ArrayRecord]]:
    """Return the state of each client in a message, as `ClientStateStore.pack` wrote it."""
    states: dict[int, dict[str, ArrayRecord]] = {}
    for name, record in content.items():
        if name.startswith(STATE_PREFIX):
            client, _, key = name.removeprefix(STATE_PREFIX).partition("/")
            states.setdefault(int(client), {})[key] = record
    return states


def add_state(reply: Mapping[str, Any], state: RecordDict) -> Mapping[str, Any]:
    """Return a client's reply together with its state."""
    if reserved := [name for name in reply if name.startswith(STATE_PREFIX)]:
        raise ValueError(f"it sent a record called '{reserved[0]}', but such names are for its state; use another")
    for key, record in state.items():
        if not isinstance(record, ArrayRecord):
            raise ValueError(f"it keeps '{key}' as a {type(record).__name__}, expected an ArrayRecord")
    if not state:
        return reply
    return {**reply, **{f"{STATE_PREFIX}{key}": record for key, record in state.items()}}


def _make_record(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    record = ArrayRecord()  # given a dict, its constructor would turn each array into bytes
    for name, values in arrays.items():
        record[name] = LazyArray(values)
    return record
