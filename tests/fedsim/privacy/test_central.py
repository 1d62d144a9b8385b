"""What a trusted server's models tell of a client: the budget, whom it holds for, and what cannot be promised."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
from dp_accounting.rdp import RdpAccountant

from fedsim.base.errors import ConfigError, RunError
from fedsim.dossier.privacy_facts import collect_proofs
from fedsim.dossier.recomputation import compose_epsilons_again
from fedsim.federation.experiment import Experiment
from fedsim.federation.run_folder import read_ledger, read_metrics
from fedsim.interfaces.mechanism import Mechanism
from fedsim.privacy.ceilings import compute_trade_off
from fedsim.privacy.central import CentralPrivacy, make_central_mechanism
from fedsim.privacy.federation_privacy import FederationLedger, find_least_noise
from fedsim.privacy.ledger import spending_by_client, summarise_ledger
from fedsim.recording.transcript import Transcript
from fedsim.report import score_ceilings
from fedsim.report.page import write_report
from fedsim.report.reported_run import open_reported_run
from fedsim.sweeps.rows import _proved_epsilons
from tests.support.experiments import make_tiny_config, run_serial

DELTA = 1e-5
TABLE = {"noise_multiplier": 1.0, "delta": 1e-3}


def make_privacy(**settings: Any) -> CentralPrivacy:
    base: dict[str, Any] = {"clip": 1.0, "noise_multiplier": 1.5, "delta": DELTA, "clients": 30, "expected": 3.0}
    return CentralPrivacy(**(base | settings))


def compose_by_renyi(event: dp_accounting.DpEvent, rounds: int) -> float:
    accountant = RdpAccountant()
    accountant.compose(event, rounds)
    return float(accountant.get_epsilon(DELTA))


@pytest.mark.parametrize("rate", [None, 0.1])
@pytest.mark.parametrize("count_noise", [None, 1.0])
def test_sum_and_count_together_cost_what_dp_accounting_says(rate: float | None, count_noise: float | None) -> None:
    """The count of +-1/2 has sensitivity 1/2, so its noise multiplier is twice its standard deviation."""
    privacy = make_privacy(rate=rate, quantile=None if count_noise is None else 0.5, count_noise=count_noise)
    releases = [dp_accounting.GaussianDpEvent(privacy.sum_noise)]
    if count_noise is not None:
        releases.append(dp_accounting.GaussianDpEvent(2 * count_noise))
    event: dp_accounting.DpEvent = dp_accounting.ComposedDpEvent(releases)
    if rate is not None:
        event = dp_accounting.PoissonSampledDpEvent(rate, event)
    bound = compose_by_renyi(event, 10)
    assert 0.8 * bound < privacy.epsilon(10) <= bound


@pytest.mark.parametrize("cycle", [1, 4, 7, 12])
def test_a_tree_costs_what_dp_accounting_says_each_time_it_begins_anew(cycle: int) -> None:
    privacy = make_privacy(noise_multiplier=6.0, cycle=cycle, correlation="tree")
    accountant = RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
    accountant.compose(dp_accounting.SingleEpochTreeAggregationDpEvent(6.0, [cycle]), 3)
    bound = float(accountant.get_epsilon(DELTA))
    assert 0.8 * bound < privacy.epsilon(3) <= bound


@pytest.mark.parametrize("settings", [{"correlation": "tree"}, {"correlation": "banded", "num_bands": 3, "cycle": 2}])
def test_noise_that_two_rounds_of_a_client_would_share_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^central_privacy\.noise: with '(tree|banded)' two rounds of a client may"):
        make_privacy(**settings)


def test_without_independent_draws_nothing_is_amplified() -> None:
    assert make_privacy(rate=None).epsilon(5) == make_privacy(rate=1.0).epsilon(5)
    assert make_privacy(rate=0.1).epsilon(5) < 0.5 * make_privacy(rate=None).epsilon(5)


@pytest.mark.parametrize("rate", [None, pytest.param(0.2, marks=pytest.mark.thorough)])
def test_the_noise_for_an_epsilon_keeps_to_it_and_is_hardly_more_than_needed(rate: float | None) -> None:
    noise = find_least_noise(lambda noise: make_central_mechanism(noise, rate, 6), 2.0, DELTA, "epsilon")
    assert 1.98 < make_privacy(noise_multiplier=noise, rate=rate).epsilon(6) <= 2.0


@pytest.mark.parametrize("noise", ["tree", "banded", "independent"])
def test_in_turns_a_client_pays_once_a_cycle(noise: str, tmp_path: Path) -> None:
    """Four clients in rounds of two: each is asked in two of five rounds, or in three."""
    table = {"epsilon": 6.0, "delta": 1e-3, "sampling": "cyclic", "noise": noise}
    config = make_config(
        central_privacy=table, strategy={"name": "fedavg", "fraction_train": 0.5}, federation={"rounds": 5}
    )
    folder = run_serial(config, tmp_path / "run")
    rows = read_ledger(folder)
    asked = [{row["client"] for row in rows if row["round"] == str(number)} for number in range(1, 6)]
    assert asked[0] | asked[1] == {"0", "1", "2", "3"}
    assert asked[2:] == [asked[0], asked[1], asked[0]]
    spent = spending_by_client(rows, "central_privacy")
    assert {spent[int(client)].rounds for client in asked[0]} == {3}
    assert 5.9 < max(item.epsilon for item in spent.values()) <= 6.0
    privacy = Experiment(config).central_privacy
    assert privacy is not None
    scale = float(rows[0]["noise_scale"])
    assert privacy.noise_multiplier == pytest.approx(scale * (2**0.5 if noise == "tree" else 1))


def test_who_was_not_drawn_pays_as_well_where_the_draw_amplifies() -> None:
    ledger = FederationLedger(make_privacy(rate=0.1, clients=3))
    rows = [*ledger.count_round(1, {2: True}), *ledger.count_round(2, {})]
    assert [(row["round"], row["client"], row["counts"]) for row in rows] == [
        (number, client, 1) for number in (1, 2) for client in range(3)
    ]
    assert {row["epsilon"] for row in rows[3:]} == {ledger.privacy.epsilon(2)} == {ledger.epsilon}


def test_otherwise_a_client_pays_for_the_rounds_in_which_it_may_send() -> None:
    ledger = FederationLedger(make_privacy(clients=3))
    ledger.count_round(1, {0: True, 1: False})
    rows = ledger.count_round(2, {1: True, 0: True})
    privacy = ledger.privacy
    assert [(row["client"], row["epsilon"]) for row in rows] == [(0, privacy.epsilon(2)), (1, privacy.epsilon(1))]


def make_config(**tables: Any) -> Any:
    table = tables.pop("central_privacy", TABLE)
    return make_tiny_config(**{"central_privacy": table, **tables})


def test_the_ledger_says_unit_neighbours_trust_and_what_is_in_clear(tmp_path: Path) -> None:
    config = make_config(
        strategy={"name": "fedavg", "fraction_train": 0.5},
        defense=[{"name": "update-noise", "clip": 1.0, "noise_multiplier": 1.0}],
    )
    folder = run_serial(config, tmp_path / "run")
    rows = [row for row in read_ledger(folder) if row["defense"] == "central_privacy"]
    sent = {(str(update.round), str(update.client)) for update in Transcript(folder.path).updates()}
    assert {(row["round"], row["client"]) for row in rows} == sent
    assert len(sent) == 2 * 2
    for row in rows:
        assert (row["unit"], row["neighbours"], row["trusted"]) == ("client", "added or removed", "server")
        assert (row["in_clear"], row["rate"]) == ("to the server updates, N and metrics", "")
        assert (row["noise_rate"], row["noise_scale"], row["releases"]) == ("1.0", "1.0", "1")
    others = [row for row in read_ledger(folder) if row["defense"] == "update-noise"]
    assert {(row["trusted"], row["in_clear"]) for row in others} == {("nobody", "N and metrics")}
    # A sweep sets epsilon beside attacks of the server, so only that of the clients' own noise counts.
    proved = {str(client): spent.epsilon for client, spent in spending_by_client(others, "update-noise").items()}
    assert {client: float(text) for client, text in _proved_epsilons(folder).items()} == proved
    [_, sentence] = summarise_ledger(read_ledger(folder))
    assert sentence.startswith("central_privacy: ε = ")
    assert sentence.endswith("for those who see the models alone and trust the server")
    page = write_report(folder).read_text()
    assert "and trust the server, which sees each update, N and the metrics in clear" in page
    assert "ε of central_privacy (not against the server) is" in page
    last = read_metrics(folder)[-1]
    assert float(last["epsilon of central_privacy"]) == max(float(row["epsilon"]) for row in rows)
    assert float(last["epsilon"]) == max(float(row["epsilon"]) for row in others)


def test_a_dossier_proves_nothing_by_it_against_the_server_and_composes_it_again(tmp_path: Path) -> None:
    reported = open_reported_run(run_serial(make_config(), tmp_path / "run"))
    proofs, sentence = collect_proofs(reported)
    assert proofs == []
    assert "central privacy, which protects against observers of the models alone, not against the server" in sentence
    assert [value.state for value in compose_epsilons_again(reported)] == ["equal"] * 8


@pytest.mark.thorough
def test_a_score_has_a_ceiling_by_it_where_others_than_the_server_attack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where both made the same attack on the same client, and whoever did so last."""
    folder = run_serial(make_config(), tmp_path / "run")
    common = {"attack": "guess", "victim": "0", "round": "2"}
    server = common | {"variant": "a", "knowledge": {}, "settings": {}}
    abouts = [server, server | {"variant": "b", "attacker": "outsider"}]
    score = common | {"metric": "identified", "value": "0.2", "floor": "0.1", "examples": "9"}
    scores = [score | {"variant": "a"}, score | {"variant": "b"}]
    curve = compute_trade_off([Mechanism(scale=1.0, releases=2)])
    assert curve is not None
    for order in (1, -1):
        monkeypatch.setattr(score_ceilings, "read_metadata", lambda folder, order=order: abouts[::order])
        of_server, of_outsider = score_ceilings.compute_score_ceilings(folder, scores, "iid")
        assert "this adversary is the server" in of_server.reason
        assert of_outsider.ceiling == float(curve.true_positive_rate(0.1))
        # A table of both shows each.
        names = [item.attack for item in score_ceilings.summarise_ceilings([of_server, of_outsider])]
        assert names == ["guess", "guess by an outsider who gets each model"]


