"""LMRA's Table 10 (Driouich et al. 2022): what differential privacy, mixup and both leave to the attacks.

    python benchmarks/lmra_defenses.py adult leaf-synthetic att-faces --data-dir DIR      # also flight-prices
    python benchmarks/kept_figures.py && python docs/paper_pages.py                       # the table

Runs fedsim on the experiment files beside it, a run folder for each data set and defense, attacks every client, and
writes what each client scored to `results/lmra-defenses.csv`; what is there already is not run again. The table has
means over clients with 95 % intervals.

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
ROWS = {"adult": "Adult", "leaf-synthetic": "Leaf Synthetic", FACES: "AT&T", "flight-prices": "flights"}
"""What fedsim/api/reproduce/papers/lmra.toml calls the data sets."""
METRICS = {"zest": "zest", "aia": "attribute_accuracy", "sia": "source_accuracy", "sra": "class_ssim"}
RESULTS_OF = {
    "lmra": {
        "zest-ours": "lmra",
        "zest-global": "global model",
        "aia-ours": "aia, lmra",
        "aia-baseline": "aia-gradient",
        "sia-ours": "sia, lmra",
        "sia-baseline": "sia, returned",
        "sra-ours": "sra, lmra",
        "sra-baseline": "sra-gradient",
    },
    "lmra-dummy-data": {
        "zest-ours": "lmra-dummy-data",
        "aia-ours": "aia, dummy data",
        "sia-ours": "sia, dummy data",
        "sra-ours": "sra, dummy data",
    },
    "optimal model": {"aia-ours": "aia, optimal"},
}
"""By the name of a result, the attack that stands for each quantity of the paper's table."""


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


def figures(scores: Scores) -> dict[str, dict[str, dict[str, str]]]:
    """What stands in the paper's place, in %: by the name of a result, row and quantity."""
    return {
        name: {
            f"{title}, {'no defense' if defense == 'none' else defense}": _row(scores, f"{data}, {defense}", name)
            for data, title in ROWS.items()
            for defense in DEFENSES
            if any(run == f"{data}, {defense}" for run, *_ in scores)
        }
        for name in RESULTS_OF
    }


def _row(scores: Scores, run: str, name: str) -> dict[str, str]:
    found, (first, *_) = {}, RESULTS_OF
    for quantity, attack in RESULTS_OF[name].items():
        kind = quantity.partition("-")[0]
        found[quantity] = cell(scores.get((run, attack, METRICS[kind], "value"), ()), scale=100)
        if name == first and not quantity.endswith("ours"):  # what others attack may be refused, the baseline is not
            floor = cell(scores.get((run, attack, METRICS[kind], "floor"), ()), scale=100)
            found[f"{kind}-floor"] = floor.partition(" ")[0]
    if name == first:
        found["accuracy"] = cell(scores.get((run, "federation", "accuracy", "value"), ()), scale=100)
    return {quantity: text for quantity, text in found.items() if text != "-"}


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+", help=", ".join([*SMALLER, FACES]))
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


if __name__ == "__main__":
    main()
