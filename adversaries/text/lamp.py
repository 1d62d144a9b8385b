"""LAMP without its language model: texts by the cosine, and by rearranging their words (Balunović et al. 2022)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adversaries.engine.distances import MeanCosine
from adversaries.engine.recipe import MEAN_GRADIENT, Recipe
from adversaries.engine.settings import check_not_negative, check_positive
from adversaries.scene import STEPPING, Scene
from adversaries.text.behind import lexicon_of
from adversaries.text.texts import FromOneUpdate
from fedsim.attacks import Paper
from fedsim.errors import ConfigError

_DECAY_EVERY = 50


@dataclass(frozen=True, kw_only=True)
class Lamp(FromOneUpdate):
    """Match a gradient of a text model by the cosine of each tensor, and move words about where that is better.

    In turns vectors are moved along slopes, and words are rearranged within their texts: two are swapped, one or
    several are moved, or the beginning is put behind the end. Of `tries` such changes of each text the one is taken
    that matches best, or none.

    Args:
        iterations: steps of Adam.                                                     [released code: 2000]
        step_size: Adam's, in standard deviations of the embedding.                    [0.01, or about 0.2]
        decay: of the step size, each 50 steps.                                        [0.89]
        norm_weight: weight of the embedding's prior: how far the mean length of the vectors that are found is from that
            of the words, squared, as a share of the latter.                           [1, or about 2]
        candidates: random starts that are tried, and as many rearrangements of the best one.  [500]
        every: steps between two rearrangements.                                       [75]
        burn_in: share of the steps before the first one.                              [0.1]
        tries: rearrangements of each text.                                            [200]
        nearest: how the token nearest to a found vector is looked up: by `euclidean` distance or by `cosine`.
        words: which tokens may be claimed: those of the whole `vocabulary`, or those `touched`, whose row of the
            embedding's gradient is not zero.
        restarts: random starts; the one with the smallest objective is the finding.
        patience: stop when the objective has not fallen by 1 % for so many iterations; 0 never.
        compile: trace and compile both backward passes, see `adversaries.engine.compiled`.
        precision: `bfloat16` computes convolutions and linear layers in it.

    References:
        Balunović, Dimitrov, Jovanović, Vechev: LAMP: Extracting Text from Gradients with Language Model Priors, NeurIPS
        2022, Algorithm 1, LAMP_cos. Differs: there is no language model, so rearrangements are judged by the cosine
        alone, where the paper adds the perplexity under GPT-2; the last estimate is claimed, not the best one; the
        lengths of texts are not known, so all places count as words; estimates are kept within the embedding's values;
        tensors that rounding alone moved are not matched.
    """

    iterations: int = 2000
    step_size: float = 0.2
    decay: float = 0.89
    norm_weight: float = 2.0
    candidates: int = 500
    every: int = 75
    burn_in: float = 0.1
    tries: int = 200

    paper: ClassVar[Paper] = Paper(
        title="LAMP: Extracting Text from Gradients with Language Model Priors",
        authors="Balunović, Dimitrov, Jovanović, Vechev",
        venue="NeurIPS",
        year=2022,
        url="https://arxiv.org/abs/2202.08827",
    )
    uses: ClassVar[frozenset[str]] = MEAN_GRADIENT | STEPPING | {"labels"}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "step_size", "decay")
        check_not_negative(self, "norm_weight")
        for name, least in (("candidates", 1), ("every", 1), ("tries", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: expected at least {least}, got {getattr(self, name)}")
        if not 0 <= self.burn_in <= 1:
            raise ConfigError(f"burn_in: expected a share from 0 to 1, got {self.burn_in}")

    def _recipe(self, scene: Scene) -> Recipe:
        return Recipe(
            distance=MeanCosine(),
            priors=[(self.norm_weight, VectorLength())],
            step_size=self.step_size,
            schedule=lambda iteration, _: self.decay ** (iteration // _DECAY_EVERY),
            jump=Rearranged(self),
            one_step=True,
        )


@dataclass(frozen=True)
class VectorLength:
    """How far the mean length of the vectors is from that of the words that may be claimed, as a share, squared."""

    def __call__(self, scene: Scene, dummy: Tensor, consensus: Tensor) -> Tensor:
        """See `Prior`; `dummy` is `example dim place`."""
        share: Tensor = scene.units.to_model(dummy).norm(dim=1).mean() / words_length(scene).to(dummy)
        return (share - 1).square()


def words_length(scene: Scene) -> Tensor:
    """Mean length of the vectors of the words that may be claimed; padding, whose vector is 0, is none."""
    lengths: Tensor = lexicon_of(scene).vectors.norm(dim=1)
    return lengths.sum() / lengths.count_nonzero()


@dataclass(frozen=True)
class Rearranged:
    """A good start, and now and then the words of each text in another order, where that matches better.

    Nothing is read back from an accelerator: the best of all that is tried is chosen there.

    Attributes:
        attack: whose settings these are.
    """

    attack: Lamp

    def __call__(self, scene: Scene, dummy: Tensor, taken: int, iterations: int, rng: torch.Generator) -> None:
        """See `Jump`."""
        attack, (texts, _, length) = self.attack, dummy.shape
        if not taken:
            noise = (torch.randn(dummy.shape, generator=rng).to(dummy) for _ in range(attack.candidates))
            start = _best(scene, noise)
            orders = (torch.randperm(length, generator=rng) for _ in range(attack.candidates))
            dummy.copy_(_as_long_as_words(scene, _best(scene, _with_first(start, orders))))
        elif taken >= attack.burn_in * iterations and taken % attack.every == 0:
            for text in range(texts):
                orders = (_order(kind, length, rng) for kind in range(attack.tries))
                dummy.copy_(_best(scene, _with_first(dummy, orders, text)))


def _with_first(dummy: Tensor, orders: Iterable[Tensor], text: int | None = None) -> Iterable[Tensor]:
    """The vectors as they are, and then those of one text, or of all, in each of these orders."""
    yield dummy
    for order in orders:
        order = order.to(dummy.device)
        if text is None:
            yield dummy[..., order]
        else:
            changed = dummy.clone()
            changed[text] = dummy[text][:, order]
            yield changed


def _best(scene: Scene, tried: Iterable[Tensor]) -> Tensor:
    """The one whose gradient matches best."""
    distance, kept = MeanCosine(), list(tried)
    target = distance.target(scene)
    found = [distance(scene.gradient(scene.before, dummy, scene.labels), target).detach() for dummy in kept]
    return torch.stack(kept).index_select(0, torch.stack(found).argmin()[None])[0]


def _as_long_as_words(scene: Scene, dummy: Tensor) -> Tensor:
    """Each vector at the mean length of those of words."""
    points = scene.units.to_model(dummy)
    points = points / points.norm(dim=1, keepdim=True) * words_length(scene).to(dummy)
    scaled: Tensor = (points - scene.units.centre) / scene.units.scale
    return scaled


def _order(kind: int, length: int, rng: torch.Generator) -> Tensor:
    """`place`, where each word comes from: of four kinds of changes, in turn."""
    places = torch.arange(length)
    first, second = sorted(torch.randint(length, (2,), generator=rng).tolist())
    if kind % 4 == 0:  # two are swapped
        places[[first, second]] = places[[second, first]]
        return places
    if kind % 4 == 3:  # the beginning is put behind the end
        rolled: Tensor = places.roll(-first)
        return rolled
    size = 1 if kind % 4 == 1 else second - first + 1  # one or several are moved
    moved, rest = places[first : first + size], torch.cat([places[:first], places[first + size :]])
    at = int(torch.randint(len(rest) + 1, (1,), generator=rng))
    return torch.cat([rest[:at], moved, rest[at:]])
