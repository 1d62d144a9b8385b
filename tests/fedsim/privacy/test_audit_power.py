"""Canaries that are scored round by round, a choice that looks at nothing, and what an audit says before it runs."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import fedsim
from clients.defenses.update_noise import UpdateNoise
from fedsim.federation.config import Config
from fedsim.federation.experiment import Experiment
from fedsim.federation.simulation import log_canary_power
from fedsim.interfaces.mechanism import Mechanism
from fedsim.privacy.audit_power import describe_canaries
from fedsim.privacy.audited_defense import AuditedDefense
from fedsim.privacy.canary_bounds import EpsilonBound, best_lower_bound, choose_curve_tests
from fedsim.privacy.canary_scores import score_rounds
from fedsim.privacy.ceilings import TradeOff, compute_tight_epsilon
from fedsim.privacy.curve_audit import is_curve_refuted
from fedsim.privacy.defense_audit import plan_audit
from tests.support.planted_defenses import SoundGradients

DELTA, CONFIDENCE = 1e-5, 0.95


def audit_rounds(
    seed: int, declared: Mechanism, rounds: int, canaries: int, noise: float, *, by_likelihood: bool = True
) -> EpsilonBound:
    """Audit DP-SGD whose noise may be less than declared, as the server sees sums of a round's steps."""
    draws = np.random.default_rng(seed)
    inside = draws.random(canaries) < 0.5
    size = rounds, canaries
    sampled = draws.binomial(declared.releases, declared.rate, size) * inside
    moves = torch.tensor(sampled + noise * declared.releases**0.5 * draws.normal(size=size))
    kinds: list[Tensor] = [moves.sum(0)]
    if by_likelihood:
        likelihoods = score_rounds(0.01 * moves, [declared] * rounds)
        assert likelihoods is not None
        kinds.insert(0, likelihoods)
    return best_lower_bound(torch.stack(kinds), torch.tensor(inside), DELTA, CONFIDENCE, [declared] * rounds)


