"""What a client update costs: fedsim beside a bare PyTorch loop, pfl-research, fluke and stock Flower on Ray.

    python benchmarks/engines.py [--repeats 3] [--only SECTION ...] [--out FILE.json] [--quick]

All train the same network from the same weights on the same synthetic data by FedAvg, evaluation
off, one thread a process; every framework in a process of its own, all of them in turn in each
repeat. CPU time is user + system of all processes of a run, Ray's daemons and actors included;
wall time is the server's. Both are taken from the end of round 2 to the end of the last round, so
imports and start-up are not in them; printed are medians over repeats, in brackets lowest and
highest. "driver" is the CPU time of the process that holds the server, in which engine serial and
the bare loop train as well. The loss at the end shows that all did the same work. fedsim's curious server records
round 1 alone, except in rows that say "recording".

pfl-research and fluke live in .venv-peers, which `make benchmark-engines` sets up.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tomli_w
from frameworks import launch
from frameworks.fedsim_engine import experiment
from frameworks.task import Task

BARE, SERIAL, RAY, STOCK, PFL, FLUKE = (
    "bare loop",
    "fedsim serial",
    "fedsim ray",
    "stock Flower+Ray",
    "pfl-research",
    "fluke",
)
MODULES = {
    BARE: "bare",
    SERIAL: "fedsim_serial",
    PFL: "pfl_research",
    FLUKE: "fluke_fl",
    RAY: "fedsim_ray",
    STOCK: "flower_ray",
}
PEERS = (PFL, FLUKE)
RATIOS = [(SERIAL, BARE), (SERIAL, PFL), (SERIAL, FLUKE), (RAY, BARE), (RAY, STOCK)]
UPDATE = {"cpu_ms": "CPU ms/update", "wall_ms": "wall ms/update", "loss": "final loss"}
DRIVER = {"driver_ms": "driver CPU ms/update", **UPDATE}
ROUND = {"cpu_s": "CPU s/round", "wall_s": "wall s/round"}
START = {"start_s": "s to the end of round 1", "total_s": "s in all"}
MEMORY = {"peak_mb": "peak MB (PSS)", "start_s": "s to the end of round 1"}
DEMO = launch.PROJECT / "examples" / "quickstart.toml"
SERIALLY = 'federation.engine="serial"'
DEMO_IMPORTS = [
    "fedsim.cli.main",
    "fedsim.audit.audit",
    "fedsim.report.page",
    "fedsim.federation.simulation",
    "fedsim.federation.engines.serial",
    "strategies.app",
    "clients.app",
    "adversaries.inversion.surrogate_model",
    "sklearn.datasets",
    "matplotlib.figure",
]
ATTACK_IMPORTS = ["torch._dynamo", "torchmetrics.functional.image", "scipy.optimize"]  # Adam, scores


@dataclass
class Row:
    """What to do in each repeat, and what came out; a repeat that failed left an empty sample."""

    name: str
    measure: Callable[[], dict[str, Any]]
    samples: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Section:
    """A table: its title, its columns by their keys in the samples, its rows."""

    title: str
    columns: Mapping[str, str]
    rows: list[Row]


def row(name: str, job: str, clients: int, rounds: int, *options: str, memory: bool = False) -> Row:
    """A row for one framework of `MODULES`; `options` are those of `python -m frameworks`."""
    python = (launch.PEERS if name in PEERS else launch.OURS) / "python"
    arguments = [MODULES[name], job, "--clients", str(clients), "--rounds", str(rounds), *options]
    return Row(name, lambda: launch.framework(python, arguments, memory=memory))


def sections(folder: Path, *, quick: bool, peers: bool) -> dict[str, Section]:
    """Everything that can be measured, by the name that `--only` takes."""

    def few(clients: int) -> int:
        return min(clients, 4) if quick else clients

    def compare(title: str, job: str, clients: int, rounds: int, names: list[str]) -> Section:
        chosen = [name for name in names if peers or name not in PEERS]
        rows = [row(name, job, few(clients), rounds) for name in chosen]
        recording = row(SERIAL, job, few(clients), rounds, "--record")
        recording.name += ", recording"
        return Section(f"{title}, {few(clients)} clients", UPDATE, [*rows, recording])

    def grow(job: str, clients: int) -> list[Row]:
        plain = [row(name, job, few(clients), 4) for name in (BARE, SERIAL, RAY)]
        recording = [row(name, job, few(clients), 4, "--record") for name in (SERIAL, RAY)]
        for measured in (*plain, *recording):
            measured.name = f"{job}, {measured.name}"
        for measured in recording:
            measured.name += ", recording"
        return [*plain, *recording]

    ours = [BARE, SERIAL, RAY, STOCK]
    return {
        "mlp-100": compare("mlp, 60 k parameters, 1 step", "mlp", 100, 12, list(MODULES)),
        "mlp-1000": compare("mlp, 60 k parameters, 1 step", "mlp", 1000, 4, list(MODULES)),
        "lenet": compare("LeNet-5, 62 k parameters, 10 steps", "lenet", 100, 4, ours),
        "cnn": compare("cnn, 1.03 M parameters, 10 steps", "cnn", 20, 4, ours),
        "parameters": Section(
            f"parameters: one step of 1.0 M (wide, {few(40)} clients) and 10 M (wider, {few(8)} clients)",
            DRIVER,
            [*grow("wide", 40), *grow("wider", 8)],
        ),
        "loop": Section(f"clients at once or one by one: engine serial, {few(100)} clients", UPDATE, at_once(few(100))),
        "logical": Section(
            "logical clients: mlp on engine serial",
            ROUND,
            [per_round(sampled=few(100), clients=few(100)), per_round(sampled=few(100), clients=100 * few(100))],
        ),
        "start-up": Section(
            f"start-up: from the command to the end of round 1, mlp, {few(10)} clients, Ray with 2 actors",
            START,
            [
                Row(RAY, lambda: launch.fedsim(start_up(folder, few(10)))),
                row(STOCK, "mlp", few(10), 1, "--warm-up", "0"),
            ],
        ),
        "demo": Section(
            "the demo (examples/quickstart.toml) on engine serial",
            START,
            [
                Row("fedsim run", lambda: launch.fedsim(DEMO, SERIALLY)),
                Row("its imports alone", lambda: launch.imports([*DEMO_IMPORTS, *ATTACK_IMPORTS])),
                Row("fedsim run, no attacks", lambda: launch.fedsim(DEMO, SERIALLY, 'adversary.when="never"')),
                Row("its imports alone (no attacks)", lambda: launch.imports(DEMO_IMPORTS)),
            ],
        ),
        "memory": Section(
            f"memory: the driver of engine ray, three recorded rounds of {few(1000)} clients x 1.0 M parameters",
            MEMORY,
            [row(RAY, "wide", few(1000), 3, "--warm-up", "1", "--record", memory=True)],
        ),
    }


def at_once(clients: int) -> list[Row]:
    """Rows of engine serial, each network first with clients at once, then with clients one by one."""
    jobs = {
        "60 k, 1 step": ("mlp",),
        "60 k, 10 steps": ("mlp-10",),
        "60 k, skewed": ("mlp-10", "--skewed"),
        "398 k, 1 step": ("broad",),
    }
    rows = []
    for title, (job, *options) in jobs.items():
        rows += [row(SERIAL, job, clients, 12, *options), row(SERIAL, job, clients, 12, *options, "--loop")]
        rows[-2].name, rows[-1].name = f"{title}, at once", f"{title}, one by one"
    return rows


def per_round(*, sampled: int, clients: int) -> Row:
    """A row of engine serial that counts rounds instead of updates."""
    updates = row(SERIAL, "mlp", clients, 12, "--sampled", str(sampled))

    def measure() -> dict[str, Any]:
        sample = updates.measure()
        return {f"{kind}_s": sample[f"{kind}_ms"] * sampled / 1e3 for kind in ("cpu", "wall")}

    return Row(f"{sampled} of {clients} clients", measure)


def start_up(folder: Path, clients: int) -> Path:
    """An experiment file for the command line, without attacks."""
    task = Task(job="mlp", clients=clients, rounds=1, warm_up=0, sampled=clients, actors=2, record=True)
    path = folder / "start-up.toml"
    path.write_text(tomli_w.dumps(experiment(task, "ray")))
    return path


def table(section: Section) -> str:
    """Medians and ranges; then ratios, each the median of the ratios within a repeat."""
    lines = ["", section.title]
    for line in section.rows:
        cells = []
        for key, label in section.columns.items():
            if found := [sample[key] for sample in line.samples if key in sample]:
                cells.append(f"{label} {_spread(found)}")
        lines.append(f"  {line.name:26}{'  '.join(cells) or 'failed'}")
    named = {line.name: line for line in section.rows}
    for ours, theirs in RATIOS:
        if ours in named and theirs in named:
            lines.append(f"    {ours} / {theirs}: {_ratio(named[ours], named[theirs], section)}")
    return "\n".join(lines)


def _ratio(ours: Row, theirs: Row, section: Section) -> str:
    cells = []
    for key, label in section.columns.items():
        pairs = zip(ours.samples, theirs.samples, strict=True)
        found = [a[key] / b[key] for a, b in pairs if key in a and key in b]
        if found and key != "loss":
            cells.append(f"{label.split()[0]} {_spread(found)}")
    return "  ".join(cells)


def _spread(values: list[float]) -> str:
    if min(values) == max(values):
        return f"{values[0]:.4g}"
    return f"{statistics.median(values):.4g} [{min(values):.4g}, {max(values):.4g}]"


def save(path: Path, machine: str, chosen: Mapping[str, Section]) -> None:
    """Every sample, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = {name: {line.name: line.samples for line in section.rows} for name, section in chosen.items()}
    path.write_text(json.dumps({"machine": machine, "samples": samples}, indent=2) + "\n")


