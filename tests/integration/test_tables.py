"""A federation on a table, whose rows are attacked, scored and reported."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from fedsim.audit.audit import Audit, open_audit
from fedsim.base.errors import KnowledgeError
from fedsim.federation.experiment import Experiment
from fedsim.federation.open_run import OpenRun
from fedsim.federation.run_folder import read_rows
from fedsim.report.page import write_report
from tests.support.experiments import make_tiny_config, run_serial

ATTACKS = [
    {"name": "tableak", "iterations": 80, "restarts": 3},
    {"name": "inverting-gradients", "iterations": 20},
]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Sixty people of whom little is known."""
    rng, path = np.random.default_rng(0), tmp_path / "people.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["age", "kind", "colour", "rich"])
        for _ in range(60):
            writer.writerow(
                [
                    rng.integers(20, 80),
                    rng.choice(["a", "b", "c"]),
                    rng.choice(["red", "blue"]),
                    rng.choice(["no", "yes"]),
                ]
            )
    return path


def test_rows_are_found_scored_beside_guesses_and_shown_with_their_entropy(table: Path, tmp_path: Path) -> None:
    config = make_tiny_config(
        data={"name": "csv", "path": str(table), "target": "rich"},
        partition={"name": "iid", "samples_per_client": 2},
        model={"name": "mlp", "hidden": [30]},
        training={"local_epochs": 1, "batch_size": 2, "learning_rate": 0.1},
        federation={"clients": 2, "rounds": 1},
        adversary={"when": "never", "victims": [0, 1], "workers": 1},
        attack=ATTACKS,
    )
    run = run_serial(config, tmp_path / "run")
    audit = open_audit(run.path, None, trust=True)
    assert audit.run() == []
    audit.score()
    rows = {(row["attack"], row["victim"], row["metric"]): row for row in read_rows(run.scores)}
    for victim in ("0", "1"):
        found = rows["tableak", victim, "columns_right"]
        assert float(found["value"]) == 1
        assert 0 < float(found["floor"]) <= 1
        assert float(found["ceiling"]) == 1
        assert ("inverting-gradients", victim, "columns_right") in rows
    html = write_report(audit.folder, audit).read_text()
    assert html.count('<small title="entropy') == 2 * 2 * 3
    assert "The small number behind a value is its entropy" in html


def test_an_attack_on_tables_says_that_images_are_none(tmp_path: Path) -> None:
    experiment = Experiment(make_tiny_config(attack=ATTACKS[:1]))
    audit = Audit(folder=OpenRun(tmp_path), spec=experiment.config, experiment=experiment, base_folder=tmp_path)
    message = r"^tableak is an attack on tables, and 'digits' has no columns; choose an attack on images, as sme, or a"
    with pytest.raises(KnowledgeError, match=message):
        audit.check()
