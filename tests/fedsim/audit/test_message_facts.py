"""N and the ids of clients, which messages show, can be withheld from an adversary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedsim.audit.audit import Audit
from fedsim.base.errors import ConfigError
from fedsim.federation.adversary_tables import AdversaryTable
from fedsim.federation.config import Config
from fedsim.federation.experiment import Experiment
from fedsim.federation.open_run import OpenRun
from fedsim.federation.run_folder import read_rows
from fedsim.federation.table_validation import validate_tables
from fedsim.interfaces.knowledge import MESSAGE_FACTS
from fedsim.plugins.registry import load, registered_names
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update
from fedsim.report.threats import list_granted_facts
from tests.support.experiments import make_attack_file, make_tiny_config, run_serial

WITHOUT_N = ["linkability", "membership-cosine", "membership-loss", "membership-lira", "fedmia", "shared-model"]
"""Attacks that say that they do not read N, of those that need nothing rare."""
KNOWN = {"candidates": "held-out"}


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, OpenRun]:
    """A run whose clients hold different numbers of examples."""
    config = make_tiny_config(partition={"name": "quantity-skew"}, model={"name": "linear"})
    return config, run_serial(config, tmp_path_factory.mktemp("counts") / "run")


def audit(recording: tuple[Config, OpenRun], *attacks: str, **adversary: Any) -> Audit:
    config, folder = recording
    spec = make_attack_file(*attacks, victims=[0, 1], candidates=40, **adversary)
    return Audit(folder=folder, spec=spec, experiment=Experiment(config), base_folder=folder.path)


def scores_by_claim(made: Audit) -> dict[tuple[str, ...], tuple[str, str]]:
    """Value and floor by variant, attack, victim and metric."""
    assert made.run() == []
    made.score()
    rows = read_rows(made.folder.scores)
    keys = ("settings", "attack", "victim", "metric")
    return {tuple(row[key] for key in keys): (row["value"], row["floor"]) for row in rows}


def test_attacks_that_say_they_do_not_read_n_claim_the_same_without_it(recording: tuple[Config, OpenRun]) -> None:
    scores_by_claim(audit(recording, *WITHOUT_N, rounds="all", knowledge=KNOWN))
    scores = scores_by_claim(audit(recording, *WITHOUT_N, rounds="all", knowledge={**KNOWN, "num_examples": False}))
    told = {key[1:]: values for key, values in scores.items() if "num_examples" not in key[0]}
    untold = {key[1:]: values for key, values in scores.items() if "num_examples" in key[0]}
    assert {attack for attack, *_ in told} == {attack for attack, *_ in untold} == set(WITHOUT_N)
    assert {key: value for key, (value, _) in told.items()} == {key: value for key, (value, _) in untold.items()}
    # Who does not know N cannot guess links by it, which is the best guess where sizes differ.
    linked = ("linkability", "0", "linked")
    assert (told[linked][1], untold[linked][1]) == ("1.0", "0.25")


def test_attacks_that_read_n_are_refused_without_it_and_so_are_those_of_strangers_that_say_nothing(
    recording: tuple[Config, OpenRun],
) -> None:
    made = audit(recording, "sme", "shared-model", knowledge={"num_examples": False})
    assert made.refusal_reasons == {
        "sme": "sme reads N, the number of examples of a client, which the threat model withholds; grant it "
        "(adversary.knowledge.num_examples), or choose client-size, which finds it, or another attack that works "
        "without it, as membership-cosine"
    }


@pytest.mark.parametrize(("rounds", "refused"), [([1], []), ("all", ["membership-cosine"])])
def test_pseudonymous_clients_are_attacked_in_one_round_or_by_who_links_their_messages(
    rounds: Any, refused: list[str], recording: tuple[Config, OpenRun]
) -> None:
    attacks = ("membership-cosine", "inverting-gradients", *(["linkability"] if rounds == "all" else []))
    made = audit(recording, *attacks, rounds=rounds, knowledge={**KNOWN, "client_ids": False})
    assert list(made.refusal_reasons) == refused
    for sentence in made.refusal_reasons.values():
        assert "joins what a client sent in several rounds" in sentence


def test_nothing_in_a_recording_without_counts_says_n(recording: tuple[Config, OpenRun], tmp_path: Path) -> None:
    hidden = Transcript(recording[1].path).without_example_counts()
    hidden.restrict_to([1]).copy_to(tmp_path / "copy")
    for transcript in (hidden, hidden.restrict_to([1]), Transcript(tmp_path / "copy")):
        for update in transcript.updates():
            assert (update.num_examples, {"num-examples", "num_examples"} & update.metrics.keys()) == (0, set())
        for reply in transcript.header(1).replies:
            assert (reply.num_examples, {"num-examples", "num_examples"} & reply.metrics.keys()) == (0, set())


def test_n_is_withheld_under_whatever_name_metrics_give_it(tmp_path: Path) -> None:
    state = {"w": torch.zeros(2)}
    metrics = {"n_samples": 7.0, "rows": 7.0, "loss": 0.5}
    payload = Payload.from_dense({"w": torch.ones(2)}, "weights")
    update = Update(round=1, client=0, before=state, payload=payload, num_examples=7, metrics=metrics)
    Recorder(tmp_path / "transcript").write(1, [update])
    hidden = Transcript(tmp_path / "transcript").without_example_counts()
    assert hidden.update(1, 0).metrics == hidden.header(1).replies[0].metrics == {"loss": 0.5}


def test_a_report_says_what_of_the_messages_is_withheld(recording: tuple[Config, OpenRun]) -> None:
    attacks = {name: load("attacks", name) for name in ("linkability", "sme")}
    findings = [{"attack": "linkability", "granted": []}]
    for knowledge, names in (({}, {}), ({"num_examples": False}, {"num_examples": ["sme"]})):
        facts = list_granted_facts(audit(recording, *attacks, knowledge=knowledge), findings, attacks)
        said = {
            fact.name: fact.needed_by for fact in facts if fact.name in MESSAGE_FACTS and fact.withheld and fact.usual
        }
        assert said == names


def test_others_than_a_server_are_told_n_of_sums() -> None:
    with pytest.raises(ConfigError, match="num_examples and client_ids are withheld from a server"):
        validate_tables(AdversaryTable, {"who": "outsider", "knowledge": {"num_examples": False}}, "a.toml")


def test_labels_that_say_n_are_not_granted_where_n_is_withheld() -> None:
    with pytest.raises(ConfigError, match="labels are granted, which are as many as the examples"):
        validate_tables(AdversaryTable, {"knowledge": {"num_examples": False, "labels": True}}, "a.toml")


def test_attacks_over_rounds_that_need_no_ids_link_messages_or_learn_from_all_of_them() -> None:
    names = [name for name in registered_names("attacks") if not load("attacks", name).needs_client_ids]
    assert names == ["giml", "linkability"]
