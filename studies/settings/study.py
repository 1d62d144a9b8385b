"""Settings of SME and IG, chosen on simulated clients of public data, against defaults and a choice by hand.

Each client has two images, takes two steps at fresh weights and sends its weights. Labels are granted. Settings are
chosen on two simulated clients of test images, in trials of 100 iterations; then three clients of training images are
attacked with 200 iterations by the defaults, by what we chose by hand, and by what was chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import fedsim
from studies.running import RUNS, Row
from studies.writing import markdown_table, select_rows

DATA: dict[str, dict[str, Any]] = {
    "digits": {"name": "mnist"},
    "cifar10": {"name": "cifar10"},
    "faces": {"name": "att-faces", "size": [32, 32], "test_images": 5},
}
NETWORKS: dict[str, dict[str, Any]] = {
    "lenet": {"name": "lenet"},
    "convnet": {"name": "convnet"},
    "sme-cnn": {"name": "sme-cnn"},
    "resnet18/4": {"name": "resnet18", "channels": 16},
    "vit": {"name": "vit", "patch": 4},
}
"""`resnet18/4` has a quarter of ResNet18's channels, so that one core attacks it."""
TITLES = {"lenet": "LeNet", "convnet": "ConvNet", "sme-cnn": "SME's CNN", "resnet18/4": "ResNet18/4", "vit": "ViT"}
VICTIMS, ITERATIONS, TRIAL_ITERATIONS = 3, 200, 100
BY_HAND: dict[str, Any] = {"step_size": 0.1, "signed": True}
TOLERANCE = 0.5
"""dB by which the chosen settings may be worse."""


def experiment_tables(network: str, data: str, attacks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the experiment in which fresh victims are attacked."""
    return {
        "data": DATA[data],
        "partition": {"name": "iid", "samples_per_client": 2},
        "model": NETWORKS[network],
        "training": {"local_epochs": 2, "batch_size": 2, "learning_rate": 0.01, "batch_norm": "eval"},
        "federation": {"clients": VICTIMS, "evaluate_every": 0, "seed": 1},
        "adversary": {"victims": list(range(VICTIMS)), "workers": 1, "knowledge": {"labels": True}},
        "attack": [{"iterations": ITERATIONS, **attack} for attack in attacks],
    }


def measure(network: str, data: str, attack: str) -> list[Row]:
    """Choose settings, attack fresh victims; return a row for each victim and setting."""
    folder = RUNS / "settings" / f"{network.replace('/', '-')}-{data}-{attack}"
    tables = experiment_tables(network, data, [{"name": attack}])
    tuning = fedsim.tune(tables, folder / "tuned.toml", iterations=TRIAL_ITERATIONS)
    chosen, trials = tuning.attacks[0].best_trial, tuning.attacks[0].trials
    closest = min((trial for trial in trials if trial.iterations == TRIAL_ITERATIONS), key=lambda trial: trial.l_sim)
    choices = {"default": {}, "by hand": BY_HAND, "tuned": chosen.changes}
    attacks = [{"name": attack, "label": label, **changes} for label, changes in choices.items()]
    run = fedsim.run(experiment_tables(network, data, attacks), folder / "victims", overwrite=True)
    rows = []
    for score in run.scores.to_dict("records"):
        if score["metric"] == "psnr":
            settings = " ".join(f"{name}={value}" for name, value in choices[score["attack"]].items())
            about = {"settings": score["attack"], "changes": settings, "client": score["victim"]}
            # What a choice by the distance to the message alone would have taken in the short trials.
            short = {
                "best_trial": max(trial.score for trial in trials if trial.iterations == TRIAL_ITERATIONS),
                "closest_trial": closest.score,
            }
            rows.append({**about, "psnr": score["value"], "floor": score["floor"], **short})
    return rows


def tables(rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the table of the page."""
    lines = []
    for network in NETWORKS:
        for data in DATA:
            for attack in ("sme", "inverting-gradients"):
                cell = select_rows(rows, network=network, data=data, attack=attack)
                if cell:
                    lines.append(format_line(TITLES[network], data, attack, cell))
    shown = ["best guess", "defaults", "by hand", "tuned", "tuned - better", "by distance", "tuned settings"]
    head = ["network", "data", "attack", *shown]
    return {"": markdown_table(head, lines)}


def format_line(network: str, data: str, attack: str, rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a line of the table: means over victims, and the tuned settings' distance to the better of the others."""
    means = {}
    for label in ("default", "by hand", "tuned"):
        means[label] = float(np.mean([float(row["psnr"]) for row in select_rows(rows, settings=label)]))
    floor = float(np.mean([float(row["floor"]) for row in select_rows(rows, settings="tuned")]))
    changes = select_rows(rows, settings="tuned")[0]["changes"] or "the defaults"
    difference = means["tuned"] - max(means["default"], means["by hand"])
    mark = f"{difference:+z.1f}" if difference >= -TOLERANCE else f"**{difference:+z.1f}**"
    values = [f"{value:.1f}" for value in (floor, *means.values())]
    lost = float(rows[0]["closest_trial"]) - float(rows[0]["best_trial"])
    return [network, data, f"`{attack}`", *values, mark, f"{lost:+z.1f}", changes]
