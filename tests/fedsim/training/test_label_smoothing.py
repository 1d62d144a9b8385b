"""Labels are smoothed in training, and nowhere else; the server says so, and attacks are handed that loss."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax, one_hot

from fedsim.audit.audit import Audit
from fedsim.audit.evaluation.own_run import OwnRun
from fedsim.audit.threat_model import apply_headers, full_knowledge
from fedsim.base.errors import ConfigError
from fedsim.base.task import smooth_labels, squared_error
from fedsim.federation.adversary_tables import AdversaryTable
from fedsim.federation.experiment import Experiment
from fedsim.federation.open_run import OpenRun
from fedsim.federation.table_validation import validate_tables
from fedsim.interfaces.attack import Attack, Knowledge
from fedsim.plugins import registry
from fedsim.recording.header import Header
from fedsim.recording.transcript import Transcript
from fedsim.training.cohort import TOLERANCE, LocalData, local_updates
from fedsim.training.gradients import example_gradients
from fedsim.training.loop import evaluate, local_gradient, local_update
from fedsim.training.model_state import copy_state, load_state
from fedsim.training.settings import LocalTraining
from tests.support.experiments import make_tiny_config, run_serial
from tests.support.small_training import net, some_data

KEY = (3, "train", 1, 0)
SMOOTHING = 0.3
ONE_STEP: dict[str, Any] = {"local_steps": 1, "batch_size": 10, "learning_rate": 0.5}


def by_hand(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy of labels of which 0.3 is spread over three classes."""
    targets = (1 - SMOOTHING) * one_hot(labels, 3) + SMOOTHING / 3
    return -(targets * log_softmax(outputs, 1)).sum(1).mean()


def gradient_by_hand(model: nn.Module) -> dict[str, Tensor]:
    inputs, labels = some_data()
    slopes = torch.autograd.grad(by_hand(model(inputs), labels), list(model.parameters()))
    return {name: slope for (name, _), slope in zip(model.named_parameters(), slopes, strict=True)}


def test_a_step_is_one_of_the_loss_of_smoothed_labels() -> None:
    model, (inputs, labels) = net(), some_data()
    expected = gradient_by_hand(model)
    before = copy_state(model)
    training = LocalTraining(**ONE_STEP, label_smoothing=SMOOTHING)
    after, loss = local_update(model, before, inputs, labels, training, key=KEY)
    for name, slope in expected.items():
        torch.testing.assert_close(before[name] - after[name], 0.5 * slope)
    load_state(model, before)
    assert loss == pytest.approx(by_hand(model(inputs), labels).item())


def test_a_gradient_that_is_sent_is_one_of_the_loss_of_smoothed_labels() -> None:
    model, (inputs, labels) = net(), some_data()
    training = LocalTraining(sends="gradient", local_steps=1, batch_size=10, label_smoothing=SMOOTHING)
    sent, _, _ = local_gradient(model, copy_state(model), inputs, labels, training, key=KEY)
    torch.testing.assert_close(sent, gradient_by_hand(model))


def test_gradients_of_single_examples_are_of_smoothed_labels() -> None:
    each, _ = example_gradients(net(), *some_data(), smooth_labels(cross_entropy, SMOOTHING))
    torch.testing.assert_close({name: of.mean(0) for name, of in each.items()}, gradient_by_hand(net()))


def test_clients_that_train_at_once_smooth_alike() -> None:
    model, (inputs, labels) = net(), some_data()
    before = copy_state(model)
    training = LocalTraining(local_epochs=2, batch_size=4, learning_rate=0.1, label_smoothing=SMOOTHING)
    (together,) = local_updates(model, before, [LocalData(inputs=inputs, labels=labels, key=KEY)], training)
    alone, loss = local_update(model, before, inputs, labels, training, key=KEY)
    assert together is not None
    assert together[1] == pytest.approx(loss, rel=1e-4)
    apart = math.sqrt(sum((together[0][name] - alone[name]).square().sum().item() for name in alone))
    assert apart < TOLERANCE * math.sqrt(sum((before[n] - alone[n]).square().sum().item() for n in alone))


def test_without_smoothing_the_loss_is_the_same_object_and_else_one_object_a_share() -> None:
    assert smooth_labels(squared_error, 0.0) is squared_error
    assert smooth_labels(cross_entropy, 0.1) is smooth_labels(cross_entropy, 0.1)


