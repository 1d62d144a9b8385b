"""What recording costs: the round loop with and without `Curious`, side by side in one process.

    python benchmarks/recording_cost.py [--blocks 9]

Two federations of the same experiment take turns, five rounds at a time, one under `Curious` (until
everything is on disk), one under the bare strategy; so drift of the machine hits both alike. Printed
are medians over these blocks of wall and CPU seconds a round, and their ratio pair by pair. CPU time
includes every thread.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy

from clients.app import app as client_app
from fedsim.config import Config, check, read_toml
from fedsim.engines.cohort import CohortGrid
from fedsim.engines.serial import InProcessGrid
from fedsim.experiment import Experiment
from fedsim.transcript import Recorder
from strategies.app import _protocol, _record, _simulation
from strategies.curious import Curious

DEMO = Path(__file__).parent.parent / "examples" / "quickstart.toml"
BLOCK = 5
SETTINGS = {
    "demo (mlp, 15 k parameters, 20 steps)": [],
    "sme-cnn, 1.03 M parameters, 10 steps of 10 MNIST images": [
        'data.name="mnist"',
        'partition={name="iid", samples_per_client=10}',
        'model={name="sme-cnn", hidden=320}',
        "training={local_epochs=10, batch_size=10, learning_rate=0.004}",
    ],
}


def blocks(experiment: Experiment, strategy: Strategy) -> Iterator[tuple[float, float]]:
    """Wall and CPU seconds a round, one block after the other: broadcast, training, recording, aggregation."""
    grid = CohortGrid(InProcessGrid(client_app), experiment.config.federation.clients, _simulation(experiment), [2])
    arrays: ArrayRecord = _record(experiment.initial_state())
    for number in itertools.count(1):
        if number % BLOCK == 1:
            wall, cpu = time.perf_counter(), time.process_time()
        messages = strategy.configure_train(number, arrays, _protocol(experiment), grid)
        aggregate, _ = strategy.aggregate_train(number, grid.send_and_receive(messages))
        assert aggregate is not None
        arrays = aggregate
        if number % BLOCK == 0:
            if isinstance(strategy, Curious):
                strategy.flush()
            yield (time.perf_counter() - wall) / BLOCK, (time.process_time() - cpu) / BLOCK


def compare(experiment: Experiment, count: int) -> None:
    """Alternate the two federations and print medians and paired ratios."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        curious = Curious(experiment.new_strategy(), Recorder(Path(folder) / "transcript"))
        pair = blocks(experiment, curious), blocks(experiment, experiment.new_strategy())
        samples = [(next(pair[0]), next(pair[1])) for _ in range(count + 1)][1:]
        size = sum(path.stat().st_size for path in Path(folder).rglob("*.safetensors")) / (count + 1) / BLOCK
    for place, what in enumerate(("wall", "cpu")):
        recorded, bare = ([sample[side][place] * 1e3 for sample in samples] for side in (0, 1))
        ratios = sorted(a / b for a, b in zip(recorded, bare, strict=True))
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        print(
            f"  {what:4}: {statistics.median(recorded):8.1f} ms a round recorded, {statistics.median(bare):8.1f} bare,"
        )
        print(f"        ratio {statistics.median(ratios):.3f} (quartiles {low:.3f} to {high:.3f})")
    print(f"  {size / 1e6:.2f} MB a round on disk")


def main() -> None:
    """Measure both settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=9)
    count = parser.parse_args().blocks
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print(f"{platform.machine()}, torch {torch.__version__}, {count} pairs of blocks of {BLOCK} rounds")
    for name, overrides in SETTINGS.items():
        config = check(Config, read_toml(DEMO, [*overrides, 'federation.engine="serial"']), name)
        print(name)
        compare(Experiment(config), count)


if __name__ == "__main__":
    main()
