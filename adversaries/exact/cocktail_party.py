"""Cocktail party attack: inputs as independent components of an update [Kariyappa2023]."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from adversaries.exact.attack import build_finding
from adversaries.exact.components import separate_components
from adversaries.exact.layer import FirstLayer, check_first_layer, check_first_layer_is_sent, read_first_layer
from adversaries.exact.mixture import InputMixture
from fedsim.base.constraints import PositiveInt
from fedsim.base.errors import AttackError
from fedsim.base.papers import cite
from fedsim.interfaces.attack import Attack, Knowledge, Paper, Progress, Target
from fedsim.interfaces.findings import Finding
from fedsim.recording.wire_format import Update

_SURE_SHARE = 0.8
"""Share of the units that an estimate leaves silent which count as silent; the rest nearly fire."""
_ROUNDS, _LEAST_GAIN = 30, 0.99
_RIDGE = 1e-8


@dataclass(frozen=True, kw_only=True)
class CocktailParty(Attack):
    """Take the rows of the first linear layer's update for mixtures of the inputs, and separate these.

    1. Keep the N largest directions of the update (`InputMixture`).
    2. Separate independent components (`separate_components`).
    3. Scale them so that they add up to the update of the bias (`scale_columns`).
    4. With `refine`, fit them to the whole update (`refine_inputs`).

    Works behind any activation and with noise on the update. The reconstructions are never exact.

    Args:
        of: what has to be independent between inputs: their `values`, as published, or the
            `differences` of neighbouring pixels, which nearly are.
        iterations: of FastICA, at most.
        refine: fit the inputs to the whole update in the end, with zero gradients where ReLU leaves
            a unit silent (ours); needs ReLU.

    References:
        [Kariyappa2023]. Differs: scikit-learn's FastICA finds the components, where the paper
        descends on an objective with priors on images; signs and sizes are those with which the
        inputs add up to the update of the bias.
    """

    of: Literal["values", "differences"] = "values"
    iterations: PositiveInt = 400
    refine: bool = False

    needs: ClassVar[frozenset[str]] = frozenset({"model", "loss", "input_shape", "value_range"})
    paper: ClassVar[Paper] = cite("Kariyappa2023")
    vector_targets: ClassVar[bool] = True

    def check_facts(self, knowledge: Knowledge, num_examples: int | None = None, granted: Collection[str] = ()) -> None:
        """Refuse a network without a first linear layer that it reads, and more examples than that distinguishes."""
        check_first_layer(knowledge, num_examples, relu=self.refine)

    def check_message(self, update: Update, knowledge: Knowledge) -> None:
        """Refuse messages without that layer."""
        check_first_layer_is_sent(update, knowledge)

    def _run(self, target: Target, progress: Progress) -> Finding:
        layer = read_first_layer(target.read_update(), target.knowledge, relu=self.refine)
        where = layer.problem.where
        if self.of == "differences" and len(layer.shape) != 3:
            raise AttackError(f"{where}: differences between neighbours are those of images; set of = 'values'")
        mixture = InputMixture.from_update(layer.weight, layer.bias, layer.problem.num_examples, where, exact=False)
        seed = int(torch.randint(1 << 31, (1,), generator=target.rng))
        columns = separate_components(mixture.inputs, layer.shape, self.of, seed, self.iterations)
        progress(1, 1, {"objective": 0.0})
        inputs = mixture.unmix_inputs(mixture.scale_columns(columns))
        return build_finding(layer, refine_inputs(layer, inputs) if self.refine else inputs)


def refine_inputs(layer: FirstLayer, inputs: Tensor) -> Tensor:
    """Refine estimates of the inputs by least squares, fitting gradients and inputs in turn.

    The update of the layer is D^T X, and D is zero where an example leaves a unit silent, which the
    estimates tell. So D is fitted to X, then X to D, and so on, until the unexplained part of the
    update no longer falls. All numbers of the update take part, so noise on it is averaged out.

    Args:
        inputs: `example input`, as is what is returned.
    """
    target = torch.cat([layer.weight, layer.bias[:, None]], 1)
    best, least = inputs, torch.inf
    for _ in range(_ROUNDS):
        # Fit the gradients.
        inputs = layer.clamp_inputs(inputs)
        extended = torch.cat([inputs, inputs.new_ones((len(inputs), 1))], 1)
        gradients = _fit_gradients(target, extended, _may_fire(layer, inputs))
        unexplained = float((target - gradients @ extended).norm())
        if unexplained > _LEAST_GAIN * least:
            break
        best, least = inputs, unexplained
        # Fit the inputs.
        gram = gradients.T @ gradients
        inputs = torch.linalg.solve(gram + _ridge(gram), gradients.T @ layer.weight)
    return best


def _may_fire(layer: FirstLayer, inputs: Tensor) -> Tensor:
    """Return `unit example`, 0 if the example surely leaves the unit silent, else 1."""
    silence = layer.silence(inputs)
    silent_values = silence.where(silence > 0, torch.nan)
    least = silent_values.nanquantile(1 - _SURE_SHARE, dim=1, keepdim=True)
    return (~(silence >= least)).T.double()


def _fit_gradients(target: Tensor, inputs: Tensor, may_fire: Tensor) -> Tensor:
    """Fit `unit example`, the gradients of each unit, which are 0 unless the unit may fire."""
    gram = inputs @ inputs.T
    masked = may_fire[:, :, None] * (gram + _ridge(gram)) * may_fire[:, None, :]
    systems = masked + torch.diag_embed(1 - may_fire)
    gradients: Tensor = torch.linalg.solve(systems, may_fire * (target @ inputs.T))
    return gradients * may_fire


def _ridge(gram: Tensor) -> Tensor:
    return _RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
