"""What each measure of exposure costs: processor time against one client step, and memory (Linux).

    python benchmarks/measure_cost.py [--repeats 5] [--only NAME ...]   # some alone are printed, and not kept
    python benchmarks/measure_cost.py --spectrum   # of one example: as estimated by default, and exactly

LeNet with tanh on random inputs of CIFAR-10's shape, one thread, batches of 1 and 8; a client step is the gradient of
the batch in plain torch. All measures take turns, and each time is divided by that of a step of the same turn; printed
are medians. Memory is what a process of its own grew by at its peak, after everything is imported.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fedsim.base.randomness import seed_globals
from fedsim.base.task import Task
from fedsim.exposure.measure import Measure
from fedsim.exposure.spectrum import Spectrum
from fedsim.plugins import registry
from fedsim.training.models.lenet import LeNet

RESULTS = Path(__file__).parent / "results" / "measure-cost.csv"
BATCHES = (1, 8)
MEASURES: dict[str, dict[str, Any]] = {
    "gradient-norm": {},
    "jacobian-norm": {},
    "sensitivity": {},
    "lipschitz": {},
    "angular-lipschitz": {},
    "lavp": {},
    "spectrum": {},
    "expected-error": {},
}


class Client:
    """A model and a batch."""

    def __init__(self, size: int) -> None:
        self.task = Task((3, 32, 32), 10)
        with seed_globals("measure-cost"):
            self.model = LeNet().build(self.task)
            self.inputs, self.labels = torch.randn(size, 3, 32, 32), torch.arange(size) % 10

    def step(self) -> None:
        """The gradient of the batch."""
        loss = self.task.loss(self.model(self.inputs), self.labels)
        torch.autograd.grad(loss, list(self.model.parameters()))

    def compute_measure(self, measure: Measure) -> dict[str, float]:
        """The measure of the batch."""
        return measure.compute(self.model, self.task.loss, self.inputs, self.labels)


def main() -> None:
    """Measure, print and write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=list(MEASURES))
    parser.add_argument("--spectrum", action="store_true", help="show the estimated spectrum beside the exact one")
    parser.add_argument("--memory-of", nargs=2, metavar=("NAME", "BATCH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory_of:
        name, size = options.memory_of
        print(_growth(name, Client(int(size))))
        return
    if options.spectrum:
        client = Client(1)
        for spectrum in (Spectrum(), Spectrum(exact=client.inputs.numel())):
            print(
                ", ".join(f"{name} {value:.5g}" for name, value in client.compute_measure(spectrum).items()), flush=True
            )
        return
    rows = [row for size in BATCHES for row in _rows(options.only, size, options.repeats)]
    if len(options.only) < len(MEASURES):
        return  # the table has all of them
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _rows(names: list[str], size: int, repeats: int) -> list[dict[str, Any]]:
    client = Client(size)
    measures = {name: registry.build("measures", name, MEASURES[name], "measure") for name in names}
    turns: dict[str, list[float]] = {name: [] for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats + 1):
        step = _step_seconds(client)
        for name, measure in measures.items():
            start = time.process_time()
            client.compute_measure(measure)
            taken = time.process_time() - start
            if turn:  # the first time imports and compiles
                turns[name].append(taken / step)
                seconds[name].append(taken)
    rows = []
    for name in names:
        command = [sys.executable, __file__, "--memory-of", name, str(size)]
        grown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        row = {
            "measure": name,
            "batch": size,
            "seconds": f"{statistics.median(seconds[name]):.3f}",
            "steps": f"{statistics.median(turns[name]):.1f}",
            "MiB": grown,
        }
        print(*row.values(), flush=True)
        rows.append(row)
    return rows


def _step_seconds(client: Client) -> float:
    client.step()
    start = time.process_time()
    for _ in range(50):
        client.step()
    return (time.process_time() - start) / 50


def _growth(name: str, client: Client) -> int:
    """MiB by which the peak grew, once everything is imported and a tiny batch was measured."""
    measure: Measure = registry.build("measures", name, MEASURES[name], "measure")
    warm = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 10))
    measure.compute(warm, client.task.loss, torch.randn(1, 3, 2, 2), torch.tensor([1]))
    client.step()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _peak()
    client.compute_measure(measure)
    return round((_peak() - before) / 1024)


def _peak() -> int:
    """KiB of memory that this process has had at most."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))


if __name__ == "__main__":
    main()
