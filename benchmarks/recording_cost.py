"""What recording costs: the share of the round loop's time that it adds, at the strategy and at the Grid, in one run.

    python benchmarks/recording_cost.py [--rounds 25]

In each round the clock is read round `Curious` and round the strategy inside it, and in the next round, round
`CuriousGrid` and the Grid inside it. The difference is what recording costs (copying, hashing, writing); it is divided
by the rest of the round (broadcast, ten clients' training in this process, aggregation; no evaluation). Printed are
medians over rounds.
"""

from __future__ import annotations

import argparse
import logging
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from clients.app import app as client_app
from fedsim.federation.build import Experiment
from fedsim.federation.config import Config, validate_tables
from fedsim.federation.engines.arrays import make_record
from fedsim.federation.engines.cohort import CohortGrid
from fedsim.federation.engines.serial import InProcessGrid
from fedsim.federation.reading import read_toml
from fedsim.recording.recorder import Recorder
from strategies.app import _simulation_record, _training_config
from strategies.curious import Curious
from strategies.curious_grid import CuriousGrid

DEMO = Path(__file__).parent.parent / "examples" / "quickstart.toml"
TEN = "federation.clients=10"
SETTINGS = {
    "mlp, 15 k parameters, 20 steps of 5 digits": [
        TEN,
        'data.name="digits"',
        'partition={name="dirichlet", alpha=0.5, samples_per_client=10, test_fraction=0.2}',
    ],
    "sme-cnn, 1.03 M parameters, 10 steps of 10 MNIST images": [
        TEN,
        'data.name="mnist"',
        'partition={name="iid", samples_per_client=10}',
        'model={name="sme-cnn", hidden=320}',
        "training={local_epochs=10, batch_size=10, learning_rate=0.004}",
    ],
}


class Stopwatch:
    """Adds up the seconds spent in functions that it has wrapped."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, timed."""

        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - started

        return timed


def timed(thing: Any, *methods: str) -> tuple[Any, Stopwatch]:
    """`thing` with a stopwatch on these methods."""
    watch = Stopwatch()
    for name in methods:
        setattr(thing, name, watch.wrap(getattr(thing, name)))
    return thing, watch


def measure(experiment: Experiment, rounds: int, folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Seconds that recording took, and seconds of the rest, in each round, by where it was recorded."""
    hooks = "configure_train", "aggregate_train"
    inner, in_strategy = timed(experiment.new_strategy(), *hooks)
    curious, round_strategy = timed(Curious(inner, Recorder(folder / "strategy" / "transcript")), *hooks)
    clients = experiment.config.federation.clients
    grid: Any = CohortGrid(
        InProcessGrid(client_app), clients, _simulation_record(experiment), [2], group_size=experiment.clients_at_once
    )
    # Not streamed, to tell training from recording.
    send = grid.send_and_receive
    grid.send_and_receive = lambda messages, timeout=None: list(send(messages))
    grid, in_grid = timed(grid, "send_and_receive")
    watched, round_grid = timed(CuriousGrid(grid, Recorder(folder / "grid" / "transcript")), "send_and_receive")
    watches = in_strategy, round_strategy, in_grid, round_grid
    arrays = make_record(experiment.initial_state())
    samples: dict[str, list[tuple[float, float]]] = {"strategy": [], "grid": []}
    for number in range(1, 2 * rounds + 5):
        at = ("strategy", "grid")[number % 2]
        strategy, wire = (curious, grid) if at == "strategy" else (inner, watched)
        for watch in watches:
            watch.seconds = 0.0
        started = time.perf_counter()
        messages = strategy.configure_train(number, arrays, _training_config(experiment), grid)
        aggregate, _ = strategy.aggregate_train(number, wire.send_and_receive(messages))
        assert aggregate is not None
        arrays = aggregate
        outside, inside = (round_strategy, in_strategy) if at == "strategy" else (round_grid, in_grid)
        recording = outside.seconds - inside.seconds
        samples[at].append((recording, time.perf_counter() - started - recording))
    return {at: found[2:] for at, found in samples.items()}  # the first rounds load the data


def main() -> None:
    """Measure both settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    rounds = parser.parse_args().rounds
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print(f"{platform.machine()}, torch {torch.__version__}, one thread, {rounds} rounds, ten clients, serial engine")
    for name, overrides in SETTINGS.items():
        config = validate_tables(Config, read_toml(DEMO, [*overrides, 'federation.engine="serial"']), name)
        with tempfile.TemporaryDirectory() as folder:
            samples = measure(Experiment(config), rounds, Path(folder))
            size = sum(path.stat().st_size for path in Path(folder).rglob("round-*.safetensors")) / (2 * rounds + 4)
        print(f"{name}: {size / 1e6:.2f} MB a round")
        for at, found in samples.items():
            low, middle, high = statistics.quantiles([recording / rest for recording, rest in found], n=4)
            cost, rest = (statistics.median(sample[k] for sample in found) * 1e3 for k in (0, 1))
            told = f"share {middle:.1%} (quartiles {low:.1%} to {high:.1%})"
            print(f"  at the {at:9} {cost:.1f} ms of recording, {rest:.1f} ms of the rest, {told}")


if __name__ == "__main__":
    main()
