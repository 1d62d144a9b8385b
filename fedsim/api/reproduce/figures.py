"""Figures as they are printed, `27.8 ± 0.3`, and the verdict on ours compared with a paper's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from fedsim.base.errors import ConfigError

Better = Literal["higher", "lower", "near"]
"""Which of our figures are as good as a paper's: those that are higher, lower, or near it on either side."""
_NUMBER = r"[+-]?(?:(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|inf)"
_PRINTED_FIGURE = re.compile(
    rf"(?P<value>{_NUMBER})(?: ± (?P<spread>{_NUMBER}))?(?: \((?P<low>{_NUMBER}) to (?P<high>{_NUMBER})\))?"
    r"(?P<note> \(.+\))?"
)
_SOME_VICTIMS = re.compile(r"\(\d+ of \d+\)$")
"""Ending of a figure that only some victims have."""
REFUSED = "refused"
"""Text of our figure where our attack refuses the setting."""


class FigureVerdict(StrEnum):
    """Comparison of our figure with the paper's."""

    MET = "met"
    MISSED = "missed"
    ABOVE = "above"
    NOT_COMPARABLE = "not comparable"


@dataclass(frozen=True)
class Figure:
    """Number as it is printed.

    Attributes:
        text: as printed, such as `27.8 ± 0.3`, `+.47 (+.20 to +.68)`, `.044`; a remark in brackets may follow.
        value: the number, in the unit of its quantity; None where `text` is `refused`.
    """

    text: str
    value: float | None

    @property
    def decimals(self) -> int:
        """Digits behind the point."""
        number = _PRINTED_FIGURE.fullmatch(self.text)
        mantissa, _, power = number["value"].partition("e") if number else ("", "", "")
        return max(len(mantissa.partition(".")[2]) - int(power or 0), 0)


def parse_figure(text: str, where: str) -> Figure:
    """Read a printed figure.

    >>> parse_figure("27.8 ± 0.3", "table 2").value
    27.8
    """
    if text == REFUSED:
        return Figure(text, None)
    if not (match := _PRINTED_FIGURE.fullmatch(text)):
        raise ConfigError(
            f"{where}: expected a figure such as '27.8 ± 0.3', '.47 (.20 to .68)' or '{REFUSED}', got {text!r}"
        )
    return Figure(text, float(match["value"]))


def difference(ours: Figure, paper: Figure) -> float:
    """Compute ours minus the paper's, to the digits that are printed; NaN where ours is refused."""
    if ours.value is None or paper.value is None:
        return float("nan")
    return round(ours.value - paper.value, max(ours.decimals, paper.decimals))


def judge_figure(ours: Figure, paper: Figure, tolerance: float, better: Better) -> FigureVerdict:
    """Compare our figure with the paper's: met up to the tolerance, above where ours is better by more than that.

    A figure far above a paper's is of another setting, and no reproduction. An attack that refuses the setting has
    missed. A figure for only some victims may miss, but not meet, a figure for all.
    """
    gap = difference(ours, paper)
    shortfall = {"higher": -gap, "lower": gap, "near": abs(gap)}[better]
    if not shortfall <= tolerance:
        return FigureVerdict.MISSED
    if _SOME_VICTIMS.search(ours.text):
        return FigureVerdict.NOT_COMPARABLE
    return FigureVerdict.ABOVE if shortfall < -tolerance else FigureVerdict.MET


def difference_text(ours: Figure, paper: Figure) -> str:
    """Format the difference with its sign and as many digits as the finer figure; empty where ours is refused."""
    if ours.value is None or paper.value is None:
        return ""
    text = f"{difference(ours, paper):+.{max(ours.decimals, paper.decimals)}f}"
    return text if re.search(r"\d\.", ours.text) else re.sub(r"(?<=[+-])0(?=\.)", "", text)
