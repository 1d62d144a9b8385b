"""What happens to updates in the study of first layers, the rows that it keeps, its tables and pictures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

import numpy as np
import pandas as pd
import torch
from matplotlib import pyplot as plt

import fedsim
from fedsim.audit.evaluation.statistics import confidence_interval
from fedsim.interfaces.attack import Paper
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.local_context import LocalContext
from fedsim.recording.wire_format import State
from studies.running import Row, runs_of_sweep
from studies.writing import column_values, group_rows, markdown_table, save_picture, select_rows, set_style

UNPUBLISHED = Paper(title="Part of a study, published nowhere", authors="fedsim", venue="fedsim", year=2026, url="")
REFINED = "cocktail-party, refined"
DATA = ("mnist", "cifar10", "adult")
BASES = {
    "mnist": {"N": "32", "E": "10", "rate": "0.01"},
    "cifar10": {"N": "24", "E": "5", "rate": "0.01"},
    "adult": {"N": "8", "E": "1", "rate": "0.05"},
}
TICKS = {"N": (4, 8, 16, 32, 64, 100), "E": (1, 5, 10, 20, 50), "rate": (0.001, 0.01, 0.1)}


@dataclass(frozen=True, kw_only=True)
class RelativeNoise(Defense):
    """Gaussian noise on the update, whose norm is that of the update times `share`."""

    share: float
    paper: ClassVar[Paper] = UNPUBLISHED

    def on_update(self, update: State, context: LocalContext) -> State:
        """See Defense."""
        squares = sum(float(tensor.square().sum()) for tensor in update.values())
        deviation = self.share * math.sqrt(squares / sum(tensor.numel() for tensor in update.values()))
        noisy = {}
        for name, tensor in update.items():
            noisy[name] = tensor + deviation * torch.randn(tensor.shape, generator=context.rng)
        return noisy


@dataclass(frozen=True, kw_only=True)
class LargestNumbers(Defense):
    """Only the largest numbers of each tensor of the update are sent, a `share` of them."""

    share: float
    paper: ClassVar[Paper] = UNPUBLISHED

    def on_update(self, update: State, context: LocalContext) -> State:
        """See Defense."""
        pruned = {}
        for name, tensor in update.items():
            rank = 1 + int((1 - self.share) * (tensor.numel() - 1))
            pruned[name] = torch.where(tensor.abs() >= tensor.abs().flatten().kthvalue(rank).values, tensor, 0)
        return pruned


def rows_of_sweep(sweep: fedsim.Sweep) -> Iterator[Row]:
    """Yield a row for each attack and client; one that the attack refused has no figures."""
    for labels, run in runs_of_sweep(sweep):
        scores, errors = run.scores, pd.read_csv(run.path / "image-scores.csv")
        seconds = {finding.victim: finding.about["seconds"] for finding in run.findings}
        size = run.transcript.update(max(run.transcript.rounds), 0).num_examples
        attack = labels["attack"].replace("values", "cocktail-party")
        about = {"cell": labels["case"], "seed": labels["seed"]}
        for client in range(10):
            of_client = scores[scores["victim"] == client].set_index("metric")
            row = about | {"client": client, "attack": attack, "n": size}
            squared_errors = errors[(errors["metric"] == "mse") & (errors["victim"] == client)]["value"]
            psnr = [-10 * math.log10(error + 1e-16) for error in squared_errors]
            if psnr:
                values = of_client["value"].to_dict()
                row |= {
                    "exact": values["exact"],
                    "floor": of_client["floor"]["exact"],
                    "twins": of_client["nearest_public"]["exact"],
                    "certified": values.get("certified"),
                    "false": values.get("false_certificates"),
                    "psnr": round(median(psnr), 2),
                    "worst": round(min(psnr), 2),
                    "labels": values.get("label_accuracy"),
                    "seconds": round(float(seconds[client]), 2),
                }
            yield row


def decibels(rows: Sequence[Mapping[str, str]]) -> list[float]:
    """Return the median PSNR of each client that was not refused."""
    return [float(row["psnr"]) for row in rows if row["psnr"]]


def tables(rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return, for each data set, a table of all cells, and one of all attacks on the base."""
    cells = list(dict.fromkeys(row["cell"] for row in rows))
    wrong = (column_values(rows, "false") > 0).sum()
    beyond = (column_values(rows, "certified") > column_values(rows, "exact") + 1e-9).sum()
    found = {
        "certificates": f"{wrong} attacks on a client gave a wrong certificate, that is, of an example below 60 dB. "
        f"{beyond} attacks certified rows\nthat do not count as exact: a certificate allows an error of 1/2000 of "
        "the range, `exact` one of 1/10000 in tables."
    }
    for data in DATA:
        head = [data, "clients", "exact (95 % interval)", "certified", "dB", "`cocktail-party`, dB", "refined, dB"]
        of_data = sorted((cell for cell in cells if cell.split()[0] == data), key=cell_order)
        found[data] = markdown_table(head, [cell_line(cell, rows) for cell in of_data])
        head = [f"{data} base", "exact", "floor", "also in public data", "median dB", "worst client, dB"]
        found[f"{data} base"] = markdown_table(head, attack_lines(f"{data} base", rows))
    return found


