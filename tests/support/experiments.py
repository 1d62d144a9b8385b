"""An experiment that runs in a blink, and variants of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedsim.federation.config import AttackFile, Config
from fedsim.federation.open_run import OpenRun
from fedsim.federation.table_validation import validate_tables

TINY: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"name": "iid", "samples_per_client": 24},
    "model": {"name": "mlp", "hidden": [16]},
    "training": {"local_epochs": 1, "batch_size": 8, "learning_rate": 0.1},
    "federation": {"engine": "serial", "seed": 3, "clients": 4, "rounds": 2},
    "strategy": {"name": "fedavg"},
    "adversary": {"when": "never"},
}
IMAGE_METRICS = [
    *("psnr", "ssim", "mse", "lpips", "recovered", "exact"),
    *("l_sim", "l_sim_line", "identified", "label_accuracy"),
]
"""What is scored of images, and of how well they explain the update, in the order of scores.csv."""


def make_tiny_config(**tables: Any) -> Config:
    """Return the tiny experiment (digits, an MLP, four clients, two rounds) with keys replaced.

    `federation={"rounds": 5}` changes one key; a table with another `name`, and a list, is
    replaced whole; a key set to None is removed.
    """
    merged = dict(TINY)
    for table, keys in tables.items():
        old = TINY.get(table, {})
        if not isinstance(keys, dict) or keys.get("name", old.get("name")) != old.get("name"):
            merged[table] = keys
        else:
            both = {**old, **keys}
            merged[table] = {key: value for key, value in both.items() if value is not None}
    return validate_tables(Config, merged, "tiny")


def make_attack_file(*attacks: str | dict[str, Any], **adversary: Any) -> AttackFile:
    """Return an attack file of these attacks (names or tables), run by one worker."""
    tables = [{"name": attack} if isinstance(attack, str) else attack for attack in attacks]
    content = {"adversary": {"workers": 1, **adversary}, "attack": tables}
    return validate_tables(AttackFile, content, "attack.toml")


def run_serial(config: Config, path: Path, **options: bool) -> OpenRun:
    """Federate `config` into the run folder `path`, attack and report nothing."""
    from fedsim.federation.simulation import run_federation

    folder = OpenRun(path)
    run_federation(config, folder, **options)
    return folder
