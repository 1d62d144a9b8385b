"""What recording costs: the share of the round loop's time that `Curious` adds, measured within one run.

    python benchmarks/recording_cost.py [--rounds 25]

In each round the clock is read round `Curious` and round the strategy inside it. The difference is what
recording costs (copying, hashing, writing); it is divided by the rest of the round (broadcast, ten
clients' training in this process, aggregation; no evaluation). Printed are medians over rounds.
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
from flwr.serverapp.strategy import Strategy

from clients.app import app as client_app
from fedsim.engines.arrays import record_of
from fedsim.engines.cohort import CohortGrid
from fedsim.engines.serial import InProcessGrid
from fedsim.experiments.build import Experiment
from fedsim.experiments.config import Config, check
from fedsim.experiments.reading import read_toml
from fedsim.recording.recorder import Recorder
from strategies.app import _protocol, _simulation
from strategies.curious import Curious

DEMO = Path(__file__).parent.parent / "examples" / "quickstart.toml"
SETTINGS = {
    "demo: mlp, 15 k parameters, 20 steps": [],
    "sme-cnn, 1.03 M parameters, 10 steps of 10 MNIST images": [
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

        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.perf_counter() - started

        return timed


def timed(strategy: Strategy) -> tuple[Strategy, Stopwatch]:
    """`strategy` with a stopwatch on the two methods that see a round's messages."""
    watch = Stopwatch()
    strategy.configure_train = watch.wrap(strategy.configure_train)  # type: ignore[method-assign]
    strategy.aggregate_train = watch.wrap(strategy.aggregate_train)  # type: ignore[method-assign]
    return strategy, watch


def measure(experiment: Experiment, rounds: int, folder: Path) -> list[tuple[float, float]]:
    """Seconds that recording took, and seconds of the rest, in each round."""
    inner, inside = timed(experiment.new_strategy())
    curious, outside = timed(Curious(inner, Recorder(folder)))
    grid = CohortGrid(
        InProcessGrid(client_app),
        experiment.config.federation.clients,
        _simulation(experiment),
        [2],
        together=experiment.together,
    )
    arrays, samples = record_of(experiment.initial_state()), []
    for number in range(1, rounds + 3):
        inside.seconds = outside.seconds = 0.0
        started = time.perf_counter()
        messages = curious.configure_train(number, arrays, _protocol(experiment), grid)
        replies = list(grid.send_and_receive(messages))  # not streamed, to tell training from recording
        aggregate, _ = curious.aggregate_train(number, replies)
        assert aggregate is not None
        arrays = aggregate
        recording = outside.seconds - inside.seconds
        samples.append((recording, time.perf_counter() - started - recording))
    return samples[2:]  # the first rounds load the data


def main() -> None:
    """Measure both settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    rounds = parser.parse_args().rounds
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print(f"{platform.machine()}, torch {torch.__version__}, one thread, {rounds} rounds, ten clients, serial engine")
    for name, overrides in SETTINGS.items():
        config = check(Config, read_toml(DEMO, [*overrides, 'federation.engine="serial"']), name)
        with tempfile.TemporaryDirectory() as folder:
            samples = measure(Experiment(config), rounds, Path(folder) / "transcript")
            size = sum(path.stat().st_size for path in Path(folder).rglob("*.safetensors")) / (rounds + 2)
        shares = [recording / rest for recording, rest in samples]
        low, middle, high = statistics.quantiles(shares, n=4)
        print(name)
        print(
            f"  recording {statistics.median(s[0] for s in samples) * 1e3:.1f} ms a round, {size / 1e6:.2f} MB on disk"
        )
        print(f"  the rest {statistics.median(s[1] for s in samples) * 1e3:.1f} ms a round")
        print(f"  share {middle:.1%} (quartiles {low:.1%} to {high:.1%})")


if __name__ == "__main__":
    main()
