"""Writes the tables of docs/inversion.md on photographs, and draws its pictures, from benchmarks/results/today.csv.

`python benchmarks/today_tables.py` takes seconds; `--pictures` draws docs/inversion-today.png and
docs/inversion-today-faces.png too, for which the study has to have run here. The study is benchmarks/today_study.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import matplotlib as mpl
import numpy as np
import today_study as study
from matplotlib import pyplot as plt
from resumed import read
from safetensors.torch import load_file
from torch import Tensor

from fedsim.audit.evaluation.statistics import confidence_interval, gains
from fedsim.base import metrics

DOCS = Path(__file__).parent.parent / "docs"
BEGIN, END = "<!-- today_tables.py: begin -->", "<!-- today_tables.py: end -->"
DATA = {"cifar10": "CIFAR-10", "faces": "Faces", "photographs": "Photographs"}
MODELS = {"resnet18": "ResNet18", "resnet18/4": "ResNet18/4", "vit": "ViT"}
SENT = {"gradient": "gradient", "epoch": "weights, E = 1"}
STATISTICS = {"none": "–", "frozen": "running", "withheld": "batch, withheld", "sent": "batch, sent"}
ATTACKS = {
    "by-batch": "`inverting-gradients`",
    "by-batch-and-statistics": "`inverting-gradients` + statistics",
    f"by-batch-and-statistics-{study.MANY}": f"`inverting-gradients` + statistics, {study.MANY} iterations",
    f"inverting-gradients-{study.MANY}": f"`inverting-gradients`, {study.MANY} iterations",
    "positions": "by positions",
}
SETTING = ("batch", "training", "model", "statistics", "attack")
"""What a line is of."""
HEAD = ("N", "sent", "network", "BatchNorm", "attack", "victims", "guess")
SCORES = ("psnr", "ssim", "lpips")
NONE = "–"
OTHERWISE = "see-through-gradients"
"""Compares by another distance."""
LEAST = 3
"""Victims from which on an interval is shown."""
Row = dict[str, str]


def main() -> None:
    """The tables, and the pictures where they are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", action="store_true")
    chosen = parser.parse_args()
    path = DOCS / "inversion.md"
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    path.write_text(f"{before}{BEGIN}\n\n{tables(read(study.RESULTS))}\n{END}{after}", encoding="utf-8")
    if chosen.pictures:
        draw("cifar10", DOCS / "inversion-today.png")
        draw("faces", DOCS / "inversion-today-faces.png")


def tables(rows: Sequence[Row]) -> str:
    """One a data set."""
    told: list[str] = []
    for data, title in DATA.items():
        of_it = [row for row in rows if row["data"] == data]
        states = [weights for weights in study.WEIGHTS if any(row["weights"] == weights for row in of_it)]
        head = [*HEAD, *states]
        told += [f"{title}, {study.SIDES[data]} x {study.SIDES[data]}:", ""]
        told += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *lines(of_it, states), ""]
    return "\n".join(told)


def lines(rows: Sequence[Row], states: Sequence[str]) -> Iterator[str]:
    """One a setting, with a column for each state of the weights."""
    settings = dict.fromkeys(tuple(row[name] for name in SETTING) for row in rows)
    for batch, training, model, statistics, attack in sorted(settings, key=_place):
        setting = dict(zip(SETTING, (batch, training, model, statistics, attack), strict=True))
        found = [row for row in rows if setting.items() <= row.items()]
        each = [[row for row in found if row["weights"] == weights] for weights in states]
        counts = dict.fromkeys(str(len(some)) for some in each if some)
        guesses = [f"{of(found, f'{name}_floor').mean():{_form(name)}}" for name in SCORES]
        shown = [batch, SENT[training], MODELS[model], STATISTICS[statistics], ATTACKS.get(attack, f"`{attack}`")]
        yield f"| {' | '.join([*shown, ', '.join(counts), ' / '.join(guesses), *map(scores, each)])} |"


def _place(setting: tuple[str, ...]) -> tuple[object, ...]:
    """By N, then gradients before epochs, then by network and BatchNorm as they are listed above."""
    batch, training, model, statistics, attack = setting
    return (int(batch), [*SENT].index(training), [*MODELS].index(model), [*STATISTICS].index(statistics), attack)


