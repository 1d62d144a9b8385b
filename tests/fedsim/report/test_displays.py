"""Numbers, tables and matrices of any kind of finding are shown, cut, and escaped."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fedsim.audit.evaluation.display import Display, DisplayMatrix, DisplayTable
from fedsim.base.errors import PluginError
from fedsim.report.panels.displays import DisplaysPanel, draw_matrix
from fedsim.report.reported_run import ReportedRun

HOSTILE = "<img src=x onerror=alert(1)>"


def render(*displays: Display) -> str | None:
    """What the panel says of findings that are shown so."""
    findings = []
    for display in displays:
        about = {
            "attack": "guess",
            "repeat": 0,
            "victim": 3,
            "round": 1,
            "rounds": [1],
            "members": [],
            "who": "client 3",
        }
        parts = {"numbers": display.numbers, "tables": display.tables, "matrices": display.matrices}
        findings.append(SimpleNamespace(about=about, **parts))
    return DisplaysPanel().render(cast(ReportedRun, SimpleNamespace(findings=findings)))


def test_findings_without_such_parts_have_no_panel() -> None:
    assert render() is None
    assert render(Display(examples=3, has_truth=True)) is None


def test_each_part_is_shown_below_its_finding() -> None:
    table = DisplayTable(title="Colours", columns=["client", "share"], rows=[("first", 0.25), ("second", 0.123456)])
    matrix = DisplayMatrix(title="Confusion", values=torch.tensor([[1.0, 3.0]]), columns=["cat", "dog"], corner="true")
    html = render(Display(numbers={"colours found": 7}, tables=[table], matrices=[matrix]))
    assert html is not None
    assert "<h3>guess: Client 3, round 1</h3>" in html
    assert "<dt>colours found</dt><dd>7</dd>" in html
    assert re.findall(r"<th scope=\"col\">(.*?)</th>", html) == ["client", "share", "true", "cat", "dog"]
    assert "<tr><td>first</td><td>0.25</td></tr>" in html
    assert "<tr><td>second</td><td>0.1235</td></tr>" in html
    assert "<caption>Confusion</caption>" in html


def test_the_texts_of_a_stranger_are_escaped() -> None:
    table = DisplayTable(title=HOSTILE, columns=[HOSTILE], rows=[(HOSTILE,)])
    matrix = DisplayMatrix(title=HOSTILE, values=torch.ones(1, 1), rows=[HOSTILE], columns=[HOSTILE], corner=HOSTILE)
    html = render(Display(numbers={HOSTILE: 1.0}, tables=[table], matrices=[matrix]))
    assert html is not None
    assert "<img" not in html
    assert html.count("&lt;img src=x onerror=alert(1)&gt;") == 10


def test_the_largest_value_of_a_matrix_is_the_darkest() -> None:
    html = draw_matrix(DisplayMatrix(title="m", values=torch.tensor([[0.0, 5.0, 10.0, float("nan")]])))
    assert re.findall(r"--shade: ([\d.]+)\">(\w+)<", html) == [
        ("0.000", "0"), ("0.500", "5"), ("1.000", "10"), ("0.000", "nan")
    ]  # fmt: skip


def test_what_is_large_is_cut_and_says_so() -> None:
    table = DisplayTable(title="Long", columns=["a"], rows=[(float(number),) for number in range(60)])
    html = render(Display(tables=[table], matrices=[DisplayMatrix(title="Wide", values=torch.zeros(2, 30))]))
    assert html is not None
    assert "Long (the first 50 of 60 rows)" in html
    assert "<td>49</td>" in html
    assert "<td>50</td>" not in html
    assert "Wide (the first 24 rows and columns of 2 x 30)" in html
    assert html.count("--shade") == 2 * 24
    many = render(*[Display(numbers={"n": 1})] * 40)
    assert many is not None
    assert re.search(r"The first \d+ of 40 findings", many)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: DisplayTable(title="t", columns=["a", "b"], rows=[("1", "2"), ("3",)]),
            "table 't': row 2 has 1 cells, expected 2, one for each column",
        ),
        (
            lambda: DisplayMatrix(title="m", values=torch.zeros(3)),
            "matrix 'm': its values have shape (3,), expected rows and columns",
        ),
        (
            lambda: DisplayMatrix(title="m", values=torch.zeros(2, 3), rows=["a", "b", "c"]),
            "matrix 'm': 3 names of rows, expected 2",
        ),
        (
            lambda: DisplayMatrix(title="m", values=torch.zeros(2, 3), columns=["a"]),
            "matrix 'm': 1 names of columns, expected 3",
        ),
    ],
)
def test_a_part_that_does_not_fit_itself_is_one_sentence(make: Any, sentence: str) -> None:
    with pytest.raises(PluginError) as caught:
        make()
    assert str(caught.value) == sentence
