"""LMRA's Table 10 (Driouich et al. 2022): what differential privacy, mixup and both leave to the attacks.

    python benchmarks/lmra_defenses.py adult leaf-synthetic att-faces --data-dir DIR      # also flight-prices
    python benchmarks/lmra_defenses.py      # prints what has been measured, runs nothing

Runs fedsim on the experiment files beside it, a run folder for each data set and defense, attacks every client, and
writes what each client scored to `results/lmra-defenses.csv`; what is there already is not run again. Prints the table,
ours beside the paper's: means over clients with 95 % intervals.

A gradient for each example is what DP-SGD costs on a CPU. So but for AT&T, networks have 64 units a layer where the
paper's have 256, and clients a quarter of the examples and of the batch size. Sampling rate, steps and noise
multiplier stay those of the paper's setting, and nearly so the noise beside a clipped gradient, sigma sqrt(d) / B.
"""

from __future__ import annotations

import argparse
import csv
import os
from collections.abc import Sequence
from pathlib import Path

from kept_scores import Scores, cell, read, scored, write
from lmra_sweeps import ATTRIBUTE, FACES, HERE, fedsim

RESULTS = HERE / "results" / "lmra-defenses.csv"
SMALLER = {
    "adult": {"partition.examples": 3075},
    "leaf-synthetic": {"partition.samples_per_client": 500},
    "flight-prices": {"data.max_examples": 3000},
}
"""Of each data set, what keeps a quarter of the examples; the rest of what differs is the same for all of them."""
DP, MIXUP = 'name = "dp-sgd", epsilon = 10.0, delta = 1e-5', 'name = "mixup"'
DEFENSES = {"none": (), "DP": (DP,), "mixup": (MIXUP,), "DP + mixup": (MIXUP, f"{DP}, with_mixing = true")}
PAPER = {
    ("flight-prices", "none"): "84.2 71.4 77.2 73.1 84.3 82.1",
    ("flight-prices", "DP"): "71.4 59.6 71.3 66.6 76.6 72.1",
    ("flight-prices", "mixup"): "80.3 68.2 75.1 72.3 82.0 80.6",
    ("flight-prices", "DP + mixup"): "64.6 57.4 68.6 65.9 75.2 72.6",
    ("adult", "none"): "88.4 70.7 73.1 67.6 78.6 75.1",
    ("adult", "DP"): "79.6 61.9 68.6 62.5 73.5 73.1",
    ("adult", "mixup"): "86.3 68.8 72.1 66.4 77.0 73.6",
    ("adult", "DP + mixup"): "77.3 60.3 66.0 61.7 71.9 71.2",
    ("leaf-synthetic", "none"): "78.2 67.3 71.1 66.3 77.9 74.6",
    ("leaf-synthetic", "DP"): "72.1 60.4 63.3 61.1 71.2 70.8",
    ("leaf-synthetic", "mixup"): "76.3 63.0 69.9 65.1 74.5 71.6",
    ("leaf-synthetic", "DP + mixup"): "71.8 60.1 62.5 60.8 70.2 69.9",
    (FACES, "none"): "57.3 52.8 - - 61.6 57.1 34.3 26.1",
    (FACES, "DP"): "52.1 48.4 - - 57.6 52.4 23.4 18.7",
    (FACES, "mixup"): "54.1 50.4 - - 60.3 56.1 33.7 25.1",
    (FACES, "DP + mixup"): "50.1 49.6 - - 55.0 51.4 23.1 18.0",
}
"""Table 10, in %: LMRA's own and the global model's, then ours and the baseline's of AIA, SIA and SRA."""
TABLES = (
    ("LMRA, Zest", "zest", "global model", "lmra", "lmra-dummy-data"),
    ("AIA, accuracy", "attribute_accuracy", "aia-gradient", "aia, lmra", "aia, dummy data", "aia, optimal"),
    ("SIA, accuracy", "source_accuracy", "sia, returned", "sia, lmra", "sia, dummy data"),
    ("SRA, SSIM", "class_ssim", "sra-gradient", "sra, lmra", "sra, dummy data"),
)
"""The metric of each attack of the paper, its baseline, then attacks on decoded models."""


