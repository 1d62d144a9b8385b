"""Several labels or numbers an example: each plug-in scores what it claims beside a floor, or refuses in a sentence."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

import fedsim
from fedsim.audit.audit import make_audit
from fedsim.base.errors import FedsimError
from fedsim.base.randomness import seed_globals
from fedsim.base.task import Loss
from fedsim.data.digits import Digits
from fedsim.federation.experiment import Experiment
from fedsim.federation.open_run import OpenRun
from fedsim.interfaces.findings import Reconstruction
from fedsim.plugins import registry
from fedsim.report.page import write_report
from fedsim.report.panels.run import sharing_table
from fedsim.training.message_function import ClientMessage
from fedsim.training.model_state import copy_state
from fedsim.training.models.mlp import Mlp
from tests.support.attacked_runs import attack_clients, read_scores, read_values
from tests.support.experiments import make_attack_file, make_tiny_config, run_serial

TABLES: dict[str, Any] = {
    "partition": {"samples_per_client": 4},
    "model": {"hidden": [64]},
    "training": {"batch_size": 4},
    "federation": {"clients": 3},
}
KINDS = ["traits", "moments"]
MADE = [
    *("analytic", "cocktail-party", "fedmia", "inverting-gradients", "linkability", "membership-cosine"),
    *("membership-combined", "membership-difference", "membership-loss", "membership-white-box", "sia", "sme"),
    *("spear", "spear-ica", "spear-ica-rounds"),
]
"""Attacks that take rows of targets; all others refuse them."""
DEFENSES: dict[str, dict[str, Any]] = {
    "dp-sgd": {"noise_multiplier": 1.0},
    "gate": {"measure": "gradient-norm", "above": 1e6},
    "layer-freeze": {"layers": ["1.*"]},
}
MEASURES: dict[str, dict[str, Any]] = {
    "angular-lipschitz": {"noises": 4},
    "expected-error": {"steps": 2},
    "jacobian-norm": {"probes": 2},
    "lavp": {"steps": 2},
}
REFUSED_DEFENSES = {"instahide": KINDS, "mixup": ["moments"]}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """What is learned of the digits: several labels, or several numbers."""
    return str(request.param)


@pytest.fixture(scope="module")
def run(kind: str, tmp_path_factory: pytest.TempPathFactory) -> OpenRun:
    """Three clients with four digits each, one step in each of two rounds."""
    return run_serial(
        make_tiny_config(data={"name": "digits", "targets": kind}, **TABLES), tmp_path_factory.mktemp(kind) / "run"
    )


@pytest.mark.parametrize("name", sorted(registry.registered_names("attacks")))
def test_an_attack_is_scored_beside_a_floor_or_refuses(run: OpenRun, kind: str, name: str) -> None:
    audit, failures = attack_clients(run, name)
    assert audit is not None or name not in MADE, failures
    if name not in MADE:
        assert failures
        for failure in failures:
            assert "attack on" in failure or "takes one class or one number" in failure, failure
        return
    assert failures == []
    assert audit is not None
    audit.score(failures)
    rows = read_values(run, name)
    scored = {row["metric"] for row in rows}
    assert scored
    metrics_without_floor = {row["metric"] for row in rows if not math.isfinite(float(row["floor"] or "nan"))}
    assert metrics_without_floor <= {"false_certificates"}, "a value without a floor"
    if "psnr" in scored:  # it claims examples, and so their targets
        assert ("labels_right" if kind == "traits" else "target_error") in scored


def test_the_exact_labels_of_exact_examples_are_read(run: OpenRun, kind: str) -> None:
    audit = make_audit(run, make_attack_file("spear", victims="all", rounds=[1]))
    assert audit.run() == []
    audit.score()
    values = [row for row in read_scores(run) if row["attack"] == "spear" and row["round"] == "1"]
    if kind == "traits":  # the sign of the last layer's gradient says each label
        assert [float(row["value"]) for row in values if row["metric"] == "labels_right"] == [1.0] * 3
    else:  # what a model after one step predicts is not a number of the victim's
        errors = [float(row["value"]) for row in values if row["metric"] == "target_error"]
        assert len(errors) == 3
        assert min(errors) > 0.3


@pytest.mark.parametrize("loss", [nn.BCEWithLogitsLoss(), lambda outputs, targets: mse_loss(outputs, targets)])
def test_an_attack_in_memory_claims_rows_whoever_wrote_the_loss(loss: Loss) -> None:
    with seed_globals("in memory"):
        network = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))
    before = copy_state(network)
    gradients = torch.autograd.grad(loss(network(torch.rand(1, 12)), torch.ones(1, 4)), list(network.parameters()))
    after = {name: before[name] - 0.1 * gradient for name, gradient in zip(before, gradients, strict=True)}
    facts: dict[str, Any] = {"model": network, "num_examples": 1, "loss": loss, "input_shape": (12,)}
    finding = fedsim.attack(before, after, attack="analytic", value_range=(0.0, 1.0), **facts)
    assert isinstance(finding, Reconstruction)
    assert finding.labels.shape == (1, 4)
    with pytest.raises(FedsimError, match=r"dlg needs .*num_classes"):
        fedsim.attack(before, after, attack="dlg", value_range=(0.0, 1.0), learning_rate=0.1, local_epochs=1, **facts)


@pytest.mark.parametrize("defense", [[], [{"name": "dp-sgd", "clip": 0.5, "noise_multiplier": 1.0}]])
def test_clients_trained_at_once_end_where_they_end_one_by_one(
    kind: str, defense: list[dict[str, Any]], tmp_path: Path
) -> None:
    tables = {**TABLES, "training": {"batch_size": 2, "local_epochs": 2}}
    states = []
    for vectorise in (True, False):
        federation = {**TABLES["federation"], "vectorise": vectorise}
        data = {"name": "digits", "targets": kind}
        config = make_tiny_config(data=data, defense=defense, **{**tables, "federation": federation})
        run = run_serial(config, tmp_path / str(vectorise))
        states.append(load_file(run.path / "checkpoint.safetensors"))
    for name, tensor in states[0].items():
        assert torch.allclose(tensor, states[1][name], atol=1e-6)


def test_labels_are_counted_by_client(kind: str) -> None:
    tables: dict[str, Any] = {"data": {"name": "digits", "targets": kind}, **TABLES}
    experiment = Experiment(make_tiny_config(**tables))
    page = str(sharing_table(experiment, ()).table)
    if kind == "traits":
        held = experiment.dataset.train.labels[torch.from_numpy(experiment.data.indices(0)[0])]
        cells = "".join(f"<td[^>]*>{int(count) or ''}</td>\\s*" for count in held.sum(0))
        assert re.search(cells, page)
        assert "with a loop" in page
    else:
        assert "mean of all targets" in page


def test_granted_targets_help_and_are_not_scored(run: OpenRun) -> None:
    attack = {"name": "inverting-gradients", "iterations": 100, "step_size": 0.1}
    for labels in (False, True):
        audit = make_audit(run, make_attack_file(attack, victims=[0], rounds=[1], knowledge={"labels": labels}))
        assert audit.run() == []
    audit.score()
    rows = [row for row in read_scores(run) if row["attack"] == "inverting-gradients" and row["round"] == "1"]
    granted = [row for row in rows if "labels" in row["granted"].split()]
    assert not {"labels_right", "target_error"} & {row["metric"] for row in granted}
    matched = [float(row["value"]) for row in granted if row["metric"] == "l_sim"]
    assert len(matched) == 1
    assert max(matched) < 0.1, "the gradients of granted targets in another order would not be matched"


def test_the_model_is_judged_beside_what_the_same_answer_gets(run: OpenRun, kind: str) -> None:
    with (run.path / "metrics.csv").open() as file:
        row = next(row for row in csv.DictReader(file) if row["client"] == "server")
    targets = Digits(targets=kind).load(None).test.labels.double()  # type: ignore[arg-type]
    if kind == "traits":
        best = torch.maximum(targets.mean(0), 1 - targets.mean(0)).mean()
        assert 0 < float(row["accuracy"]) < 1
    else:
        best = (targets - targets.mean(0)).square().mean()
        assert not row["accuracy"]
    assert float(row["guess"]) == pytest.approx(best.item())
    assert write_report(run, None, []).is_file()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted(registry.registered_names("defenses")))
def test_a_defense_works_or_refuses(tmp_path: Path, kind: str, name: str) -> None:
    tables: dict[str, Any] = {"data": {"name": "digits", "targets": kind}, **TABLES}
    config = make_tiny_config(defense=[{"name": name, **DEFENSES.get(name, {})}], **tables)
    if kind in REFUSED_DEFENSES.get(name, []):
        with pytest.raises(FedsimError, match=r"leave it out|leave the defense out"):
            run_serial(config, tmp_path / "run")
        return
    run = run_serial(config, tmp_path / "run")
    spec = make_attack_file(
        {"name": "inverting-gradients", "iterations": 2}, victims=[0], rounds=[1], knowledge={"defenses": True}
    )
    audit = make_audit(run, spec)
    audit.score(audit.run())
    assert read_scores(run)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted(registry.registered_names("measures")))
def test_a_measure_knows_the_gradient_of_rows_of_targets(kind: str, name: str) -> None:
    dataset = Digits(targets=kind).load(None)  # type: ignore[arg-type]
    with seed_globals("rows of targets"):
        network = Mlp(hidden=(8,)).build(dataset.task)
    inputs, targets = dataset.train.inputs(slice(0, 3)), dataset.train.labels[:3]
    message = ClientMessage.create(network, dataset.task.loss, inputs, targets)
    # The message that it measures is the gradient of the mean of the examples' losses.
    parameters = list(network.parameters())
    if kind == "traits":
        loss = binary_cross_entropy_with_logits(network(inputs), targets)
    else:
        loss = mse_loss(network(inputs), targets)
    expected = torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, parameters)])
    assert torch.allclose(message.vector, expected, atol=1e-6)
    cls = registry.load("measures", name)
    values = cls(**MEASURES.get(name, {})).compute_for_message(message)
    assert values
    assert all(math.isfinite(value) for value in values.values())
