"""What a judgement is made of: one number with its floor and ceiling, and the public data that guesses come from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedsim.evaluation.statistics import best_guess


@dataclass(frozen=True, kw_only=True)
class Public:
    """What anybody may know of such data without seeing the victim's: examples of the same kind.

    Attributes:
        data: `example channel height width`, in [0, 1], or `example place` tokens.
        labels: `example`, class indices.
    """

    data: Tensor
    labels: Tensor


@dataclass(frozen=True, kw_only=True)
class Score:
    """One number about one finding.

    Attributes:
        metric: name of the metric.
        value: mean over the victim's images or records.
        floor: what guessing gets; the best guess by this metric.
        floor_guess: which guess that was.
        nearest_public: what the public example closest to each true one would get, NaN where none is
            known. No guess: it takes the truth to pick it. An attack that stays below may have found the
            kind of data, rather than the data.
        ceiling: what a perfect finding would get, None where the metric has no bound.
        higher_is_better: direction, from the adversary's point of view.
        per_image: `example`, the values behind the mean; empty where there are none.
        missing: why there is no value; then `value` is NaN.
    """

    metric: str
    value: float
    floor: float = math.nan
    floor_guess: str = ""
    nearest_public: float = math.nan
    ceiling: float | None = None
    higher_is_better: bool = True
    per_image: tuple[float, ...] = ()
    missing: str = ""

    @classmethod
    def beside(
        cls,
        metric: str,
        value: float,
        guesses: Mapping[str, float],
        *,
        ceiling: float | None,
        higher_is_better: bool = True,
        nearest_public: float = math.nan,
        per_image: tuple[float, ...] = (),
    ) -> Score:
        """A score whose floor is the best of `guesses`, which are called by what they do."""
        guess, floor = best_guess(guesses, higher_is_better=higher_is_better)
        return cls(
            metric=metric,
            value=value,
            floor=floor,
            floor_guess=guess,
            nearest_public=nearest_public,
            ceiling=ceiling,
            higher_is_better=higher_is_better,
            per_image=per_image,
        )

    @classmethod
    def not_computed(cls, metric: str, why: str, *, higher_is_better: bool = True) -> Score:
        """A score without a value, and the reason."""
        return cls(metric=metric, value=math.nan, missing=why, higher_is_better=higher_is_better)
