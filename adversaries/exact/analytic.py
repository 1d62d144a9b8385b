"""The first attack on linear layers: an input is a row of the update over that of the bias (Phong et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adversaries.exact.attack import finding_of
from adversaries.exact.layer import Layer, read_layer
from fedsim.attacks import Attack, Knowledge, Paper, Progress, single_update
from fedsim.errors import AttackError
from fedsim.findings import Finding
from fedsim.recording.transcript import Transcript

_ALIKE = 1e-3
"""Inputs whose largest difference, as a share of the range, is below this are one."""
_OUTSIDE = 1e-2
"""By how much of the range an input may be outside of it, by rounding."""


@dataclass(frozen=True, kw_only=True)
class Analytic(Attack):
    """Divide each unit's row by its bias: where a unit saw one example only, that is the example.

    A unit that saw several gives a weighted sum of them. Its weights mostly have either sign, so that it leaves the
    range of an input; of a client that holds one class alone they have one sign, and means of several are claimed, too.
    Of the rows that stay in the range, those that several units give come first; no more than N are claimed. One
    example alone is recovered whole by any unit; of a batch only what is alone in a unit, which is rare.

    References:
        Phong et al.: Privacy-Preserving Deep Learning via Additively Homomorphic Encryption, IEEE TIFS 2018, Sect. 3.
        Differs: for batches and updates of several steps, where the paper has one example and its gradient.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"model", "loss", "input_shape", "value_range"})
    paper: ClassVar[Paper] = Paper(
        title="Privacy-Preserving Deep Learning via Additively Homomorphic Encryption",
        authors="Phong, Aono, Hayashi, Wang, Moriai",
        venue="IEEE Transactions on Information Forensics and Security",
        year=2018,
        url="https://eprint.iacr.org/2017/715",
    )

    def _run(
        self, transcript: Transcript, knowledge: Knowledge, victim: int, rng: torch.Generator, progress: Progress
    ) -> Finding:
        layer = read_layer(self, single_update(transcript, victim), knowledge, relu=False)
        inputs = _within(layer)
        if not len(inputs):
            raise AttackError(
                f"{layer.scene.where}: no unit of '{layer.name}' gives an input within the range, so "
                "each saw several examples; choose 'spear-ica'"
            )
        groups: list[list[Tensor]] = []
        for one in inputs:
            group = next((g for g in groups if float((g[0] - one).abs().max()) < _ALIKE * layer.extent), None)
            if group is None:
                groups.append(group := [])
            group.append(one)
        groups = sorted(groups, key=len, reverse=True)[: layer.scene.num_examples]
        progress(1, 1, {"objective": 0.0})
        return finding_of(layer, torch.stack([group[0] for group in groups]))


def _within(layer: Layer) -> Tensor:
    """`candidate input`: rows over biases that are inputs, those of the largest biases first, as they are surest."""
    order = layer.bias.abs().argsort(descending=True)
    order = order[(layer.bias[order] != 0) & layer.weight[order].any(1)]
    inputs = layer.weight[order] / layer.bias[order, None]
    outside = (inputs - layer.clamped(inputs)).abs().amax(1)
    return inputs[outside <= _OUTSIDE * layer.extent]
