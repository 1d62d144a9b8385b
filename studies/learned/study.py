"""The rows that the study of learned inversion keeps, and its table in docs/studies/priors.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from studies.defenses.study import NONE, gain_text, naive_and_adaptive
from studies.priors.study import gains_of_best, mean_text, rows_of_sweep, verdict_text
from studies.running import STUDIES, read_rows
from studies.writing import column_values, group_rows, markdown_table, select_rows

__all__ = ["rows_of_sweep", "tables"]

ATTACK = "learned-inversion"
Rows = Sequence[Mapping[str, str]]


def tables(rows: Rows) -> dict[str, str]:
    """Return a line for each cell, with the strongest reading of the attacks of other studies."""
    inversions, priors = (read_rows(STUDIES / name / "results.csv") for name in ("defenses", "priors"))
    undefended, lines = select_rows(rows, cell=NONE), []
    for (cell,), of_cell in group_rows(rows, "cell").items():
        line = [cell]
        for attack, former in (("ig", inversions), ("map", priors), (ATTACK, rows)):
            readings = naive_and_adaptive(select_rows(former, cell=cell), attack, "psnr")
            line += [gain_text(reading) if reading else "–" for reading in readings]
        gains = gains_of_best(select_rows(of_cell, metric="psnr"))
        line.append(f"{sum(gain > 0 for gain in gains)} of {len(gains)}")
        best = select_rows(of_cell, knows=True) or of_cell
        line.append(mean_text(column_values(select_rows(best, metric="psnr"), "other")))
        lines.append([*line, verdict_text(cell, of_cell, undefended, ATTACK)])
    head = ["defense"]
    for title in ("ig", "map", "learned"):
        head += [f"{title}: naive", f"{title}: adaptive"]
    return {"": markdown_table([*head, "victims beyond", "other client's images", "defense"], lines)}