def cell_order(cell: str) -> tuple[bool, list[tuple[float, str]]]:
    """Sort the base first, then by words and numbers."""
    words = cell.replace(",", "").split()
    return not cell.endswith("base"), [(float(w), "") if w[0].isdigit() else (-1, w) for w in words]


def cell_line(cell: str, rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Format a cell: what the exact attack recovers, then the median PSNR of it and of the others."""
    attacks = ("spear-ica", "spear-ica-rounds", "spear")
    of_cell = select_rows(rows, cell=cell)
    attack = next(name for name in attacks if select_rows(of_cell, attack=name))
    exact, certified = (column_values(select_rows(of_cell, attack=attack), name) for name in ("exact", "certified"))
    low, high = confidence_interval(exact, share=True)
    share = f"{exact.mean():.3f} ({low:.2f}, {high:.2f})"
    line = [cell.partition(" ")[2], str(len(exact)), share, f"{certified.mean():.3f}"]
    for name in (attack, "cocktail-party", REFINED):
        psnr = decibels(found := select_rows(of_cell, attack=name))
        refused = len(found) - len(psnr)
        line.append((f"{median(psnr):.1f}" if psnr else "-") + (f" ({refused} refused)" if refused else ""))
    return line


def attack_lines(cell: str, rows: Sequence[Mapping[str, str]]) -> Iterator[list[str]]:
    """Yield a line for each attack on the same clients."""
    for (attack,), found in group_rows(select_rows(rows, cell=cell), "attack").items():
        means = [f"{column_values(found, column).mean():.3f}" for column in ("exact", "floor", "twins")]
        yield [f"`{attack}`", *means, f"{median(decibels(found)):.1f}", f"{min(decibels(found)):.1f}"]


def draw(rows: Sequence[Mapping[str, str]]) -> None:
    """Draw both pictures of docs/explanation/exact.md."""
    set_style()
    draw_steps(rows)
    draw_protection(rows)


def draw_steps(rows: Sequence[Mapping[str, str]]) -> None:
    """Draw the share of exact examples against N, E and the learning rate."""
    figure, axes = plt.subplots(1, 3, figsize=(9, 2.6), sharey=True)
    by_cell = group_rows(select_rows(rows, attack="spear-ica"), "cell")
    titles = {"N": "examples N", "E": "local epochs E", "rate": "learning rate"}
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        for data, marker in zip(DATA, "os^", strict=True):
            by_place = {BASES[data][name]: by_cell[f"{data} base",]}
            for (cell,), found in by_cell.items():
                words = cell.split()
                if words[:2] == [data, name] and len(words) == 3:
                    by_place[words[2]] = found
            places = sorted(by_place, key=float)
            means = [column_values(by_place[place], "exact").mean() for place in places]
            axis.plot([float(place) for place in places], means, marker=marker, label=data)
        axis.set_xscale("log")
        axis.minorticks_off()
        axis.set_xticks(TICKS[name], list(map(str, TICKS[name])))
        axis.set_xlabel(title)
    axes[0].set_ylabel("share of examples above 40 dB")
    axes[0].set_ylim(-0.03, 1.05)
    axes[1].legend(frameon=False)
    save_picture(figure, "exact-steps.svg")


def draw_protection(rows: Sequence[Mapping[str, str]]) -> None:
    """Draw what changes of the update leave, on MNIST; nothing where an attack refuses more than half."""
    names = ["base", "float16", "clipping 0.1", "noise 0.0001", "noise 0.001", "noise 0.01", "noise 0.1"]
    names += ["top-k 0.5", "top-k 0.1", "weight decay 0.001", "optimizer adam", "BatchNorm behind the layer"]
    names += ["width 100 100", "width 100 100, 10 rounds"]
    figure, axis = plt.subplots(figsize=(9, 3.4))
    for place, attack in enumerate(("spear-ica", REFINED, "cocktail-party", "sme")):
        heights = []
        for name in names:
            several = attack == "spear-ica" and name.endswith("rounds")
            found = select_rows(rows, cell=f"mnist {name}", attack="spear-ica-rounds" if several else attack)
            psnr = decibels(found)
            heights.append(median(psnr) if 2 * len(psnr) >= len(found) > 0 else 0)
        axis.bar(np.arange(len(names)) + 0.2 * place - 0.3, heights, 0.2, label=attack)
    axis.axhline(40, color="grey", linewidth=0.8, linestyle=":")
    axis.text(len(names) - 0.5, 41, "exact", ha="right", color="grey")
    axis.set_xticks(range(len(names)), [name.replace(" ", "\n") for name in names], fontsize=7)
    axis.set_ylabel("median PSNR, dB (none: refused)")
    axis.legend(frameon=False, ncols=4, loc="lower right", bbox_to_anchor=(1, 1))
    save_picture(figure, "exact-protection.svg")
