"""Error feedback: the part of an update that a client did not send is added to its next update."""

from __future__ import annotations

from fedsim.interfaces.local_context import Memory
from fedsim.recording.wire_format import State


def add_unsent(update: State, memory: Memory) -> State:
    """Return `update` plus the remainder of earlier rounds in `memory`, if there is any.

    >>> import torch
    >>> add_unsent({"w": torch.tensor([1.0])}, {"w": torch.tensor([0.5])})
    {'w': tensor([1.5000])}
    """
    return {name: tensor + memory[name] if name in memory else tensor for name, tensor in update.items()}


def keep_unsent(memory: Memory, intended: State, sent: State) -> None:
    """Store the part of `intended` that is not in `sent` in `memory`, for the next round."""
    for name, tensor in intended.items():
        memory[name] = tensor - sent[name]
