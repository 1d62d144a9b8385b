"""What a client's algorithm keeps between rounds, in the client's state (Flower's `Context.state`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from clients.client_state import ClientMemories
from fedsim.federation.experiment import Experiment
from fedsim.interfaces.local_context import Memory
from fedsim.recording.payloads import State

_MEMORY_RECORD, _PRIVATE_RECORD = "algorithm", "algorithm.private"
"""Names of the records; those of defenses end with a number."""


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
