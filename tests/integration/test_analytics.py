"""Apps of federated analytics: recorded, what they say in clear, attacked, and scored beside a guess."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import fedsim
from fedsim.base.errors import FedsimError
from fedsim.federation.privacy_tables import SecureAggregationTable
from strategies.secure_sum_grid import SecureSumGrid
from tests.support.commands import call_fedsim
from tests.support.experiments import make_tiny_config, run_serial

CLIENTS = 4
AGES = [[21, 34, 58], [30], [45, 46, 47, 71], [25, 66]]
COHORTS = [(0, 1, 2), (0, 1), (1, 2, 3), (0, 3), (0, 2, 3), (1, 3), (2, 3)]
ATTACK = """
[adversary]
rounds = "all"

[adversary.knowledge]
model = false
{app}
[[attack]]
name = "differencing"

[truth]
{truth}
"""


def count(ages: list[int]) -> dict[str, Any]:
    """Return the answers about these people: a histogram of decades, and the sum of ages."""
    decades = np.histogram(ages, np.arange(20, 90, 10))[0].astype(np.float32)
    return {"decades": decades, "total": np.array([sum(ages)], np.float32)}


def make_app(*, weighted: bool) -> ClientApp:
    """Return an app whose first client has one more person from round 2 on, if the server says so."""
    app = ClientApp(mods=[fedsim.partition_mod])

    def answer(message: Message, context: Any) -> Message:
        ages = AGES[int(context.node_config["partition-id"])] + people_of(message)
        arrays = ArrayRecord({name: Array(values) for name, values in count(ages).items()})
        metrics = MetricRecord({"num-examples": len(ages) if weighted else 1})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    def people_of(message: Message) -> list[int]:
        return list(message.content["config"]["joined"])  # type: ignore[arg-type]

    app.train()(answer)
    app.query()(answer)
    return app


def ask(grid: Any, partitions: dict[int, int], kind: str, cohorts: list[tuple[int, ...]], joined: list[int]) -> None:
    """Ask one cohort in each round; from round 2 on, each has the people who joined."""
    nodes = {client: node for node, client in partitions.items()}
    for number, cohort in enumerate(cohorts, 1):
        empty = {name: Array(np.zeros_like(values)) for name, values in count([30]).items()}
        config = ConfigRecord({"joined": joined if number > 1 else [], "server-round": number})
        content = RecordDict({"config": config} | ({"arrays": ArrayRecord(empty)} if kind == "train" else {}))
        list(grid.send_and_receive([Message(content, nodes[client], kind) for client in cohort]))


def write_attack(folder: Path, rounds: dict[int, list[int]], app: str = "", people: Any = None) -> Path:
    """Write the truth, by round who joined before it, and the attack file."""
    answers = {
        client: {number: count(ages + joined) for number, joined in rounds.items()} for client, ages in enumerate(AGES)
    }
    table = fedsim.write_answers(folder / "truth", answers, people)
    truth = "\n".join(f'{client} = "{path}"' for client, path in table.items())
    (folder / "attack.toml").write_text(ATTACK.format(app=app, truth=truth))
    return folder / "attack.toml"


@pytest.mark.usefixtures("server_task")
@pytest.mark.parametrize("weighted", [False, True])
def test_cohorts_of_secure_sums_give_single_clients_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, weighted: bool
) -> None:
    clients = fedsim.InProcessGrid(make_app(weighted=weighted), CLIENTS)
    sums = SecureSumGrid(clients, SecureAggregationTable(clip=512.0), 0, clients.partitions)
    grid = fedsim.CuriousGrid(sums, tmp_path / "recording", partitions=clients.partitions)
    ask(grid, clients.partitions, "train", COHORTS, [])
    assert "round 1, clients 0, 1, 2: " in caplog.text  # who is called by other numbers on the wire
    file = write_attack(tmp_path, {number: [] for number in range(1, len(COHORTS) + 1)})
    run = fedsim.open(tmp_path / "recording", file=file)
    finding = run.attack("differencing", victim=1)
    assert finding.values["decades"][0].round().tolist() == [0, 1, 0, 0, 0, 0]
    assert finding.values["total"][0].item() == pytest.approx(30, abs=0.05)
    scores = run.scores.set_index("metric")
    assert scores.loc["answers_exact", "value"] == 1.0 > scores.loc["answers_exact", "floor"]
    assert not scores["doubt"].any()  # each question is sent as zeros, which no answer moves
    assert "begin with the same model" not in caplog.text
    # A single cohort determines nobody, and the ceiling says so.
    finding = run.attack("differencing", victim=1, round=[1])
    assert not finding.standings["total"].any()
    assert finding.group.tolist() == [0, 1, 2]
    rows = run.scores[run.scores["metric"] == "answers_exact"]
    assert (rows["ceiling"] < 1).any()


@pytest.mark.usefixtures("server_task")
def test_a_person_who_joins_is_told_from_answers_in_clear(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    clients = fedsim.InProcessGrid(make_app(weighted=True), CLIENTS)
    grid = fedsim.CuriousGrid(clients, tmp_path / "recording", partitions=clients.partitions)
    ask(grid, clients.partitions, "query", [(0, 1), (0, 1, 2)], [71])
    app = '[app]\nmessages = "query"\nrecord = "arrays"\n'
    people = {0: {2: count([71])}}
    file = write_attack(tmp_path, {1: [], 2: [71]}, app, people)
    done = call_fedsim("inspect", tmp_path / "recording", capfd=capfd)
    assert "client 1: arrays.decades: counts of 1 person in 6 cells, and one of them is alone" in done.stdout
    done = call_fedsim("attack", "-q", tmp_path / "recording", file, capfd=capfd)
    assert done.returncode == 0, done.stderr
    run = fedsim.open(tmp_path / "recording", file=file)
    finding = run.attack("differencing", victim=0)
    assert finding.people["2/total"].tolist() == [71]
    scores = run.scores.drop_duplicates("metric").set_index("metric")
    assert scores.loc["people_exact", "value"] == 1.0 > scores.loc["people_exact", "floor"]
    assert scores.loc["false_certificates", "value"] == 0.0


def test_a_truth_about_other_questions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FedsimError, match="is not a number or array of numbers"):
        fedsim.write_answers(tmp_path, {0: {1: {"total": "many"}}})


def test_people_of_a_client_without_answers_are_not_dropped(tmp_path: Path) -> None:
    people: Any = {"0": {2: {"total": 1}}}
    with pytest.raises(FedsimError, match="client 0: people joined or left, but it has no answers"):
        fedsim.write_answers(tmp_path, {0: {1: {"total": 4}}}, people)


@pytest.mark.usefixtures("server_task")
def test_a_truth_of_examples_is_no_truth_of_answers(tmp_path: Path) -> None:
    clients = fedsim.InProcessGrid(make_app(weighted=True), CLIENTS)
    grid = fedsim.CuriousGrid(clients, tmp_path / "recording", partitions=clients.partitions)
    ask(grid, clients.partitions, "train", [(0, 1)], [])
    table = fedsim.write_truth(tmp_path, lambda client: (np.ones((3, 2)), np.ones(3)), [0])
    (tmp_path / "attack.toml").write_text(ATTACK.format(app="", truth=f'0 = "{table["0"]}"'))
    with pytest.raises(FedsimError, match="holds examples, and answers to queries are claimed"):
        fedsim.open(tmp_path / "recording", file=tmp_path / "attack.toml").attack("differencing")


def test_a_run_of_networks_has_no_answers_to_solve(tmp_path: Path) -> None:
    run_serial(make_tiny_config(), tmp_path / "run")
    with pytest.raises(FedsimError, match="is an attack on answers to queries, and these clients train a network"):
        fedsim.open(tmp_path / "run").attack("differencing")
