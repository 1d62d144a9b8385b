"""LMRA's source inference by record and by client; the table of docs/studies/papers/lmra.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import fedsim
from fedsim.api.reproduce.papers import read_papers
from fedsim.audit.evaluation.statistics import confidence_interval
from studies.running import Row, runs_of_sweep
from studies.writing import column_values, group_rows, markdown_table, select_rows

SOURCES = {"last-returned": ("last-returned model", "last"), "returned": ("majority over rounds", "baseline")}
"""Their titles, and the paper's names of them."""
DECISIONS = ("each", "together")
Rows = Sequence[Mapping[str, str]]


def rows_of_sweep(sweep: fedsim.Sweep) -> Iterator[Row]:
    """Yield a row for each client: the share of its records that are said to be its own."""
    for labels, run in runs_of_sweep(sweep):
        source, decide = labels["attack"].split(", ")
        for score in run.scores.to_dict("records"):
            if score["metric"] == "source_accuracy":
                yield {
                    "data": labels["data"],
                    "source": source,
                    "decide": decide,
                    "seed": labels["seed"],
                    "client": score["victim"],
                    "value": score["value"],
                    "floor": score["floor"],
                }


def tables(rows: Rows) -> dict[str, str]:
    """Return means over clients with their 95 % intervals (Gaffke's), in percent, beside the paper's figures."""
    lines, published = [], read_papers()["lmra"].table["table1-sia"].rows
    for (data, source), cell in group_rows(rows, "data", "source").items():
        title, name = SOURCES[source]
        seeds, figures = sorted({row["seed"] for row in cell}), []
        for decide in DECISIONS:
            values = column_values(select_rows(cell, decide=decide), "value")
            low, high = confidence_interval(values, share=True)
            figures.append(f"{100 * values.mean():.1f} ({100 * low:.0f}, {100 * high:.0f})" if len(values) else "–")
        floor = 100 * column_values(cell, "floor").mean()
        lines.append([data, title, ", ".join(seeds), *figures, f"{floor:.1f}", str(published[data][name])])
    head = ["", "read from", "seeds", "each record", "a client's together", "at random", "paper"]
    return {"": markdown_table(head, lines)}
