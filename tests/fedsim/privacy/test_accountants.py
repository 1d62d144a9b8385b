"""Epsilon of sampled Gaussian steps: Opacus' own figures, and those of an accountant that Google wrote."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest

from fedsim.base.errors import ConfigError
from fedsim.privacy import accountants
from fedsim.privacy.accountants import Steps, compute_epsilon, find_noise_multiplier

DELTA = 1e-5
HISTORIES = [
    (Steps(1.5, 0.04, 50), Steps(3.0, 0.04, 80)),  # one of Opacus' own cases, as the first of those below
    (Steps(0.8, 1.0, 12),),
]
MORE_HISTORIES = [
    (Steps(1.5, 0.04, 100),),
    (Steps(4.0, 0.01, 2000),),
    (Steps(2.0, 0.1, 9), Steps(2.0, 0.1, 18)),
    (Steps(2.0, 0.05, 20), Steps(1.2, 0.1, 5), Steps(5.0, 1.0, 3)),
]
ALL_HISTORIES = [*HISTORIES, *(pytest.param(history, marks=pytest.mark.thorough) for history in MORE_HISTORIES)]


def by_google(accountant: Any, history: tuple[Steps, ...]) -> float:
    import dp_accounting

    for noise, rate, number in history:
        event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
        accountant.compose(event, number)
    return accountant.get_epsilon(DELTA)


@pytest.mark.parametrize("history", ALL_HISTORIES)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:Optimal order")
def test_epsilon_is_that_of_opacus(history: tuple[Steps, ...]) -> None:
    from opacus.accountants import PRVAccountant, RDPAccountant

    rdp, prv = RDPAccountant(), PRVAccountant()
    for theirs in (rdp, prv):
        theirs.history = [tuple(steps) for steps in history]
    assert compute_epsilon(history, DELTA) == pytest.approx(rdp.get_epsilon(DELTA), rel=1e-6)
    # Its error of 0.01 is part of the bound; ours is computed more finely.
    assert prv.get_epsilon(DELTA) - 0.011 <= compute_epsilon(history, DELTA, "prv") <= prv.get_epsilon(DELTA)


@pytest.mark.parametrize("history", ALL_HISTORIES)
def test_epsilon_is_within_one_percent_of_google(history: tuple[Steps, ...]) -> None:
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    assert compute_epsilon(history, DELTA) == pytest.approx(by_google(RdpAccountant(), history), rel=0.01)
    assert compute_epsilon(history, DELTA, "prv") == pytest.approx(by_google(PLDAccountant(), history), rel=0.01)


@pytest.mark.parametrize(
    ("epsilon", "rate", "steps", "accountant"),
    [
        (500.0, 1.0, 12, "rdp"),
        pytest.param(10.0, 0.1, 30, "rdp", marks=pytest.mark.thorough),
        (1.0, 0.05, 500, "rdp"),
        pytest.param(0.1, 0.02, 40, "rdp", marks=pytest.mark.thorough),
        (3.0, 1.0, 7, "rdp"),
        pytest.param(1.0, 0.2, 20, "prv", marks=pytest.mark.thorough),
        pytest.param(0.1, 1.0, 4, "prv", marks=pytest.mark.thorough),
        (3.0, 1.0, 7, "prv"),
    ],
)
def test_the_noise_multiplier_reaches_the_wanted_epsilon_and_hardly_more(
    epsilon: float, rate: float, steps: int, accountant: str
) -> None:
    noise = find_noise_multiplier(epsilon, DELTA, rate, steps, accountant)  # type: ignore[arg-type]
    reached = compute_epsilon((Steps(noise, rate, steps),), DELTA, accountant)  # type: ignore[arg-type]
    assert 0.99 * epsilon <= reached <= epsilon


def test_privacy_loss_distributions_are_tighter() -> None:
    for history in HISTORIES:
        assert compute_epsilon(history, DELTA, "prv") < compute_epsilon(history, DELTA, "rdp")


def test_hardly_any_noise_has_no_finite_epsilon_and_no_distribution() -> None:
    for extreme in (1e-200, 1e-160, 1e200):  # at 1e-160 Opacus' series does not end
        assert compute_epsilon((Steps(extreme, 0.1, 10),), DELTA) == math.inf
    with pytest.raises(ConfigError, match=r"'prv' cannot compute this \(epsilon is about .*set it to 'rdp'"):
        compute_epsilon((Steps(0.05, 0.5, 10),), DELTA, "prv")


def test_what_no_noise_reaches_is_said() -> None:
    with pytest.raises(ConfigError, match=r"epsilon: 0\.001 at delta 1e-09 is not reached in 1000 steps .*larger"):
        find_noise_multiplier(0.001, 1e-9, 1.0, 1000)


def test_renyi_divergences_are_those_of_opacus_without_its_import() -> None:
    """Its package imports parts of torch that take longer than all else of a check."""
    code = (
        "import sys; from fedsim.privacy.accountants import Steps, compute_epsilon, find_noise_multiplier; "
        "compute_epsilon((Steps(1.0, 0.01, 100),), 1e-5); find_noise_multiplier(3.0, 1e-5, 0.01, 100); "
        "sys.exit('opacus' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
    from opacus.accountants import RDPAccountant
    from opacus.accountants.utils import MAX_SIGMA

    assert list(accountants._OPACUS_ORDERS) == RDPAccountant.DEFAULT_ALPHAS
    assert accountants._LARGEST_NOISE == MAX_SIGMA
