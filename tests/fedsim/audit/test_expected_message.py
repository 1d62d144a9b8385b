"""Attacks are checked before a federation runs by a message as its clients will send it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedsim.audit.audit import Audit, make_audit
from fedsim.audit.expected_message import expect_message
from fedsim.audit.refusals import find_refusals
from fedsim.base.errors import FedsimError
from fedsim.federation.config import AttackFile, Config
from fedsim.federation.experiment import Experiment
from fedsim.federation.open_run import OpenRun
from fedsim.federation.resolve import resolve
from fedsim.interfaces.attack import Knowledge
from fedsim.plugins import registry
from fedsim.recording.wire_format import Update
from tests.support.experiments import make_attack_file, make_tiny_config, run_serial

NORMALISED = {"model": {"name": "mlp", "hidden": [16], "batch_norm": True}}
GRADIENTS = {"strategy": {"name": "fedsgd", "learning_rate": 0.1}}
WITHHELD = {"training": {"batch_norm_statistics": "withheld"}}
PRIVATE_HEAD = {"algorithm": {"name": "fedper"}, "federation": {"evaluate_every": 0, "rounds": 1}}
SETTINGS: dict[str, dict[str, Any]] = {
    "weights": {},
    "gradients": {**GRADIENTS, "training": {"local_epochs": None, "local_steps": 1, "learning_rate": None}},
    "statistics": NORMALISED,
    "statistics with gradients": {
        **NORMALISED,
        **GRADIENTS,
        "training": {"local_epochs": None, "local_steps": 1, "learning_rate": None},
    },
    "withheld statistics": {**NORMALISED, **WITHHELD},
    "frozen normalisation": {**NORMALISED, "training": {"batch_norm": "frozen"}},
    "private head": PRIVATE_HEAD,
    "private normalisation": {**NORMALISED, **PRIVATE_HEAD, "algorithm": {"name": "fedbn"}},
    "control variates": {"algorithm": {"name": "scaffold"}, "strategy": {"name": "scaffold"}},
    "linear term": {"algorithm": {"name": "feddyn"}, "strategy": {"name": "feddyn"}},
}


@pytest.mark.parametrize("tables", SETTINGS.values(), ids=SETTINGS)
def test_the_message_has_the_tensors_that_clients_send(tables: dict[str, Any], tmp_path: Path) -> None:
    config = make_tiny_config(**tables)
    sent = next(run_serial(config, tmp_path / "run").recording.updates())
    expected = expect_message(Experiment(resolve(config)), config.adversary, sent.num_examples)
    assert expected.payload.kind == sent.payload.kind
    assert (expected.gradient_move is None) == (sent.gradient_move is None)
    for name in ("before", "after", "gradient"):
        theirs, ours = getattr(sent, name) or {}, getattr(expected, name) or {}
        assert {key: (tensor.shape, tensor.dtype) for key, tensor in ours.items()} == {
            key: (tensor.shape, tensor.dtype) for key, tensor in theirs.items()
        }, name
    for key, tensor in sent.pseudo_gradient.items():
        assert bool(expected.pseudo_gradient[key].any()) == bool(tensor.any()), key


def make_waiting_audit(config: Config, folder: Path, attack: str, **knowledge: Any) -> Audit:
    """Return the audit of a federation that is still to run, by an attack on client 0 in all rounds."""
    rounds = [1] if registry.load("attacks", attack).reads_one_round() else "all"
    granted = {"candidates": "held-out", "known_candidates": 4, "records": True, "auxiliary": True, **knowledge}
    file = make_attack_file({"name": attack, **QUICK.get(attack, {})}, victims=[0], rounds=rounds, knowledge=granted)
    config = config.model_copy(update={"adversary": file.adversary, "attack": file.attack})
    run = OpenRun(folder)
    experiment = run.build_experiment(resolve(config))
    return Audit(folder=run, spec=config, experiment=experiment, base_folder=folder, awaits_run=True)


QUICK: dict[str, dict[str, Any]] = {"see-through-gradients": {"bn_weight": 0.0}}
PART = "of the model are in no message, as of a part that stays with the clients"
STATISTICS = "the model normalises with 2.running_mean, which clients of this federation do not share"
NO_LAST_LAYER = "labels cannot be recovered: the model ends in Softmax, not in a linear layer; grant them"
SOFTMAX = {"model": {"name": f"{__name__}:build_softmax"}}

SUMS_OF_GRADIENTS = {
    "strategy": GRADIENTS["strategy"],
    "training": {"local_epochs": None, "local_steps": 1, "learning_rate": None, "batch_size": 4},
    "secure_aggregation": {"groups": "all"},
}


def build_softmax() -> nn.Module:
    """Return a network that gives probabilities."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10), nn.Softmax(1))


