"""What a recording by recipe takes: its bytes, and the seconds until an update is back.

    python benchmarks/recipe_recording.py [--repeats 20] [--clients 1000] [--out FILE.json]

One round of each setting is recorded with `[recording] keep = "recipe"`. Then updates of clients drawn at random are
read, each of a client whose group was not computed just before. The time is set against that of training the group
alone, without recording, in the same process. Rows have medians over updates.
"""

from __future__ import annotations

import logging
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from measuring import PROJECT, Row, make_parser, publish_rows

from fedsim.federation.config import Config
from fedsim.federation.experiment import Experiment
from fedsim.federation.experiment_file import read_toml
from fedsim.federation.open_run import OpenRun
from fedsim.federation.simulation import run_federation
from fedsim.federation.table_validation import validate_tables
from fedsim.training.cohort import local_updates
from fedsim.training.loop import local_update

DEMO = PROJECT / "examples" / "quickstart.toml"
COMMON = [
    'federation={engine="serial", rounds=1, evaluate_every=0}',
    'recording.keep="recipe"',
    'data.name="mnist"',
    'partition={name="iid", samples_per_client=10}',
    'adversary.when="never"',
]
SETTINGS = {
    "mlp, 60 k parameters, 1 step": [
        'model={name="mlp", hidden=[75]}',
        "training={local_epochs=1, batch_size=10, learning_rate=0.1}",
    ],
    "sme-cnn, 1.03 M parameters, 10 steps": [
        'model={name="sme-cnn", hidden=320}',
        "training={local_epochs=10, batch_size=10, learning_rate=0.004}",
    ],
}


def train_group(experiment: Experiment, group: list[int]) -> float:
    """Return the seconds in which the clients of a group train from w_0, at once where they do so."""
    shares = experiment.local_data(group, 1, experiment.training)
    state = experiment.initial_state()
    started = time.perf_counter()
    if len(group) > 1:
        local_updates(experiment.model, state, shares, experiment.training)
    else:
        (share,) = shares
        local_update(
            experiment.model, state, share.inputs, share.labels, experiment.training, key=share.key, order=share.order
        )
    return time.perf_counter() - started


def measure_setting(config: Config, folder: Path, repeats: int) -> Row:
    """Return the figures of one setting."""
    started = time.perf_counter()
    run_federation(config, OpenRun(folder))
    seconds = time.perf_counter() - started

    experiment, transcript = Experiment(config), OpenRun(folder).recording
    size = experiment.clients_at_once
    count = config.federation.clients
    victims = random.Random(0).sample(range(0, count, size), min(repeats, -(-count // size)))
    transcript.update(1, count - 1)  # this loads the data
    back, training = [], []
    for victim in victims:
        began = time.perf_counter()
        transcript.update(1, victim)
        back.append(time.perf_counter() - began)
        training.append(train_group(experiment, list(range(victim, min(victim + size, count)))))
    return {
        "MB of the updates": sum(transcript.upload_sizes(1).values()) / 1e6,
        "MB recorded": transcript.round_path(1).stat().st_size / 1e6,
        "run, s": seconds,
        "group": size,
        "training, ms": 1e3 * statistics.median(training),
        "update back, ms": 1e3 * statistics.median(back),
        "slowest, ms": 1e3 * max(back),
    }


def main() -> None:
    """Measure all settings."""
    parser = make_parser(__doc__, repeats=20)
    parser.add_argument("--clients", type=int, default=1000)
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rows: list[Row] = []
    for name, overrides in SETTINGS.items():
        config = validate_tables(
            Config, read_toml(DEMO, [*COMMON, f"federation.clients={options.clients}", *overrides]), name
        )
        with tempfile.TemporaryDirectory() as folder:
            rows.append({"setting": name, **measure_setting(config, Path(folder) / "run", options.repeats)})
    publish_rows(rows, options.out)


if __name__ == "__main__":
    main()
