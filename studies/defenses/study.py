"""The rows that the study of defenses keeps, the table of docs/studies/defenses.md and its picture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.transforms import Bbox

import fedsim
from fedsim.api.reproduce.papers import read_toml
from fedsim.federation.run_folder import RunFolder, read_ledger
from fedsim.privacy.ledger import spending_by_client
from fedsim.report.adaptive import FAILS, HOLDS, NOT_CONCLUDED, ONLY_NAIVE, NaiveAdaptivePair, at_floor
from fedsim.report.verdicts import LEAKS, ScoreReading, score_readings
from studies.running import STUDIES, Row, final_accuracy, runs_of_sweep
from studies.writing import cycle_marks, group_rows, markdown_table, save_picture, select_rows, set_style

METRICS = ("psnr", "ssim")
ATTACKS = ("sme", "ig")
SHORT = {HOLDS: "holds", ONLY_NAIVE: "**naive only**", FAILS: "fails", NOT_CONCLUDED: "not concluded"}
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
NONE, SUMS, PROTOCOL = "none", "secure-aggregation", "settings"
TICKS = (-4, -2, -1, 0, 1, 2, 5, 10, 20, 50)
LEGEND_HEIGHT = 0.12
NEAR = 0.8
"""dB above the floor up to which cells are named in the picture."""
OF_ALL_SCORES: dict[str, Any] = {
    "variant": "", "missing": "", "round": 1, "settings": "{}", "ceiling": "", "nearest_public": "nan",
    "higher_is_better": True, "instrument": "", "examples": 1,
}  # fmt: skip
"""Columns of scores.csv that are the same in all rows of the study, and not kept."""
Rows = Sequence[Mapping[str, str]]


def rows_of_sweep(sweep: fedsim.Sweep) -> Iterator[Row]:
    """Yield a row for each attack, victim and metric; the naive attack's have accuracy and epsilon."""
    for labels, run in runs_of_sweep(sweep):
        cost = cost_of(run)
        for score in run.scores.to_dict("records"):
            if score["metric"] in METRICS:
                knows = str(score["attack"]).endswith("adaptive")
                yield {
                    "cell": labels["case"], "key": labels["cell"][:8], "knows": knows,
                    **(cost | {"accuracy": "", "epsilon": ""} if knows else cost), "failed": "",
                    "attack": f"{labels['attack']} adaptive" if knows else labels["attack"],
                    **{name: score[name] for name in ("victim", "metric", "value", "floor", "floor_guess")},
                }  # fmt: skip


def row_of_failure(cell: Mapping[str, str], run: fedsim.Run) -> Row:
    """Return the row of a cell whose attack is refused, which is what the study has to say of it."""
    return {
        "cell": cell["case"], "key": cell["cell"][:8], "knows": False, **cost_of(run), "failed": cell["reason"],
        "attack": "", "victim": "", "metric": "", "value": "", "floor": "", "floor_guess": "",
    }  # fmt: skip


def cost_of(run: fedsim.Run) -> Row:
    """Return what the federation of a run ended with, and what its messages weigh."""
    return {
        "accuracy": final_accuracy(run),
        "epsilon": min((loss.epsilon for loss in epsilons(RunFolder(run.path))), default=""),
        "bytes": next(iter(run.transcript.upload_sizes(run.transcript.rounds[0]).values())),
    }


def epsilons(folder: RunFolder) -> Iterator[Any]:
    """Yield what each defense of client 0 has spent."""
    rows = read_ledger(folder)
    for defense in dict.fromkeys(row["defense"] for row in rows):
        yield from (loss for client, loss in spending_by_client(rows, defense).items() if client == 0)


def group_cells(rows: Rows) -> dict[str, list[Mapping[str, str]]]:
    """Return the rows of each cell, in the order of the sweep."""
    order = [case["label"] for case in read_toml(STUDIES / "defenses" / "sweep.toml")["sweep"]["axes"]["case"]]
    found = group_rows(rows, "cell")
    return {cell: found[cell,] for cell in order if (cell,) in found}