@pytest.mark.parametrize(("runs", "rate"), [(12, 1.0), pytest.param(300, 0.2, marks=pytest.mark.thorough)])
def test_of_sound_runs_no_more_than_said_are_refuted(runs: int, rate: float) -> None:
    refuted = 0
    for seed in range(runs):
        declared = Mechanism(scale=(0.7, 2.0)[seed % 2], rate=rate, releases=(1, 4)[seed // 2 % 2])
        proved = compute_tight_epsilon(Mechanism(scale=declared.scale, rate=rate, releases=20), DELTA)
        rounds = 20 // declared.releases
        refuted += audit_rounds(seed, declared, rounds, 300, declared.scale).epsilon > proved
    assert refuted <= (1 - CONFIDENCE) * runs


def test_a_mechanism_that_tells_all_at_once_is_refuted_exactly_above_the_chance_of_it() -> None:
    """With probability 5 % it tells all coins, otherwise none: no bound that takes coins for independent holds."""
    curve = TradeOff(epsilons=np.array([0.0]), deltas=np.array([0.05]))
    for canaries in (100, 1000):
        assert not is_curve_refuted(curve, canaries, canaries, canaries, 0.951)
        assert is_curve_refuted(curve, canaries, canaries, canaries, 0.94)


def test_one_step_a_round_shows_half_of_epsilon_and_the_sum_of_moves_less() -> None:
    declared, proved = (
        Mechanism(scale=1.0, rate=0.1),
        compute_tight_epsilon(Mechanism(scale=1.0, rate=0.1, releases=100), DELTA),
    )
    bounds = np.array(
        [
            [audit_rounds(seed, declared, 100, 10_000, 1.0, by_likelihood=kind).epsilon for kind in (True, False)]
            for seed in range(2)
        ]
    )
    likelihood, total = bounds.mean(0) / proved
    assert 0.4 < likelihood <= 1
    assert total < 0.9 * likelihood


def test_scores_need_no_learning_rate_and_nothing_but_declared_gaussian_noise() -> None:
    moves = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    declared = [Mechanism(scale=1.0, rate=0.3, releases=2)] * 3
    scores = score_rounds(moves, declared)
    assert scores is not None
    scaled = score_rounds(1e-3 * moves, declared)
    assert scaled is not None
    assert torch.allclose(scaled, scores, atol=1e-5)
    assert score_rounds(moves, [*declared[:2], None]) is None
    assert score_rounds(moves, [*declared[:2], Mechanism(noise="laplace", scale=1.0)]) is None
    without_noise = score_rounds(torch.tensor([[0.0, 1.0]]), declared[:1])
    assert without_noise is not None
    assert without_noise.isfinite().all()


def test_how_many_are_guessed_is_chosen_before_anything_is_sent() -> None:
    declared = [Mechanism(scale=1.0)]
    inside = torch.rand(500, generator=torch.Generator().manual_seed(1)) < 0.5
    (share, _), (of_all, _) = choose_curve_tests(declared, 500, DELTA, CONFIDENCE)
    for scores in (torch.zeros(500), inside.double()):
        bound = best_lower_bound(scores, inside, DELTA, CONFIDENCE, declared)
        assert not bound.uses_curve or bound.guesses in (round(500 * share), 500 * of_all)


@pytest.mark.parametrize(("canaries", "finds"), [(20, False), (400, True)])
def test_what_canaries_can_find_is_what_they_find(canaries: int, finds: bool) -> None:
    declared = Mechanism(scale=1.0)
    proved = compute_tight_epsilon(declared, DELTA)
    sentence, is_promising = describe_canaries([declared], canaries, proved, DELTA, CONFIDENCE)
    assert is_promising == finds
    if not finds:
        assert "refute nothing, not even 5 %" in sentence
        assert audit_rounds(0, declared, 1, canaries, 0.01).epsilon < proved
        return
    refuted_share = int(sentence.partition("if it has ")[2].partition(" %")[0]) / 100
    found = [audit_rounds(seed, declared, 1, canaries, refuted_share).epsilon > proved for seed in range(10)]
    assert sum(found) >= 9


@pytest.mark.parametrize(("steps", "is_less"), [(1, False), (10, True)])
def test_a_run_says_that_sums_of_steps_show_less_than_is_proved_of_each(
    steps: int, is_less: bool, caplog: pytest.LogCaptureFixture
) -> None:
    experiment = {
        "data": {"name": "digits"},
        "partition": {"name": "iid", "samples_per_client": 40},
        "model": {"name": "mlp", "hidden": [8]},
        "training": {"local_steps": steps, "batch_size": 8},
        "federation": {"engine": "serial", "clients": 2, "rounds": 1},
        "defense": [{"name": "dp-sgd", "noise_multiplier": 1.0}],
        "adversary": {"when": "never", "victims": [0]},
        "canaries": {"count": 100},
    }
    with caplog.at_level(logging.INFO):
        log_canary_power(Experiment(Config.model_validate(experiment)))
    assert ("they show less here, since 10 steps a round are seen as one sum" in caplog.text) == is_less


def test_the_plan_of_an_audit_is_held_against_what_is_promised_of_its_guesses() -> None:
    """Guesses are about full batches, of which more epsilon is promised than of those that are sampled."""
    plan = " ".join(plan_audit(AuditedDefense.from_defense(SoundGradients(noise_multiplier=0.7)), 20_000))
    assert "below the promised one" not in plan, "along the Gaussian curve they show more"
    assert "they refute the promised curve if there is 90 % of the noise or less" in plan
    small = " ".join(plan_audit(AuditedDefense.from_defense(SoundGradients(noise_multiplier=0.3)), 100))
    assert "below the promised one: they can refute the promised curve, but not the epsilon itself" in small
    assert "they refute nothing, however little noise there is" in small
    tiny = " ".join(plan_audit(AuditedDefense.from_defense(UpdateNoise(noise_multiplier=0.01)), 100))
    assert "so little noise is declared that nothing below 1 is proved" in tiny


def test_a_run_warns_of_canaries_that_find_nothing_and_concludes_no_more_than_it_saw(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    experiment = {
        "data": {"name": "digits"},
        "partition": {"name": "iid", "samples_per_client": 40},
        "model": {"name": "mlp", "hidden": [8]},
        "training": {"local_steps": 1, "batch_size": 8},
        "federation": {"engine": "serial", "clients": 2, "rounds": 2, "evaluate_every": 2},
        "defense": [{"name": "dp-sgd", "noise_multiplier": 0.5}],
        "adversary": {"when": "never", "victims": [0]},
        "canaries": {"count": 20},
    }
    with caplog.at_level(logging.WARNING):
        done = fedsim.run(experiment, out=tmp_path)
    assert "this audit is too small to find anything" in caplog.text
    assert "Broken" not in (tmp_path / "report.html").read_text()
    assert len(done.epsilons) == 1
