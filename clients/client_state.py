"""What a client keeps between rounds in its state (Flower's `Context.state`).

That are the memories of its defenses and of its algorithm, and what its exposure measures found.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from flwr.app import RecordDict
from torch import Tensor

from fedsim.base.errors import RunError
from fedsim.exposure.of_clients import STATE_KEY, measure_client, pack_rows
from fedsim.federation.engines.arrays import make_record, read_state
from fedsim.federation.experiment import Experiment
from fedsim.interfaces.defense_calls import describe_value
from fedsim.interfaces.local_context import DefenseKey, Memory, copy_tensors
from fedsim.recording.payloads import State
from fedsim.training.cohort import LocalData
from fedsim.training.settings import LocalTraining

_DTYPES = frozenset(
    (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.float32, torch.float64,
    )
)  # fmt: skip
"""Types that NumPy and a checkpoint can hold."""
_MAX_NAME_LENGTH = 200
_MEMORY_RECORD, _PRIVATE_RECORD = "algorithm", "algorithm.private"
"""Names of the records; those of defenses end with a number."""


class ClientMemories:
    """Memories of one client's defenses during one round: copies, until `store` writes them back."""

    def __init__(self, state: RecordDict) -> None:
        self._state = state
        self._memories: dict[str, dict[str, Tensor]] = {}

    def read(self, defense_key: DefenseKey) -> Memory:
        """Return the memory of a defense, which its hooks may change."""
        return self.read_record(_record_name(defense_key))

    def read_record(self, name: str) -> Memory:
        """Return the memory that the state has under `name`, empty where it has none."""
        if name not in self._memories:
            # `state.array_records` would refer to itself, and so be freed late.
            record: Any = self._state.get(name)
            stored = {} if record is None else read_state(record)
            self._memories[name] = {key: tensor.clone() for key, tensor in stored.items()}
        return self._memories[name]

    def discard(self, defense_key: DefenseKey) -> None:
        """Forget what hooks of a defense changed, because one of them failed."""
        self._memories.pop(_record_name(defense_key), None)

    def check(self) -> None:
        """Raise RunError for what cannot be carried to the next round."""
        for name, memory in self._memories.items():
            for key, value in memory.items():
                _check_entry(key, value, name)

    def store(self) -> None:
        """Write the memories to the state of the client's node.

        Raises:
            RunError: one holds something else than dense tensors by name; nothing was written.
        """
        self.check()
        for name, memory in self._memories.items():
            if memory:
                # A defense may write another client's memory into the same tensors.
                arrays = {key: tensor.cpu().contiguous() for key, tensor in copy_tensors(memory).items()}
                self._state[name] = make_record(arrays)
            elif name in self._state:
                del self._state[name]


@contextmanager
def restore_on_failure(state: RecordDict) -> Iterator[None]:
    """Restore `state` if an error is raised within: a client that fails keeps the state it had."""
    before = dict(state)
    try:
        yield
    except BaseException:
        state.clear()
        state.update(before)
        raise


def _record_name(defense_key: DefenseKey) -> str:
    return "-".join(map(str, defense_key))


def _check_entry(name: object, value: object, where: str) -> None:
    """Raise RunError for an entry that cannot be carried to the next round."""
    if not isinstance(name, str) or not name.isprintable() or not 1 <= len(name) <= _MAX_NAME_LENGTH:
        raise RunError(
            f"{where}: expected names of 1 to {_MAX_NAME_LENGTH} printable characters in its memory, "
            f"got {str(name)[:40]!r}"
        )
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.dtype not in _DTYPES:
        raise RunError(
            f"{where}: expected '{name}' in its memory as a dense tensor of real numbers, got {describe_value(value)}"
        )


@dataclass(frozen=True, kw_only=True)
class AlgorithmMemory:
    """Memory of one client's algorithm in one round, which is changed in place.

    Attributes:
        memory: what the algorithm itself keeps.
        private_parts: tensors of the model that never leave the client, by name.
    """

    memory: Memory
    private_parts: Memory

    @classmethod
    def read(cls, experiment: Experiment, client: int, memories: ClientMemories) -> Self:
        """Read the memory of `client`; before its first round its private parts are drawn."""
        private_parts = memories.read_record(_PRIVATE_RECORD)
        if not private_parts:
            private_parts.update(experiment.initial_private_state(client))
        return cls(memory=memories.read_record(_MEMORY_RECORD), private_parts=private_parts)

    def complete_model(self, shared: State) -> dict[str, Tensor]:
        """Return the whole model: `shared` with the private parts."""
        return {**shared, **self.private_parts}


def measure_exposure(
    experiment: Experiment, before: State, number: int, share: LocalData, settings: LocalTraining, state: RecordDict
) -> None:
    """Compute the experiment's exposure measures of round `number`, and put them into `state`.

    Args:
        before: w_t, the state that the client received.
        state: its `Context.state`.
    """
    due_measures = [measure for measure in experiment.measures if measure.is_due(number)]
    if due_measures:
        rows = list(
            measure_client(due_measures, experiment.model_with_state(before), share, settings, experiment.client_loss)
        )
        state[STATE_KEY] = make_record({"rows": pack_rows(rows)})
