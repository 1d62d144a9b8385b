"""How long a grid of 5 attacks x 6 defenses x 3 seeds takes, and that `kill -9` in its middle changes nothing.

    python benchmarks/sweep_speed.py [--tiny] [--iterations 400] [--keep runs/sweep-speed]

The clients are people with their own handwriting. Three sweeps are made, each with a store of its own:

1. the grid on all cores; it is killed when half of its cells are done, and started again;
2. the same grid, never interrupted: the table must be the same, bit for bit, but for the seconds;
3. the same with one worker, so one cell after another: how much longer that takes is the gain of working side by side,
   and what it takes beyond the seconds of its cells and federations is the overhead of the sweep itself, its start, its
   checks and its page included.

Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import tomli_w

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
CLOCK = ["seconds"]
"""Columns that are not the same twice."""
PAUSE = 0.2
"""Seconds between two looks at what is done."""


def attack(name: str, iterations: int) -> dict[str, Any]:
    """An attack; one iteration of DLG's optimiser takes as long as ten or more of the others."""
    return {"name": name, "iterations": max(1, iterations // 10) if name == "dlg" else iterations}


def grid(size: tuple[int, int, int], iterations: int) -> dict[str, Any]:
    """The sweep file."""
    attacks, defenses, seeds = size
    return {
        "sweep": {
            "seeds": [*range(1, seeds + 1)],
            "axes": {
                "attack": [attack(name, iterations) for name in ATTACKS[:attacks]],
                "defense": DEFENSES[:defenses],
            },
        },
        "data": {"name": "handwriting"},
        "partition": {"name": "natural", "samples_per_client": 10, "test_fraction": 0.2},
        "model": {"name": "mlp"},
        "training": {"local_epochs": 2, "batch_size": 5, "learning_rate": 0.02},
        "federation": {"clients": 12, "rounds": 5},
        "adversary": {"victims": [0, 2, 4], "rounds": [1]},
    }


@contextmanager
def begun(file: Path, name: str, *changes: str) -> Iterator[subprocess.Popen[bytes]]:
    """`fedsim sweep` on its way, into the folder `name` and a store of its own, both beside the file."""
    command = [sys.executable, "-c", "from fedsim.cli.main import main; main()", "sweep", file.name, "--quiet"]
    command += ["--out", name, "--cells", f"{name}-cells"]
    for change in changes:
        command += ["--set", change]
    with subprocess.Popen(command, cwd=file.parent) as process:
        yield process


def swept(file: Path, name: str, *changes: str) -> float:
    """Seconds that a whole sweep takes, some of whose cells may fail."""
    started = time.perf_counter()
    with begun(file, name, *changes) as process:
        if (code := process.wait()) not in (0, 1):
            raise SystemExit(f"fedsim sweep {name}: exit code {code}")
    return time.perf_counter() - started


def killed(file: Path, name: str, cells: int) -> tuple[float, int]:
    """Seconds until so many cells are done and the sweep is killed, and how many are done then."""
    started = time.perf_counter()
    with begun(file, name) as process:
        while done(file.parent / f"{name}-cells") < cells:
            if process.poll() is not None:
                raise SystemExit(f"fedsim sweep {name}: ended before it was killed, exit code {process.returncode}")
            time.sleep(PAUSE)
        process.send_signal(signal.SIGKILL)
    return time.perf_counter() - started, done(file.parent / f"{name}-cells")


def done(store: Path) -> int:
    """How many cells of a store are finished."""
    return len(list(store.glob("attacks/*.json")))


def table(folder: Path) -> pd.DataFrame:
    """The scores, but for what differs from run to run: the clock and the place of the store."""
    found = pd.read_csv(folder / "sweep.csv", dtype=str, keep_default_na=False)
    return found.drop(columns=[*CLOCK, "run"]).sort_values(list(found.columns[:12]), ignore_index=True)


def working(store: Path) -> float:
    """Seconds that cells and federations took, by themselves."""
    return sum(json.loads(path.read_text())["marker"]["seconds"] for path in store.glob("*/*.json"))


def measure_sweeps(folder: Path, size: tuple[int, int, int], iterations: int) -> None:
    """Make the three sweeps and print what they took."""
    file = folder / "grid.toml"
    file.write_text(tomli_w.dumps(grid(size, iterations)), encoding="utf-8")
    cells = math.prod(size)
    first, kept = killed(file, "killed", cells // 2)
    again = swept(file, "killed")
    beside = swept(file, "whole")
    alone = swept(file, "alone", "sweep.workers=1")
    expected = table(folder / "killed")
    same = [expected.equals(table(folder / name)) for name in ("whole", "alone")]
    beyond = alone - working(folder / "alone-cells")
    print(f"{cells} cells, {len(expected)} scores, {iterations} iterations; Python {sys.version.split()[0]}")
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    failed = pd.read_csv(folder / "killed" / "cells.csv")["state"].eq("failed").sum()
    print(f"cells that failed, as attacks may: {failed}")
    print(f"grid: {first + again:.0f} s, {first:.0f} s until kill -9 with {kept} cells done, {again:.0f} s after that")
    print(f"the same scores as without kill -9: {same[0]}; as one cell after another: {same[1]}")
    print(f"at a stretch: {beside:.0f} s on all cores, {alone:.0f} s one after another: {alone / beside:.2f} times")
    print(f"overhead of the sweep: {beyond:.1f} s of {alone:.0f} s, {beyond / alone:.1%}")
    if not all(same):
        raise SystemExit("the tables differ")


def main() -> None:
    """Measure in a folder that is kept, or in one that is not."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="2 attacks x 2 defenses x 2 seeds")
    parser.add_argument("--iterations", type=int, default=400, help="of each attack; of DLG a tenth")
    parser.add_argument("--keep", type=Path, help="a folder that does not exist yet")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary) / "sweeps"
        folder.mkdir(parents=True)
        measure_sweeps(folder.resolve(), TINY if arguments.tiny else FULL, arguments.iterations)


if __name__ == "__main__":
    main()
