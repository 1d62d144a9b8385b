"""LAMP without its language model: cosine matching with word reordering [Balunovic2022]."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adversaries.text.embedding_space import problem_lexicon
from adversaries.text.texts import SingleUpdateTextAttack
from fedsim.base.constraints import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Share
from fedsim.base.papers import cite
from fedsim.interfaces.attack import Paper
from fedsim.inversion.distances import MeanCosine
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.recipe import MEAN_GRADIENT_FACTS, Recipe
from fedsim.inversion.training_mismatch import OPTIMIZER_FACTS

_STEPS_PER_DECAY = 50


@dataclass(frozen=True, kw_only=True)
class Lamp(SingleUpdateTextAttack):
    """Match a gradient of a text model by the cosine of each tensor, and reorder words.

    Algorithm 1:

    1. Start from the best of many random starts and of many reorderings of it (`WordReordering`).
    2. Minimise the mean of 1 - cosine over tensors, plus the embedding norm prior, over the dummy
       embeddings by Adam (`_recipe`).
    3. Every `every` steps, try `tries` reorderings of each text and keep the best, or none: swap
       two words, move one or several, or move the beginning behind the end (`_draw_order`).
    4. Claim the words whose embeddings are nearest.

    Args:
        iterations: steps of Adam.                                          [released code: 2000]
        step_size: Adam's, in standard deviations of the embedding.         [0.01, or about 0.2]
        decay: factor of the step size every 50 steps.                      [0.89]
        norm_weight: weight of the embedding norm prior, see `EmbeddingNormPrior`. [1, or about 2]
        candidates: random starts, and as many reorderings of the best one. [500]
        every: steps between two reorderings.                               [75]
        burn_in: share of the steps before the first reordering.            [0.1]
        tries: reorderings of each text.                                    [200]

    References:
        [Balunovic2022], Algorithm 1, LAMP_cos. Differs: there is no language model, so reorderings
        are compared by the cosine only, where the paper adds the perplexity under GPT-2; the last
        estimate is claimed, not the best one; the lengths of texts are not known, so all positions
        count as words; estimates are kept within the embedding's values; tensors whose change is
        only rounding are not matched.
    """

    iterations: PositiveInt = 2000
    step_size: PositiveFloat = 0.2
    decay: PositiveFloat = 0.89
    norm_weight: NonNegativeFloat = 2.0
    candidates: PositiveInt = 500
    every: PositiveInt = 75
    burn_in: Share = 0.1
    tries: NonNegativeInt = 200

    paper: ClassVar[Paper] = cite("Balunovic2022")
    uses: ClassVar[frozenset[str]] = MEAN_GRADIENT_FACTS | OPTIMIZER_FACTS | {"labels"}

    def _recipe(self, problem: InversionProblem) -> Recipe:
        return Recipe(
            distance=MeanCosine(),
            priors=[(self.norm_weight, EmbeddingNormPrior())],
            step_size=self.step_size,
            schedule=lambda iteration, _: self.decay ** (iteration // _STEPS_PER_DECAY),
            discrete_step=WordReordering(self),
            one_step=True,
        )


@dataclass(frozen=True)
class EmbeddingNormPrior:
    """Squared relative difference of the mean norms of dummy embeddings and words."""

    def __call__(self, problem: InversionProblem, dummy: Tensor, consensus: Tensor) -> Tensor:
        """Compute the prior as `Prior` describes; `dummy` is `example dim position`."""
        mean_norm = problem.scaling.to_model(dummy).norm(dim=1).mean()
        ratio: Tensor = mean_norm / mean_word_norm(problem).to(dummy)
        return (ratio - 1).square()


def mean_word_norm(problem: InversionProblem) -> Tensor:
    """Return the mean norm of the lexicon's vectors without padding, whose vector is 0."""
    norms: Tensor = problem_lexicon(problem).vectors.norm(dim=1)
    return norms.sum() / norms.count_nonzero()


@dataclass(frozen=True)
class WordReordering:
    """Discrete step of LAMP: chooses the best start, later the best order of words.

    Nothing is read back from an accelerator: the best of all candidates is selected there.
    """

    attack: Lamp

    def __call__(
        self, problem: InversionProblem, dummy: Tensor, steps_taken: int, iterations: int, rng: torch.Generator
    ) -> None:
        """Change `dummy` in place after `taken` steps, as `DiscreteStep` describes."""
        attack, (num_texts, _, length) = self.attack, dummy.shape
        if not steps_taken:
            noise = (torch.randn(dummy.shape, generator=rng).to(dummy) for _ in range(attack.candidates))
            start = _select_best(problem, noise)
            orders = (torch.randperm(length, generator=rng) for _ in range(attack.candidates))
            start = _select_best(problem, _reorder_all(start, orders))
            dummy.copy_(_rescale_to_words(problem, start))
        elif steps_taken >= attack.burn_in * iterations and steps_taken % attack.every == 0:
            for text in range(num_texts):
                orders = (_draw_order(kind, length, rng) for kind in range(attack.tries))
                dummy.copy_(_select_best(problem, _reorder_text(dummy, text, orders)))


def _reorder_all(dummy: Tensor, orders: Iterable[Tensor]) -> Iterable[Tensor]:
    """Yield the dummy embeddings unchanged, then with all texts in each order."""
    yield dummy
    for order in orders:
        yield dummy[..., order.to(dummy.device)]


def _reorder_text(dummy: Tensor, text: int, orders: Iterable[Tensor]) -> Iterable[Tensor]:
    """Yield the dummy embeddings unchanged, then with one text in each order."""
    yield dummy
    for order in orders:
        reordered = dummy.clone()
        reordered[text] = dummy[text][:, order.to(dummy.device)]
        yield reordered


def _select_best(problem: InversionProblem, candidates: Iterable[Tensor]) -> Tensor:
    """Return the candidate whose gradient matches best."""
    distance, dummies = MeanCosine(), list(candidates)
    target = distance.target(problem)
    distances = []
    for dummy in dummies:
        gradient = problem.gradient(problem.before, dummy, problem.labels)
        distances.append(distance(gradient, target).detach())
    best = torch.stack(distances).argmin()
    return torch.stack(dummies).index_select(0, best[None])[0]


def _rescale_to_words(problem: InversionProblem, dummy: Tensor) -> Tensor:
    """Scale each dummy embedding to the mean norm of words."""
    points = problem.scaling.to_model(dummy)
    points = points / points.norm(dim=1, keepdim=True) * mean_word_norm(problem).to(dummy)
    scaled: Tensor = (points - problem.scaling.centre) / problem.scaling.scale
    return scaled


def _draw_order(kind: int, length: int, rng: torch.Generator) -> Tensor:
    """Draw a change of one of four kinds; return where the word at each position comes from."""
    positions = torch.arange(length)
    first, second = sorted(torch.randint(length, (2,), generator=rng).tolist())

    # Swap two words.
    if kind % 4 == 0:
        positions[[first, second]] = positions[[second, first]]
        return positions

    # Move the beginning behind the end.
    if kind % 4 == 3:
        rolled: Tensor = positions.roll(-first)
        return rolled

    # Move one word, or several.
    size = 1 if kind % 4 == 1 else second - first + 1
    span = positions[first : first + size]
    remaining = torch.cat([positions[:first], positions[first + size :]])
    target = int(torch.randint(len(remaining) + 1, (1,), generator=rng))
    return torch.cat([remaining[:target], span, remaining[target:]])