@pytest.mark.parametrize(
    ("tables", "knowledge", "attack", "reason"),
    [
        (SETTINGS["withheld statistics"], {}, "dlfa", STATISTICS),
        (SETTINGS["withheld statistics"], {}, "label-counts", STATISTICS),
        (SETTINGS["withheld statistics"], {}, "analytic", STATISTICS),
        (SETTINGS["withheld statistics"], {}, "membership-cosine", "a candidate has no gradient of its own"),
        (SETTINGS["withheld statistics"], {}, "membership-loss", None),
        (SETTINGS["withheld statistics"], {}, "sra-gradient", None),
        (PRIVATE_HEAD, {}, "dlg", f"the clients: '3.weight', '3.bias' {PART}"),
        (PRIVATE_HEAD, {}, "rlu", PART),
        (PRIVATE_HEAD, {}, "sia", PART),
        (PRIVATE_HEAD, {}, "client-size", PART),
        (PRIVATE_HEAD, {}, "lmra-dummy-data", PART),
        (PRIVATE_HEAD, {}, "analytic", None),
        (PRIVATE_HEAD, {}, "sme", None),
        (PRIVATE_HEAD, {}, "shared-model", None),
        (PRIVATE_HEAD, {"private_parts": True}, "dlfa", None),
        # As many tensors are sent, statistics among them, as the model has parameters.
        ({**NORMALISED, **PRIVATE_HEAD}, {}, "membership-loss", f"the clients: '4.weight', '4.bias' {PART}"),
        (SOFTMAX, {}, "inverting-gradients", NO_LAST_LAYER),
        (SOFTMAX, {}, "joint-inversion", NO_LAST_LAYER),
        (SOFTMAX, {"labels": True}, "inverting-gradients", None),
        (SOFTMAX, {}, "dlg", None),
        (SUMS_OF_GRADIENTS, {}, "joint-inversion", None),
        (
            {**SUMS_OF_GRADIENTS, "strategy": {}, "training": {"batch_size": 4}},
            {},
            "joint-inversion",
            "steps take 8 of",
        ),
        (SETTINGS["control variates"], {}, "linkability", "in each round: clients add control variates"),
        (SETTINGS["control variates"], {"client_ids": False}, "inverting-gradients", "withholds who sent that; grant"),
        (SETTINGS["control variates"], {}, "inverting-gradients", None),
    ],
)
def test_what_messages_will_not_hold_refuses_an_attack_before_the_run(
    tables: dict[str, Any], knowledge: dict[str, Any], attack: str, reason: str | None, tmp_path: Path
) -> None:
    training = {"batch_size": 24, **tables.get("training", {})}
    config = make_tiny_config(**{**tables, "training": training})
    found = make_waiting_audit(config, tmp_path, attack, **knowledge).refusal_reasons.get(attack)
    assert (found is None) == (reason is None), found
    assert (reason or "") in (found or "")


def test_a_check_that_changes_its_message_changes_no_other_and_no_federation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []

    def overwrite(attack: object, update: Update, knowledge: Knowledge) -> None:
        assert knowledge.private_parts is not None
        for state in (update.before, update.after, knowledge.private_parts):
            seen.extend(float(tensor.abs().sum()) for tensor in state.values())
            for tensor in state.values():
                tensor.fill_(7.0)

    monkeypatch.setattr(registry.load("attacks", "sme"), "check_message", overwrite)
    audit = make_waiting_audit(make_tiny_config(**PRIVATE_HEAD), tmp_path, "sme", private_parts=True)
    assert audit.experiment is not None
    start = {name: tensor.clone() for name, tensor in audit.experiment.initial_model_state().items()}
    assert not find_refusals(audit)
    assert not find_refusals(audit)
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :] != []
    assert all(torch.equal(tensor, start[name]) for name, tensor in audit.experiment.initial_model_state().items())


@pytest.mark.slow
@pytest.mark.parametrize("tables", SETTINGS.values(), ids=SETTINGS)
def test_no_attack_that_works_is_refused_before_the_run(tables: dict[str, Any], tmp_path: Path) -> None:
    config = make_tiny_config(**{**tables, "partition": {"samples_per_client": 8}})
    run = run_serial(config, tmp_path / "run")
    for attack in registry.registered_names("attacks"):
        waiting = make_waiting_audit(config, tmp_path / "waiting", attack)
        reason = waiting.refusal_reasons.get(attack, "")
        if "does not apply" not in reason or "sums over clients" in reason:  # another kind of attack
            continue
        audit = make_audit(run, AttackFile(adversary=waiting.spec.adversary, attack=waiting.spec.attack))
        vars(audit)["refusal_reasons"] = {}
        try:
            failures = audit.run()
        except FedsimError as error:
            failures = [str(error)]
        assert failures, reason
