"""Cocktail party attack: inputs as independent components of an update (Kariyappa et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from adversaries.engine.settings import check_choices
from adversaries.exact.attack import finding_of
from adversaries.exact.components import unmixing
from adversaries.exact.layer import read_layer
from adversaries.exact.mixture import Mixture
from adversaries.exact.refinement import refined
from fedsim.attacks import Attack, Knowledge, Paper, Progress, single_update
from fedsim.errors import AttackError, ConfigError
from fedsim.findings import Finding
from fedsim.recording.transcript import Transcript


@dataclass(frozen=True, kw_only=True)
class CocktailParty(Attack):
    """Take the rows of the first linear layer's update for mixtures of the inputs, and separate these.

    Works behind any activation and with noise on the update, of which it keeps the N largest directions. The
    reconstructions are never exact.

    Args:
        of: what is held to be independent of one input and another: its `values`, as published, or the `differences`
            between neighbouring pixels, which are nearly so.
        iterations: of FastICA, at most.
        refine: fit them to the whole update in the end, with zeros where ReLU leaves a unit silent (ours); needs ReLU.

    References:
        Kariyappa et al.: Cocktail Party Attack, ICML 2023. Differs: scikit-learn's FastICA finds the components, where
        the paper descends on an objective with priors on images; signs and sizes are those with which the inputs add
        up to the update of the bias.
    """

    of: Literal["values", "differences"] = "values"
    iterations: int = 400
    refine: bool = False

    needs: ClassVar[frozenset[str]] = frozenset({"model", "loss", "input_shape", "value_range"})
    paper: ClassVar[Paper] = Paper(
        title="Cocktail Party Attack: Breaking Aggregation-Based Privacy in Federated Learning Using Independent "
        "Component Analysis",
        authors="Kariyappa, Guo, Maeng, Xiong, Suh, Qureshi, Lee",
        venue="ICML",
        year=2023,
        url="https://arxiv.org/abs/2209.05578",
    )

    def __post_init__(self) -> None:
        check_choices(self)
        if self.iterations < 1:
            raise ConfigError(f"iterations: expected at least 1, got {self.iterations}")

    def _run(
        self, transcript: Transcript, knowledge: Knowledge, victim: int, rng: torch.Generator, progress: Progress
    ) -> Finding:
        layer = read_layer(self, single_update(transcript, victim), knowledge, relu=self.refine)
        where = layer.scene.where
        if self.of == "differences" and len(layer.shape) != 3:
            raise AttackError(f"{where}: differences between neighbours are those of images; set of = 'values'")
        mixture = Mixture.of(layer.weight, layer.bias, layer.scene.num_examples, where, exact=False)
        seed = int(torch.randint(1 << 31, (1,), generator=rng))
        columns = unmixing(mixture.inputs, layer.shape, self.of, seed, self.iterations)
        progress(1, 1, {"objective": 0.0})
        inputs = mixture.unmixed(mixture.scaled(columns))
        return finding_of(layer, refined(layer, inputs) if self.refine else inputs)
