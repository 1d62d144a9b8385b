"""Trade-off curves of mechanisms: closed forms, monotone, and above every attack on a sound mechanism."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from fedsim.interfaces.mechanism import Mechanism
from fedsim.privacy.ceilings import TradeOff, compute_tight_epsilon, compute_trade_off


def _curve(**settings: float | int | str) -> TradeOff:
    curve = compute_trade_off([Mechanism(**settings)])  # type: ignore[arg-type]
    assert curve is not None
    return curve


def _gaussian_rate(rates: np.ndarray[tuple[int], np.dtype[np.float64]], distance: float) -> object:
    return norm.cdf(norm.ppf(rates) + distance)


@pytest.mark.parametrize(("neighbours", "distance"), [("replaced", 0.5), ("added or removed", 1.0)])
def test_the_curve_of_gaussian_noise_is_that_of_two_normal_distributions(neighbours: str, distance: float) -> None:
    curve, rates = _curve(scale=2.0, neighbours=neighbours), np.geomspace(1e-3, 0.99, 30)
    exact = _gaussian_rate(rates, distance)
    assert (curve.true_positive_rate(rates) >= exact).all()  # type: ignore[operator]
    assert curve.true_positive_rate(rates) == pytest.approx(exact, rel=0.01)
    assert curve.accuracy == pytest.approx(norm.cdf(distance / 2), abs=1e-3)
    assert curve.area == pytest.approx(norm.cdf(distance / math.sqrt(2)), abs=2e-3)


def test_releases_compose_as_less_noise_does() -> None:
    assert _curve(scale=4.0, releases=4).accuracy == pytest.approx(_curve(scale=2.0).accuracy, abs=1e-3)
    two_kinds = compute_trade_off([Mechanism(scale=4.0), Mechanism(scale=4.0, releases=3)])
    assert two_kinds is not None
    assert two_kinds.accuracy == _curve(scale=4.0, releases=4).accuracy


def test_more_noise_or_less_sampling_lowers_the_ceiling() -> None:
    assert _curve(scale=2.0).area < _curve(scale=1.0).area
    assert _curve(scale=1.0, rate=0.1).area < _curve(scale=1.0).area


def test_a_guess_with_much_prior_knowledge_may_be_right_more_often() -> None:
    bounds = _curve(scale=2.0).true_positive_rate([0.001, 0.1, 0.5])
    assert (bounds > [0.001, 0.1, 0.5]).all()
    assert (np.diff(bounds) > 0).all()


def test_laplace_noise_keeps_to_its_pure_epsilon() -> None:
    curve, rates = _curve(noise="laplace", scale=1.0, neighbours="replaced"), np.linspace(0.001, 0.9, 20)
    assert (curve.true_positive_rate(rates) <= np.minimum(1, math.e * rates) * 1.01).all()
    assert curve.true_positive_rate(0.01) == pytest.approx(0.01 * math.e, rel=0.01)


def test_almost_no_noise_proves_nothing() -> None:
    assert compute_trade_off([Mechanism(scale=0.05)]) is None
    assert compute_tight_epsilon(Mechanism(scale=0.05), 1e-5) == math.inf
