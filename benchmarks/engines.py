"""What a client update costs: fedsim beside a bare PyTorch loop, pfl-research, fluke and stock Flower on Ray.

    python benchmarks/engines.py [--repeats 3] [--only SECTION ...] [--out FILE.json] [--quick]

All train the same network from the same weights on the same synthetic data by FedAvg, evaluation off, one thread a
process; every framework in a process of its own, all of a section in turn. CPU time (`ms` an update) is user + system
of all processes of a run, Ray's daemons and actors included; wall time is the server's; "driver" is the CPU time of the
process that holds the server, without what fedsim's clients do there on engine serial; a bare loop trains in it. All
are taken from the end of round 2 to the end of the last round, so imports and start-up are not in them; ratios are of
CPU time to the section's first way. The loss at the end shows that all did the same work. fedsim's curious server
records round 1 alone, except in ways that say "recording".

pfl-research and fluke live in .venv-peers, which `make benchmark-engines` sets up.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from frameworks.jobs import Task
from frameworks.launch import BenchmarkError, run_framework
from measuring import PROJECT, Row, compare_turns, make_parser, publish_rows

BARE, SERIAL, RAY, STOCK = "bare loop", "fedsim serial", "fedsim ray", "stock Flower+Ray"
PFL, FLUKE = "pfl-research", "fluke"
MODULES = {
    BARE: "bare",
    SERIAL: "fedsim_engine",
    PFL: "pfl_research",
    FLUKE: "fluke_fl",
    RAY: "fedsim_engine",
    STOCK: "flower_ray",
}
PEERS = PROJECT / ".venv-peers"
PRIVATE = {PFL: PEERS, FLUKE: PEERS}
"""Environments that are not fedsim's."""


@dataclass(frozen=True)
class Run:
    """One framework on one task; `about` is added to its name."""

    way: str
    task: Task
    about: str = ""

    def recording(self) -> Run:
        """Return the same with every round recorded."""
        return replace(self, task=replace(self.task, record=True), about=f"{self.about}, recording")

    def measure(self, *, memory: bool) -> dict[str, Any]:
        """Run it in a process of its own."""
        python = PRIVATE.get(self.way, PROJECT / ".venv") / "bin" / "python"
        task = replace(self.task, engine="ray" if self.way == RAY else "serial")
        return run_framework(python, MODULES[self.way], task, memory=memory)


def compare_ways(job: str, clients: int, rounds: int, ways: Iterable[str]) -> list[Run]:
    """Return a run of each framework, and one of fedsim that records every round."""
    task = Task(job, clients, rounds)
    return [*(Run(way, task) for way in ways), Run(SERIAL, task).recording()]


def grow_network(job: str, clients: int) -> list[Run]:
    """Return runs of a network with many parameters, recorded and not."""
    runs = [Run(way, Task(job, clients, 4), f", {job}") for way in (BARE, SERIAL, RAY)]
    return [*runs, *(run.recording() for run in runs[1:])]


def train_at_once(title: str, job: str, *, skewed: bool = False) -> list[Run]:
    """Return a run with clients one by one, and one with clients at once."""
    task = Task(job, 100, 12, skewed=skewed)
    one_by_one = Run(SERIAL, replace(task, loop=True), f", {title}, one by one")
    return [one_by_one, Run(SERIAL, task, f", {title}, at once")]


SECTIONS = {
    "mlp-100": compare_ways("mlp", 100, 12, MODULES),
    "mlp-1000": compare_ways("mlp", 1000, 4, MODULES),
    "lenet": compare_ways("lenet", 100, 4, [BARE, SERIAL, RAY, STOCK]),
    "cnn": compare_ways("cnn", 20, 4, [BARE, SERIAL, RAY, STOCK]),
    "wide": grow_network("wide", 40),
    "wider": grow_network("wider", 8),
    "loop, 1 step": train_at_once("60 k", "mlp"),
    "loop, 10 steps": train_at_once("60 k", "mlp-10"),
    "loop, skewed": train_at_once("60 k", "mlp-10", skewed=True),
    "loop, broad": train_at_once("398 k", "broad"),
    "sampled": [
        Run(SERIAL, Task("mlp", 100, 12), ", 100 of 100"),
        Run(SERIAL, Task("mlp", 10_000, 12, sampled=100), ", 100 of 10 000"),
    ],
    "start-up": [Run(way, Task("mlp", 10, 1, warm_up=0)) for way in (STOCK, RAY)],
    "memory": [Run(RAY, Task("wide", 1000, 3, warm_up=1)).recording()],
}


def measure_section(name: str, runs: list[Run], repeats: int) -> list[Row]:
    """Return a row for each run that did not fail: medians over turns."""
    samples: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for _ in range(repeats):
        for run in runs:
            way = f"{run.way}{run.about}"
            try:
                samples[way].append(run.measure(memory=name == "memory"))
            except BenchmarkError as error:
                print(f"{name}: {way}: {error}", flush=True)
    complete = {way: turns for way, turns in samples.items() if len(turns) == repeats}
    if not complete:
        return []
    cpu = [{way: turns[turn]["cpu"] for way, turns in complete.items()} for turn in range(repeats)]
    rows = compare_turns(cpu, next(iter(complete)), {"section": name})
    for row in rows:
        turns = complete[row["way"]]
        row |= {f"{kind}, ms": 1e3 * statistics.median(turn[kind] for turn in turns) for kind in ("driver", "wall")}
        for figure in ("loss", "start_s", "peak_mb"):
            if figure in turns[0]:
                row[figure] = statistics.median(turn[figure] for turn in turns)
    return rows


def main() -> None:
    """Measure all sections, with what has been measured so far in the result."""
    parser = make_parser(__doc__, repeats=3, choices=SECTIONS)
    parser.add_argument("--quick", action="store_true", help="at most 4 clients: does the benchmark itself work?")
    options = parser.parse_args()
    if not (PEERS / "ready").exists():
        print("pfl-research and fluke are left out: .venv-peers is missing; `make benchmark-engines` sets it up")
    rows: list[Row] = []
    for name in options.only:
        runs = [run for run in SECTIONS[name] if run.way not in PRIVATE or (PEERS / "ready").exists()]
        if options.quick:
            few = [run for run in runs if not run.task.sampled]
            runs = [replace(run, task=replace(run.task, clients=min(run.task.clients, 4))) for run in few]
        rows += measure_section(name, runs, options.repeats)
        publish_rows(rows, options.out)


if __name__ == "__main__":
    main()
