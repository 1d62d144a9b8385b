"""The label distribution of a client by counting the labels of each of its messages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from adversaries.inference.label_distribution import over_rounds
from adversaries.labels.last_layer import last_layer, untrained
from adversaries.labels.updates import count_labels
from adversaries.scene import STEPPING, scene_of, warn_unless_plain
from fedsim.attacks import Attack, Knowledge, Paper, Progress
from fedsim.findings import Finding
from fedsim.recording.transcript import Transcript
from fedsim.wire.messages import Update


@dataclass(frozen=True, kw_only=True)
class LabelCounts(Attack):
    """Claim the shares of classes that are counted from the last layer's bias in each message.

    It is what attacks on gradients do where labels are withheld, see `count_labels`: exact but for how sure the model
    is of each class, which noise or simulated training stand in for; the server needs no data.

    References:
        Dimitrov et al.: Data Leakage in Federated Averaging, TMLR 2022. Differs: see `count_labels`; the counts of
        several rounds are averaged.
    """

    paper: ClassVar[Paper] = Paper(
        title="Data Leakage in Federated Averaging",
        authors="Dimitrov, Balunović, Konstantinov, Vechev",
        venue="TMLR",
        year=2022,
        url="https://arxiv.org/abs/2206.12395",
    )
    needs: ClassVar[frozenset[str]] = frozenset({"model", "loss", "input_shape", "value_range"})
    uses: ClassVar[frozenset[str]] = STEPPING | {"learning_rate", "local_epochs", "batch_size", "defenses"}
    temporal: ClassVar[bool] = True

    def _run(
        self, transcript: Transcript, knowledge: Knowledge, victim: int, rng: torch.Generator, progress: Progress
    ) -> Finding:
        warn_unless_plain(self, knowledge, f"client {victim}", simulated={"momentum"})

        def counted(update: Update) -> Tensor:
            scene = scene_of(update, knowledge)
            before, after = (
                dict(zip(scene.names, weights, strict=True)) | dict(scene.buffers)
                for weights in (scene.before, scene.after or scene.before)  # where a gradient was sent
            )
            layer = last_layer(scene, scene.before[0].new_zeros((2, *(knowledge.input_shape or ()))))
            if layer.bias_gradient is not None and not layer.bias_gradient.any():
                raise untrained("the bias")
            labels = count_labels(update, knowledge, scene.model, before, after, rng)
            return labels.bincount(minlength=len(layer.weight))

        # Smoothing that is part of the loss is part of the formulas, too.
        minimised = knowledge if knowledge.loss is cross_entropy else replace(knowledge, label_smoothing=None)
        return over_rounds(transcript, victim, minimised, counted, progress)
