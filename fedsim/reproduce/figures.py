"""A figure as it is printed, `27.8 ± 0.3`, and the verdict on ours beside a paper's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from fedsim.errors import ConfigError

Better = Literal["higher", "lower", "near"]
"""Which of our figures are as good as a paper's: those that are higher, lower, or near it on either side."""
_NUMBER = r"[+-]?(?:(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|inf)"
_FORM = re.compile(
    rf"(?P<value>{_NUMBER})(?: ± (?P<spread>{_NUMBER}))?(?: \((?P<low>{_NUMBER}) to (?P<high>{_NUMBER})\))?"
    r"(?P<note> \(.+\))?"
)
_OF_SOME = re.compile(r"\(\d+ of \d+\)$")
"""How a figure ends that some victims alone have."""
REFUSED = "refused"
"""What stands for our figure where our attack refuses the setting."""


class Verdict(StrEnum):
    """What our figure says of the paper's."""

    MET = "met"
    MISSED = "missed"
    ABOVE = "above"
    NOT_COMPARABLE = "not comparable"


@dataclass(frozen=True)
class Figure:
    """A number as it is printed.

    Attributes:
        text: as printed, such as `27.8 ± 0.3`, `+.47 (+.20 to +.68)`, `.044`; a remark in brackets may follow.
        value: the number, in the unit of its quantity; None where `text` is `refused`.
    """

    text: str
    value: float | None

    @property
    def decimals(self) -> int:
        """Digits behind the point."""
        number = _FORM.fullmatch(self.text)
        mantissa, _, power = number["value"].partition("e") if number else ("", "", "")
        return max(len(mantissa.partition(".")[2]) - int(power or 0), 0)


def figure(text: str, where: str) -> Figure:
    """Read a printed figure.

    Raises:
        ConfigError: it is none; `where` is named.
    """
    if text == REFUSED:
        return Figure(text, None)
    if not (match := _FORM.fullmatch(text)):
        raise ConfigError(
            f"{where}: expected a figure such as '27.8 ± 0.3', '.47 (.20 to .68)' or '{REFUSED}', got {text!r}"
        )
    return Figure(text, float(match["value"]))


def difference(ours: Figure, paper: Figure) -> float:
    """Ours minus the paper's, to the digits that are printed; NaN where ours is refused."""
    if ours.value is None or paper.value is None:
        return float("nan")
    return round(ours.value - paper.value, max(ours.decimals, paper.decimals))


def judged(ours: Figure, paper: Figure, tolerance: float, better: Better) -> Verdict:
    """Met where ours is the paper's, up to the tolerance; above where it is better by more than that.

    A figure far above a paper's is of another setting, and no reproduction.
    What refuses to answer has missed. What answers for some victims alone may miss, but not meet, a figure for all.
    """
    gap = difference(ours, paper)
    short = {"higher": -gap, "lower": gap, "near": abs(gap)}[better]
    if not short <= tolerance:
        return Verdict.MISSED
    if _OF_SOME.search(ours.text):
        return Verdict.NOT_COMPARABLE
    return Verdict.ABOVE if short < -tolerance else Verdict.MET


def difference_text(ours: Figure, paper: Figure) -> str:
    """With its sign, as many digits as the finer of the two; nothing where ours is refused."""
    if ours.value is None or paper.value is None:
        return ""
    text = f"{difference(ours, paper):+.{max(ours.decimals, paper.decimals)}f}"
    return text if re.search(r"\d\.", ours.text) else re.sub(r"(?<=[+-])0(?=\.)", "", text)
