"""What federations of many clients take: time and memory of a run, and of the commands on its folder.

    python benchmarks/many_clients.py [--only NAME ...] [--out FILE.json]

All clients train a network of 60 010 parameters for one step, on engine `serial`, recorded by recipe and not attacked.
Each run and each command is a process of its own. CPU time is user + system of that process, from its start; what a
run of a single client takes is that of the start. Memory is the peak of resident memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measuring import Row, make_parser, publish_rows

from fedsim.data import Dataset, Examples

CLASSES = 10
SHAPE = (1, 8, 8)
SETTINGS: dict[str, dict[str, Any]] = {
    "1 client": {"clients": 1},
    "1 000 clients": {"clients": 1000},
    "10 000 clients": {"clients": 10_000},
    "20 000 clients": {"clients": 20_000},
    "20 000 clients, 3 rounds": {"clients": 20_000, "rounds": 3},
    "100 000 clients": {"clients": 100_000},
    "1 000 000 clients, 1 % a round, 10 rounds": {"clients": 1_000_000, "rounds": 10, "fraction": 0.01, "examples": 2},
}
COMMANDS = {"inspect": ["inspect"], "report": ["report", "--trust"], "resume": ["run", "--trust", "--resume"]}


@dataclass(frozen=True, kw_only=True)
class TinyImages:
    """Synthetic images, `examples` for each of `clients`."""

    clients: int
    examples: int = 10

    def load(self, folder: Path | None) -> Dataset:
        """See `DatasetPlugin`."""
        del folder
        rng = torch.Generator().manual_seed(0)
        labels = torch.randint(CLASSES, (self.clients * self.examples,), generator=rng)
        raw = torch.randint(128, (len(labels), *SHAPE), generator=rng, dtype=torch.uint8)
        raw += torch.randint(128, (CLASSES, *SHAPE), generator=rng, dtype=torch.uint8)[labels]
        return Dataset(
            name="synthetic",
            train=Examples(raw=raw, labels=labels, scale=1 / 255),
            test=Examples(raw=raw[:100], labels=labels[:100], scale=1 / 255),
            num_classes=CLASSES,
            source="generated",
            licence="none needed",
        )


def write_experiment(path: Path, *, clients: int, rounds: int = 1, fraction: float = 1.0, examples: int = 10) -> None:
    """Write the experiment of one setting."""
    path.write_text(f"""
data = {{ name = "many_clients:TinyImages", clients = {clients}, examples = {examples}, standardise = false }}
partition = {{ name = "iid" }}
model = {{ name = "mlp", hidden = [800] }}
training = {{ local_epochs = 1, batch_size = {examples}, learning_rate = 0.05 }}
federation = {{ engine = "serial", clients = {clients}, rounds = {rounds}, evaluate_every = 0 }}
strategy = {{ name = "fedavg", fraction_train = {fraction} }}
recording = {{ keep = "recipe" }}
adversary = {{ when = "never" }}
""")


def measure_command(*words: str) -> dict[str, float]:
    """Run a command of fedsim; return its CPU seconds, wall seconds and peak memory in MB."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    started = time.perf_counter()
    command = [str(Path(sys.executable).with_name("fedsim")), *words]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"fedsim {' '.join(words)} failed")
    seconds = usage.ru_utime + usage.ru_stime
    return {"CPU s": seconds, "wall s": time.perf_counter() - started, "MB": usage.ru_maxrss / 1024}


def measure_setting(name: str, folder: Path) -> Row:
    """Run one setting, then the commands on its folder."""
    experiment, run = folder / "experiment.toml", folder / "run"
    write_experiment(experiment, **SETTINGS[name])
    row: Row = {"setting": name, **measure_command("run", str(experiment), "--out", str(run), "--quiet")}
    row["recorded MB"] = sum(path.stat().st_size for path in run.rglob("*") if path.is_file()) / 1e6
    for command, words in COMMANDS.items():
        figures = measure_command(*words, str(run))
        row[f"{command}, CPU s"], row[f"{command}, MB"] = figures["CPU s"], figures["MB"]
    return row


def main() -> None:
    """Measure the settings."""
    options = make_parser(__doc__, choices=SETTINGS).parse_args()
    rows: list[Row] = []
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure_setting(name, Path(folder)))
    publish_rows(rows, options.out)


if __name__ == "__main__":
    main()