def test_the_ceiling_of_a_sum_is_that_of_its_own_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_serial(make_config(), tmp_path / "run")
    about = {"attack": "guess", "variant": "a", "victim": "0", "knowledge": {}, "settings": {}, "attacker": "outsider"}
    abouts = [about | {"round": "1", "members": [0, 1]}, about | {"round": "2", "members": [0, 2]}]
    monkeypatch.setattr(score_ceilings, "read_metadata", lambda folder: abouts)
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(score_ceilings, "find_trade_off", lambda ledger, *key: asked.append(key) or "none")
    score = {"attack": "guess", "variant": "a", "victim": "0", "metric": "identified", "value": "0.2"}
    score_ceilings.compute_score_ceilings(folder, [score | {"round": number} for number in "12"], "iid")
    assert asked == [((0, 1), 1, "outsider"), ((0, 2), 2, "outsider")]


def test_a_run_with_correlated_noise_goes_on_to_the_same_models(tmp_path: Path) -> None:
    """The noise of earlier rounds is in no checkpoint, and is made again."""
    tables: dict[str, Any] = {
        "strategy": {"name": "fedavg", "fraction_train": 0.25},
        "central_privacy": TABLE | {"sampling": "cyclic", "noise": "banded"},
    }
    whole = run_serial(make_config(**tables, federation={"rounds": 6}), tmp_path / "whole")
    part = run_serial(make_config(**tables, federation={"rounds": 4}), tmp_path / "part")
    run_serial(make_config(**tables, federation={"rounds": 6}), part.path, resume=True)
    assert part.ledger.read_bytes() == whole.ledger.read_bytes()
    [last_part, last_whole] = [read_metrics(folder)[-1] for folder in (part, whole)]
    assert last_part["loss"] == last_whole["loss"]
    assert "correlated by 4 bands over rounds" in write_report(whole).read_text()


