"""A score: one number with its floor and ceiling; and the public data that guesses come from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedsim.audit.evaluation.statistics import best_guess


@dataclass(frozen=True, kw_only=True)
class PublicExamples:
    """Public examples of the same kind as the victim's data.

    Attributes:
        data: `example channel height width` in [0, 1], or `example position` tokens.
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
        floor: value of the best guess by this metric.
        floor_guess: name of that guess.
        nearest_public: value of the public example closest to each true one; NaN where none is
            known. It is no guess, because picking it takes the truth. An attack that stays below
            may have found the kind of data rather than the data.
        ceiling: value of a perfect finding; None where the metric has no bound.
        higher_is_better: direction, from the adversary's point of view.
        per_image: `example`, the values behind the mean; empty where there are none.
        missing: reason why there is no value; then `value` is NaN.
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
    def against_guesses(
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
        """Make a score whose floor is the best of `guesses`, given by name."""
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
    def from_reason(cls, metric: str, reason: str, *, higher_is_better: bool = True) -> Score:
        """Make a score that has no value, for this `reason`."""
        return cls(metric=metric, value=math.nan, missing=reason, higher_is_better=higher_is_better)
