"""What each defense costs: processor time of a client's local step against none, and bytes of an update, in one run.

    python benchmarks/defense_cost.py [--repeats 15] [--only NAME ...]

Clients train as in a round of the serial engine, on one thread; the time of a step is that of all that clients do in a
round, messages among it, divided by their steps. All defenses take turns, and each time is divided by that without a
defense of the same turn. Printed are the median over turns and the quartiles; bytes are those of a recorded update.
"""

from __future__ import annotations

import argparse
import csv
import logging
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from clients.app import app as client_app
from fedsim.federation.build import Experiment
from fedsim.federation.config import Config, validate_tables
from fedsim.federation.engines.arrays import make_record
from fedsim.federation.engines.cohort import CohortGrid
from fedsim.federation.engines.serial import InProcessGrid
from fedsim.plugins import registry
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from strategies.app import _simulation_record, _training_config
from strategies.curious import Curious

RESULTS = Path(__file__).parent / "results" / "defense-cost.csv"
WHERE: dict[str, dict[str, Any]] = {
    "CNN": {
        "data": {"name": "mnist"},
        "partition": {"name": "iid", "samples_per_client": 160},
        "model": {"name": "sme-cnn"},
        "training": {"local_epochs": 1, "batch_size": 32, "learning_rate": 0.01},
        "federation": {"clients": 1},
    },
    "MLP": {
        "data": {"name": "digits"},
        "partition": {"name": "iid", "samples_per_client": 48},
        "model": {"name": "mlp", "hidden": [100]},
        "training": {"local_epochs": 2, "batch_size": 16, "learning_rate": 0.01},
        "federation": {"clients": 4, "vectorise": False},
    },
    "32 MLPs at once": {
        "data": {"name": "digits"},
        "partition": {"name": "iid", "samples_per_client": 48},
        "model": {"name": "mlp", "hidden": [100]},
        "training": {"local_epochs": 2, "batch_size": 16, "learning_rate": 0.01},
        "federation": {"clients": 32},
    },
}
"""SME's CNN with batches of 32 MNIST images; a small network whose clients train one by one, and several at once."""
NONE = "none"
DEFENSES: dict[str, dict[str, Any] | None] = {
    NONE: None,
    "update-noise": {"name": "update-noise", "noise_multiplier": 0.01},
    "update-noise, Laplace": {"name": "update-noise", "noise_multiplier": 0.01, "noise": "laplace"},
    "update-noise, C follows": {"name": "update-noise", "noise_multiplier": 0.01, "quantile": 0.5, "bit_noise": 1.0},
    "dp-sgd": {"name": "dp-sgd", "noise_multiplier": 1.0},
    "dp-sgd, per layer": {"name": "dp-sgd", "noise_multiplier": 1.0, "clipping": "per-layer"},
    "gradient-prune": {"name": "gradient-prune"},
    "outpost": {"name": "outpost"},
    "soteria": {"name": "soteria"},
    "mixup": {"name": "mixup"},
    "instahide": {"name": "instahide"},
    "augmentation": {"name": "augmentation"},
    "top-k": {"name": "top-k"},
    "top-k, feedback": {"name": "top-k", "error_feedback": True},
    "random-mask": {"name": "random-mask"},
    "layer-freeze, biases": {"name": "layer-freeze", "layers": ["*.bias"]},
    "quantise, 8 bits": {"name": "quantise"},
    "quantise, signs": {"name": "quantise", "scheme": "sign"},
    "quantise, ternary": {"name": "quantise", "scheme": "ternary"},
    "quantise, fp16": {"name": "quantise", "scheme": "fp16"},
}
"""By what the table calls it; settings are the defaults where nothing is said."""
Row = dict[str, Any]


def experiment(where: str, defense: dict[str, Any] | None) -> Experiment:
    """Of one round at one place, under one defense."""
    tables = {name: dict(keys) for name, keys in WHERE[where].items()}
    tables["federation"] |= {"engine": "serial", "seed": 1, "rounds": 1}
    fixed = {"strategy": {"name": "fedavg"}, "adversary": {"when": "never"}, "defense": [defense] if defense else []}
    return Experiment(validate_tables(Config, tables | fixed, where))


