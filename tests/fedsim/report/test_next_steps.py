"""What to do next follows from the verdict, is a command to copy, and is the same everywhere."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from fedsim.audit.evaluation.score import Score
from fedsim.federation.config import Config
from fedsim.federation.table_validation import validate_tables
from fedsim.recording.reported_accuracy import ReportedAccuracy
from fedsim.report.headline import describe_accuracy
from fedsim.report.learning import NoLearning, Remedy
from fedsim.report.next_steps import AuditedRun, suggest_after_audit, suggest_after_sweep
from fedsim.report.sweep_answer import answer_sweep
from fedsim.report.verdicts import ScoreReading, score_readings
from tests.support.silent_messages import row_of
from tests.support.sweep_tables import AT_FLOOR, HALVED, LEAKING, make_both, make_rows

BELOW = [9.0, 9.5, 9.2, 9.4, 9.1, 9.3]
LOWER = [8.5, 9.0, 8.7, 8.9, 8.6, 8.8]
MIXED = [9.0, 15.0, 9.2, 15.0, 15.0, 15.0]
MATCHED = {"attack": [{"name": "sme", "label": "a"}]}
GRANTED = {"adversary": {"knowledge": {"defenses": True}}}
"""The defenses are known, and no attack can use them."""
DEFENDED = {"defense": [{"name": "top-k", "fraction": 0.5}]}


def make_readings(psnr: Sequence[float]) -> list[ScoreReading]:
    """Return readings of scores whose floor is 10."""
    rows = []
    for victim, value in enumerate(psnr):
        rows.append(row_of(Score.against_guesses("psnr", value, {"noise": 10.0}), victim, 4))
    return score_readings(rows, {})


def list_commands(psnr: Sequence[float], tables: dict[str, Any] | None = None, **keys: Any) -> list[str]:
    """Return the commands after an audit of a run in `runs/a`; `tables` is None for a recording."""
    config = None if tables is None else validate_tables(Config, tables, "x")
    situation: dict[str, Any] = {
        "readings": make_readings(psnr),
        "num_recorded": 6,
        "has_failures": False,
        "no_learning": NoLearning(),
        "folder": "runs/a",
    }
    return [step.command for step in suggest_after_audit(AuditedRun(config=config, **situation | keys))]


def test_after_a_leak_comes_a_defense_and_a_comparison() -> None:
    defended, compared = list_commands(LEAKING, {})
    words = shlex.split(defended)
    assert words[:3] == ["fedsim", "run", "runs/a/experiment.toml"]
    assert words[-2:] == ["--out", "runs/a-defended"]
    assert 'defense=[{name="update-noise", clip=0.5, noise_multiplier=0.05}]' in words
    assert compared == "fedsim compare runs/a runs/a-defended"


def test_after_a_leak_through_a_defense_come_other_defenses() -> None:
    assert list_commands(LEAKING, DEFENDED) == ["fedsim list defenses", "fedsim dossier runs/a"]


def test_after_a_leak_of_an_app_no_run_is_proposed() -> None:
    assert list_commands(LEAKING) == ["fedsim list defenses", "fedsim dossier runs/a"]


def test_few_victims_become_all_that_were_recorded_by_the_same_command() -> None:
    command = "fedsim attack RUN a.toml --set adversary.rounds=[2]"
    first = list_commands(MIXED[:2], command=command)[0]
    assert first == "fedsim attack runs/a a.toml --set adversary.rounds=[2] --set 'adversary.victims=\"all\"'"


def test_where_all_scores_are_in_doubt_no_further_victims_are_advised() -> None:
    rows = []
    for victim in range(6):
        score = Score.against_guesses("membership_auc", 0.9, {"chance": 0.5})
        rows.append(row_of(score, victim, 100) | {"doubt": "candidates differ in more than membership; draw others"})
        rows.append(row_of(Score.from_reason("tpr_at_1_in_100", "too few candidates"), victim, 100))
    readings = score_readings(rows, {})
    # A baseline, as of the broadcast model, is another attack, whose scores are sure.
    sure = replace(readings[0].summary, attack="broadcast", num_in_doubt=0)
    run = AuditedRun(
        readings=[*readings, replace(readings[0], summary=sure, baseline=True)],
        config=validate_tables(Config, {}, "x"),
        num_recorded=9,
        has_failures=False,
        no_learning=NoLearning(),
        folder="runs/a",
    )
    [step] = suggest_after_audit(run)
    assert (step.aim, step.command) == ("Do what the doubts in scores.csv ask for, then", "fedsim attack runs/a")


def test_commands_on_a_run_that_names_code_trust_it() -> None:
    own = {"attack": [{"name": "my_attack:MyAttack"}]}
    defended, compared = list_commands(LEAKING, own, command="fedsim attack RUN attack.toml")
    made, attacked = defended.split(" && ")
    assert made.startswith("fedsim run --trust runs/a/experiment.toml --set 'defense=")
    assert attacked.startswith("fedsim attack --trust runs/a-defended attack.toml --set ")
    assert compared == "fedsim compare runs/a runs/a-defended"  # which runs no code


@pytest.mark.parametrize(("num_in_doubt", "is_tuned"), [(1, True), (6, False)])
def test_one_victim_in_doubt_among_others_stops_no_advice(num_in_doubt: int, is_tuned: bool) -> None:
    rows = []
    for victim, value in enumerate(MIXED):
        doubt = {"doubt": "values seem to be in another unit"} if victim < num_in_doubt else {}
        rows.append(row_of(Score.against_guesses("psnr", value, {"noise": 10.0}), victim, 4) | doubt)
    commands = list_commands((), MATCHED, readings=score_readings(rows, {}))
    assert (commands == ["fedsim tune runs/a"]) == is_tuned


def test_where_all_few_clients_were_attacked_more_are_recorded() -> None:
    first = list_commands(MIXED[:2], {}, num_recorded=2)[0]
    assert "--set federation.clients=10" in first
    assert first.endswith("--out runs/a-larger")


def test_a_defense_that_seems_to_hold_meets_an_adversary_who_knows_it() -> None:
    assert list_commands(BELOW, DEFENDED) == [
        "fedsim attack runs/a --set adversary.knowledge.defenses=true",
        "fedsim dossier runs/a",
    ]
    assert list_commands(BELOW, MATCHED) == ["fedsim tune runs/a", "fedsim dossier runs/a"]
    assert list_commands(BELOW, DEFENDED | GRANTED) == ["fedsim list attacks", "fedsim dossier runs/a"]


@pytest.mark.parametrize("attack", ["spear-ica", "joint-inversion", "stranger:Attack", "not-installed"])
def test_only_attacks_of_one_round_with_a_step_size_are_tuned(attack: str) -> None:
    trust = "--trust " if ":" in attack else ""
    assert list_commands(BELOW, {"attack": [{"name": attack}]}) == [f"fedsim dossier {trust}runs/a"]


@pytest.mark.parametrize(
    ("tables", "party"),
    [
        ({"secure_aggregation": {"groups": "all"}}, "server"),
        ({}, "outsider"),
        ({"adversary": {"who": "server"}}, "clients"),
    ],
)
def test_where_all_clients_are_one_sum_another_federation_is_run(tables: dict[str, Any], party: str) -> None:
    federation = {"federation": {"seed": 8, "clients": 5}}
    assert list_commands(MIXED[:1], tables | federation, party=party) == [
        "fedsim run runs/a/experiment.toml --set federation.seed=9 --out runs/a-seed-9"
    ]


def test_attacks_of_a_file_are_made_again_by_the_file() -> None:
    command = "fedsim attack RUN file.toml"
    run, attack = list_commands(LEAKING, {}, command=command)[0].split(" && ")
    assert run.endswith("--out runs/a-defended")
    assert "adversary" not in run
    assert attack == "fedsim attack runs/a-defended file.toml --set adversary.knowledge.defenses=true"
    # What is tuned are the attacks of the experiment.
    assert list_commands(BELOW, {"attack": [{"name": "sme"}]}, command=command) == ["fedsim dossier runs/a"]


def test_under_secure_aggregation_alone_no_adversary_is_granted_a_defense() -> None:
    assert list_commands(BELOW, {"secure_aggregation": {"groups": 2}}) == ["fedsim dossier runs/a"]


def test_settings_are_looked_for_where_attacks_claim_examples_alone() -> None:
    rows = []
    for victim in range(6):
        rows.append(row_of(Score.against_guesses("linked", float(victim % 2), {"chance": 0.5}), victim, 4))
    readings = score_readings(rows, {})
    config = validate_tables(Config, {}, "x")
    run = AuditedRun(
        readings=readings, config=config, num_recorded=6, has_failures=False, no_learning=NoLearning(), folder="runs/a"
    )
    assert not any("fedsim tune" in step.command for step in suggest_after_audit(run))
    assert suggest_after_audit(run)


def test_without_scores_the_truth_is_asked_for_unless_attacks_failed() -> None:
    [truth] = suggest_after_audit(
        AuditedRun(
            readings=[],
            config=None,
            num_recorded=2,
            has_failures=False,
            no_learning=NoLearning(),
            command="fedsim attack RUN x",
        )
    )
    assert (
        truth.text
        == "Name the clients' data in [truth], under the ids that fedsim inspect prints, then: fedsim attack RUN x"
    )
    [failure] = suggest_after_audit(
        AuditedRun(
            readings=[],
            config=None,
            num_recorded=2,
            has_failures=True,
            no_learning=NoLearning(),
            command="fedsim attack RUN x",
        )
    )
    assert failure.aim.startswith("Fix what made the attacks fail")


@pytest.mark.parametrize(
    ("remedy", "rate", "change"),
    [
        ("train longer", 0.1, "federation.rounds=15"),
        ("smaller steps", 1000.0, "training.learning_rate=0.01"),
        ("smaller steps", 0.1, "training.learning_rate=0.01"),
        ("larger steps", 1e-9, "training.learning_rate=0.01"),
        ("larger steps", 0.5, "training.learning_rate=5"),
    ],
)
def test_a_model_that_has_not_learnt_is_trained_otherwise_first(remedy: Remedy, rate: float, change: str) -> None:
    tables = {"federation": {"rounds": 3}, "training": {"learning_rate": rate}}
    no_learning = NoLearning(sentence="it has not learnt", remedy=remedy)
    first = list_commands(LEAKING, tables, no_learning=no_learning)[0]
    assert f"--set {change} --out runs/a-longer" in first


def test_a_folder_with_spaces_is_quoted() -> None:
    for command in list_commands(LEAKING, {}, folder="my runs/a"):
        assert any(word.startswith("my runs/a") for word in shlex.split(command))


def list_sweep_steps(
    rows: list[dict[str, Any]], *, knows_defenses: bool, tables: dict[str, Any] | None = None
) -> list[tuple[str, str]]:
    """Return what to do after a sweep over defenses, whose file has these tables."""
    texts = [{name: str(value) for name, value in row.items()} for row in rows]
    answer = answer_sweep(texts, [], ("defense",))
    steps = suggest_after_sweep(
        answer,
        knows_defenses=knows_defenses,
        folder="runs/s",
        command="fedsim sweep s.toml",
        tables=tables or {},
    )
    return [(step.aim, step.command) for step in steps]


def test_after_a_sweep_that_holds_come_another_attack_and_a_dossier() -> None:
    steps = list_sweep_steps(
        [*make_rows(LEAKING), *make_both({False: AT_FLOOR, True: LOWER}, "noise")], knows_defenses=True
    )
    assert steps[0][0].startswith("Before you rely on noise, ")
    assert [command for _, command in steps] == ["fedsim sweep s.toml", "fedsim dossier runs/s"]


@pytest.mark.parametrize("knows_defenses", [False, True])
def test_after_a_sweep_that_does_not_hold_come_other_defenses(knows_defenses: bool) -> None:
    steps = list_sweep_steps(
        [*make_rows(LEAKING), *make_both({False: HALVED, True: HALVED}, "noise")], knows_defenses=knows_defenses
    )
    commands = [command for _, command in steps]
    assert ("fedsim sweep s.toml --set adversary.knowledge.defenses=true" in commands) is not knows_defenses
    assert commands[-2:] == ["fedsim list defenses", "fedsim dossier runs/s"]


def test_defenses_that_a_sweep_grants_are_not_to_be_granted_again() -> None:
    rows = [*make_rows(LEAKING), *make_both({False: HALVED, True: HALVED}, "noise")]
    steps = list_sweep_steps(rows, knows_defenses=False, tables=GRANTED)
    assert "fedsim list attacks" in [command for _, command in steps]
    assert not any("adversary.knowledge.defenses" in command for _, command in steps)


@pytest.mark.parametrize("knows_defenses", [False, True])
def test_further_victims_are_not_advised_where_an_adaptive_attack_is_missing(knows_defenses: bool) -> None:
    steps = list_sweep_steps([*make_rows(LEAKING), *make_rows(AT_FLOOR, "noise")], knows_defenses=knows_defenses)
    granting = "fedsim sweep s.toml --set adversary.knowledge.defenses=true"
    missing = "fedsim list attacks" if knows_defenses else granting
    assert [command for _, command in steps] == [missing, "fedsim dossier runs/s"]


def test_where_seeds_are_too_few_more_of_them_come_first() -> None:
    rows = [*make_rows(LEAKING, seed=1), *make_rows(LEAKING, seed=2)]
    for seed, change in ((1, -2.0), (2, 0.3)):
        changed = [value + change for value in LEAKING]
        rows += make_both({False: changed, True: changed}, "noise", seed=seed)
    aim, command = list_sweep_steps(rows, knows_defenses=True)[0]
    assert aim == "Add seeds, because these are too few"
    assert command == "fedsim sweep s.toml --set 'sweep.seeds=[1, 2, 3, 4, 5]'"


@pytest.mark.parametrize(
    ("tables", "command"),
    [
        (
            {"training": {"local_epochs": 5}},
            "fedsim sweep s.toml --set training.local_epochs=1 --set 'adversary.victims=\"all\"'",
        ),
        ({"training": {"local_epochs": 1}}, "fedsim sweep s.toml --set 'adversary.victims=\"all\"'"),
        ({"training": {"local_steps": 3}, "adversary": {"victims": "all"}}, "fedsim list attacks"),
        ({"adversary": {"victims": "all"}}, "fedsim list attacks"),
    ],
)
def test_where_nothing_leaks_without_a_defense_a_setting_that_is_otherwise_is_changed_first(
    tables: dict[str, Any], command: str
) -> None:
    rows = [*make_rows(AT_FLOOR), *make_rows(AT_FLOOR, "noise")]
    [(_, advised)] = list_sweep_steps(rows, knows_defenses=True, tables=tables)
    assert advised == command


def test_of_an_app_is_said_where_its_accuracy_is_found() -> None:
    assert describe_accuracy([], None).endswith("see the app's own evaluation, if it has one.")
    assert describe_accuracy([], validate_tables(Config, {}, "x")) == ""


def test_of_an_app_the_accuracy_that_its_clients_reported_is_quoted() -> None:
    reported = ReportedAccuracy(accuracy=0.119, clients=7, examples=42, round=3)
    assert describe_accuracy([], None, reported) == (
        "As 7 clients reported in round 3, the model's accuracy on their 42 examples is 11.9 %."
    )
    alone = ReportedAccuracy(accuracy=0.5, clients=1, examples=0, round=0)
    assert describe_accuracy([], None, alone) == (
        "As 1 client reported, the model's accuracy on its examples is 50.0 %."
    )