@pytest.mark.parametrize("share", [-0.1, 1.0, math.nan, math.inf])
def test_a_share_that_cannot_be_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=r"^training\.label_smoothing: expected (at least 0|a value below 1), got"):
        LocalTraining(local_epochs=1, label_smoothing=share)


def test_labels_of_no_classes_cannot_be_smoothed() -> None:
    with pytest.raises(ConfigError, match=r"^training.label_smoothing: spreads labels .*leave it out"):
        smooth_labels(squared_error, 0.1)


def test_a_regression_is_refused_before_work(tmp_path: Path) -> None:
    rows = "\n".join(f"{number},{number % 7},{number * 2}" for number in range(40))
    (tmp_path / "table.csv").write_text(f"a,b,y\n{rows}\n")
    data = {"name": "csv", "path": str(tmp_path / "table.csv"), "target": "y", "task": "regression"}
    config = make_tiny_config(
        data=data, model={"name": "linear"}, training={"local_epochs": 1, "label_smoothing": 0.1}, attack=[]
    )
    with pytest.raises(ConfigError, match=r"^training.label_smoothing: spreads labels over classes"):
        Experiment(config).check()


# What the server says, and what an adversary knows.


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> OpenRun:
    """A federation that smooths its labels."""
    config = make_tiny_config(training={"local_epochs": 1, "label_smoothing": SMOOTHING}, attack=[{"name": "sme"}])
    return run_serial(config, tmp_path_factory.mktemp("smoothed") / "run")


def test_the_server_tells_of_it_only_where_it_is_used(run: OpenRun, tmp_path: Path) -> None:
    assert Transcript(run.path).header(1).config["label-smoothing"] == SMOOTHING
    plain = run_serial(make_tiny_config(), tmp_path / "plain")
    assert "label-smoothing" not in Transcript(plain.path).header(1).config


def test_what_is_measured_is_the_plain_loss(run: OpenRun) -> None:
    experiment = Experiment(run.read_experiment())  # type: ignore[arg-type]
    inputs, labels = experiment.data.to_model(experiment.dataset.test.inputs()), experiment.dataset.test.labels
    state = Transcript(run.path).update(2, 0).before
    plain = evaluate(experiment.model, state, inputs, labels)["loss"]
    rows = (run.path / "metrics.csv").read_text().splitlines()
    loss = rows[0].split(",").index("loss")
    first = next(row.split(",") for row in rows[1:] if row.startswith("1,server"))
    assert float(first[loss]) == pytest.approx(plain, rel=1e-4)


def attack_knowledge(run: OpenRun, **knowledge: Any) -> Knowledge:
    """What an attack of the run is handed."""
    config = run.read_experiment()
    assert config is not None
    spec = config.model_copy(update={"adversary": validate_tables(AdversaryTable, {"knowledge": knowledge}, "x")})
    audit = Audit(folder=run, spec=spec, experiment=Experiment(config), base_folder=run.path)
    header = audit.transcript.header(1)
    return apply_headers(
        audit.granted_knowledge, spec.adversary, [header], registry.load("attacks", "sme").declared_facts()
    )


def test_attacks_are_handed_the_loss_of_smoothed_labels_unless_it_is_withheld(run: OpenRun) -> None:
    outputs, labels = torch.randn(10, 3, generator=torch.Generator().manual_seed(0)), some_data()[1]
    known, withheld = attack_knowledge(run).loss, attack_knowledge(run, label_smoothing=False).loss
    assert known is not None
    assert withheld is cross_entropy
    torch.testing.assert_close(known(outputs, labels), by_hand(outputs, labels))
    experiment = Experiment(run.read_experiment())  # type: ignore[arg-type]
    assert full_knowledge(AdversaryTable(), OwnRun({}, experiment), run.path).loss is known
    assert experiment.loss is known


def test_an_attack_that_reads_the_loss_reads_the_smoothing() -> None:
    class Reader(Attack):
        needs = frozenset({"loss"})

    assert "label_smoothing" in Reader.declared_facts()
    assert "label_smoothing" not in Attack.declared_facts()


def test_a_loss_that_is_no_cross_entropy_contradicts_a_header_that_tells_of_smoothing() -> None:
    sent = Header(version=1, round=1, broadcasts=[], replies=[], failures={}, config={"label-smoothing": 0.1})
    with pytest.raises(ConfigError, match="label_smoothing"):
        apply_headers(Knowledge(loss=squared_error), AdversaryTable(), [sent], frozenset({"loss", "label_smoothing"}))
