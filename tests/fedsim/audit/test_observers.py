"""Attacks of curious clients and of outsiders, made on what these see of a recording."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from fedsim.api.runs import Run
from fedsim.audit.audit import Audit, make_audit
from fedsim.audit.evaluation.foreign_recording import ForeignRecording
from fedsim.audit.observers import observe_run
from fedsim.base.errors import ConfigError, KnowledgeError
from fedsim.federation.adversary_tables import AdversaryTable
from fedsim.federation.open_run import OpenRun
from fedsim.federation.table_validation import validate_tables
from fedsim.recording.message_format import MessageFormat
from fedsim.report.attack_traits import read_metadata
from fedsim.report.page import write_report
from tests.support.experiments import make_attack_file, make_tiny_config, run_serial

TINY = {"partition": {"samples_per_client": 4}, "training": {"batch_size": 4}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> OpenRun:
    """Four clients with four digits each, one step in each of two rounds."""
    return run_serial(make_tiny_config(model={"hidden": [64]}, **TINY), tmp_path_factory.mktemp("run") / "run")


def attack(run: OpenRun, *attacks: str, **adversary: Any) -> list[str]:
    """Attack and score; return what failed."""
    audit = make_audit(run, make_attack_file(*attacks, victims="all", **adversary))
    failures = audit.run()
    audit.score(failures)
    return failures


def test_clients_that_collude_against_one_get_back_its_images(run: OpenRun) -> None:
    assert attack(run, "analytic") == []
    assert attack(run, "analytic", who=[0, 1, 2]) == []
    assert attack(run, "analytic", who="outsider") == []
    scores = Run(run.path).scores
    psnr = scores[scores.metric == "psnr"]
    by_who = dict(list(psnr.groupby("settings")))
    assert set(by_who) == {"{}", '{"adversary.who": [0, 1, 2]}', '{"adversary.who": "outsider"}'}
    colluders, outsider = by_who['{"adversary.who": [0, 1, 2]}'], by_who['{"adversary.who": "outsider"}']
    # Of the one that is left everything is seen, of sixteen examples together little.
    assert list(colluders.victim) == [3]
    assert colluders.value.item() > 60
    assert list(outsider.examples) == [16]
    assert outsider.value.item() < colluders.value.item() - 10
    # The page says who attacked.
    page = write_report(run, None, []).read_text()
    assert "<h1>What the server, an outsider who gets each model and clients 0, 1, 2 together could learn" in page
    assert "A round shows <strong>clients 0, 1, 2 together</strong>" in page


@pytest.mark.thorough
def test_python_says_who_attacks(run: OpenRun) -> None:
    finding = Run(run.path).attack("analytic", who=[0, 1, 2], victim=3)
    assert finding.tensors["data"].shape[0] == 4
    # In any order they are the same clients, and the victim is another.
    same = Run(run.path).attack("analytic", who=(2, 0, 1), victim=3)
    assert torch.equal(same.tensors["data"], finding.tensors["data"])
    Run(run.path).attack("analytic", who=[0])
    attackers = [about["attacker"] for about in read_metadata(run) if "attacker" in about]
    assert [0] in attackers
    assert [2, 0, 1] not in attackers


def group_psnr(run: OpenRun) -> dict[str, pd.DataFrame]:
    """PSNR by the settings of who attacked."""
    scores = Run(run.path).scores
    return dict(list(scores[scores.metric == "psnr"].groupby("settings")))


def test_an_eavesdropper_gets_what_the_server_gets_on_its_links(tmp_path: Path) -> None:
    run = run_serial(make_tiny_config(model={"hidden": [64]}, **TINY), tmp_path / "run")
    assert attack(run, "analytic") == []
    assert attack(run, "analytic", who="eavesdropper") == []
    assert attack(run, "analytic", who=["eavesdropper", 1, 2]) == []
    by_who = group_psnr(run)
    server, some_links = by_who["{}"], by_who['{"adversary.who": ["eavesdropper", 1, 2]}']
    assert list(by_who['{"adversary.who": "eavesdropper"}'].value) == list(server.value)
    assert list(some_links.victim) == [1, 2]
    assert list(some_links.value) == list(server.value)[1:3]
    page = write_report(run, None, []).read_text()
    on_links = "an eavesdropper on all links and an eavesdropper on the links of clients 1, 2"
    assert f"{on_links} could learn from clients" in page
    assert "the messages on these links as the server gets them" in page


def test_links_that_are_not_heard_are_named(run: OpenRun) -> None:
    audit = make_audit(run, make_attack_file("analytic", victims=[3], who=["eavesdropper", 1]))
    with pytest.raises(ConfigError, match="does not see the link of client 3; choose victims among"):
        audit.run()
    with pytest.raises(ConfigError, match="does not see the link of client 3; choose victims among"):
        make_tiny_config(adversary={"who": ["eavesdropper", 1], "victims": [1, 3]}, **TINY)
    with pytest.raises(ConfigError, match="knows whose messages"):
        make_attack_file("analytic", who=["eavesdropper", 1], knowledge={"client_ids": False})
    with pytest.raises(ConfigError, match="client 99 is not of this federation"):
        attack(run, "analytic", who=["eavesdropper", 99])


def test_an_eavesdropper_under_secure_aggregation_gets_what_models_show(tmp_path: Path) -> None:
    tables = {"secure_aggregation": {"groups": 2, "clip": 4.0}, **TINY}
    run = run_serial(make_tiny_config(model={"hidden": [64]}, **tables), tmp_path / "run")
    assert attack(run, "analytic", who="eavesdropper") == []
    assert attack(run, "analytic", who="outsider") == []
    by_who = group_psnr(run)
    eavesdropper, outsider = by_who['{"adversary.who": "eavesdropper"}'], by_who['{"adversary.who": "outsider"}']
    assert list(eavesdropper.examples) == [16]  # of all, in spite of the two groups whose sums the server sees
    assert list(eavesdropper.value) == list(outsider.value)
    assert "Uploads are masked, and reveal nothing." in write_report(run, None, []).read_text()
    # The last round is recorded, and still shows an eavesdropper nothing.
    unseen = r"round 2 shows an eavesdropper.* no update \(the model after it.*\); rounds that show one: 1$"
    with pytest.raises(ConfigError, match=unseen):
        attack(run, "analytic", who="eavesdropper", rounds=[2])
    with pytest.raises(ConfigError, match="num_examples and client_ids are withheld"):
        attack(run, "analytic", who="eavesdropper", knowledge={"num_examples": False})
    with pytest.raises(KnowledgeError, match="uploads are masked, and models show an eavesdropper"):
        attack(run, "linkability", who="eavesdropper")


def test_attacks_on_single_clients_are_refused_where_sums_are_seen(run: OpenRun) -> None:
    with pytest.raises(KnowledgeError, match="models show others than the server the sum over all clients"):
        attack(run, "linkability", who=[0])


def test_before_a_run_nothing_is_read_of_the_one_that_it_replaces(run: OpenRun, tmp_path: Path) -> None:
    # Of four clients, two see the sum of the others; of the three to come, they see the update of the third.
    config = make_tiny_config(
        federation={"clients": 3},
        adversary={"who": [0, 1], "victims": "all", "rounds": "all"},
        attack=[{"name": "linkability"}],
    )
    settings = {"spec": config, "experiment": run.build_experiment(config), "base_folder": run.path}
    with pytest.raises(KnowledgeError, match="linkability does not apply"):
        Audit(folder=run, **settings).check()
    Audit(folder=run, awaits_run=True, **settings).check()
    # A run that failed in its first round left an empty recording.
    empty = OpenRun(tmp_path / "empty")
    empty.transcript.mkdir(parents=True)
    Audit(folder=empty, **settings).check()


def test_a_server_with_momentum_is_refused_before_any_attack(tmp_path: Path) -> None:
    config = make_tiny_config(strategy={"name": "fedadam"}, **TINY)
    run = run_serial(config, tmp_path / "run")
    with pytest.raises(ConfigError, match="the model after round 1 is not the mean of its replies"):
        attack(run, "analytic", who=[0])
    assert not list(run.findings.rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"adversary": {"who": []}}, "expected the ids of colluding clients, each once"),
        ({"adversary": {"who": [1, 1]}}, "expected the ids of colluding clients, each once"),
        ({"adversary": {"who": [7]}}, "adversary.who"),
        ({"adversary": {"who": "clients"}}, "adversary.who"),
        ({"adversary": {"who": ["eavesdropper"]}}, "expected the ids of clients whose links are heard, each once"),
        ({"adversary": {"who": ["eavesdropper", "eavesdropper", 1]}}, "expected one party besides clients"),
        ({"adversary": {"who": ["eavesdropper", 9]}}, "adversary.who"),
        ({"adversary": {"who": "eavesdropper", "when": "in-round"}, "secure_aggregation": {}}, "masked vectors"),
        ({"adversary": {"who": [1], "when": "in-round"}}, "set when = 'at-end'"),
        ({"adversary": {"who": [1]}, "recording": {"clients": [0, 1]}}, "recording.clients"),
        ({"adversary": {"who": [1, 2], "victims": [0, 2]}}, "client 2 is among those who attack"),
    ],
)
def test_an_adversary_that_sees_nothing_is_named(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_tiny_config(**tables)


def test_clients_that_do_not_exist_are_named(run: OpenRun) -> None:
    with pytest.raises(ConfigError, match="client 99 is not of this federation, whose clients are 0, 1, 2, 3"):
        attack(run, "analytic", who=[0, 99])


def test_of_a_foreign_recording_the_clients_are_those_in_it(run: OpenRun) -> None:
    adversary = validate_tables(AdversaryTable, {"who": [0, 99]}, "adversary")
    with pytest.raises(ConfigError, match="client 99 is not of this federation, whose clients are 0, 1, 2, 3"):
        observe_run(run, ForeignRecording({}), adversary, MessageFormat())
    adversary = validate_tables(AdversaryTable, {"who": [0, 1]}, "adversary")
    assert observe_run(run, ForeignRecording({}), adversary, MessageFormat()).rounds == [1, 2]


@pytest.mark.parametrize("table", [{}, {"central_privacy": {"clip": 1.0, "noise_multiplier": 1.0}}])
def test_a_recording_of_some_clients_is_not_taken_for_one_of_all(table: dict[str, Any], tmp_path: Path) -> None:
    run = run_serial(make_tiny_config(recording={"clients": [0, 1]}, **table, **TINY), tmp_path / "run")
    with pytest.raises(ConfigError, match="this run recorded some of them alone"):
        attack(run, "analytic", who="outsider")


def test_central_privacy_protects_from_an_outsider_and_clients_cannot_subtract(tmp_path: Path) -> None:
    private = {"clip": 1.0, "noise_multiplier": 1.0}
    run = run_serial(make_tiny_config(model={"hidden": [64]}, central_privacy=private, **TINY), tmp_path / "run")
    assert attack(run, "analytic", who="outsider") == []
    scores = Run(run.path).scores
    psnr = scores[scores.metric == "psnr"]
    assert (psnr.value < psnr.floor).all()
    assert "all others in it, each clipped and under noise." in write_report(run, None, []).read_text()
    with pytest.raises(ConfigError, match="they cannot subtract their updates"):
        attack(run, "analytic", who=[0])


def test_central_privacy_of_a_strategy_with_momentum_is_refused(tmp_path: Path) -> None:
    tables = {"central_privacy": {"clip": 1.0, "noise_multiplier": 1.0}, "strategy": {"name": "fedadam"}}
    run = run_serial(make_tiny_config(**tables, **TINY), tmp_path / "run")
    with pytest.raises(ConfigError, match="fedadam does more with the noisy sum than a plain step"):
        attack(run, "analytic", who="outsider")


def test_membership_is_told_from_the_models_alone(run: OpenRun) -> None:
    assert (
        attack(run, "membership-loss", "membership-cosine", who="outsider", knowledge={"candidates": "held-out"}) == []
    )
    scores = Run(run.path).scores
    counts = scores[scores.metric == "membership_auc"].set_index("attack").examples
    assert dict(counts) == {"membership-loss": 32, "membership-cosine": 32}  # half are those of all four clients
