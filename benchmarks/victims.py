"""Victims with SME's CNN (App. D) and noise in the place of data: what an attack computes does not depend on them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedsim.base.randomness import generator, seed_globals
from fedsim.base.task import Task
from fedsim.interfaces.attack import Knowledge, Target, VictimTask
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update
from fedsim.training.model_state import copy_state
from fedsim.training.models.sme import SmeCnn


@dataclass(frozen=True, kw_only=True)
class NoiseVictims:
    """Clients with the same network, who send w_0 and noise of their own as w_T; their labels are known.

    Attributes:
        shape: of an image.
        channels: of both convolutions.
        hidden: units between them and the answer.
        count: N.
        classes: at least N, as each image has a label of its own.
        epochs: E, in batches of `batch_size` and with `rate`, as attacks that simulate training are told.
    """

    shape: tuple[int, int, int] = (3, 32, 32)
    channels: tuple[int, int] = (64, 128)
    hidden: int = 200
    count: int = 50
    classes: int = 100
    epochs: int = 20
    batch_size: int = 10
    rate: float = 0.004

    def build_model(self) -> nn.Module:
        """Build what is attacked."""
        with seed_globals("noise victims"):
            return SmeCnn(channels=self.channels, hidden=self.hidden).build(Task(self.shape, self.classes))

    def record_updates(self, victims: int, folder: Path) -> Transcript:
        """Record an update of each victim."""
        before, updates = copy_state(self.build_model()), []
        for client in range(victims):
            rng, after = generator("noise", client), {}
            for name, tensor in before.items():
                after[name] = tensor + 0.01 * torch.randn(tensor.shape, generator=rng)
            sent = Payload.from_dense(after, "weights")
            updates.append(Update(round=1, client=client, before=before, payload=sent, num_examples=self.count))
        Recorder(folder).write(1, updates)
        return Transcript(folder)

    def draw_targets(self, transcript: Transcript, victims: int, device: str = "cpu") -> Iterator[VictimTask]:
        """Yield each victim as an attack gets it."""
        depth = self.shape[0]
        known = Knowledge(
            model=self.build_model,
            loss=cross_entropy,
            input_shape=self.shape,
            num_classes=self.classes,
            value_range=((0.0,) * depth, (1.0,) * depth),
            input_mean=(0.5,) * depth,
            input_std=(0.25,) * depth,
            labels=torch.arange(self.count),
            learning_rate=self.rate,
            local_epochs=self.epochs,
            batch_size=self.batch_size,
            device=torch.device(device),
        )
        for client in range(victims):
            rng = generator("attack", client)
            yield VictimTask(target=Target(transcript=transcript, victim=client, knowledge=known, rng=rng))
