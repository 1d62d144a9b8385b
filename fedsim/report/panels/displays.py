"""Panel of what evaluators show of findings in numbers, tables and matrices, of kinds that the page need not know."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup
from torch import Tensor

from fedsim.audit.evaluation.display import DisplayMatrix, DisplayTable
from fedsim.interfaces.panel import Panel
from fedsim.report.charts import HeatMapCell, draw_heat_map
from fedsim.report.html import render_fragment
from fedsim.report.reported_run import ReportedRun
from fedsim.report.victim_groups import MAX_SHOWN_GROUPS

_MAX_ROWS = 50
"""Most rows of a table that are shown."""
_MAX_SIDE = 24
"""Most rows, and most columns, of a matrix that are drawn."""


class DisplaysPanel(Panel):
    """Show the numbers, tables and matrices that the evaluator of each finding returns."""

    title = "What else the findings show"
    link = "Findings"
    order = 45

    def render(self, run: ReportedRun) -> Markup | None:
        """Return them below the name of each attack and victim; None where there are none."""
        findings = [finding for finding in run.findings if finding.numbers or finding.tables or finding.matrices]
        if not findings:
            return None
        shown_findings = []
        for finding in findings[:MAX_SHOWN_GROUPS]:
            numbers = {name: format_cell(value) for name, value in finding.numbers.items()}
            tables = [_cut_table(table) for table in finding.tables]
            heat_maps = [draw_matrix(matrix) for matrix in finding.matrices]
            parts = {"numbers": numbers, "tables": tables, "heat_maps": heat_maps}
            shown_findings.append({"about": finding.about, **parts})
        return render_fragment("displays.html.j2", findings=shown_findings, total=len(findings))


@dataclass(frozen=True, kw_only=True)
class _CutTable:
    """First rows of a table, as texts, and the number of those that are left out."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    omitted: int


def _cut_table(table: DisplayTable) -> _CutTable:
    rows = [[format_cell(cell) for cell in row] for row in table.rows[:_MAX_ROWS]]
    return _CutTable(title=table.title, columns=table.columns, rows=rows, omitted=len(table.rows) - len(rows))


def format_cell(value: str | float) -> str:
    """Return a cell as text, a number with four significant digits.

    >>> format_cell("brown"), format_cell(0.123456), format_cell(3)
    ('brown', '0.1235', '3')
    """
    return value if isinstance(value, str) else f"{value:.4g}"


def draw_matrix(matrix: DisplayMatrix) -> Markup:
    """Draw a matrix as a heat map: the largest value is the darkest, the smallest has no colour."""
    values = matrix.values.detach().double().cpu()
    rows, columns = _names(matrix.rows, len(values)), _names(matrix.columns, values.shape[1])
    title = matrix.title
    if max(values.shape) > _MAX_SIDE:
        title += f" (the first {_MAX_SIDE} rows and columns of {values.shape[0]} x {values.shape[1]})"
    shown_values = values[:_MAX_SIDE, :_MAX_SIDE]
    cells = _shade_cells(shown_values)
    return draw_heat_map(title, rows[:_MAX_SIDE], columns[:_MAX_SIDE], cells, corner=matrix.corner)


def _names(names: Sequence[str], size: int) -> Sequence[str]:
    return names or [str(number) for number in range(size)]


def _shade_cells(values: Tensor) -> list[list[HeatMapCell]]:
    finite_values = values[values.isfinite()]
    low, high = (finite_values.min().item(), finite_values.max().item()) if len(finite_values) else (0.0, 0.0)
    cells = []
    for row in values.tolist():
        cell_row = []
        for value in row:
            shade = (value - low) / (high - low) if math.isfinite(value) and high > low else math.nan
            cell_row.append(HeatMapCell(text=f"{value:.3g}", shade=shade))
        cells.append(cell_row)
    return cells
