"""What each measure of exposure costs: processor time against one client step, and memory (Linux).

    python benchmarks/measure_cost.py [--repeats 5] [--only NAME ...] [--out FILE.json]
    python benchmarks/measure_cost.py --spectrum   # of one example: as estimated by default, and exactly

LeNet with tanh on random inputs of CIFAR-10's shape, one thread, batches of 1 and 8; a client step is the gradient of
the batch in plain torch. Memory is what a process of its own grew by at its peak, after everything is imported.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from measuring import Row, compare_turns, make_parser, measure_in_turns, peak_growth, publish_rows, run_alone

from fedsim.base.randomness import seed_globals
from fedsim.base.task import Task
from fedsim.exposure.measure import Measure
from fedsim.exposure.spectrum import Spectrum
from fedsim.plugins import registry
from fedsim.training.models.lenet import LeNet

BATCHES = (1, 8)
MEASURES = (
    "gradient-norm",
    "jacobian-norm",
    "sensitivity",
    "lipschitz",
    "angular-lipschitz",
    "lavp",
    "spectrum",
    "expected-error",
)
STEP = "client step"


class Client:
    """A model and a batch."""

    def __init__(self, size: int) -> None:
        self.task = Task((3, 32, 32), 10)
        with seed_globals("measure-cost"):
            self.model = LeNet().build(self.task)
            self.inputs, self.labels = torch.randn(size, 3, 32, 32), torch.arange(size) % 10

    def step(self) -> None:
        """Compute the gradient of the batch."""
        loss = self.task.loss(self.model(self.inputs), self.labels)
        torch.autograd.grad(loss, list(self.model.parameters()))

    def compute_measure(self, measure: Measure) -> dict[str, float]:
        """Compute the measure of the batch."""
        return measure.compute(self.model, self.task.loss, self.inputs, self.labels)


def build_measure(name: str) -> Measure:
    """Build a measure with its default settings."""
    measure: Measure = registry.build("measures", name, {}, "measure")
    return measure


def time_calls(call: Callable[[], object], count: int = 1) -> Callable[[], float]:
    """Return what measures the CPU seconds of a call, as a mean over several."""

    def seconds() -> float:
        started = time.process_time()
        for _ in range(count):
            call()
        return (time.process_time() - started) / count

    return seconds


def measure_memory(name: str, client: Client) -> float:
    """Return by how many MiB a measure grows, once everything is imported and a tiny batch was measured."""
    measure = build_measure(name)
    small = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 10))
    measure.compute(small, client.task.loss, torch.randn(1, 3, 2, 2), torch.tensor([1]))
    client.step()
    return peak_growth(lambda: client.compute_measure(measure))


def measure_batch(names: list[str], size: int, repeats: int) -> list[Row]:
    """Return a row for a client step and for each measure."""
    client = Client(size)
    ways = {STEP: time_calls(client.step, 50)}
    for name in names:
        ways[name] = time_calls(partial(client.compute_measure, build_measure(name)))
    rows = compare_turns(measure_in_turns(ways, repeats), STEP, {"batch": size})
    for row in rows[1:]:
        row["MiB"] = run_alone("--memory-of", row["way"], str(size))
    return rows


def main() -> None:
    """Measure all, or show what the estimated spectrum says beside the exact one."""
    parser = make_parser(__doc__, repeats=5, choices=MEASURES)
    parser.add_argument("--spectrum", action="store_true", help="show the estimated spectrum beside the exact one")
    parser.add_argument("--memory-of", nargs=2, metavar=("NAME", "BATCH"), help="print the MiB of one measure")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory_of:
        name, size = options.memory_of
        print(measure_memory(name, Client(int(size))))
    elif options.spectrum:
        client = Client(1)
        estimates = [client.compute_measure(s) for s in (Spectrum(), Spectrum(exact=client.inputs.numel()))]
        publish_rows(estimates, options.out)
    else:
        rows = [row for size in BATCHES for row in measure_batch(options.only, size, options.repeats)]
        publish_rows(rows, options.out)


if __name__ == "__main__":
    main()
