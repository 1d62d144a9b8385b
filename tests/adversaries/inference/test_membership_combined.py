"""Rounds combined with the public matrix: what one hides its neighbours tell, and never more than is proved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedsim
from adversaries.inference.membership_combined import weigh_rounds
from fedsim.privacy.ceilings import compute_trade_off
from fedsim.privacy.central import CentralPrivacy
from strategies.round_noise import RoundNoise

ROUNDS, CYCLE, NUMBERS = 16, 4, 40_000
SETTINGS: dict[str, dict[str, Any]] = {
    "banded": {"correlation": "banded", "num_bands": 4},
    "tree": {"correlation": "tree"},
    "independent": {},
}


def make_privacy(kind: str) -> CentralPrivacy:
    return CentralPrivacy(
        clip=1.0, noise_multiplier=3.0, delta=1e-5, clients=8, expected=2.0, cycle=CYCLE, **SETTINGS[kind]
    )


def measure_area(scores: torch.Tensor, members: torch.Tensor) -> float:
    """The area under the ROC curve, by ranks."""
    ranks = scores.argsort().argsort().double() + 1
    num_members = int(members.sum())
    largest = num_members * (len(members) - num_members)
    return float((ranks[members].sum() - num_members * (num_members + 1) / 2) / largest)


@pytest.mark.parametrize("kind", SETTINGS)
def test_the_combination_tells_what_the_ledger_allows_and_no_more(kind: str) -> None:
    """Numbers of the released sum, to half of which the victim adds the clip in each of its rounds."""
    privacy, victim_turn = make_privacy(kind), 1
    noise = RoundNoise(privacy, seed=3)
    members = torch.arange(NUMBERS) % 2 == 0
    takes_part = torch.tensor([float(number % CYCLE == victim_turn) for number in range(ROUNDS)], dtype=torch.float64)
    moves = torch.stack(
        [
            torch.from_numpy(noise.draw({"w": np.zeros(NUMBERS)}, number + 1, 1.0)["w"]) + takes_part[number] * members
            for number in range(ROUNDS)
        ]
    )
    covariance = torch.from_numpy(privacy.compute_noise_covariance(ROUNDS))
    rounds = range(1, ROUNDS + 1)
    alone, combined = (
        measure_area(weigh_rounds(rounds, takes_part, known) @ moves, members) for known in (None, covariance)
    )
    curve = compute_trade_off([privacy.mechanism(ROUNDS // CYCLE)], replaced=False)
    assert curve is not None
    assert combined <= curve.area + 0.01
    if kind == "independent":
        assert combined == pytest.approx(alone)
    else:
        assert combined > alone + 0.04
    if kind == "banded":
        assert combined > curve.area - 0.02, "each round's fresh noise alone is left"


def test_the_victim_counts_fully_and_other_rounds_cancel_noise() -> None:
    covariance = torch.from_numpy(make_privacy("banded").compute_noise_covariance(4))
    takes_part = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    weights = weigh_rounds([1, 2, 3, 4], takes_part, covariance)
    assert float(weights @ takes_part) == pytest.approx(1.0)
    even = weigh_rounds([1, 2, 3, 4], takes_part, None)
    assert float(weights @ covariance @ weights) < 0.7 * float(even @ covariance @ even)
    assert weigh_rounds([2, 4], torch.ones(2), covariance[:4, :4]).shape == (2,)


@pytest.mark.parametrize(("who", "is_known"), [("outsider", True), ("server", False)])
def test_who_sees_models_knows_the_matrix_and_the_server_needs_none(who: str, is_known: bool, tmp_path: Path) -> None:
    experiment = {
        "data": {"name": "digits"},
        "partition": {"name": "iid", "samples_per_client": 12},
        "model": {"name": "mlp", "hidden": [8]},
        "training": {"local_steps": 1, "batch_size": 12},
        "federation": {"engine": "serial", "clients": 4, "rounds": 4, "evaluate_every": 4},
        "strategy": {"name": "fedavg", "fraction_train": 0.5},
        "central_privacy": {"noise_multiplier": 1.0, "delta": 1e-2, "sampling": "cyclic", "noise": "banded"},
        "adversary": {"who": who, "rounds": "all", "victims": [0], "knowledge": {"candidates": "held-out"}},
        "attack": [{"name": "membership-combined"}],
    }
    done = fedsim.run(experiment, out=tmp_path / who)
    assert not done.scores.empty
    assert done.scores["granted"].str.contains("noise_covariance").all() == is_known
