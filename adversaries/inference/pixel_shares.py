"""Shares of the classes of pixels, from the bias of the last convolution of a segmentation."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from adversaries.inference.label_distribution import infer_label_distribution
from fedsim.base.errors import AttackError, KnowledgeError
from fedsim.base.papers import cite
from fedsim.base.task import goal_of
from fedsim.interfaces.attack import ALL, Attack, Knowledge, Paper, Progress, RoundsNeeded, Target
from fedsim.interfaces.findings import LabelDistribution
from fedsim.inversion import MEAN_GRADIENT_FACTS
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.problem_builder import build_problem
from fedsim.inversion.training_mismatch import OPTIMIZER_FACTS, warn_unless_plain_sgd
from fedsim.recording.wire_format import Update

_PROBES = 32
"""Images of noise that stand for the client's where no records are granted."""


@dataclass(frozen=True, kw_only=True)
class PixelShares(Attack):
    """Claim which share of a client's pixels is of each class, from the last convolution's bias in each message.

    With the cross-entropy of pixels, the gradient of the bias of class k is the mean confidence in k less the share
    of the pixels that are of k. The confidences are those of the model on auxiliary records, or on noise where none
    are granted, as the mean of w_0 and w_T.

    References:
        [Dimitrov2022]. Differs: counts pixels of masks, where the paper counts labels of examples; the shares of
        several rounds are averaged.
    """

    paper: ClassVar[Paper] = cite("Dimitrov2022")
    needs: ClassVar[frozenset[str]] = frozenset({"model", "loss", "input_shape", "value_range"}) | MEAN_GRADIENT_FACTS
    uses: ClassVar[frozenset[str]] = OPTIMIZER_FACTS | {"auxiliary", "defenses"}
    rounds_needed: ClassVar[RoundsNeeded] = ALL
    vector_targets: ClassVar[bool] = True

    def check_facts(self, knowledge: Knowledge, num_examples: int | None = None, granted: Collection[str] = ()) -> None:
        """Refuse a loss that is not one of masks."""
        if goal_of(knowledge.loss) != "masks":
            raise AttackError(
                "it is an attack on masks, and the loss is not one of pixels; choose another attack, as label-counts"
            )

    def check_message(self, update: Update, knowledge: Knowledge) -> None:
        """Refuse a network of which a part stays with the clients."""
        build_problem(update, knowledge)

    def _run(self, target: Target, progress: Progress) -> LabelDistribution:
        knowledge = target.knowledge
        warn_unless_plain_sgd(self, knowledge, f"client {target.victim}")

        def count_pixels(update: Update) -> Tensor:
            problem = build_problem(update, knowledge)
            self.check_facts(knowledge)
            noise = torch.rand((_PROBES, *(knowledge.input_shape or ())), generator=target.rng)
            inputs = problem.scaling.low + (problem.scaling.high - problem.scaling.low) * noise.to(problem.before[0])
            if knowledge.auxiliary is not None:
                inputs = knowledge.auxiliary.inputs.to(inputs)
            bias = problem.parameter_names.index(
                f"{_last_convolution(problem.model, inputs[:1])}.bias".removeprefix(".")
            )
            confidences = [
                _mean_confidence(problem, weights, inputs) for weights in (problem.before, problem.after) if weights
            ]
            gradient = problem.mean_gradient[bias]
            if not gradient.any():
                raise AttackError(
                    f"{problem.where}: the last convolution's bias did not change; attack a model whose last layer is "
                    "trained"
                )
            return (torch.stack(confidences).mean(0) - gradient).clamp_min(0)

        return infer_label_distribution(target, count_pixels, progress, smoothing=None)


@torch.no_grad()
def _mean_confidence(problem: InversionProblem, weights: Sequence[Tensor], inputs: Tensor) -> Tensor:
    """Return the mean over examples and pixels of the confidence in each class, at these weights."""
    state = {**dict(zip(problem.parameter_names, weights, strict=True)), **problem.buffers}
    outputs: Tensor = torch.func.functional_call(problem.model, state, (inputs,))
    return outputs.softmax(1).mean((0, 2, 3))


@torch.no_grad()
def _last_convolution(model: nn.Module, inputs: Tensor) -> str:
    """Return the name of the convolution with a bias whose outputs are the model's."""
    calls: list[tuple[str, Tensor]] = []

    def record(name: str, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        del layer, inputs
        calls.append((name, output))

    with ExitStack() as hooks:
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Conv2d) and layer.bias is not None:
                hooks.enter_context(layer.register_forward_hook(partial(record, name)))
        outputs = model(inputs)
    for name, output in reversed(calls):
        if torch.equal(output, outputs):
            return name
    raise KnowledgeError("the model does not end in a convolution with a bias")
