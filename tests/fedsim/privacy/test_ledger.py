"""The ledger says what clients did over all rounds, whatever happened in them, and what that cost."""

from __future__ import annotations

import csv
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedAvg
from torch import Tensor

import fedsim
import strategies.app
from clients.defenses.dp_sgd import DpSgd
from fedsim.base.errors import ConfigError, PluginError, RunError
from fedsim.federation.experiment import Experiment
from fedsim.federation.integrity import compare_with_manifest
from fedsim.federation.open_run import OpenRun
from fedsim.federation.run_folder import read_ledger, read_metrics
from fedsim.interfaces.attack import Paper
from fedsim.interfaces.defense import Defense, Guarantee, Participation
from fedsim.interfaces.defense_checks import check_order
from fedsim.interfaces.local_context import LocalContext
from fedsim.plugins import registry
from fedsim.privacy.ledger import spending_by_client, summarise_ledger, unique_labels
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State
from fedsim.report.page import write_report
from fedsim.training.local_round import LocalRound
from strategies.checkpoint import Checkpoint
from tests.support.experiments import make_tiny_config, run_serial

DP = {"name": "dp-sgd", "noise_multiplier": 1.0}


@cache
def by_google(*kinds: tuple[float, float, int]) -> float:
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant()
    for noise, rate, number in kinds:
        event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
        accountant.compose(event, number)
    return float(accountant.get_epsilon(1e-5))


def last(folder: OpenRun, defense: str = "dp-sgd") -> Mapping[int, float]:
    return {client: some.epsilon for client, some in spending_by_client(read_ledger(folder), defense).items()}


def test_a_run_is_composed_over_rounds_as_google_composes_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    folder = run_serial(make_tiny_config(defense=[DP], federation={"rounds": 3}), tmp_path / "run")
    rows = read_ledger(folder)
    assert [(row["round"], row["client"]) for row in rows] == [(str(r), str(c)) for r in (1, 2, 3) for c in range(4)]
    for row in rows:
        assert (row["num_examples"], row["batch_size"], row["steps"], row["counts"]) == ("24", "8", "3", "1")
        assert (float(row["rate"]), row["noise_multiplier"], float(row["delta"])) == (8 / 24, "1.0", 1e-5)
        assert float(row["epsilon"]) == pytest.approx(by_google((1.0, 8 / 24, 3 * int(row["round"]))), rel=0.01)
    server = [row for row in read_metrics(folder) if row["client"] == "server"]
    assert [row["epsilon"] for row in server] == [row["epsilon"] for row in rows if row["client"] == "0"]
    for row in server:
        said = rf"round {row['round']}/3: .*epsilon {float(row['epsilon']):.3f}, 4 of 4 clients returned"
        assert re.search(said, caplog.text)
    told = f"privacy: dp-sgd: ε = {float(rows[-1]['epsilon']):.3g}, δ = 1e-05 after 3 rounds for client 0, which spent"
    assert told in caplog.text
    frame = fedsim.open(folder.path).ledger
    assert len(frame) == 12
    assert frame["epsilon"].iloc[-1] == float(rows[-1]["epsilon"])
    assert compare_with_manifest(OpenRun(folder.path)).differences == []
    assert "epsilon" not in str(Transcript(folder.path).header(3))


def test_a_client_pays_for_the_rounds_in_which_it_sent_and_for_no_others(tmp_path: Path) -> None:
    """Two of three clients are sampled, and every third straggles."""
    config = make_tiny_config(
        defense=[DP],
        strategy={"name": "fedavg", "fraction_train": 0.67},
        federation={"rounds": 9, "clients": 6, "straggler_probability": 0.3},
    )
    folder = run_serial(config, tmp_path / "run")
    sent: dict[int, list[int]] = {client: [] for client in range(6)}
    for update in Transcript(folder.path).updates():
        sent[update.client].append(update.round)
    rows = read_ledger(folder)
    assert len(rows) == 9 * 4
    counted = {c: [int(r["round"]) for r in rows if int(r["client"]) == c and r["counts"] == "1"] for c in sent}
    assert counted == sent
    assert len({len(rounds) for rounds in sent.values()}) > 2
    assert sum(map(len, sent.values())) < len(rows)
    for client, epsilon in last(folder).items():
        times = len(sent[client])
        assert epsilon == pytest.approx(by_google((1.0, 8 / 24, 3 * times)) if times else 0.0, rel=0.01)


