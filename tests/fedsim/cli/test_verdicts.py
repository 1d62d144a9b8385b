"""Each verdict that a command prints has a colour: a missing one would end a long command in an error."""

from __future__ import annotations

from typing import get_args

import pytest

from fedsim.api.reproduce.figures import FigureVerdict, parse_figure
from fedsim.api.reproduce.papers import FigureComparison
from fedsim.cli import check, reproduce
from fedsim.contract.checks import Verdict


@pytest.mark.parametrize("verdict", FigureVerdict)
def test_each_verdict_on_a_figure_is_printed_in_a_colour(verdict: FigureVerdict) -> None:
    figure = parse_figure("12.5", "table")
    comparison = FigureComparison(row="r", quantity="q", paper=figure, ours=figure, verdict=verdict)
    *_, printed = reproduce._cells(comparison)
    assert printed.endswith(f"]{verdict}[/]")
    assert printed.split("]")[0] in ("[green", "[red", "[yellow", "[dim")


def test_each_verdict_on_a_plugin_is_printed_in_a_style() -> None:
    assert set(check._STYLES) == set(get_args(Verdict))
