"""How long a grid of 5 attacks x 6 defenses x 3 seeds takes, and that `kill -9` in its middle changes nothing.

    python benchmarks/sweep_speed.py [--tiny] [--iterations 400] [--keep runs/sweep-speed] [--out FILE.json]

The clients are people with their own handwriting. Three sweeps are made, each with a store of its own:

1. the grid on all cores; it is killed when half of its cells are done, and started again;
2. the same grid, never interrupted: the table must be the same, bit for bit, but for the seconds;
3. the same with one worker, so one cell after another: how much longer that takes is the gain of working side by side,
   and what it takes beyond the seconds of its cells and federations is the overhead of the sweep itself, its start, its
   checks and its page included.

Run it on a machine that does nothing else.
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pandas as pd
import tomli_w
from measuring import Row, make_parser, publish_rows

ATTACKS = ("inverting-gradients", "sme", "dlg", "sapag", "long-strides")
DEFENSES: list[list[dict[str, Any]]] = [
    [],
    [{"name": "update-noise", "clip": 2.0, "noise_multiplier": 0.001}],
    [{"name": "dp-sgd", "clip": 1.0, "noise_multiplier": 0.5}],
    [{"name": "top-k", "fraction": 0.1}],
    [{"name": "gradient-prune", "pruned": 0.9}],
    [{"name": "quantise"}],
]
FULL, TINY = (5, 6, 3), (2, 2, 2)
"""How many attacks, defenses and seeds."""
PAUSE = 0.2
"""Seconds between two looks at what is done."""


def build_sweep(size: tuple[int, int, int], iterations: int) -> Row:
    """Return the tables of the sweep file; an iteration of DLG's optimiser takes as long as ten of the others."""
    attacks, defenses, seeds = size
    settings = []
    for name in ATTACKS[:attacks]:
        settings.append({"name": name, "iterations": max(1, iterations // 10) if name == "dlg" else iterations})
    return {
        "sweep": {"seeds": [*range(1, seeds + 1)], "axes": {"attack": settings, "defense": DEFENSES[:defenses]}},
        "data": {"name": "handwriting"},
        "partition": {"name": "natural", "samples_per_client": 10, "test_fraction": 0.2},
        "model": {"name": "mlp"},
        "training": {"local_epochs": 2, "batch_size": 5, "learning_rate": 0.02},
        "federation": {"clients": 12, "rounds": 5},
        "adversary": {"victims": [0, 2, 4], "rounds": [1]},
    }


def run_sweep(file: Path, name: str, *changes: str, kill_after: int | None = None) -> tuple[float, int]:
    """Run `fedsim sweep` into the folder `name` with a store of its own, to the end or until so many cells are done.

    Returns:
        Seconds that it took, and how many cells are done; some may have failed.
    """
    command = [sys.executable, "-c", "from fedsim.cli.main import main; main()", "sweep", file.name, "--quiet"]
    command += ["--out", name, "--cells", f"{name}-cells"]
    for change in changes:
        command += ["--set", change]
    store, started = file.parent / f"{name}-cells", time.perf_counter()
    with subprocess.Popen(command, cwd=file.parent) as process:
        while kill_after is not None and count_cells(store) < kill_after and process.poll() is None:
            time.sleep(PAUSE)
        if kill_after is not None:
            process.send_signal(signal.SIGKILL)
        code = process.wait()
    if code not in ((-signal.SIGKILL,) if kill_after is not None else (0, 1)):
        raise SystemExit(f"fedsim sweep {name}: exit code {code}")
    return time.perf_counter() - started, count_cells(store)


def count_cells(store: Path) -> int:
    """Return how many cells of a store are finished."""
    return len(list(store.glob("attacks/*.json")))


def read_scores(folder: Path) -> pd.DataFrame:
    """Return the scores, but for what differs from run to run: the clock and the place of the store."""
    scores = pd.read_csv(folder / "sweep.csv", dtype=str, keep_default_na=False)
    return scores.drop(columns=["seconds", "run"]).sort_values(list(scores.columns[:12]), ignore_index=True)


def measure_sweeps(folder: Path, size: tuple[int, int, int], iterations: int) -> Row:
    """Make the three sweeps; return what they took."""
    file = folder / "grid.toml"
    file.write_text(tomli_w.dumps(build_sweep(size, iterations)), encoding="utf-8")
    killed, done = run_sweep(file, "killed", kill_after=math.prod(size) // 2)
    resumed, _ = run_sweep(file, "killed")
    whole, _ = run_sweep(file, "whole")
    alone, _ = run_sweep(file, "alone", "sweep.workers=1")
    scores = read_scores(folder / "killed")
    if not all(scores.equals(read_scores(folder / name)) for name in ("whole", "alone")):
        raise SystemExit("the tables of the three sweeps differ")
    markers = [json.loads(path.read_text())["marker"] for path in (folder / "alone-cells").glob("*/*.json")]
    states = pd.read_csv(folder / "killed" / "cells.csv")["state"]
    return {
        "cells": math.prod(size),
        "failed": int(states.eq("failed").sum()),
        "s until kill -9": killed,
        "cells done then": done,
        "s after that": resumed,
        "s side by side": whole,
        "s one after another": alone,
        "s of these beyond cells": alone - sum(marker["seconds"] for marker in markers),
    }


def main() -> None:
    """Measure in a folder that is kept, or in one that is not."""
    parser = make_parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="2 attacks x 2 defenses x 2 seeds")
    parser.add_argument("--iterations", type=int, default=400, help="of each attack; of DLG a tenth")
    parser.add_argument("--keep", type=Path, help="a folder that does not exist yet")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary) / "sweeps"
        folder.mkdir(parents=True)
        row = measure_sweeps(folder.resolve(), TINY if options.tiny else FULL, options.iterations)
        publish_rows([row], options.out)


if __name__ == "__main__":
    main()
