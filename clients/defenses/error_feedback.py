"""Error feedback: what a client did not send in one round is added to its update in the next."""

from __future__ import annotations

from fedsim.defense import Memory
from fedsim.wire.messages import State


def with_unsent(update: State, memory: Memory) -> State:
    """`update` plus what `memory` holds from earlier rounds, by name; the update itself where that is nothing."""
    return {name: tensor + memory[name] if name in memory else tensor for name, tensor in update.items()}


def keep_unsent(memory: Memory, wanted: State, sent: State) -> None:
    """Put what is left of `wanted` when `sent` has been sent into `memory`, for the next round."""
    for name, tensor in wanted.items():
        memory[name] = tensor - sent[name]