def is_defended(cell: str) -> bool:
    """Return whether a cell has a defense, which an adversary may know or not."""
    return family(cell) not in (NONE, SUMS, PROTOCOL)


def family(cell: str) -> str:
    """Return the defense of a cell."""
    return cell.split()[0]


def tables(rows: Rows) -> dict[str, str]:
    """Return a line for each cell: what it costs, and what it leaves."""
    cells = group_cells(rows)
    plain = int(cells[NONE][0]["bytes"])
    head = ["defense", "accuracy", "ε", "bytes"]
    head += [f"{attack}: {title}" for attack in ATTACKS for title in ("naive", "adaptive", "defense")]
    lines = []
    for cell, of_cell in cells.items():
        naive = next(row for row in of_cell if row["knows"] == "False")
        size = "–" if family(cell) == SUMS else f"{int(naive['bytes']) / plain:.2f}"
        line = [cell, f"{100 * float(naive['accuracy']):.1f} %", promised_epsilon(naive["epsilon"]), size]
        for attack in ATTACKS:
            line += attack_texts(of_cell, attack, cells[NONE])
        lines.append(line)
    return {"": markdown_table(head, lines)}


def promised_epsilon(epsilon: str) -> str:
    """Format ε of the whole run; a figure that promises nothing is told by its size."""
    if not epsilon:
        return "–"
    return f"{float(epsilon):.3g}" if float(epsilon) < 1000 else f"10^{math.log10(float(epsilon)):.0f}"


def attack_texts(rows: Rows, attack: str, undefended: Rows) -> list[str]:
    """Format mean dB above the floor, naive and adaptive, and what the defense is worth."""
    naive, adaptive = naive_and_adaptive(rows, attack, "psnr")
    if naive is None:
        return ["refuses", "–", "–"]
    verdicts = []
    for metric in METRICS:
        control, _ = naive_and_adaptive(undefended, attack, metric)
        verdicts.append(worth_of(rows[0]["cell"], *naive_and_adaptive(rows, attack, metric), control))
    verdict = verdicts[0] if verdicts[0] == verdicts[1] else f"{verdicts[0]}, by SSIM {verdicts[1]}"
    return [gain_text(naive), gain_text(adaptive) if adaptive else "–", verdict]


def naive_and_adaptive(rows: Rows, attack: str, metric: str) -> tuple[ScoreReading | None, ScoreReading | None]:
    """Return what a report would read of the naive attack and of the adaptive one."""
    full: list[dict[str, Any]] = []
    for row in select_rows(rows, metric=metric):
        full.append({**row, **OF_ALL_SCORES, "granted": "defenses" if row["knows"] == "True" else ""})
    readings = {reading.summary.attack_key[0]: reading for reading in score_readings(full, {})}
    return readings.get(attack), readings.get(f"{attack} adaptive")


def worth_of(cell: str, naive: ScoreReading | None, adaptive: ScoreReading | None, control: ScoreReading | None) -> str:
    """Return what the defense is worth beside the attack without it; settings of the protocol everybody knows."""
    if naive is None or cell == NONE or (adaptive is None and is_defended(cell)):
        return "–"
    if adaptive is None:
        holds = at_floor(naive.summary) and control is not None and control.verdict == LEAKS
        return "holds" if holds else {LEAKS: "fails"}.get(naive.verdict, "not concluded")
    return SHORT[NaiveAdaptivePair(naive=naive, adaptive=adaptive, control=control).outcome]


def gain_text(reading: ScoreReading) -> str:
    """Format how far a score is above the floor, with half the width of the score's interval."""
    return f"{reading.summary.gain:+z.1f} ± {(reading.summary.high - reading.summary.low) / 2:.1f}"


