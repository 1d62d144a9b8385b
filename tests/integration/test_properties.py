"""Properties in a run: records are granted, clients attacked, judged and reported; what has none is refused."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adversaries.inference.property_inference import PropertyInference
from fedsim.audit.audit import open_audit
from fedsim.audit.evaluation.foreign_recording import ForeignRecording
from fedsim.audit.evaluation.own_run import OwnRun
from fedsim.audit.evaluation.properties import PropertyEvaluator
from fedsim.audit.finding_files import load_finding
from fedsim.audit.threat_model import grant_knowledge
from fedsim.base.errors import ConfigError, KnowledgeError
from fedsim.base.randomness import numpy_generator
from fedsim.federation.config import AttackFile
from fedsim.federation.experiment import Experiment
from fedsim.federation.open_run import OpenRun
from fedsim.federation.table_validation import validate_tables
from fedsim.interfaces.findings import PropertyPresence
from fedsim.report.page import write_report
from tests.support.experiments import make_tiny_config, run_serial

CLIENTS, COUNT = 4, 30  # the tiny experiment has four clients
SHARES = (0.5, 0.0, 0.5, 0.0)
ATTACK = {"name": "property-inference", "simulated": 20, "trees": 50}
Made = Callable[..., OpenRun]


@pytest.fixture(scope="module")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A run on a table of height, two colours and a target; half of the clients hold red rows."""

    def run(grouped: bool = False, shares: tuple[float, ...] = SHARES, **tables: Any) -> OpenRun:
        home = tmp_path_factory.mktemp("properties")
        rng, rows = numpy_generator("rows"), []
        for place in range(1000):
            red, height = place % 2 == 0, float(rng.normal())
            rows.append([f"{height:.4f}", f"{rng.normal() + 2 * red:.4f}", "red" if red else "blue", str(height > 0)])
        with (home / "rows.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["height", "weight", "colour", "tall"], *rows])
        data = {"name": "csv", "path": str(home / "rows.csv"), "target": "tall", "test_fraction": 0.5}
        data |= {"group": "colour"} if grouped else {}
        train = Experiment(make_tiny_config(data=data)).dataset.train
        red = train.groups == 1 if train.groups is not None else train.inputs()[:, 3] == 1
        places = {kind: torch.nonzero(red == kind).flatten().tolist() for kind in (False, True)}
        held: dict[str, list[int]] = {}
        for client, share in enumerate(shares):
            having = round(share * COUNT)
            own = [places[True].pop() for _ in range(having)] + [places[False].pop() for _ in range(COUNT - having)]
            held[str(client)] = own
        (home / "held.json").write_text(json.dumps(held))
        partition = {"name": "index-file", "path": str(home / "held.json")}
        return run_serial(make_tiny_config(data=data, partition=partition, **tables), home / "run")

    return run


@pytest.fixture(scope="module")
def folder(make_run: Made) -> OpenRun:
    return make_run()


@pytest.fixture
def blind_classifier(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack guesses instead of training: what its claims are judged by does not depend on them."""

    class Blind:
        def predict_proba(self, features: Any) -> Any:
            return np.full((len(features), 2), 0.5)

    monkeypatch.setattr(PropertyInference, "_train_classifier", lambda *_: (Blind(), 0.5))


def spec(name: Any = "colour=red", victims: Any = "all", **attack: Any) -> AttackFile:
    adversary = {"victims": victims, "rounds": "all", "workers": 1, "knowledge": {"property_records": name}}
    return validate_tables(AttackFile, {"adversary": adversary, "attack": [ATTACK | attack]}, "attacks")


def scores(audit: Any) -> dict[tuple[int, str], dict[str, Any]]:
    return {(row["victim"], row["metric"]): row for row in audit.score()}


def test_properties_are_attacked_judged_and_reported(folder: OpenRun) -> None:
    audit = open_audit(folder.path, spec(victims=[1, 2]))
    assert audit.run() == []
    rows = scores(audit)
    assert len(rows) == 2 * 4
    for metric in ("property_auc", "property_client_auc"):
        assert sum(rows[client, metric]["value"] for client in (1, 2)) / 2 > 0.9
        assert {rows[client, metric]["floor"] for client in (1, 2)} == {0.5}
    finding, about = load_finding(next((folder.findings / "property-inference").glob("*client-2*.safetensors")))
    assert isinstance(finding, PropertyPresence)
    assert finding.rounds.tolist() == [1] * CLIENTS + [2] * CLIENTS
    right = (finding.scores > 0.5) == (torch.tensor(SHARES)[finding.clients] > 0)
    mine = finding.clients == 2
    assert rows[2, "property_accuracy"]["value"] == pytest.approx(float(right[mine].double().mean()))
    assert about["knowledge"]["property_records"] == "colour=red"
    page = write_report(audit.folder, audit).read_text()
    for words in ("property of messages, AUC", "Messages with the property, known", "For a property, the AUC"):
        assert words in page


def test_a_group_is_a_property_that_the_model_is_not_fed_with(make_run: Made) -> None:
    folder = make_run(grouped=True, federation={"rounds": 1})
    audit = open_audit(folder.path, spec("group=red", victims=[1, 2]))
    assert audit.granted_knowledge.property_records is not None
    assert audit.granted_knowledge.property_records.inputs.shape[1] == 2
    assert audit.run() == []
    assert sum(scores(audit)[client, "property_auc"]["value"] for client in (1, 2)) / 2 > 0.9


@pytest.mark.usefixtures("blind_classifier")
def test_of_clients_that_send_gradients_the_truth_is_that_of_the_mini_batch(make_run: Made) -> None:
    strategy = {"name": "fedsgd", "learning_rate": 0.1}
    training = {"local_steps": 1, "local_epochs": None, "learning_rate": None, "batch_size": 4}
    folder = make_run(strategy=strategy, training=training)
    audit = open_audit(folder.path, spec(victims=[0], present=0.6))
    assert audit.run() == []
    finding, about = load_finding(next((folder.findings / "property-inference").glob("*client-0*.safetensors")))
    truth = PropertyEvaluator().truth(finding, about, audit.case)
    assert audit.experiment is not None
    assert truth is not None
    pairs = zip(finding.clients.tolist(), finding.rounds.tolist(), strict=True)
    red = torch.stack([audit.experiment.attacked_examples(*pair)[0][:, 3].mean() for pair in pairs])
    assert torch.equal(truth.data[:, 0], red)
    assert 0.5 not in red.tolist()  # as of all that a client holds
    assert truth.labels.tolist() == (red > 0.29).long().tolist()  # nearer to 0.6 than to 0


@pytest.mark.usefixtures("blind_classifier")
@pytest.mark.parametrize(("shares", "told"), [((0.5,) * 4, "the larger share"), ((0.0,) * 4, "the smaller share")])
def test_where_all_clients_are_of_one_kind_there_is_no_area(make_run: Made, shares: Any, told: str) -> None:
    audit = open_audit(make_run(shares=shares, federation={"rounds": 1}).path, spec(victims=[0]))
    assert audit.run() == []
    row = scores(audit)[0, "property_auc"]
    assert f"each of the {CLIENTS} messages has the property in {told}, so there is nothing to" in row["missing"]
    assert scores(audit)[0, "property_accuracy"]["floor"] == 1
    assert "there is nothing to distinguish" in write_report(audit.folder, audit).read_text()


@pytest.mark.usefixtures("blind_classifier")
def test_the_floor_of_the_accuracy_is_of_those_who_are_attacked(make_run: Made) -> None:
    """Clients 0 and 2 hold red rows, 1 and 3 none; the floor must not follow from clients that nobody attacks."""
    folder = make_run(federation={"rounds": 1})
    floors = {}
    for victims in ([0], [0, 2], [0, 1, 2]):
        audit = open_audit(folder.path, spec(victims=victims))
        assert audit.run() == []
        rows = scores(audit)
        assert sorted({victim for victim, _ in rows}) == victims
        for metric in ("property_accuracy", "property_client_accuracy"):
            assert len({rows[victim, metric]["floor"] for victim in victims}) == 1
            floors[len(victims), metric] = rows[0, metric]["floor"]
        assert rows[0, "property_auc"]["floor"] == 0.5
    assert [floors[count, "property_accuracy"] for count in (1, 2, 3)] == pytest.approx([1, 1, 2 / 3])
    assert [floors[count, "property_client_accuracy"] for count in (1, 2, 3)] == pytest.approx([1, 1, 2 / 3])


@pytest.mark.usefixtures("blind_classifier")
def test_the_floor_counts_the_messages_that_victims_sent(make_run: Made) -> None:
    """Of mini-batches some of one client are of either kind; the same answer for all is then right in some of them."""
    strategy = {"name": "fedsgd", "learning_rate": 0.1, "fraction_train": 0.5}
    training = {"local_steps": 1, "local_epochs": None, "learning_rate": None, "batch_size": 2}
    audit = open_audit(make_run(strategy=strategy, training=training, federation={"rounds": 8}).path, spec(present=0.9))
    assert audit.run() == []
    experiment, found = audit.experiment, list[float]()
    assert experiment is not None
    for client in {victim for victim, _ in scores(audit)}:
        sent = [number for number in range(1, 9) if client in audit.transcript.clients(number)]
        red = torch.stack([experiment.attacked_examples(client, number)[0][:, 3].mean() for number in sent])
        found.append(float((red > 0.44).double().mean()))
    often = sum(found) / len(found)
    assert 0 < often < 1
    for (_, metric), row in scores(audit).items():
        if metric == "property_accuracy":
            assert row["floor"] == pytest.approx(max(often, 1 - often))


def test_a_sum_over_clients_is_not_read(make_run: Made) -> None:
    audit = open_audit(make_run(secure_aggregation={"groups": 2}, federation={"rounds": 1}).path, spec())
    with pytest.raises(KnowledgeError, match="property-inference does not apply: it reads the updates of single"):
        audit.run()


def test_a_property_has_to_be_named_and_known(folder: OpenRun) -> None:
    for name, told in (
        (True, "name the property, column=category, such as sex=Female, or group=name; got True"),
        ("colour", "expected column=category, such as sex=Female, or group=name, got colour"),
        ("colour=green", "'colour' is never 'green'"),
    ):
        with pytest.raises(ConfigError, match=told):
            _ = open_audit(folder.path, spec(name)).granted_knowledge


def test_of_a_recording_made_elsewhere_nobody_knows_who_has_a_property() -> None:
    with pytest.raises(ConfigError, match="property_records: it is not known which records the clients"):
        grant_knowledge(spec().adversary, ForeignRecording({}), Path())


def test_images_of_nobody_have_no_property() -> None:
    with pytest.raises(ConfigError, match="'digits' has neither columns of categories nor groups"):
        grant_knowledge(spec().adversary, OwnRun({}, Experiment(make_tiny_config())), Path())