@pytest.mark.thorough
def test_each_client_has_its_own_rate_steps_and_noise(tmp_path: Path) -> None:
    config = make_tiny_config(
        partition={"name": "dirichlet", "alpha": 0.5}, defense=[{"name": "dp-sgd", "epsilon": 1.0}],
        training={"batch_size": 16},
    )  # fmt: skip
    folder = run_serial(config, tmp_path / "run")
    rows = [row for row in read_ledger(folder) if row["round"] == "2"]
    counts = Experiment(config).data.counts
    assert len(set(counts)) > 2
    for row in rows:
        count = counts[int(row["client"])]
        rate, steps = min(1.0, 16 / count), math.ceil(count / 16)
        assert (float(row["rate"]), int(row["steps"])) == (rate, steps)
        proved = by_google((float(row["noise_multiplier"]), rate, 2 * steps))
        assert float(row["epsilon"]) == pytest.approx(proved, rel=0.01)
        assert 0.99 <= float(row["epsilon"]) <= 1.0
    assert len({row["noise_multiplier"] for row in rows}) == len({*counts})


class Fewer(FedAvg):
    """Asks for one local step less in each round, and for larger batches."""

    def configure_train(self, server_round: int, arrays: Any, config: ConfigRecord, grid: Any) -> Any:
        del config["local-epochs"]
        config["local-steps"], config["batch-size"] = 4 - server_round, 4 * server_round
        return super().configure_train(server_round, arrays, config, grid)


@pytest.mark.thorough
def test_what_the_server_asked_for_counts_and_not_what_the_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        registry, "load", lambda group, name, real=registry.load: Fewer if group == "strategies" else real(group, name)
    )
    folder = run_serial(make_tiny_config(defense=[DP], federation={"rounds": 3}), tmp_path / "run")
    assert [(row["batch_size"], row["steps"]) for row in read_ledger(folder)[::4]] == [
        ("4", "3"),
        ("8", "2"),
        ("12", "1"),
    ]
    proved = by_google((1.0, 4 / 24, 3), (1.0, 8 / 24, 2), (1.0, 12 / 24, 1))
    assert last(folder)[0] == pytest.approx(proved, rel=0.01)


class More(FedAvg):
    """Asks for two steps more than [training] says, in all rounds but the first."""

    def configure_train(self, server_round: int, arrays: Any, config: ConfigRecord, grid: Any) -> Any:
        del config["local-epochs"]
        config["local-steps"] = 3 if server_round == 1 else 5
        return super().configure_train(server_round, arrays, config, grid)


