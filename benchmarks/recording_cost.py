"""What recording costs: the share of the round loop's time that it adds, at the strategy and at the Grid, in one run.

    python benchmarks/recording_cost.py [--repeats 25] [--out FILE.json]

In each round the CPU time of this process is read round `Curious` and round the strategy inside it, and in the next
round, round `CuriousGrid` and the Grid inside it. The difference is what recording costs (copying, hashing, writing);
it is divided by the rest of the round (broadcast, ten clients' training in this process, aggregation; no evaluation).
Rows have the medians over rounds, and the quartiles of the share.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import PROJECT, Row, make_parser, publish_rows

from clients.app import app as client_app
from fedsim.federation.config import Config
from fedsim.federation.engines.arrays import make_record
from fedsim.federation.engines.cohort import CohortGrid, make_simulation
from fedsim.federation.engines.serial import InProcessGrid
from fedsim.federation.experiment import Experiment
from fedsim.federation.experiment_file import read_toml
from fedsim.federation.table_validation import validate_tables
from fedsim.recording.recorder import Recorder
from strategies.app import _training_config
from strategies.curious import Curious
from strategies.curious_grid import CuriousGrid

DEMO = PROJECT / "examples" / "quickstart.toml"
TEN = "federation.clients=10"
COMMON = 'federation.engine="serial"', "adversary.victims=[0]"
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
    """Adds up the CPU seconds spent in methods of a thing."""

    def __init__(self, thing: Any, *methods: str) -> None:
        self.seconds = 0.0
        for name in methods:
            setattr(thing, name, self._wrap(getattr(thing, name)))

    def _wrap(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            started = time.process_time()
            try:
                return method(*arguments, **named)
            finally:
                self.seconds += time.process_time() - started

        return call


def measure_rounds(experiment: Experiment, rounds: int, folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Return seconds of recording, and of the rest, in each round, by where it was recorded."""
    hooks = "configure_train", "aggregate_train"
    inner = experiment.new_strategy()
    in_strategy = Stopwatch(inner, *hooks)
    curious = Curious(inner, Recorder(folder / "strategy" / "transcript"))
    round_strategy = Stopwatch(curious, *hooks)
    clients, simulation = experiment.config.federation.clients, make_simulation(experiment.config)
    grid: Any = CohortGrid(InProcessGrid(client_app), clients, simulation, [2], group_size=experiment.clients_at_once)
    # Not streamed, to tell training from recording.
    send = grid.send_and_receive
    grid.send_and_receive = lambda messages, timeout=None: list(send(messages))
    in_grid = Stopwatch(grid, "send_and_receive")
    recorded: Any = CuriousGrid(grid, Recorder(folder / "grid" / "transcript"))
    round_grid = Stopwatch(recorded, "send_and_receive")
    arrays = make_record(experiment.initial_state())
    samples: dict[str, list[tuple[float, float]]] = {"strategy": [], "grid": []}
    for number in range(1, 2 * rounds + 5):
        at = ("strategy", "grid")[number % 2]
        strategy, wire = (curious, grid) if at == "strategy" else (inner, recorded)
        for watch in (in_strategy, round_strategy, in_grid, round_grid):
            watch.seconds = 0.0
        started = time.process_time()
        messages = strategy.configure_train(number, arrays, _training_config(experiment), grid)
        aggregate, _ = strategy.aggregate_train(number, wire.send_and_receive(messages))
        assert aggregate is not None
        arrays = aggregate
        outside, inside = (round_strategy, in_strategy) if at == "strategy" else (round_grid, in_grid)
        recording = outside.seconds - inside.seconds
        samples[at].append((recording, time.process_time() - started - recording))
    return {at: times[2:] for at, times in samples.items()}  # the first rounds load the data


def main() -> None:
    """Measure both settings."""
    options = make_parser(__doc__, repeats=25).parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rows: list[Row] = []
    for name, overrides in SETTINGS.items():
        config = validate_tables(Config, read_toml(DEMO, [*overrides, *COMMON]), name)
        with tempfile.TemporaryDirectory() as folder:
            samples = measure_rounds(Experiment(config), options.repeats, Path(folder))
            sizes = [path.stat().st_size for path in Path(folder).rglob("round-*.safetensors")]
        for at, times in samples.items():
            recording, rest = (1e3 * statistics.median(values) for values in zip(*times, strict=True))
            low, middle, high = statistics.quantiles([taken / other for taken, other in times], n=4)
            about = {"setting": name, "at": at, "MB a round": sum(sizes) / 1e6 / (2 * options.repeats + 4)}
            figures = {"recording, ms": recording, "rest, ms": rest, "share": middle, "lower": low, "upper": high}
            rows.append({**about, **figures, "seconds": times})
    publish_rows(rows, options.out)


if __name__ == "__main__":
    main()
