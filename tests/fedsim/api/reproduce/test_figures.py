"""Figures are read as they are printed, and judged by the tolerance alone."""

from __future__ import annotations

import math

import pytest

from fedsim.api.reproduce.figures import FigureVerdict, difference, difference_text, judge_figure, parse_figure
from fedsim.base.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value", "decimals"),
    [
        ("27.8 ± 0.3", 27.8, 1),
        (".044", 0.044, 3),
        ("+.47 (+.20 to +.68)", 0.47, 2),
        ("-0.51 (-0.85 to -0.06)", -0.51, 2),
        ("25.2 ± 0.2 (25.1, 25.0)", 25.2, 1),
        ("2.22e-4", 2.22e-4, 6),
        ("100", 100.0, 0),
    ],
)
def test_a_printed_figure_is_read(text: str, value: float, decimals: int) -> None:
    found = parse_figure(text, "here")
    assert (found.text, found.value, found.decimals) == (text, value, decimals)


@pytest.mark.parametrize("text", ["", "N/A", "27,8", "27.8 +- 0.3", "27.8 dB", "± 3", "1 2", "nan"])
def test_what_is_no_figure_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="sme: row: expected a figure"):
        parse_figure(text, "sme: row")


@pytest.mark.parametrize(
    ("ours", "better", "verdict"),
    [
        ("3.9", "higher", FigureVerdict.MISSED),
        ("4.0", "higher", FigureVerdict.MET),
        ("9.9", "higher", FigureVerdict.ABOVE),
        ("4.8", "lower", FigureVerdict.MET),
        ("4.9", "lower", FigureVerdict.MISSED),
        ("0.1", "lower", FigureVerdict.ABOVE),
        ("4.8", "near", FigureVerdict.MET),
        ("4.9", "near", FigureVerdict.MISSED),
        ("3.9", "near", FigureVerdict.MISSED),
        ("4.4 (3 of 4)", "higher", FigureVerdict.NOT_COMPARABLE),
        ("4.4 ± 0.2 (3 of 4)", "near", FigureVerdict.NOT_COMPARABLE),
        ("3.9 (3 of 4)", "higher", FigureVerdict.MISSED),
        ("inf", "higher", FigureVerdict.ABOVE),
        ("refused", "higher", FigureVerdict.MISSED),
        ("refused", "lower", FigureVerdict.MISSED),
        ("refused", "near", FigureVerdict.MISSED),
    ],
)
def test_the_verdict_goes_by_what_is_better_and_ends_at_the_tolerance(
    ours: str, better: str, verdict: FigureVerdict
) -> None:
    """4.0 is 0.4 below 4.4, and 4.8 as much above, though neither difference is so in binary."""
    assert judge_figure(parse_figure(ours, ""), parse_figure("4.4", ""), 0.4, better) is verdict  # type: ignore[arg-type]


def test_differences_have_the_digits_of_the_finer_figure() -> None:
    assert difference_text(parse_figure("+2.3 ± 0.16", ""), parse_figure("+2.5", "")) == "-0.2"
    assert difference_text(parse_figure("0.12", ""), parse_figure("0.123 ± 0.02", "")) == "-0.003"
    assert difference_text(parse_figure(".061", ""), parse_figure(".044", "")) == "+.017"
    assert difference_text(parse_figure("refused", ""), parse_figure(".044", "")) == ""
    assert math.isnan(difference(parse_figure("refused", ""), parse_figure(".044", "")))
