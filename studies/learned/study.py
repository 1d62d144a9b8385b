"""The rows that the study of learned inversion keeps, and its table in docs/studies/priors.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from studies.defenses.study import NONE, gain_text, naive_and_adaptive
from studies.priors.study import gains_of_best, mean_text, rows_of_sweep, verdict_text
from studies.running import STUDIES, read_rows
from studies.writing import markdown_table

__all__ = ["rows_of_sweep", "tables"]

ATTACK = "learned-inversion"
Rows = Sequence[Mapping[str, str]]


def tables(rows: Rows) -> dict[str, str]:
    """Return a line for each cell, with the strongest reading of the attacks of other studies."""
    inversions, priors = (read_rows(STUDIES / name / "results.csv") for name in ("defenses", "priors"))
    undefended = [row for row in rows if row["cell"] == NONE]
    lines = []
    for cell in dict.fromkeys(row["cell"] for row in rows):
        of_cell = [row for row in rows if row["cell"] == cell]
        line = [cell]
        for attack, former in (("ig", inversions), ("map", priors), (ATTACK, rows)):
            readings = naive_and_adaptive([row for row in former if row["cell"] == cell], attack, "psnr")
            line += [gain_text(reading) if reading else "–" for reading in readings]
        gains = gains_of_best([row for row in of_cell if row["metric"] == "psnr"])
        line.append(f"{sum(gain > 0 for gain in gains)} of {len(gains)}")
        best = [row for row in of_cell if row["knows"] == "True"] or of_cell
        line.append(mean_text([float(row["other"]) for row in best if row["metric"] == "psnr"]))
        lines.append([*line, verdict_text(cell, of_cell, undefended, ATTACK)])
    head = ["defense"]
    for title in ("ig", "map", "learned"):
        head += [f"{title}: naive", f"{title}: adaptive"]
    return {"": markdown_table([*head, "victims beyond", "other client's images", "defense"], lines)}