def changed(data: str, defenses: Sequence[str]) -> list[str]:
    """What differs from the experiment file."""
    moved: dict[str, object] = {}
    if data != FACES:
        moved = {**SMALLER[data], "model.hidden": [64, 64, 64], "training.batch_size": 128}
    if data == "flight-prices":  # targets of a regression are mixed, too, which the defense wants to be told
        defenses = [text.replace(MIXUP, f"{MIXUP}, regression = true") for text in defenses]
    moved |= {"federation.vectorise": "false", "defense": f"[{', '.join(f'{{{text}}}' for text in defenses)}]"}
    return [word for name, value in moved.items() for word in ("--set", f"{name}={value}")]


def measure(data: str, defense: str, folder: Path, data_dir: str) -> Path:
    """The run folder of one cell, recorded and attacked."""
    run = folder / f"{data}-{defense.replace(' + ', '-')}".lower()
    begin = [str(HERE / f"lmra-{data}.toml"), "--out", str(run), *changed(data, DEFENSES[defense])]
    fedsim(
        "run",
        *(["--resume", str(run)] if (run / "experiment.toml").exists() else begin),
        "--quiet",
        "--data-dir",
        data_dir,
    )
    attacks = "lmra-defenses-faces-attacks.toml" if data == FACES else "lmra-defenses-attacks.toml"
    known = [] if data == FACES else ["--set", f"adversary.knowledge.partial_records={ATTRIBUTE[data]}"]
    beside = ["--quiet", "--data-dir", data_dir, "--set", "adversary.workers=1", *known]
    fedsim("attack", str(run), str(HERE / attacks), *beside, may_fail=True)
    return run


def learned(name: str, run: Path) -> Scores:
    """How well the federation of a run learned, on test data."""
    with (run / "metrics.csv").open() as file:
        *_, last = [row for row in csv.DictReader(file) if row["client"] == "server" and row["loss"]]
    return {
        (name, "federation", metric, "value"): [float(last[metric])] for metric in ("accuracy", "loss") if last[metric]
    }


def print_tables(scores: Scores) -> None:
    """One table for each attack of the paper, in Markdown."""
    for place, (title, metric, *attacks) in enumerate(TABLES):
        print(f"\n| {title} | paper: ours, baseline | floor | {' | '.join(f'`{name}`' for name in attacks)} |")
        print("|---" * (len(attacks) + 3) + "|")
        for (data, defense), text in PAPER.items():
            name, published = f"{data}, {defense}", text.split()[2 * place : 2 * place + 2]
            if (name, attacks[-1], metric, "value") not in scores:
                continue
            floor = cell(scores[name, attacks[0], metric, "floor"]).partition(" ")[0]
            ours = " | ".join(cell(scores.get((name, attack, metric, "value"), [None])) for attack in attacks)
            print(f"| {name} | {', '.join(published)} | {floor} | {ours} |")
    print("\n| accuracy of the federation |" + "".join(f" {defense} |" for defense in DEFENSES))
    print("|---" * (len(DEFENSES) + 1) + "|")
    for data in dict.fromkeys(data for data, _ in PAPER):
        kept = [scores.get((f"{data}, {defense}", "federation", "accuracy", "value"), []) for defense in DEFENSES]
        print(f"| {data} | {' | '.join(cell(values) for values in kept)} |")


def main() -> None:
    """Measure what is missing, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="*", help=f"{', '.join([*SMALLER, FACES])}; none prints what was measured")
    parser.add_argument("--data-dir", default=os.environ.get("FEDSIM_DATA", "."))
    parser.add_argument("--folder", type=Path, default=Path("runs/lmra-defenses"))
    options = parser.parse_args()
    if strange := set(options.data) - {*SMALLER, FACES}:
        parser.error(f"data: expected {', '.join([*SMALLER, FACES])}, got {', '.join(sorted(strange))}")
    for data in options.data:
        for defense in DEFENSES:
            name, kept = f"{data}, {defense}", read(RESULTS)
            if not any(run == name for run, *_ in kept):
                run = measure(data, defense, options.folder, options.data_dir)
                write(RESULTS, kept | scored(name, run) | learned(name, run))
    print_tables(read(RESULTS))


if __name__ == "__main__":
    main()
