"""Cocktail party attack: inputs as independent components of an update [Kariyappa2023]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from adversaries.exact.attack import build_finding
from adversaries.exact.components import separate_components
from adversaries.exact.layer import read_first_layer
from adversaries.exact.mixture import InputMixture
from adversaries.exact.refinement import refine_inputs
from fedsim.base.constraints import PositiveInt
from fedsim.base.errors import AttackError
from fedsim.base.papers import cite
from fedsim.interfaces.attack import Attack, Paper, Progress, Target
from fedsim.interfaces.findings import Finding


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