class Round:
    """A round of all clients of an experiment, again and again."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment, clients = experiment, experiment.config.federation.clients
        simulation, together = _simulation_record(experiment), experiment.clients_at_once
        self._grid: Any = CohortGrid(InProcessGrid(client_app), clients, simulation, [2], group_size=together)
        self._arrays = make_record(experiment.initial_state())
        self.steps = sum(experiment.training.steps(count) for count in experiment.data.counts)

    def replies(self, strategy: Any) -> Iterator[Any]:
        """What clients send in round 1."""
        messages = strategy.configure_train(1, self._arrays, _training_config(self.experiment), self._grid)
        return iter(self._grid.send_and_receive(messages))

    def seconds(self) -> float:
        """Processor time of one local step."""
        started, count = time.process_time(), 0
        for reply in self.replies(self.experiment.new_strategy()):
            if reply.has_error():
                raise RuntimeError(f"a client failed: {reply.error.reason}")
            count += 1
        assert count == self.experiment.config.federation.clients
        return (time.process_time() - started) / self.steps

    def nbytes(self) -> int:
        """Of the update of client 0, as it is read from a recording."""
        with tempfile.TemporaryDirectory() as folder:
            curious = Curious(self.experiment.new_strategy(), Recorder(Path(folder) / "transcript"))
            curious.aggregate_train(1, self.replies(curious))
            return Transcript(Path(folder)).update(1, 0).payload.nbytes


def measure_defenses(where: str, defenses: dict[str, dict[str, Any] | None], repeats: int) -> list[Row]:
    """A row for each defense at one place."""
    rounds = {name: Round(experiment(where, table)) for name, table in defenses.items()}
    sizes = {name: each.nbytes() for name, each in rounds.items()}  # which also loads the data
    turns: list[dict[str, float]] = []
    for turn in range(repeats):
        turns.append({name: each.seconds() for name, each in rounds.items()})
        print(f"{where}: turn {turn + 1} of {repeats}", file=sys.stderr)
    return [row(where, name, turns, sizes) for name in defenses]


def row(where: str, name: str, turns: list[dict[str, float]], sizes: dict[str, int]) -> Row:
    """The figures of one defense."""
    low, middle, high = statistics.quantiles([turn[name] / turn[NONE] for turn in turns], n=4)
    return {
        "where": where,
        "defense": name,
        "milliseconds": f"{1e3 * statistics.median(turn[name] for turn in turns):.4g}",
        "ratio": f"{middle:.3g}",
        "lower quartile": f"{low:.3g}",
        "upper quartile": f"{high:.3g}",
        "bytes": sizes[name],
        "bytes to none": f"{sizes[name] / sizes[NONE]:.3g}",
    }


def markdown(rows: list[Row]) -> str:
    """A line for each defense: its ratio at each place with the quartiles, and its bytes."""
    places = list(dict.fromkeys(row["where"] for row in rows))
    lines = [f"| defense | {' | '.join(f'step, {place}' for place in places)} | bytes, CNN |", "|---" * 5 + "|"]
    for name in dict.fromkeys(row["defense"] for row in rows):
        found = {row["where"]: row for row in rows if row["defense"] == name}
        cells = [_cell(found[place]) for place in places]
        size = found["CNN"]
        lines.append(f"| {name} | {' | '.join(cells)} | {size['bytes']:,} ({size['bytes to none']}) |")
    return "\n".join(lines)


def _cell(row: Row) -> str:
    if row["defense"] == NONE:
        return f"{row['milliseconds']} ms"
    return f"{row['ratio']} ({row['lower quartile']} to {row['upper quartile']})"


def chosen(only: list[str]) -> dict[str, dict[str, Any] | None]:
    """None and the defenses to measure; each built-in one has to be in the table above."""
    here = {table["name"] for table in DEFENSES.values() if table}
    ours = {name for name in registry.registered_names("defenses") if _is_ours(name)}
    if missing := sorted(ours - here):
        sys.exit(f"defense_cost: {missing[0]} is not measured; add a line to DEFENSES")
    if unknown := sorted(set(only) - here):
        sys.exit(f"defense_cost: nothing is called {unknown[0]}; known: {', '.join(sorted(here))}")
    return {label: table for label, table in DEFENSES.items() if table is None or not only or table["name"] in only}


def _is_ours(name: str) -> bool:
    owner = registry.find_entry_point("defenses", name).dist
    return owner is not None and owner.name == "fedsim-curious"


def main() -> None:
    """Measure all, write the CSV file unless a part was asked for, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    defenses = chosen(options.only)
    rows = [row for where in WHERE for row in measure_defenses(where, defenses, options.repeats)]
    if not options.only:
        with RESULTS.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    print(f"{platform.machine()}, torch {torch.__version__}, one thread, {options.repeats} turns\n\n{markdown(rows)}")


if __name__ == "__main__":
    main()