@pytest.mark.parametrize(
    ("asks", "defense", "promised"),
    [
        (More, {"name": "dp-sgd", "epsilon": 6.0}, 6.0),
        pytest.param(More, DP, (1.0, 1.0, 3), marks=pytest.mark.thorough),
        (More, {"name": "update-noise", "noise_multiplier": 9.0}, None),
        pytest.param(Fewer, {"name": "dp-sgd", "epsilon": 6.0}, None, marks=pytest.mark.thorough),
        (FedAvg, {"name": "dp-sgd", "epsilon": 6.0}, None),
    ],
)
def test_a_promise_that_was_not_kept_because_the_strategy_asked_for_more_is_told(
    asks: type[FedAvg],
    defense: dict[str, Any],
    promised: float | tuple[float, float, int] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also of a run that was interrupted after the rounds in which more was asked for."""
    monkeypatch.setattr(
        registry, "load", lambda group, name, real=registry.load: asks if group == "strategies" else real(group, name)
    )
    # All of a client's examples are one batch, for which noise is found quickly.
    tables: dict[str, Any] = {"federation": {"rounds": 3}, "training": {"batch_size": 24}}
    name, first = defense["name"], make_tiny_config(defense=[defense], **tables)
    real = strategies.app.Checkpoint.save

    def once(self: Checkpoint, *rest: Any) -> None:
        real(self, *rest)
        if self.round == 2:
            monkeypatch.setattr(strategies.app.Checkpoint, "save", real)
            raise RunError("interrupted")

    monkeypatch.setattr(strategies.app.Checkpoint, "save", once)
    with pytest.raises(RunError, match="interrupted"):
        run_serial(first, tmp_path / "run")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING and "ε" in record.message]
    folder = run_serial(first, tmp_path / "run", resume=True)
    told = [record.message for record in caplog.records if record.levelno >= logging.WARNING and "ε" in record.message]
    if promised is None:
        assert told == []
        return
    (sentence,) = told
    found = re.fullmatch(
        rf"privacy: {name}: client \d has spent ε = {last(folder)[0]:.4g} in 3 rounds, above the (.*) that was "
        r"promised before the run, and the same is true of 3 more; the strategy asked for .*",
        sentence,
    )
    assert found, sentence
    if isinstance(promised, tuple):  # not where tests are collected, as it takes a while
        promised = by_google(promised)
    assert float(found[1]) == pytest.approx(promised, rel=0.01)


def test_a_client_that_fails_or_is_too_late_may_have_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_tiny_config(defense=[DP], federation={"vectorise": False})
    real, calls = DpSgd.on_sum, list[int]()

    def sometimes(self: DpSgd, total: State, expected: float, context: LocalContext) -> State:
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("no")
        return real(self, total, expected, context)

    monkeypatch.setattr(DpSgd, "on_sum", sometimes)
    folder = run_serial(run, tmp_path / "run")
    assert {update.client for update in Transcript(folder.path).updates() if update.round == 1} == {1, 2, 3}
    assert {row["counts"] for row in read_ledger(folder)} == {"1"}


# Strangers' defenses.


@dataclass(frozen=True, kw_only=True)
class Halved(Defense):
    """Promises two of epsilon a round at a delta of its own, as it says."""

    delta: float = 1e-3
    paper = Paper(title="none", authors="nobody", venue="none", year=2000, url="")

    def on_update(self, update: State, context: LocalContext) -> State:
        return {name: tensor / 2 for name, tensor in update.items()}

    def guarantee(self, participation: Participation, delta: float) -> Guarantee | None:
        assert delta == self.delta
        return Guarantee(epsilon=2.0 * participation.rounds, delta=delta, neighbours="halves", accountant="doubling")


def test_a_strangers_guarantee_is_composed_and_each_defense_has_its_own_figure(tmp_path: Path) -> None:
    tables = make_tiny_config(federation={"rounds": 3}).model_dump(mode="json", exclude_none=True)
    noise = {"name": "update-noise", "noise_multiplier": 0.0}
    run = fedsim.run({**tables, "defense": [Halved(), DP, noise]}, tmp_path / "run")
    rows, folder = read_ledger(OpenRun(run.path)), OpenRun(run.path)
    halved = rows[0]["defense"]
    assert [row["defense"] for row in rows[:3]] == [halved, "dp-sgd", halved]
    assert last(folder, halved) == dict.fromkeys(range(4), 6.0)
    (*_, row) = (row for row in read_metrics(folder) if row["client"] == "server")
    assert float(row[f"epsilon of {halved}"]) == 6.0
    assert float(row["epsilon of dp-sgd"]) == last(folder)[0]
    assert summarise_ledger(rows, [2])[0] == (
        f"{halved}: ε = 6, δ = 0.001 after 3 rounds for client 0, which spent most; for the attacked client 2 ε = 6 "
        "after 3 rounds"
    )


def test_rounds_of_different_kinds_are_added_up_unless_the_defense_knows_better() -> None:
    kinds = [Participation(num_examples=9, batch_size=b, steps=1, rounds=2) for b in (1, 2, 3, 4)]

    @dataclass(frozen=True, kw_only=True)
    class Split(Halved):
        delta: float = 1e-3 / 4

    proved = Split().compose_guarantees(kinds, 1e-3)
    assert proved is not None
    assert (proved.epsilon, proved.delta) == (4 * 2 * 2.0, 1e-3)


@pytest.mark.parametrize(
    ("epsilon", "delta", "says"),
    [
        (math.nan, 1e-5, "epsilon = nan at delta = 1e-05 proves nothing"),
        (-1.0, 1e-5, "epsilon = -1.0 at delta = 1e-05 proves nothing"),
        (2.0, 1.0, "epsilon = 2.0 at delta = 1.0 proves nothing"),
        (2.0, 1e-4, "asked for delta = 1e-05, it states epsilon = 2 for 0.0001"),
    ],
)
def test_what_proves_nothing_at_the_delta_that_is_asked_for_is_refused(
    epsilon: float, delta: float, says: str, tmp_path: Path
) -> None:
    stated_delta = delta

    @dataclass(frozen=True, kw_only=True)
    class Misstated(Halved):
        delta: float = 1e-5

        def guarantee(self, participation: Participation, delta: float) -> Guarantee | None:
            return Guarantee(epsilon=epsilon, delta=stated_delta, neighbours="halves", accountant="none")

    tables = make_tiny_config().model_dump(mode="json", exclude_none=True)
    with pytest.raises(PluginError, match=re.escape(says)):
        fedsim.run({**tables, "defense": [Misstated()]}, tmp_path / "run")


def test_examples_that_one_defense_chooses_are_covered_by_no_guarantee_of_another() -> None:
    """The client would sample its four examples at 8 / 4, and the ledger say that it sampled 24 at 8 / 24."""

    @dataclass(frozen=True, kw_only=True)
    class ChoosesFour(Halved):
        def on_data(self, local: LocalRound, context: LocalContext) -> Tensor:
            return torch.arange(4)

    dp_sgd = DpSgd(noise_multiplier=1.0)
    for defenses in ([ChoosesFour(), dp_sgd], [dp_sgd, ChoosesFour()]):
        with pytest.raises(ConfigError, match="the guarantee of dp-sgd does not cover"):
            check_order(defenses)
    check_order([ChoosesFour()])  # what it promises itself is its author's


def test_where_nothing_is_proved_there_is_no_ledger(tmp_path: Path) -> None:
    folder = run_serial(make_tiny_config(defense=[{"name": "top-k"}, {"name": "gradient-prune"}]), tmp_path / "run")
    assert not folder.ledger.exists()
    with folder.metrics.open() as file:
        assert "epsilon" not in (csv.DictReader(file).fieldnames or ())
    assert fedsim.open(folder.path).ledger.empty
    assert unique_labels(["a", "b", "a", "a"]) == ["a", "b", "a 2", "a 3"]


# Interrupted.


class Killed(BaseException):
    """Like a signal: nothing catches it."""


@pytest.mark.parametrize(
    "point",
    ["strategies.app.check_replies", pytest.param("strategies.checkpoint.Checkpoint.save", marks=pytest.mark.thorough)],
)
def test_a_run_that_goes_on_gives_the_same_ledger(point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_tiny_config(
        defense=[DP],
        federation={"rounds": 4, "clients": 7, "straggler_probability": 0.2},
        strategy={"name": "fedavg", "fraction_train": 0.7},
    )
    whole = run_serial(config, tmp_path / "whole")
    owner, name = (strategies.app, "check_replies") if "check_replies" in point else (Checkpoint, "save")
    real, calls = getattr(owner, name), []

    def third(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise Killed
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, third)
        with pytest.raises(Killed):
            run_serial(config, tmp_path / "run")
    folder = OpenRun(tmp_path / "run")
    assert {row["round"] for row in read_ledger(folder)} == {"1", "2", "3"}  # put down before clients are asked
    run_serial(config, tmp_path / "run", resume=True)
    assert folder.ledger.read_bytes() == whole.ledger.read_bytes()
    assert compare_with_manifest(OpenRun(folder.path)).differences == []


def test_more_rounds_than_the_noise_was_chosen_for_are_refused(tmp_path: Path) -> None:
    def run(rounds: int, **defense: Any) -> None:
        whole = {"batch_size": 24}  # for which noise is found quickly
        config = make_tiny_config(
            defense=[{"name": "dp-sgd", **defense}], federation={"rounds": rounds}, training=whole
        )
        run_serial(config, tmp_path / str(*defense), resume=(tmp_path / str(*defense)).exists())

    run(1, epsilon=1.0)
    with pytest.raises(
        RunError, match=r"dp-sgd of client \d had noise_multiplier = .* in round 1, and now has .*put the"
    ):
        run(2, epsilon=1.0)
    run(1, noise_multiplier=1.0)
    run(2, noise_multiplier=1.0)
    assert last(OpenRun(tmp_path / "noise_multiplier"))[0] == pytest.approx(by_google((1.0, 1.0, 2)), rel=0.01)


@pytest.mark.parametrize("damage", ["removed", "changed", pytest.param("shortened", marks=pytest.mark.thorough)])
def test_a_run_does_not_go_on_without_its_ledger(damage: str, tmp_path: Path) -> None:
    folder = run_serial(make_tiny_config(defense=[DP]), tmp_path / "run")
    lines = folder.ledger.read_text().splitlines(keepends=True)
    if damage == "removed":
        folder.ledger.unlink()
    else:
        folder.ledger.write_text("".join(lines[:5] if damage == "shortened" else [*lines[:-1], lines[0]]))
    expected = "has no row of dp-sgd in round 1, .*put the file back" if damage == "removed" else "is not what this run"
    with pytest.raises(RunError, match=rf"ledger\.csv: {expected}"):
        run_serial(make_tiny_config(defense=[DP], federation={"rounds": 3}), tmp_path / "run", resume=True)
    assert compare_with_manifest(OpenRun(folder.path)).differences
    if damage != "shortened":
        with pytest.raises((RunError, ConfigError), match=r"ledger\.csv"):
            _ = fedsim.open(folder.path).ledger


# In the report.


def test_the_report_tells_who_spent_most_and_what_the_victims_did(tmp_path: Path) -> None:
    config = make_tiny_config(
        defense=[DP, {"name": "top-k"}], federation={"rounds": 3, "clients": 6, "straggler_probability": 0.4}
    )
    folder = run_serial(config, tmp_path / "run")
    epsilons = last(folder)
    most = max(epsilons, key=lambda client: (epsilons[client], -client))
    html = write_report(OpenRun(folder.path)).read_text(encoding="utf-8")
    assert f"ε = {epsilons[most]:.3g}, δ = 1e-05 after" in html
    assert f"for client {most}, which spent most; one example added or removed" in html
    assert "no formal guarantee" in html


def test_without_data_and_ledger_the_report_keeps_to_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDSIM_DATA", raising=False)
    folder = OpenRun(tmp_path / "run")
    folder.prepare(resume=False, overwrite=False)
    folder.write_experiment(
        make_tiny_config(data={"name": "mnist"}, defense=[DP], partition={"samples_per_client": 10})
    )
    html = write_report(OpenRun(folder.path)).read_text(encoding="utf-8")
    assert "privacy of each example, over all rounds; how much depends on the data of the clients" in html