def draw(rows: Rows) -> None:
    """Draw what IG and SME get above the floor, by lost accuracy: naive open, adaptive filled, joined by a line."""
    set_style()
    cells = group_cells(rows)
    figure, axes = plt.subplots(1, 2, figsize=(11, 6.6), sharey=True)
    styles = dict(zip(dict.fromkeys(map(family, cells)), cycle_marks(COLOURS, "osD^v"), strict=False))
    for axis, attack in zip(axes, ("ig", "sme"), strict=True):
        for cell, of_cell in cells.items():
            lost = percent_right(cells[NONE]) - percent_right(of_cell)
            draw_cell(axis, of_cell, lost, attack, styles[family(cell)])
        axis.axhline(0, color="grey", linewidth=0.8, linestyle=":")
        axis.set_xscale("symlog", linthresh=2, linscale=1)
        axis.minorticks_off()
        axis.set_xticks(TICKS, list(map(str, TICKS)))
        axis.set_xlabel("accuracy lost against no defense, percentage points")
        axis.set_title(attack.upper())
    axes[0].set_ylabel("PSNR above the floor, dB (more is more leakage)")
    handles = [Line2D([], [], color=c, marker=m, linestyle="", label=name) for name, (c, m) in styles.items()]
    grey: dict[str, Any] = {"color": "grey", "marker": "o", "linestyle": ""}
    handles.append(Line2D([], [], fillstyle="none", label="open: naive", **grey))
    handles.append(Line2D([], [], fillstyle="full", label="filled: knows all", **grey))
    figure.legend(handles=handles, loc="lower center", ncols=6, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, LEGEND_HEIGHT, 1, 1))
    for axis in axes:
        spread_names(axis)
    save_picture(figure, "defense-study.svg", legend_height=LEGEND_HEIGHT)


def percent_right(rows: Rows) -> float:
    """Return the accuracy of the federation, in per cent."""
    return next(float(row["accuracy"]) for row in rows if row["knows"] == "False") * 100


def draw_cell(axis: Any, rows: Rows, lost: float, attack: str, style: tuple[str, str]) -> None:
    """Draw one cell, named where the attack gets little; settings of the protocol are a filled point alone."""
    cell, (colour, marker) = rows[0]["cell"], style
    naive, adaptive = naive_and_adaptive(rows, attack, "psnr")
    if naive is None:
        return
    best = adaptive or naive
    if adaptive or is_defended(cell):
        axis.plot([lost] * 2, [naive.summary.gain, best.summary.gain], color=colour, linewidth=0.8)
        axis.plot(lost, naive.summary.gain, marker, color=colour, fillstyle="none", markersize=5)
    if adaptive or not is_defended(cell):
        axis.plot(lost, best.summary.gain, marker, color=colour, markersize=5)
    if (most := max(naive.summary.gain, best.summary.gain)) < NEAR:
        line = {"arrowstyle": "-", "linewidth": 0.4, "color": "#999999", "shrinkA": 0, "shrinkB": 2}
        text = {"textcoords": "offset points", "fontsize": 6, "color": "#333333", "va": "center"}
        axis.annotate(cell, (lost, most), (5, 0), arrowprops=line, **text)


def spread_names(axis: Any) -> None:
    """Move each name to the nearest place where it covers no marker and no other name."""
    canvas = axis.figure.canvas.get_renderer()
    taken = []
    for line in axis.lines:
        for x, y in axis.transData.transform(line.get_xydata()):
            if line.get_linestyle() == "None":
                taken.append(Bbox.from_bounds(x - 4, y - 4, 8, 8))
    names = sorted(axis.texts, key=lambda name: -name.xy[1])
    frame = axis.get_window_extent(canvas)
    offsets = [(x, y, side) for x in range(5, 90, 3) for y in range(-90, 91, 3) for side in ("left", "right")]
    for name in names:
        for x, y, side in sorted(offsets, key=lambda offset: offset[0] ** 2 + offset[1] ** 2):
            name.set(position=(x if side == "left" else -x, y), horizontalalignment=side)
            name.update_positions(canvas)
            box = Text.get_window_extent(name, canvas).padded(1)
            inside = frame.x0 < box.x0 and box.x1 < frame.x1 + 60 and frame.y0 < box.y0
            if inside and not any(box.overlaps(other) for other in taken):
                break
        taken.append(box)
