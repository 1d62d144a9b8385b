"""Records that are equal are one record, whoever holds them and wherever they stand."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

import fedsim


@dataclass(frozen=True, kw_only=True)
class ClaimClient(fedsim.Attack):
    """Claims that all records are of one client."""

    client: int = 1
    needs: ClassVar[frozenset[str]] = frozenset({"records"})

    def _run(self, target: Any, progress: Any) -> fedsim.Inference:
        scores = torch.zeros(len(target.knowledge.records.inputs), 3)
        scores[:, self.client] = 1
        return fedsim.Inference(of="source", candidates=torch.arange(3), scores=scores)


def test_each_client_that_holds_an_equal_record_is_its_source(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows, labels = rng.random((16, 4)).tolist(), rng.integers(0, 2, 16).tolist()
    held = {"a": range(4), "b": (0, 1, 2, 4), "c": range(5, 9)}  # three records of `a` are also those of `b`
    for part in ("train", "test"):
        data = {user: {"x": [rows[at] for at in own], "y": [labels[at] for at in own]} for user, own in held.items()}
        (tmp_path / "table" / part).mkdir(parents=True)
        file = {"users": list(held), "num_samples": [4] * 3, "user_data": data}
        (tmp_path / "table" / part / "all.json").write_text(json.dumps(file))
    experiment = {
        "data": {"name": "leaf", "path": str(tmp_path / "table")},
        "partition": {"name": "natural"},
        "model": {"name": "mlp", "hidden": [4]},
        "federation": {"engine": "serial", "clients": 3, "rounds": 1},
    }
    run = fedsim.run(experiment, out=tmp_path / "run")
    for client in range(3):
        run.attack(ClaimClient(client=client), victim=0, knowledge={"records": True})
    scores = run.scores.query("metric == 'source_accuracy'").sort_values("value")
    assert scores["value"].tolist() == [0.0, 0.75, 1.0]
    np.testing.assert_allclose(scores["floor"], (1 + 0.75 + 0) / 3)
