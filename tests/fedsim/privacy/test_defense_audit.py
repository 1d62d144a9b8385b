"""`audit_defense` finds each of twelve planted bugs, alarms at no sound defense, and says what it cannot see."""

from __future__ import annotations

import math

import numpy as np
import pytest

from clients.defenses.dp_sgd import DpSgd
from clients.defenses.gradient_prune import GradientPrune
from clients.defenses.update_noise import UpdateNoise
from fedsim.base.errors import ConfigError
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.mechanism import Mechanism
from fedsim.privacy.audited_defense import AuditedDefense
from fedsim.privacy.ceilings import compute_tight_epsilon, compute_trade_off
from fedsim.privacy.defense_audit import DefenseAudit, audit_defense, plan_audit
from fedsim.privacy.guessing_game import judge_scores, largest_epsilon
from tests.support.commands import Call
from tests.support.planted_defenses import PLANTED, SOUND, SoundGradients

TRIALS = 200
FINDING_WORDS = {
    "clipping by batch": "the distance 2 of two neighbours",
    "noise before clipping": "times as large at a large gradient",
    "half the noise": "0.49",
    "noise of one layer missing": "noise of last.bias is the same",
    "wrong rate": "samples at the rate 0.4, and the accountant uses 0.1",
    "the same noise each step": "has a correlation of 1.000",
    "noise from the seed that the server knows": "different secret randomness",
    "fixed batches accounted as Poisson": "each in exactly one of an epoch",
    "epsilon of the wrong delta": "look for another delta",
    "shares too small after drop-outs": "shares for more clients than send",
    "sums without modulus": "the messages reveal more than is accounted for",
    "N leaked through weights": "at 16 examples as at zeros",
}


def _audit(kind: tuple[type[Defense], int, int]) -> DefenseAudit:
    cls, clients, survivors = kind
    return audit_defense(cls(), trials=TRIALS, clients=clients, survivors=survivors)


@pytest.mark.slow
@pytest.mark.parametrize("bug", PLANTED)
def test_each_planted_bug_is_found_and_named(bug: str) -> None:
    done = _audit(PLANTED[bug])
    assert any(FINDING_WORDS[bug] in violation for violation in done.violations), done.violations
    assert done.conclusion.startswith("The promise of epsilon")


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOUND)
def test_no_sound_defense_is_said_to_be_broken(kind: str) -> None:
    done = _audit(SOUND[kind])
    assert done.violations == []
    assert "which does not prove that the program keeps its promise" in done.conclusion


@pytest.mark.slow
@pytest.mark.parametrize(
    "defense", [DpSgd(noise_multiplier=1.0, clipping="per-layer"), UpdateNoise(noise_multiplier=4.0, noise="laplace")]
)
def test_the_defenses_here_keep_to_their_mechanisms(defense: Defense) -> None:
    assert audit_defense(defense, trials=100).violations == []


def test_the_bound_by_the_gaussian_curve_is_at_least_nine_tenths_of_what_is_proved() -> None:
    draws, mechanism, delta = np.random.default_rng(1), Mechanism(scale=1.0), 1e-5
    without, with_canary = draws.normal(0, 1, 60_000), draws.normal(1, 1, 60_000)
    game = judge_scores(without, with_canary, compute_trade_off([mechanism], replaced=False), delta, mechanism)
    proved = compute_tight_epsilon(mechanism, delta)
    assert 0.9 * proved < game.best_epsilon <= proved
    assert not game.is_broken


def test_guesses_of_less_noise_than_is_declared_are_above_the_curve() -> None:
    draws, mechanism = np.random.default_rng(1), Mechanism(scale=1.0)
    without, with_canary = draws.normal(0, 1, 2000), draws.normal(2, 1, 2000)
    curve = compute_trade_off([mechanism], replaced=False)
    assert judge_scores(without, with_canary, curve, 1e-5, mechanism).is_broken


def test_what_an_audit_can_and_cannot_find_is_said_before_it_runs() -> None:
    plan = " ".join(plan_audit(AuditedDefense.from_defense(SoundGradients(noise_multiplier=0.3)), 100))
    gaussian = Mechanism(scale=0.3)
    assert f"at most {largest_epsilon(100, gaussian, 1e-5):.3g}, below the promised one" in plan
    assert "Cannot be found: what shows only after more rounds" in plan
    masks, _, _ = SOUND["masks"]
    assert "declares no `mechanism`" in " ".join(plan_audit(AuditedDefense.from_defense(masks()), 1000))


def test_an_audit_that_is_too_small_or_has_nothing_to_refute_does_not_begin() -> None:
    with pytest.raises(
        ConfigError, match=r"--trials: 20 trials show an epsilon of at most 0 of unknown noise, .*at least 100"
    ):
        audit_defense(SoundGradients(), trials=20)
    with pytest.raises(ConfigError, match="GradientPrune promises nothing that an audit could refute"):
        audit_defense(GradientPrune())
    with pytest.raises(ConfigError, match="UpdateNoise promises nothing with these settings"):
        audit_defense(UpdateNoise(noise_multiplier=0.0))
    with pytest.raises(ConfigError, match="--survivors: expected 1 to 3, the number of --clients, got 4"):
        audit_defense(UpdateNoise(noise_multiplier=4.0), clients=3, survivors=4)
    with pytest.raises(ConfigError, match="--clients: gradients of examples are not summed"):
        audit_defense(SoundGradients(), clients=3)


@pytest.mark.parametrize("mechanism", [None, Mechanism(scale=1.0), Mechanism(noise="laplace", scale=1.0)])
def test_guesses_that_are_all_right_show_what_is_said_before_and_no_more(mechanism: Mechanism | None) -> None:
    without, with_canary = np.linspace(-101, -100, 100), np.linspace(100, 101, 100)
    game = judge_scores(without, with_canary, None, 1e-5, mechanism)
    assert game.best_epsilon == pytest.approx(largest_epsilon(100, mechanism, 1e-5), rel=0.01)


def test_more_trials_can_show_more() -> None:
    shown = [largest_epsilon(trials) for trials in (100, 1000, 10_000)]
    assert shown == sorted(shown)
    assert not math.isclose(shown[0], shown[1])


def test_the_command_ends_with_code_1_and_names_the_bug(call: Call) -> None:
    done = call("audit-defense", "tests.support.planted_defenses:SumsWithoutModulus", "--trials", "100")
    assert done.returncode == 1
    assert "Guesses in 100 trials of 2 releases" in done.stdout
    assert "violates its guarantee: guesses find at least" in done.stderr
    assert FINDING_WORDS["sums without modulus"] in done.stderr


@pytest.mark.thorough
def test_the_command_says_what_it_cannot_prove_of_a_sound_defense(call: Call) -> None:
    done = call("audit-defense", "update-noise", "--set", "noise_multiplier=4.0", "--trials", "100")
    assert done.returncode == 0, done.stderr
    assert "does not prove that the program keeps its promise" in done.stdout
