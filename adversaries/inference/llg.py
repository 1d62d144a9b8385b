"""LLG: the label distribution of a client from signs and sizes of the last layer's rows."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adversaries.inference.label_distribution import over_rounds
from adversaries.labels.last_layer import last_layer, untrained
from adversaries.labels.logit_gradient import logit_gradient
from adversaries.scene import scene_of
from fedsim.attacks import Attack, Knowledge, Paper, Progress
from fedsim.errors import AttackError
from fedsim.findings import Finding
from fedsim.recording.transcript import Transcript
from fedsim.wire.messages import Update

log = logging.getLogger("fedsim." + __name__)


@dataclass(frozen=True, kw_only=True)
class LabelLeakage(Attack):
    """Claim the shares of classes that the sums of the last layer's rows tell, without any data.

    Behind a ReLU, the sum of a class's row of the gradient is negative only if the class occurs, and every example of
    it makes the sum smaller by about the same amount, the impact. So each class whose sum is negative is claimed once,
    then again and again the class whose sum is smallest, with the impact taken off each time, until there are N
    labels. Of an update of several steps, w_t - w_k takes the place of the gradient; the scale does not matter.

    References:
        Wainakh et al.: User-Level Label Leakage from Gradients in Federated Learning, PoPETs 2022, LLG, the variant
        that sees the shared gradient alone. Differs: one label an example, whatever the number of local steps; the
        mean over rounds.
    """

    paper: ClassVar[Paper] = Paper(
        title="User-Level Label Leakage from Gradients in Federated Learning",
        authors="Wainakh, Ventola, Müßig, Keim, Garcia Cordero, Zimmer, Grube, Kersting, Mühlhäuser",
        venue="PoPETs",
        year=2022,
        url="https://arxiv.org/abs/2105.09369",
    )
    needs: ClassVar[frozenset[str]] = frozenset({"model", "loss", "input_shape", "value_range"})
    temporal: ClassVar[bool] = True

    def _run(
        self, transcript: Transcript, knowledge: Knowledge, victim: int, rng: torch.Generator, progress: Progress
    ) -> Finding:
        def counted(update: Update) -> Tensor:
            scene = scene_of(update, knowledge)
            noise = torch.randn((_PROBES, *(knowledge.input_shape or ())), generator=rng)
            layer = last_layer(scene, noise.to(scene.before[0]))
            if not layer.weight_gradient.any():
                raise untrained("the weight")
            if len(layer.weight) < 3:
                raise AttackError(
                    f"{scene.where}: of two classes the rows of the last layer's gradient are each other's negatives, "
                    "of which LLG would always claim one class alone; take label-counts"
                )
            if not logit_gradient(scene.loss, len(layer.weight), knowledge.device).treats_classes_alike:
                raise AttackError(
                    f"{scene.where}: clients minimise a loss with class weights, and LLG is of one without; take "
                    "label-counts"
                )
            if not layer.non_negative:
                log.warning(
                    "%s: %s: the last layer's inputs may be below 0, which LLG excludes", self.called, scene.where
                )
            return counts_by_rows(layer.weight_gradient.sum(1), update.num_examples)

        return over_rounds(transcript, victim, knowledge, counted, progress)


_PROBES = 64


def counts_by_rows(sums: Tensor, num_examples: int) -> Tensor:
    """`class`, how often each occurs among `num_examples`.

    Where more sums are negative than there are examples, the smallest count. Where none is, there is no impact, and all
    classes count alike.

    Args:
        sums: `class`, of the rows of the last layer's gradient, on any scale.
    """
    classes = len(sums)
    negative = sums < 0
    if not negative.any():
        return torch.ones(classes)
    impact = float(sums[negative].sum()) / num_examples * (1 + 1 / classes)
    first = sums.argsort()[: min(int(negative.sum()), num_examples)]
    counts, left = torch.zeros(classes), sums.clone()
    counts[first] = 1
    left[first] -= impact
    for _ in range(num_examples - len(first)):
        place = left.argmin()
        counts[place] += 1
        left[place] -= impact
    return counts
