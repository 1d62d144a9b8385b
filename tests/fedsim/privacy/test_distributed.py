"""What noisy sums under secure aggregation prove, to whom, and which sums cannot be had."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from scipy.special import logsumexp
from scipy.stats import skellam

from fedsim.audit.evaluation.proved_ceilings import find_trade_off
from fedsim.base.errors import ConfigError
from fedsim.dossier.privacy_facts import collect_proofs
from fedsim.dossier.recomputation import compose_epsilons_again
from fedsim.federation.experiment import Experiment
from fedsim.federation.run_folder import read_ledger
from fedsim.interfaces.mechanism import Mechanism
from fedsim.privacy.ceilings import TradeOff, compute_tight_epsilon, compute_trade_off
from fedsim.privacy.distributed import bound_grid_length
from fedsim.privacy.skellam import bound_divergences
from fedsim.report.page import write_report
from fedsim.report.reported_run import open_reported_run
from fedsim.sweeps.rows import _proved_epsilons
from tests.support.experiments import make_tiny_config, run_serial

DELTA = 1e-5


def make_mechanism(**settings: Any) -> Mechanism:
    return Mechanism(
        **{"noise": "skellam", "scale": 4.0, "distance": 1e5, "dimension": 100, "unit": "client"} | settings
    )


@pytest.mark.parametrize("variance", [0.5, 4.0, 30.0])
@pytest.mark.parametrize("distance", [1, 3])
def test_no_divergence_is_above_its_bound(variance: float, distance: int) -> None:
    """One number, whose divergence can be summed up; orders 2, 3, 4 and 8."""
    values = np.arange(-400, 401)
    log_near, log_far = (skellam.logpmf(values - shift, variance / 2, variance / 2) for shift in (0, distance))
    certain = np.isfinite(log_near) & np.isfinite(log_far) & (log_far > -200) & (log_near > -200)
    bounds = bound_divergences(variance, float(distance), 1)
    for index, order in ((0, 2), (1, 3), (2, 4), (6, 8)):
        terms = order * log_far[certain] - (order - 1) * log_near[certain]
        divergence = float(logsumexp(terms)) / (order - 1)
        assert divergence <= bounds[index] * (1 + 1e-9)
        if variance > 20:
            assert divergence > 0.8 * bounds[index]


def test_on_a_fine_grid_it_costs_what_gaussian_noise_costs() -> None:
    accountant = RdpAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(4.0), 10)
    gaussian = float(accountant.get_epsilon(DELTA))
    fine = compute_tight_epsilon(make_mechanism(releases=10), DELTA)
    assert fine == pytest.approx(gaussian, rel=0.01)
    by_distance = [compute_tight_epsilon(make_mechanism(scale=1.0, distance=steps), DELTA) for steps in (2.0, 1e5)]
    assert by_distance[0] > 1.05 * by_distance[1]


def test_a_coarse_grid_makes_an_update_longer() -> None:
    assert bound_grid_length(1.0, 1e-6, 10_000) == pytest.approx(1e6, rel=1e-3)
    assert bound_grid_length(1.0, 0.01, 10_000) > 200


def test_its_curve_is_above_that_of_gaussian_noise_and_of_two_clients_higher_still() -> None:
    """It follows from divergences, which prove a little less than distributions do."""
    curve = compute_trade_off([make_mechanism()])
    stated = compute_trade_off([make_mechanism()], replaced=False)
    gaussian = compute_trade_off([Mechanism(scale=4.0)])
    assert curve is not None
    assert stated is not None
    assert gaussian is not None
    assert gaussian.area < curve.area < 0.75
    assert stated.area < curve.area
    assert compute_trade_off([make_mechanism(), Mechanism(scale=4.0)]) is None


@pytest.mark.parametrize("settings", [{"distance": None}, {"dimension": None}, {"rate": 0.5}])
def test_a_mechanism_that_lacks_what_its_bound_needs_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="of Skellam noise the distance and the dimension are needed"):
        make_mechanism(**settings)


TABLE = {"noise_multiplier": 4.0, "delta": 1e-3}


def make_config(**tables: Any) -> Any:
    base = {"distributed_privacy": TABLE, "secure_aggregation": {"threshold": 3}}
    return make_tiny_config(**(base | tables))


def test_the_ledger_says_what_it_holds_for_and_a_ceiling_follows_from_it(tmp_path: Path) -> None:
    folder = run_serial(make_config(), tmp_path / "run")
    rows = read_ledger(folder)
    assert [(row["round"], row["client"]) for row in rows] == [(str(r), str(c)) for r in (1, 2) for c in range(4)]
    for row in rows:
        assert (row["defense"], row["unit"], row["noise"]) == ("distributed_privacy", "client", "skellam")
        assert row["trusted"] == "other clients of a sum, to add their noise"
        assert row["in_clear"] == "who answered, the sum of N, and metrics of evaluation"
        rounds = int(row["round"])
        mechanism = make_mechanism(
            releases=rounds, distance=float(row["noise_distance"]), dimension=int(row["noise_dimension"])
        )
        assert float(row["epsilon"]) == compute_tight_epsilon(mechanism, 1e-3)
    curve = find_trade_off(rows, [0, 1, 2, 3], 2)
    expected = compute_trade_off([mechanism])
    assert isinstance(curve, TradeOff)
    assert expected is not None
    assert curve.area == expected.area
    assert set(_proved_epsilons(folder).values()) == {rows[-1]["epsilon"]}
    reported = open_reported_run(folder)
    [proof], sentence = collect_proofs(reported)
    assert (proof.defense, proof.epsilon, sentence) == ("distributed_privacy", float(rows[-1]["epsilon"]), "")
    assert [value.state for value in compose_epsilons_again(reported)] == ["equal"] * 8
    assert "at least 3 clients of each sum add their share of noise" in write_report(folder).read_text()


def test_an_interrupted_run_goes_on_to_the_same_model_and_budget(tmp_path: Path) -> None:
    tables: dict[str, Any] = {"distributed_privacy": TABLE, "strategy": {"name": "fedavg", "fraction_train": 0.75}}
    whole = run_serial(make_config(**tables, federation={"rounds": 4}), tmp_path / "whole")
    part = run_serial(make_config(**tables, federation={"rounds": 2}), tmp_path / "part")
    run_serial(make_config(**tables, federation={"rounds": 4}), part.path, resume=True)
    assert part.ledger.read_bytes() == whole.ledger.read_bytes()
    assert len(read_ledger(whole)) == 4 * 3


def test_noise_follows_from_epsilon_and_keeps_to_it() -> None:
    privacy = Experiment(make_config(distributed_privacy={"epsilon": 3.0, "delta": 1e-3})).distributed_privacy
    assert privacy is not None
    assert 2.95 < privacy.epsilon(2) <= 3.0
    assert privacy.shares == 3
    assert privacy.dimension == 64 * 16 + 16 + 16 * 10 + 10


@pytest.mark.parametrize(
    ("groups", "threshold", "shares"),
    [("all", 0.5, 2), ("all", 1.0, 4), (2, 1.0, 2), ("all", 3, 3)],
)
def test_shares_are_made_for_the_fewest_clients_whose_sum_can_be_unmasked(
    groups: Any, threshold: float, shares: int
) -> None:
    table = {"groups": groups, "threshold": threshold}
    privacy = Experiment(make_config(secure_aggregation=table)).distributed_privacy
    assert privacy is not None
    assert privacy.shares == shares


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"secure_aggregation": None}, "distributed_privacy: a client adds a share of noise, which is enough in a sum"),
        (
            {"distributed_privacy": {"noise_multiplier": 1.0, "delta": 0.25}},
            "0.25 promises nothing to one of 4 clients",
        ),
        (
            {"distributed_privacy": {"noise_multiplier": 100.0, "delta": 1e-3}},
            "secure_aggregation.bits: sums are taken modulo 2^32, and those over 4 clients with 22 bits and noise "
            "multiplier 100 may be larger; expected at most 21 bits",
        ),
        (
            {"distributed_privacy": {"noise_multiplier": 1e8, "delta": 1e-3}},
            "may be larger; no grid is coarse enough; lower the noise or distributed_privacy.clip, or raise epsilon",
        ),
        (
            {"distributed_privacy": {"epsilon": 1e-9, "delta": 1e-15}},
            "distributed_privacy.epsilon: 1e-09 at delta 1e-15 is not reached in 2 rounds, whatever the noise",
        ),
        (
            {"model": {"name": "mlp", "hidden": [16], "batch_norm": True}},
            "is a running statistic of a BatchNorm layer, and with noise a variance may fall below 0",
        ),
        ({"central_privacy": {"noise_multiplier": 1.0, "delta": 1e-3}}, "under secure aggregation it sees sums alone"),
    ],
)
def test_what_no_sum_can_keep_is_refused_before_anything_runs(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        Experiment(make_config(**tables)).check()


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({}, "noise_multiplier: set it, or epsilon, from which it follows, and not both"),
        (TABLE | {"clip": 0.0}, "distributed_privacy.clip"),
        (TABLE | {"modulus": 7}, "distributed_privacy.modulus: unknown key"),
    ],
)
def test_a_table_that_says_nothing_sound_is_refused_in_a_sentence(table: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        make_config(distributed_privacy=table)


@pytest.mark.parametrize(("senders", "is_broken"), [(1.0, False), (0.1, True)])
def test_canaries_find_shares_of_too_few_clients_and_no_fault_in_enough(senders: float, is_broken: bool) -> None:
    """Through rounding, noise and modulus of the protocol itself."""
    from studies.shares.study import audit_shares

    bound, proved = audit_shares(2.0, canaries=1000, seed=1, senders=senders)
    assert (bound.epsilon > proved) == is_broken
    assert bound.uses_curve
    assert bound.epsilon > 0.2 * proved
