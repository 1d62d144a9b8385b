"""Recordings of updates, and attacks on them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fedsim.base.randomness import generator
from fedsim.interfaces.attack import Attack, Knowledge, Target
from fedsim.recording.payloads import Kind, Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State, Update

Record = Callable[[Update | Iterable[Update]], Transcript]
"""The fixture `record`: one update, or several in order of their rounds, as a recording."""
PLAIN_SGD: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "proximal_mu": 0.0}
"""What is known of a client that trains by gradients alone."""


def build_update(
    before: State, sent: State, form: Kind = "weights", *, round: int = 1, client: int = 0, num_examples: int = 1
) -> Update:
    """Return what a client sent as it is: its weights, its gradient or its difference."""
    payload = Payload.from_dense(sent, form)
    return Update(round=round, client=client, before=before, payload=payload, num_examples=num_examples)


def record_updates(folder: Path, updates: Iterable[Update]) -> Transcript:
    """Write updates, which come in order of their rounds, and return the recording."""
    recorder = Recorder(folder)
    for number, group in itertools.groupby(updates, key=lambda update: update.round):
        recorder.write(number, list(group))
    return Transcript(folder)


def target_client(transcript: Transcript, knowledge: Knowledge, victim: int = 0, seed: int = 0) -> Target:
    """Return what an attack on this client is given."""
    return Target(transcript=transcript, victim=victim, knowledge=knowledge, rng=generator(seed))


def run_attack(attack: Attack, transcript: Transcript, knowledge: Knowledge, victim: int = 0, seed: int = 0) -> Any:
    """Return what the attack finds of one client."""
    return attack.run(target_client(transcript, knowledge, victim, seed))
