"""Label distributions in a run: auxiliary records are granted, clients attacked, judged and reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.audit.audit import open_audit
from fedsim.audit.evaluation.foreign_recording import ForeignRecording
from fedsim.audit.finding_files import load_finding
from fedsim.audit.threat_model import grant_knowledge
from fedsim.base.errors import ConfigError, DataError
from fedsim.federation.auxiliary import auxiliary_records
from fedsim.federation.config import AttackFile
from fedsim.federation.experiment import Experiment
from fedsim.federation.open_run import OpenRun
from fedsim.federation.table_validation import validate_tables
from fedsim.interfaces.findings import LabelDistribution
from fedsim.report.page import write_report

RUN = {
    "partition": {"name": "dirichlet", "alpha": 0.3, "samples_per_client": 60},
    "training": {"local_epochs": 2, "learning_rate": 0.1, "batch_size": 10},
    "federation": {"clients": 4, "rounds": 3, "evaluate_every": 100},
    "adversary": {"when": "never"},
}
ATTACKS = ("label-counts", "llg", "rlu")


def spec(count: int = 300, attacks: tuple[str, ...] = ATTACKS, victims: str | list[int] = "all") -> AttackFile:
    adversary = {
        "victims": victims,
        "rounds": "all",
        "workers": 1,
        "auxiliary": count,
        "knowledge": {"auxiliary": True},
    }
    return validate_tables(
        AttackFile, {"adversary": adversary, "attack": [{"name": name} for name in attacks]}, "attacks"
    )


def experiment_of(folder: OpenRun) -> Experiment:
    config = folder.read_experiment()
    assert config is not None
    return Experiment(config)


def test_distributions_are_attacked_judged_and_reported(folder: OpenRun) -> None:
    audit = open_audit(folder.path, spec(60, victims=[0, 2]))
    assert audit.run() == []
    scored = [row for row in audit.score() if row["victim"] in (0, 2)]  # another test may have attacked others before
    rows = {(row["attack"], row["victim"], row["metric"]): row for row in scored}
    assert len(rows) == 2 * 2 * len(ATTACKS)
    for attack in ATTACKS:
        own = [rows[attack, client, "label_distance"] for client in (0, 2)]
        assert sum(row["value"] for row in own) < sum(row["floor"] for row in own) / 2
    data = experiment_of(folder).data
    finding, about = load_finding(next((folder.findings / "rlu").glob("*client-2*.safetensors")))
    assert isinstance(finding, LabelDistribution)
    assert finding.rounds.tolist() == [1, 2, 3]
    true = data.train(2)[1].bincount(minlength=10) / len(data.train(2)[1])
    assert rows["rlu", 2, "label_distance"]["value"] == pytest.approx(
        float((finding.mean_shares - true).abs().sum() / 2)
    )
    assert "auxiliary" in about["granted"]
    page = write_report(audit.folder, audit).read_text()
    for words in ("label distribution, total variation", "the shares of the classes in the public data", "auxiliary"):
        assert words in page


def test_auxiliary_records_are_none_that_clients_train_on(folder: OpenRun) -> None:
    data = experiment_of(folder).data
    few, all_of_them = auxiliary_records(data, 20), auxiliary_records(data, 10**6)
    assert len(few.inputs) == len(few.labels) == 20
    assert torch.equal(few.inputs, all_of_them.inputs[:20])
    _, index = data.auxiliary_examples()
    assert len(all_of_them.inputs) == len(np.unique(index))
    held = torch.cat([inputs for inputs, _ in data.model_examples(range(4))])
    assert torch.cdist(few.inputs.flatten(1), held.flatten(1)).min() > 0


def test_where_clients_train_on_everything_there_are_none(folder: OpenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    data = experiment_of(folder).data
    nobody = np.empty(0, dtype=np.int64)
    monkeypatch.setattr(type(data), "auxiliary_examples", lambda self: (self.dataset.train, nobody))
    with pytest.raises(DataError, match="clients train on all examples of 'digits'; hold some out with"):
        auxiliary_records(data, 20)


def test_a_finding_from_more_auxiliary_records_is_made_anew(folder: OpenRun) -> None:
    claims: list[Any] = []
    for count in (50, 100):
        audit = open_audit(folder.path, spec(count, ("rlu",), victims=[1]))
        assert audit.run() == []
        finding, _ = load_finding(next((folder.findings / "rlu").glob("*client-1*.safetensors")))
        claims.append(finding.tensors["shares"])
    assert not torch.equal(*claims)


def test_of_a_recording_made_elsewhere_nobody_knows_auxiliary_records() -> None:
    with pytest.raises(ConfigError, match="recording made elsewhere do not train on; attack the run of"):
        grant_knowledge(spec().adversary, ForeignRecording({}), Path())