def main() -> None:
    """Measure, and print after each repeat what there is so far."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--only", nargs="+", metavar="SECTION", help="of: " + ", ".join(sections(Path(), quick=True, peers=True))
    )
    parser.add_argument("--out", type=Path, help="write every sample to this JSON file")
    parser.add_argument("--quick", action="store_true", help="at most 4 clients: does the benchmark itself work?")
    asked = parser.parse_args()
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, " + ", ".join(
        f"{name} {version(name)}" for name in ("torch", "flwr", "ray")
    )
    print(machine)
    peers = (launch.PEERS.parent / "ready").exists()
    if not peers:
        print("pfl-research and fluke are left out: .venv-peers is missing; `make benchmark-engines` sets it up")
    with tempfile.TemporaryDirectory() as folder:
        known = sections(Path(folder), quick=asked.quick, peers=peers)
        if unknown := set(asked.only or ()) - set(known):
            parser.error(f"--only: nothing is called {', '.join(sorted(unknown))}; choose from {', '.join(known)}")
        chosen = {name: section for name, section in known.items() if not asked.only or name in asked.only}
        for repeat in range(1, asked.repeats + 1):
            print(f"\nrepeat {repeat} of {asked.repeats}, load average {os.getloadavg()[0]:.1f}")
            for section in chosen.values():
                for line in section.rows:
                    line.samples.append(_sample(line))
                print(table(section), flush=True)
                if asked.out:
                    save(asked.out, machine, chosen)


def _sample(line: Row) -> dict[str, Any]:
    try:
        return line.measure() | {"load": os.getloadavg()[0]}
    except launch.BenchmarkError as error:
        print(f"{line.name}: {error}")
        return {}


if __name__ == "__main__":
    main()
