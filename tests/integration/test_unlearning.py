"""Two models around the removal of a client, imported as its update, tell what it held, and not what others hold."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import fedsim
from fedsim.audit.audit import Audit, open_audit
from fedsim.federation.config import AttackFile
from fedsim.federation.table_validation import validate_tables
from fedsim.recording.wire_format import State
from fedsim.training.loop import local_update
from fedsim.training.model_state import copy_state
from fedsim.training.settings import LocalTraining
from tests.support.digit_clients import DIGITS, mlp

ROOT = Path(__file__).parents[2]
CLIENTS, HELD = (0, 1, 2, 3), 12
PLAN = LocalTraining(local_epochs=2, batch_size=10, learning_rate=0.2)
MEMBERSHIP: list[dict[str, Any]] = [
    {"name": "membership-loss"},
    {"name": "membership-loss", "label": "by decrease", "by_decrease": True},
    {"name": "membership-cosine"},
]


def held_by(client: int) -> tuple[Tensor, Tensor]:
    rows = slice(client * HELD, (client + 1) * HELD)
    return DIGITS.train.inputs(rows), DIGITS.train.labels[rows]


@cache
def train_together(*clients: int) -> State:
    """Federated averaging from the first weights, as a server does again without a client that leaves."""
    state = copy_state(mlp())
    for number in range(10):
        returned = []
        for client in clients:
            inputs, labels = held_by(client)
            key = ("unlearning", number, client)
            returned.append(local_update(mlp(), state, inputs, labels, PLAN, key=key)[0])
        state = {name: torch.stack([model[name] for model in returned]).mean(0) for name in state}
    return state


def ascend(state: State, client: int) -> State:
    """One step up the loss of some of a client's examples, by which it is forgotten."""
    model, (inputs, labels) = mlp(), held_by(client)
    model.load_state_dict(state)
    cross_entropy(model(inputs[:4]), labels[:4]).backward()
    return {name: p.detach() + 0.2 * p.grad for name, p in model.named_parameters() if p.grad is not None}


def import_removals(
    folder: Path, before: State, after: Mapping[int, State], attacks: list[dict[str, Any]], held: int = HELD
) -> Audit:
    """Import two models for each client; return the audit of these attacks on them."""
    spec = importlib.util.spec_from_file_location("writer", ROOT / "examples/other-frameworks/exchange_writer.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    writer = module.ExchangeWriter(folder / "exchange")
    for client, state in after.items():
        writer.write_broadcast(1, {name: tensor.numpy() for name, tensor in state.items()}, client=client)
        writer.write_reply(1, client, {name: tensor.numpy() for name, tensor in before.items()}, held)
    fedsim.import_exchange(folder / "exchange", folder / "run")

    def read_truth(client: Any) -> tuple[Tensor, Tensor]:
        inputs, labels = held_by(client)
        return inputs[:held], labels[:held]

    public = DIGITS.train.inputs(slice(600, 1000)), DIGITS.train.labels[600:1000]
    known = {
        "model": "tests.support.digit_clients:mlp", "input_shape": [1, 8, 8], "value_range": [0.0, 1.0],
        "num_classes": 10, "candidates": "held-out",
    }  # fmt: skip
    tables = {
        "adversary": {"workers": 1, "victims": "all", "knowledge": known},
        "attack": attacks,
        "truth": fedsim.write_truth(folder / "truth", read_truth, list(after), public=public),
    }
    return open_audit(folder / "run", validate_tables(AttackFile, tables, "attack.toml"), trust=True)


def audit_removals(
    folder: Path, before: State, after: Mapping[int, State], attacks: list[dict[str, Any]], held: int = HELD
) -> dict[tuple[str, str], tuple[float, float]]:
    """Import two models for each client and attack them; mean score and floor by attack and metric."""
    audit = import_removals(folder, before, after, attacks, held)
    assert audit.run() == []
    rows = audit.score()
    scores = dict[tuple[str, str], tuple[float, float]]()
    for attack, metric in {(row["attack"], row["metric"]) for row in rows}:
        found = [row for row in rows if (row["attack"], row["metric"]) == (attack, metric)]
        scores[attack, metric] = mean(row["value"] for row in found), mean(row["floor"] for row in found)
    return scores


def test_who_left_is_told_from_who_stayed(tmp_path: Path) -> None:
    everybody = train_together(*CLIENTS)
    without = {client: train_together(*(other for other in CLIENTS if other != client)) for client in CLIENTS}
    left = audit_removals(tmp_path / "left", everybody, without, MEMBERSHIP)
    # Of a client that stays, the models around the removal of another one tell nothing.
    of_another = {client: without[(client + 1) % len(CLIENTS)] for client in CLIENTS}
    stayed = audit_removals(tmp_path / "stayed", everybody, of_another, MEMBERSHIP)
    for attack in ("by decrease", "membership-cosine"):
        value, floor = left[attack, "membership_auc"]
        assert floor == 0.5
        assert value > 0.58
        assert stayed[attack, "membership_auc"][0] < 0.5
    # The model from before the removal tells who trained it, and not who left.
    assert left["membership-loss", "membership_auc"] == stayed["membership-loss", "membership_auc"]


def test_a_score_of_records_that_a_truth_file_no_longer_holds_is_refused(tmp_path: Path) -> None:
    everybody = train_together(*CLIENTS)
    audit = import_removals(tmp_path, everybody, {0: everybody}, MEMBERSHIP[:1])
    assert audit.run() == []
    assert audit.score()
    # As many other records of the same classes take their place.
    others = DIGITS.train.inputs(slice(1000, 1000 + HELD)), held_by(0)[1]
    fedsim.write_truth(tmp_path / "truth", lambda client: others, [0])
    failures: list[str] = []
    assert open_audit(audit.folder.path, audit.spec, trust=True).score(failures) == []
    assert "scores other candidates than those that the truth files hold now; attack again" in "".join(failures)
    again = open_audit(audit.folder.path, audit.spec, trust=True)
    assert again.run() == []
    assert again.score(failures := [])
    assert failures == []


def test_forgetting_by_ascent_gives_the_forgotten_examples_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    everybody = train_together(*CLIENTS)
    attacks: list[dict[str, Any]] = [{"name": "spear-ica"}, {"name": "sme", "iterations": 100, "step_size": 0.1}]
    left = audit_removals(tmp_path / "left", everybody, {0: ascend(everybody, 0)}, attacks, 4)
    assert left["spear-ica", "psnr"][0] > 60
    assert left["sme", "psnr"][0] > left["sme", "psnr"][1] + 2
    assert "does not explain its message" not in caplog.text
    # What a client that stays holds is not what the models around the removal of another one are about.
    stayed = audit_removals(tmp_path / "stayed", everybody, {0: ascend(everybody, 1)}, attacks, 4)
    assert stayed == {}
    assert "client 0: not scored: what truth.0 says that it held does not explain its message" in caplog.text
