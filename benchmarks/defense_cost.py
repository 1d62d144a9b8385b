"""What each defense costs: processor time of a client's local step against none, and bytes of an update, in one run.

    python benchmarks/defense_cost.py [--repeats 15] [--only NAME ...] [--out FILE.json]

Clients train as in a round of the serial engine, on one thread; the time of a step is that of all that clients do in a
round, messages among it, divided by their steps. Bytes are those of a recorded update.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measuring import Row, compare_turns, make_parser, measure_in_turns, publish_rows

from clients.app import app as client_app
from fedsim.federation.config import Config
from fedsim.federation.engines.arrays import make_record
from fedsim.federation.engines.cohort import CohortGrid, make_simulation
from fedsim.federation.engines.serial import InProcessGrid
from fedsim.federation.experiment import Experiment
from fedsim.federation.table_validation import validate_tables
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from strategies.app import _training_config
from strategies.curious import Curious

MLP: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"name": "iid", "samples_per_client": 48},
    "model": {"name": "mlp", "hidden": [100]},
    "training": {"local_epochs": 2, "batch_size": 16, "learning_rate": 0.01},
}
WHERE: dict[str, dict[str, Any]] = {
    "CNN": {
        "data": {"name": "mnist"},
        "partition": {"name": "iid", "samples_per_client": 160},
        "model": {"name": "sme-cnn"},
        "training": {"local_epochs": 1, "batch_size": 32, "learning_rate": 0.01},
        "federation": {"clients": 1},
    },
    "MLP": {**MLP, "federation": {"clients": 4, "vectorise": False}},
    "32 MLPs at once": {**MLP, "federation": {"clients": 32}},
}
"""SME's CNN with batches of 32 MNIST images; a small network whose clients train one by one, and several at once."""
NONE = "none"
DEFENSES: dict[str, dict[str, Any]] = {
    NONE: {},
    "update-noise": {"name": "update-noise", "noise_multiplier": 0.01},
    "update-noise, Laplace": {"name": "update-noise", "noise_multiplier": 0.01, "noise": "laplace"},
    "update-noise, C follows": {"name": "update-noise", "noise_multiplier": 0.01, "quantile": 0.5, "bit_noise": 1.0},
    "dp-sgd": {"name": "dp-sgd", "noise_multiplier": 1.0},
    "dp-sgd, per layer": {"name": "dp-sgd", "noise_multiplier": 1.0, "clipping": "per-layer"},
    "gradient-prune": {"name": "gradient-prune"},
    "outpost": {"name": "outpost"},
    "censor": {"name": "censor"},
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


def build_experiment(where: str, defense: dict[str, Any]) -> Experiment:
    """Build the experiment of one round at one place, under one defense."""
    tables = {name: dict(keys) for name, keys in WHERE[where].items()}
    tables["federation"] |= {"engine": "serial", "seed": 1, "rounds": 1}
    fixed = {"strategy": {"name": "fedavg"}, "adversary": {"when": "never"}, "defense": [defense] if defense else []}
    return Experiment(validate_tables(Config, tables | fixed, where))


class Round:
    """A round of all clients of an experiment, again and again."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment, clients = experiment, experiment.config.federation.clients
        simulation, together = make_simulation(experiment.config), experiment.clients_at_once
        self._grid: Any = CohortGrid(InProcessGrid(client_app), clients, simulation, [2], group_size=together)
        self._arrays = make_record(experiment.initial_state())
        self.steps = sum(experiment.training.steps(count) for count in experiment.data.counts)

    def replies(self, strategy: Any) -> Iterator[Any]:
        """Yield what clients send in round 1."""
        messages = strategy.configure_train(1, self._arrays, _training_config(self.experiment), self._grid)
        return iter(self._grid.send_and_receive(messages))

    def seconds(self) -> float:
        """Return the processor time of one local step."""
        started, count = time.process_time(), 0
        for reply in self.replies(self.experiment.new_strategy()):
            if reply.has_error():
                raise RuntimeError(f"a client failed: {reply.error.reason}")
            count += 1
        assert count == self.experiment.config.federation.clients
        return (time.process_time() - started) / self.steps

    def nbytes(self) -> int:
        """Return the size of the update of client 0, as it is read from a recording."""
        with tempfile.TemporaryDirectory() as folder:
            curious = Curious(self.experiment.new_strategy(), Recorder(Path(folder) / "transcript"))
            curious.aggregate_train(1, self.replies(curious))
            return Transcript(Path(folder)).update(1, 0).payload.nbytes


def measure_defenses(where: str, names: list[str], repeats: int) -> list[Row]:
    """Return a row for each defense at one place."""
    rounds = {name: Round(build_experiment(where, DEFENSES[name])) for name in names}
    turns = measure_in_turns({name: each.seconds for name, each in rounds.items()}, repeats)
    rows = compare_turns(turns, NONE, {"where": where})
    for row in rows:
        row["bytes"] = rounds[row["way"]].nbytes()
    return rows


def main() -> None:
    """Measure at all places."""
    options = make_parser(__doc__, repeats=15, choices=DEFENSES).parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    names = list(dict.fromkeys([NONE, *options.only]))
    publish_rows([row for where in WHERE for row in measure_defenses(where, names, options.repeats)], options.out)


if __name__ == "__main__":
    main()
