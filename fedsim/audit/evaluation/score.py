"""A score: one number with its floor and ceiling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedsim.audit.evaluation.statistics import best_guess
from fedsim.interfaces.metric import find_metric


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
        ceiling: value of a perfect finding; None where there is no bound.
        per_image: `example`, the values behind the mean; empty where there are none.
        count: number of items that the value is about, where these are not the finding's examples.
        missing: reason why there is no value; then `value` is NaN.
        instrument: what the metric measured with, see `ExampleMetric.instrument`; empty for nothing.
    """

    metric: str
    value: float
    floor: float = math.nan
    floor_guess: str = ""
    nearest_public: float = math.nan
    ceiling: float | None = None
    per_image: tuple[float, ...] = ()
    count: int | None = None
    missing: str = ""
    instrument: str = ""

    @property
    def higher_is_better(self) -> bool:
        """Return the direction that the metric declares."""
        return find_metric(self.metric).higher_is_better

    @classmethod
    def against_guesses(
        cls,
        metric: str,
        value: float,
        guesses: Mapping[str, float],
        *,
        ceiling: float | None = None,
        nearest_public: float = math.nan,
        per_image: tuple[float, ...] = (),
    ) -> Score:
        """Make a score whose floor is the best of `guesses`, given by name.

        Args:
            metric: name of a declared metric.
            value: of the finding.
            guesses: value of each guess.
            ceiling: value of a perfect finding, where it differs from what the metric declares.
            nearest_public: see the attribute.
            per_image: see the attribute.

        Raises:
            PluginError: no such metric is declared.
        """
        facts = find_metric(metric)
        guess, floor = best_guess(guesses, higher_is_better=facts.higher_is_better)
        return cls(
            metric=metric,
            value=value,
            floor=floor,
            floor_guess=guess,
            nearest_public=nearest_public,
            ceiling=facts.best_value if ceiling is None else ceiling,
            per_image=per_image,
        )

    @classmethod
    def from_reason(cls, metric: str, reason: str) -> Score:
        """Make a score that has no value, for this `reason`."""
        return cls(metric=metric, value=math.nan, missing=reason)


def name_without_public(guesses: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name guesses so that it stands beside each score that its floor is lower than public examples would make it."""
    return {f"{name}; there are no public data to guess by": guess for name, guess in guesses.items()}
