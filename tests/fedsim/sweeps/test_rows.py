"""Rows of a sweep's table say of a run what it measured at last, and of which model."""

from __future__ import annotations

from pathlib import Path

import torch

from fedsim.audit.evaluation.score import Score
from fedsim.audit.scores import SCORE_COLUMNS
from fedsim.federation.config import Config
from fedsim.federation.open_run import OpenRun
from fedsim.federation.table_validation import validate_tables
from fedsim.sweeps.rows import sweep_rows
from tests.support.recordings import build_update, record_updates
from tests.support.silent_messages import row_of

COLUMNS = ("round", "client", "accuracy", "num_examples", "model")


def read_accuracies(path: Path, *rows: tuple[object, ...]) -> list[tuple[str, str]]:
    """Return the accuracy and that of the victim, of victims 0 and 1 in a run with these rows of `metrics.csv`."""
    folder = OpenRun(path)
    with folder.hold_lock():
        folder.prepare(resume=False, overwrite=False)
        folder.write_experiment(validate_tables(Config, {"attack": [{"name": "dlg"}]}, "x"))
        folder.write_table(folder.metrics, COLUMNS, [dict(zip(COLUMNS, row, strict=True)) for row in rows])
        score_rows = []
        for victim in range(2):
            score = Score.against_guesses("psnr", 20.0, {"noise": 10.0})
            score_rows.append(row_of(score, victim, 4) | {"attack": "dlg"})
            del score_rows[-1]["title"]
        folder.write_table(folder.scores, SCORE_COLUMNS, score_rows)
    weights = {"weight": torch.ones(2)}
    record_updates(folder.transcript, [build_update(weights, weights)])
    return [(row["accuracy"], row["client_accuracy"]) for row in sweep_rows(folder, "dlg", ())]


def test_clients_that_the_last_evaluation_did_not_ask_have_no_accuracy(tmp_path: Path) -> None:
    rows = [
        *((1, "server", 0.2, 100, "shared"), (1, 0, 0.1, 10, "personal"), (1, 1, 0.2, 10, "personal")),
        *((2, "server", 0.6, 100, "shared"), (2, 1, 0.7, 10, "personal")),
        (3, "server", "", "", ""),
    ]
    assert read_accuracies(tmp_path / "run", *rows) == [("0.6", ""), ("0.6", "0.7")]


def test_the_mean_of_the_clients_own_models_is_no_accuracy_of_a_shared_one(tmp_path: Path) -> None:
    rows = [(1, "server", 0.95, 20, "personal"), (1, 0, 0.9, 10, "personal"), (1, 1, 1.0, 10, "personal")]
    assert read_accuracies(tmp_path / "run", *rows) == [("", "0.9"), ("", "1.0")]
