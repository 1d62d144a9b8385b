"""What a judgement is made of: one number with its floor and ceiling, and the public data that guesses come from."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


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
