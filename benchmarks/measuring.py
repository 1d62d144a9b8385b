"""What all benchmarks share: arguments, turns, tables, and results that name their machine, commit and command."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

PROJECT = Path(__file__).resolve().parent.parent
Row = dict[str, Any]


def make_parser(description: str | None, repeats: int = 0, choices: Iterable[str] = ()) -> argparse.ArgumentParser:
    """Return a parser of what benchmarks take: `--out`, `--repeats` where things take turns, `--only` with choices."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if repeats:
        parser.add_argument("--repeats", type=int, default=repeats, help=f"turns (default {repeats})")
    parser.add_argument("--out", type=Path, help="write everything to this JSON file")
    if choices := list(choices):
        parser.add_argument("--only", nargs="+", choices=choices, default=choices, metavar="NAME")
    return parser


def measure_in_turns(ways: Mapping[str, Callable[[], float]], repeats: int) -> list[dict[str, float]]:
    """Measure every way once in each turn, so that what slows the machine slows all; a turn before is not counted."""
    turns = [{name: way() for name, way in ways.items()} for _ in range(repeats + 1)]
    return turns[1:]


def compare_turns(turns: Sequence[Mapping[str, float]], base: str, about: Row) -> list[Row]:
    """Return a row for each way: median milliseconds, and the ratio to `base` of the same turn with its quartiles."""
    rows = []
    for name in turns[0]:
        seconds = [turn[name] for turn in turns]
        ratios = [turn[name] / turn[base] for turn in turns]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        figures = {"ms": 1e3 * statistics.median(seconds), "ratio": middle, "lower": low, "upper": high}
        rows.append({**about, "way": name, **figures, "seconds": seconds})
    return rows


def publish_rows(rows: Sequence[Row], out: Path | None) -> None:
    """Print a Markdown table of the rows below where they come from; write both to `out`, lists of turns included."""
    origin = describe_origin()
    print(*(f"{key}: {value}" for key, value in origin.items()), sep="\n", end="\n\n")
    columns = [key for key in dict.fromkeys(key for row in rows for key in row) if key != "seconds"]
    print(f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", sep="\n")
    for row in rows:
        print(f"| {' | '.join(format_value(row.get(key, '')) for key in columns)} |", flush=True)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({**origin, "rows": rows}, indent=2) + "\n")


def format_value(value: Any) -> str:
    """Format a number with four digits, anything else as it is."""
    return f"{value:.4g}" if isinstance(value, float) else f"{value}"


def describe_origin() -> dict[str, str]:
    """Return on which machine, from which commit and by which command a benchmark runs."""
    words = ["git", "-C", str(PROJECT), "describe", "--always", "--dirty=+", "--exclude=*"]
    commit = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    processor = platform.machine()
    for line in read_lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
    load = f"load {os.getloadavg()[0]:.1f}"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return {
        "machine": f"{processor}, {os.cpu_count()} cores, {load}, {versions}",
        "commit": commit or "unknown",
        "command": shlex.join(["python", os.path.relpath(sys.argv[0], PROJECT), *sys.argv[1:]]),
    }


def run_alone(*arguments: str) -> Any:
    """Run this benchmark with other arguments in a process of its own; return the JSON that it prints last."""
    words = [sys.executable, sys.argv[0], *arguments]
    return json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def peak_growth(work: Callable[[], object]) -> float:
    """Return by how many MiB the memory of this process rises at its peak while it works (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = read_memory("VmRSS")
    work()
    return read_memory("VmHWM") - before


def read_memory(field: str) -> float:
    """Return a figure of the memory of this process in MiB."""
    return next(int(line.split()[1]) / 1024 for line in read_lines("/proc/self/status") if line.startswith(field))


def read_lines(path: str) -> list[str]:
    """Return the lines of a file; none where there is no such file."""
    return Path(path).read_text().splitlines() if Path(path).exists() else []