@pytest.mark.parametrize("strategy", ["fedavg", pytest.param("fedadam", marks=pytest.mark.thorough)])
def test_an_interrupted_run_goes_on_to_the_same_models_and_budget(strategy: str, tmp_path: Path) -> None:
    """The clip adapts, so it is state; some rounds have no client at all."""
    tables: dict[str, Any] = {
        "strategy": {"name": strategy, "fraction_train": 0.2},
        "central_privacy": TABLE | {"sampling": "poisson", "quantile": 0.5, "count_noise": 2.0},
    }
    whole = run_serial(make_config(**tables, federation={"rounds": 6}), tmp_path / "whole")
    part = run_serial(make_config(**tables, federation={"rounds": 3}), tmp_path / "part")
    run_serial(make_config(**tables, federation={"rounds": 6}), part.path, resume=True)
    assert part.ledger.read_bytes() == whole.ledger.read_bytes()
    kept = ("accuracy", "loss", "epsilon of central_privacy")
    metrics = [[[row[key] for key in kept] for row in read_metrics(folder)] for folder in (part, whole)]
    assert metrics[0] == metrics[1]
    assert len(read_ledger(whole)) == 6 * 4
    recorded = {number: Transcript(whole.path).header(number) for number in Transcript(whole.path).rounds}
    assert 0 < len(recorded) < 6  # a round without clients has nothing to record, and counts


