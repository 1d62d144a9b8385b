"""TGIAs-RO without a prior, by the number of evaluations; the table of docs/studies/papers/tgias-ro.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import fedsim
from fedsim.audit.evaluation.statistics import confidence_interval
from studies.running import Row, runs_of_sweep
from studies.writing import column_values, group_rows, markdown_table, select_rows

DECIMALS = {"psnr": 2, "ssim": 3}
Rows = Sequence[Mapping[str, str]]


def rows_of_sweep(sweep: fedsim.Sweep) -> Iterator[Row]:
    """Yield a row for each client and metric, with the number of evaluations, by which cells are named."""
    for labels, run in runs_of_sweep(sweep):
        for score in run.scores.to_dict("records"):
            if score["metric"] in DECIMALS:
                yield {
                    "size": labels["training.batch_size"],
                    "evaluations": labels["attack"],
                    "seed": labels["seed"],
                    "client": score["victim"],
                    "metric": score["metric"],
                    "value": score["value"],
                    "floor": score["floor"],
                }


def tables(rows: Rows) -> dict[str, str]:
    """Return means over clients with half their 95 % intervals, floors beside them."""
    lines = []
    groups = group_rows(rows, "size", "evaluations")
    for size, evaluations in sorted(groups, key=lambda setting: [int(value) for value in setting]):
        line = [size, evaluations]
        for metric, decimals in DECIMALS.items():
            cell = select_rows(groups[size, evaluations], metric=metric)
            values = column_values(cell, "value")
            half = values.mean() - confidence_interval(values)[0]
            floor = column_values(cell, "floor").mean()
            line += [f"{values.mean():.{decimals}f} ± {half:.{decimals}f}", f"{floor:.{decimals}f}"]
        lines.append([*line[:2], str(len(cell)), *line[2:]])
    return {"": markdown_table(["b", "evaluations", "clients", "PSNR (dB)", "floor", "SSIM", "floor"], lines)}
