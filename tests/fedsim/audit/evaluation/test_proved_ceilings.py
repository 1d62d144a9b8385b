"""Ceilings beside scores: a broken mechanism is flagged, a sound one is not, and none is claimed without cause."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fedsim.audit.evaluation.memberships import score_membership
from fedsim.audit.evaluation.proved_ceilings import (
    FALSE_ALARMS,
    ProvedCeiling,
    compute_ceiling,
    compute_chance,
    find_trade_off,
)
from fedsim.base.randomness import generator
from fedsim.interfaces.mechanism import Mechanism
from fedsim.privacy.ceilings import TradeOff, compute_trade_off
from fedsim.privacy.federation_privacy import OTHER_CLIENTS

HELD_OUT = {"candidates": "held-out"}
CANDIDATES = 300


def _curve(scale: float) -> TradeOff:
    curve = compute_trade_off([Mechanism(scale=scale, neighbours="replaced")])
    assert curve is not None
    return curve


def _score_cell(seed: int, distance: float, declared: float) -> list[ProvedCeiling]:
    """Score the best attack on a Gaussian mechanism, whose noise is 1 / `distance`, against the declared one."""
    members = torch.arange(CANDIDATES) % 2 == 0
    noise = torch.randn(CANDIDATES, generator=generator("cell", seed, str(distance)))
    curve = _curve(1 / declared)
    ceilings = []
    for score in score_membership(noise + distance * members, members):
        if math.isnan(score.value):
            continue
        row = {"metric": score.metric, "value": score.value, "examples": CANDIDATES, "floor": score.floor}
        ceiling, reason = compute_ceiling(row, HELD_OUT, "iid", curve)
        assert not reason
        chance = compute_chance(row, ceiling, curve)
        ceilings.append(
            ProvedCeiling(
                attack="best", victim="0", round="1", metric=score.metric, value=score.value, ceiling=ceiling,
                chance=chance, tests=3,
            )
        )  # fmt: skip
    assert len(ceilings) == 3
    return ceilings


def test_of_a_thousand_cells_of_sound_mechanisms_none_is_flagged_though_half_lie_above() -> None:
    flagged, above, cells = 0, 0, 1000
    for seed in range(cells):
        distance = (0.25, 0.5, 1.0, 2.0)[seed % 4]
        cell = _score_cell(seed, distance, declared=distance)
        flagged += any(item.is_exceeded for item in cell)
        above += cell[0].value > cell[0].ceiling
    assert above > 0.3 * cells  # the attack is the best one, so it is at its ceiling
    assert flagged == 0  # of these seeds; each is flagged with a probability of at most 0.001


@pytest.mark.parametrize("declared", [0.5, 1.0])
def test_a_mechanism_with_a_third_of_the_noise_is_flagged(declared: float) -> None:
    for seed in range(5):
        cell = _score_cell(seed, 3 * declared, declared)
        assert any(item.is_exceeded for item in cell)
        assert all(item.chance > 1e-12 or item.is_exceeded for item in cell)


def test_a_score_above_its_ceiling_is_named_with_its_ceiling() -> None:
    item = ProvedCeiling(
        attack="lira", victim="3", round="2", metric="membership_auc", value=0.9, ceiling=0.6, chance=FALSE_ALARMS / 9,
        tests=8,
    )  # fmt: skip
    assert item.is_exceeded
    assert "lira: membership_auc = 0.9 of client 3 in round 2 is above the proved ceiling of 0.6" in item.sentence


def _row(metric: str, **values: Any) -> dict[str, Any]:
    return {"metric": metric, "value": 0.5, "floor": 0.1, "examples": 60, **values}


def test_identification_is_bounded_by_the_curve_at_its_chance() -> None:
    curve = _curve(2.0)
    ceiling, reason = compute_ceiling(_row("identified"), {}, "iid", curve)
    assert not reason
    assert ceiling == float(curve.true_positive_rate(0.1))


@pytest.mark.parametrize(
    ("metric", "knowledge", "partition", "words"),
    [
        ("psnr", {}, "iid", "finitely many candidates"),
        ("identified", {"auxiliary": "test"}, "iid", "granted auxiliary"),
        ("membership_auc", {"candidates": "other-clients"}, "iid", "those of two clients"),
        ("membership_auc", HELD_OUT, "natural", "partition 'natural'"),
        ("attribute_accuracy", {}, "iid", "known only from below"),
        ("source_accuracy", {}, "iid", "two clients"),
    ],
)
def test_where_no_ceiling_holds_a_phrase_says_why(
    metric: str, knowledge: dict[str, str], partition: str, words: str
) -> None:
    ceiling, reason = compute_ceiling(_row(metric), knowledge, partition, _curve(2.0))
    assert math.isnan(ceiling)
    assert words in reason


def test_a_score_in_doubt_as_of_candidates_of_different_kinds_has_no_ceiling() -> None:
    row = _row("membership_auc") | {"doubt": "candidates differ in more than membership"}
    ceiling, reason = compute_ceiling(row, HELD_OUT, "iid", _curve(2.0))
    assert math.isnan(ceiling)
    assert reason == "the score is in doubt"


def _ledger_row(number: int, client: int = 0, **values: Any) -> dict[str, Any]:
    row = {
        "round": number, "client": client, "defense": "dp", "counts": 1, "unit": "example",
        "neighbours": "added or removed", "noise": "gaussian", "noise_scale": 4.0, "noise_rate": 1.0, "releases": 2,
        "noise_distance": "", "noise_dimension": "", "trusted": "nobody",
    }  # fmt: skip
    return row | values


def test_the_curve_is_of_all_counted_rounds_up_to_the_attacked_one() -> None:
    ledger = [_ledger_row(1), _ledger_row(2, counts=0), _ledger_row(3), _ledger_row(4), _ledger_row(3, client=1)]
    curve = find_trade_off(ledger, [0], 3)
    expected = compute_trade_off([Mechanism(scale=4.0, releases=4)])
    assert isinstance(curve, TradeOff)
    assert expected is not None
    assert curve.area == expected.area


def test_noise_that_a_trusted_server_adds_is_no_ceiling_for_the_server() -> None:
    central = [_ledger_row(number, trusted="server", defense="central_privacy", noise_scale=9.0) for number in (1, 2)]
    reason = find_trade_off(central, [0], 2)
    assert reason == "central_privacy holds for those who see the models alone, and this adversary is the server"
    # On a link nothing is added yet.
    assert "is an eavesdropper on all links" in str(find_trade_off(central, [0], 2, "eavesdropper"))
    curve = find_trade_off([*central, _ledger_row(1)], [0], 2)
    expected = compute_trade_off([Mechanism(scale=4.0, releases=2)])
    assert isinstance(curve, TradeOff)
    assert expected is not None
    assert curve.area == expected.area


def test_clients_who_attack_know_their_shares_of_noise() -> None:
    ledger = [_ledger_row(1, trusted=OTHER_CLIENTS, noise="skellam", noise_distance=1e4, noise_dimension=9)]
    reason = find_trade_off(ledger, [0], 1, [3])
    assert reason == "clients that attack know their own shares of the noise, which does not count for them"
    assert isinstance(find_trade_off(ledger, [0], 1, "outsider"), TradeOff)
    assert isinstance(find_trade_off(ledger, [0], 1, ["eavesdropper", 0]), TradeOff)  # it has no share
    assert isinstance(find_trade_off(ledger, [0], 1), TradeOff)


@pytest.mark.parametrize("attacker", ["outsider", [3, 4]])
def test_for_who_sees_the_models_alone_it_is_one_without_amplification(attacker: Any) -> None:
    """They may know who took part in which round."""
    central = [_ledger_row(number, trusted="server", noise_rate=0.1, releases=1) for number in (1, 2, 3)]
    curve = find_trade_off(central, [0], 2, attacker)
    expected = compute_trade_off([Mechanism(scale=4.0, releases=2)])
    assert isinstance(curve, TradeOff)
    assert expected is not None
    assert curve.area == expected.area


@pytest.mark.parametrize(
    ("rows", "clients", "words"),
    [
        ([], [0], "no defense proves"),
        ([_ledger_row(1, noise="")], [0], "declares no mechanism"),
        ([_ledger_row(1, noise_scale=0.05)], [0], "nothing below 1"),
        ([_ledger_row(1), _ledger_row(1, client=1, releases=3)], [0, 1], "different mechanisms"),
    ],
)
def test_without_a_curve_the_reason_is_said(rows: list[dict[str, Any]], clients: list[int], words: str) -> None:
    curve = find_trade_off(rows, clients, 1)
    assert isinstance(curve, str)
    assert words in curve