@pytest.mark.thorough
def test_noise_for_another_number_of_rounds_is_refused_when_a_run_goes_on(tmp_path: Path) -> None:
    table = {"epsilon": 9.0, "delta": 1e-3}
    run = run_serial(make_config(central_privacy=table, federation={"rounds": 1}), tmp_path / "run")
    with pytest.raises(RunError, match=r"central_privacy of client 0 had noise_multiplier = .* and now has"):
        run_serial(make_config(central_privacy=table, federation={"rounds": 2}), run.path, resume=True)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({}, "noise_multiplier: set it, or epsilon, from which it follows, and not both"),
        ({"noise_multiplier": 1.0, "epsilon": 2.0}, "set it, or epsilon, from which it follows, and not both"),
        ({"noise_multiplier": 0.0}, "central_privacy.noise_multiplier"),
        (TABLE | {"clip": 0.0}, "central_privacy.clip"),
        (TABLE | {"clip": float("inf")}, "central_privacy.clip"),
        (TABLE | {"quantile": 1.5}, "central_privacy.quantile"),
        (TABLE | {"count_noise": 1.0}, "count_noise: a fixed clip counts nothing"),
        (TABLE | {"sampling": "uniform"}, "central_privacy.sampling"),
        (TABLE | {"noise": "tree"}, "noise: 'tree' protects a client that adds to one of the rounds that share noise"),
        (TABLE | {"noise": "banded", "sampling": "poisson"}, "noise: 'banded' protects a client that adds to one"),
        (
            TABLE | {"noise": "tree", "sampling": "cyclic", "quantile": 0.5},
            "quantile: noise = 'tree' spans rounds, and requires a fixed clip",
        ),
        (TABLE | {"noise": "tree", "sampling": "cyclic", "bands": 2}, "bands: noise = 'tree' has none; leave it out"),
        (TABLE | {"noise": "banded", "sampling": "cyclic", "bands": 0}, "central_privacy.bands"),
        (TABLE | {"sigma": 1.0}, "central_privacy.sigma: unknown key"),
    ],
)
def test_a_table_that_says_nothing_sound_is_refused_in_a_sentence(table: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        make_config(central_privacy=table)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"central_privacy": {"noise_multiplier": 1.0, "delta": 0.25}}, "0.25 promises nothing to one of 4 clients"),
        (
            {"central_privacy": {"epsilon": 1e-9, "delta": 1e-15}},
            "central_privacy.epsilon: 1e-09 at delta 1e-15 is not reached in 2 rounds, whatever the noise",
        ),
        (
            {"model": {"name": "mlp", "hidden": [16], "batch_norm": True}},
            "is a running statistic of a BatchNorm layer, and with noise a variance may fall below 0",
        ),
        ({"central_privacy": TABLE | {"quantile": 0.5}}, "set it above 0.5"),
        ({"strategy": {"name": "krum"}}, "Krum may use more of the updates than their mean"),
        ({"strategy": {"name": "fedmedian"}}, "FedMedian may use more of the updates than their mean"),
        (
            {"strategy": {"name": "fedavg", "weighted_by_key": "train_loss"}},
            "strategy.weighted_by_key: under central_privacy all clients count alike",
        ),
        ({"strategy": {"name": "fedavg", "fraction_train": 0.0}}, "with 0 no client trains"),
        (
            {
                "strategy": {"name": "fedavg", "min_train_nodes": 2},
                "central_privacy": TABLE | {"sampling": "poisson"},
            },
            "strategy.min_train_nodes: with central_privacy.sampling = 'poisson' clients are sampled",
        ),
        ({"secure_aggregation": {}}, "under secure aggregation it sees sums alone"),
        (
            {
                "strategy": {"name": "fedavg", "fraction_train": 0.75},
                "central_privacy": TABLE | {"sampling": "cyclic"},
            },
            "all 4 clients take turns, and rounds of 3 do not divide them",
        ),
        (
            {
                "strategy": {"name": "fedavg", "fraction_train": 0.5},
                "central_privacy": TABLE | {"sampling": "cyclic", "noise": "banded", "bands": 3},
            },
            "bands: noise of 3 bands spans as many rounds, and each client is asked once in 2",
        ),
        (
            {"algorithm": {"name": "scaffold"}, "strategy": {"name": "scaffold"}},
            "Scaffold may use more of the updates than their mean",
        ),
    ],
)
def test_what_the_server_cannot_bound_is_refused_before_anything_runs(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        Experiment(make_config(**tables)).check()
