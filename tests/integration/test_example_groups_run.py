"""A run under secure aggregation is attacked, and its groups of examples are judged by who holds them."""

from __future__ import annotations

from pathlib import Path

from fedsim.audit.audit import open_audit
from tests.support.experiments import make_attack_file, make_tiny_config, run_serial

CLIENTS, EXAMPLES = 3, 6


def test_recovered_examples_and_their_groups_are_scored(tmp_path: Path) -> None:
    config = make_tiny_config(
        partition={"name": "iid", "samples_per_client": EXAMPLES},
        model={"name": "mlp", "hidden": [600]},
        training={"local_epochs": 3, "batch_size": 2, "learning_rate": 0.3},
        federation={"clients": CLIENTS, "rounds": 5},
        secure_aggregation={"groups": "all", "bits": 24, "clip": 0.3},
    )
    folder = run_serial(config, tmp_path / "run")
    audit = open_audit(folder.path, make_attack_file("sratta", rounds="all"))
    assert audit.run() == []
    rows = {row["metric"]: row for row in audit.score()}
    assert rows["false_certificates"]["value"] == 0
    assert rows["certified"]["value"] > 0.2
    assert rows["exact"]["examples"] == CLIENTS * EXAMPLES
    assert rows["pairs_found"]["value"] > rows["pairs_found"]["floor"]
    assert rows["pairs_right"]["value"] == 1
    assert rows["pairs_right"]["examples"] < CLIENTS * EXAMPLES
