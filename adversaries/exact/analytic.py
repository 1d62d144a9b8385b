"""Analytic attack: a row of the first layer's update over its bias is an input (Phong, 2018)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adversaries.exact.attack import build_finding
from adversaries.exact.layer import FirstLayer, check_first_layer, check_first_layer_is_sent, read_first_layer
from fedsim.base.errors import AttackError
from fedsim.base.papers import cite
from fedsim.interfaces.attack import Attack, Knowledge, Paper, Progress, Target
from fedsim.interfaces.findings import Finding
from fedsim.recording.wire_format import Update

_SAME_INPUT = 1e-3
"""Inputs are the same if their largest difference is below this share of the range."""
_MAX_EXCESS = 1e-2
"""Largest share of the range by which rounding may move an input out of it."""


@dataclass(frozen=True, kw_only=True)
class Analytic(Attack):
    """Divide each unit's row by its bias: where a unit saw one example only, that is the example.

    1. Divide the rows of the update by the bias (`_candidates`). A unit that several examples fired
       gives a weighted sum of them, whose weights mostly have both signs, so that it leaves the
       range of an input. For a client with a single class they have one sign, and means of several
       examples are claimed, too.
    2. Group equal inputs; claim at most N, those that most units give first (`_run`).

    A single example is recovered by any unit; of a batch only the examples that fire a unit alone,
    which is rare.

    References:
        [Phong2018], Sect. 3. Differs: for batches and updates of several steps, where the paper has
        one example and its gradient.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"model", "loss", "input_shape", "value_range"})
    uses: ClassVar[frozenset[str]] = frozenset({"private_parts"})
    paper: ClassVar[Paper] = cite("Phong2018")
    vector_targets: ClassVar[bool] = True

    def check_facts(self, knowledge: Knowledge, num_examples: int | None = None, granted: Collection[str] = ()) -> None:
        """Refuse a network without a first linear layer that it reads."""
        check_first_layer(knowledge, relu=False)

    def check_message(self, update: Update, knowledge: Knowledge) -> None:
        """Refuse messages without that layer."""
        check_first_layer_is_sent(update, knowledge)

    def _run(self, target: Target, progress: Progress) -> Finding:
        layer = read_first_layer(target.read_update(), target.knowledge, relu=False)
        candidates = _candidates(layer)
        if not len(candidates):
            raise AttackError(
                f"{layer.problem.where}: no unit of '{layer.name}' gives an input within the range, "
                "so each saw several examples; choose 'spear-ica'"
            )
        groups: list[list[Tensor]] = []
        tolerance = _SAME_INPUT * layer.range_width
        for candidate in candidates:
            for group in groups:
                if float((group[0] - candidate).abs().max()) < tolerance:
                    group.append(candidate)
                    break
            else:
                groups.append([candidate])
        groups = sorted(groups, key=len, reverse=True)[: layer.problem.num_examples]
        progress(1, 1, {"objective": 0.0})
        return build_finding(layer, torch.stack([group[0] for group in groups]))


def _candidates(layer: FirstLayer) -> Tensor:
    """Return `candidate input`, rows over biases that are in the range of an input.

    Those of the largest biases come first, as their rounding is smallest.
    """
    order = layer.bias.abs().argsort(descending=True)
    order = order[(layer.bias[order] != 0) & layer.weight[order].any(1)]
    inputs = layer.weight[order] / layer.bias[order, None]
    excess = (inputs - layer.clamp_inputs(inputs)).abs().amax(1)
    return inputs[excess <= _MAX_EXCESS * layer.range_width]