def scores(rows: Sequence[Row]) -> str:
    """Means over victims, and the distance that is left; the PSNR with its interval.

    Bold is what is beyond the best guess, as far as the interval of the gain tells; fewer than `LEAST` victims have
    neither interval nor bold.
    """
    if not rows:
        return NONE
    told = [score_of(rows, name) for name in SCORES]
    if len(rows) >= LEAST:
        low, high = confidence_interval(of(rows, "psnr"))
        told[0] += f" ({low:.1f}, {high:.1f})"
    left = np.nan if rows[0]["attack"] == OTHERWISE else of(rows, "distance").mean()
    return " / ".join([*told, NONE if np.isnan(left) else f"{left:.2g}"])


def score_of(rows: Sequence[Row], name: str) -> str:
    """A mean, bold where it is beyond the best guess."""
    values = of(rows, name)
    beyond, _ = confidence_interval(gains(values, of(rows, f"{name}_floor"), higher_is_better=name != "lpips"))
    told = f"{values.mean():{_form(name)}}"
    return f"**{told}**" if len(rows) >= LEAST and beyond > 0 else told


def _form(name: str) -> str:
    return ".1f" if name == "psnr" else ".2f"


def of(rows: Sequence[Row], what: str) -> np.ndarray:
    """Of each victim."""
    return np.array([float(row[what]) for row in rows])


SHOWN = [
    (f"{MODELS[model]}, {weights},\n{how}", model, weights, statistics, attack)
    for weights in study.BOTH
    for how, model, statistics, attack in (
        ("running statistics", "resnet18/4", "frozen", "inverting-gradients"),
        ("batch's, withheld", "resnet18/4", "withheld", "by-batch"),
        ("batch's, sent", "resnet18/4", "sent", "by-batch-and-statistics"),
        ("matching", "vit", "none", "inverting-gradients"),
        ("by positions", "vit", "none", "positions"),
    )
]
"""Rows of a picture, below what was held."""
PANELS = [(1, 1), (1, 2), (1, 3), (4, 1)]
"""N and victim of its columns."""


def draw(data: str, path: Path) -> None:
    """What was held, and below what was claimed; nothing where an attack is not of so many images."""
    mpl.rcParams.update({"font.size": 7})
    true = [study.held(data, batch, seed)[0] for batch, seed in PANELS]
    rows = [("held", list[Tensor | None](true))]
    for title, *setting in SHOWN:
        claims = [shown(data, setting, batch, seed, of) for (batch, seed), of in zip(PANELS, true, strict=True)]
        rows.append((title, claims))
    count = sum(map(len, true))
    figure, axes = plt.subplots(len(rows), count, figsize=(8, 8 * len(rows) / (count + 2.2)), squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for (title, images), line in zip(rows, axes, strict=True):
        left = iter(line)
        for some, held in zip(images, true, strict=True):
            for number, axis in enumerate(islice(left, len(held))):
                if some is not None:
                    image = some[number].permute(1, 2, 0).numpy()
                    axis.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
                    if title != "held":
                        axis.set_title(f"{decibels(some[number], held[number]):.1f} dB", pad=2)
        line[0].text(-0.1, 0.5, title, transform=line[0].transAxes, ha="right", va="center")
    axes[0][1].set_title("three victims with one image each")
    axes[0][4].set_title("one with four", loc="left")
    figure.subplots_adjust(left=0.22, right=0.99, top=0.97, bottom=0.01, wspace=0.08, hspace=0.25)
    figure.savefig(path, dpi=80, metadata={"Software": None})
    plt.close(figure)


def shown(data: str, setting: Sequence[str], batch: int, seed: int, true: Tensor) -> Tensor | None:
    """Images of the claim, in the order of the true ones; None where the attack is not of so many."""
    model, weights, statistics, attack = setting
    if attack == "positions" and batch > 1:
        return None
    cell = study.Cell(model, data, batch, "gradient", weights, statistics, attack, seed)
    return metrics.pair_examples(load_file(study.claim(cell))["data"], true)


def decibels(claimed: Tensor, true: Tensor) -> float:
    """PSNR of one image."""
    return metrics.psnr(claimed[None], true[None]).item()


if __name__ == "__main__":
    main()
