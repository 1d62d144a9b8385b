"""The numbers behind tables: means and intervals over clients and seeds, and sign tests."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fedsim.audit.evaluation import statistics


def test_the_interval_of_one_run_is_students_over_clients() -> None:
    values = [0.1, 0.4, 0.5, 0.9]
    mean, margin = statistics.mean_and_margin({(str(client), "run"): value for client, value in enumerate(values)})
    low, high = statistics.confidence_interval(np.array(values))
    assert (mean - margin, mean + margin) == pytest.approx((low, high))


def test_clients_and_runs_both_widen_the_interval() -> None:
    table = {("0", "a"): 0.1, ("0", "b"): 0.3, ("1", "a"): 0.5, ("1", "b"): 0.7, ("2", "a"): 0.9, ("2", "b"): 1.1}
    clients, runs = np.array([0.2, 0.6, 1.0]), np.array([0.5, 0.7])
    errors = clients.var(ddof=1) / 3, runs.var(ddof=1) / 2
    freedom = sum(errors) ** 2 / (errors[0] ** 2 / 2 + errors[1] ** 2)
    assert statistics.mean_and_margin(table) == pytest.approx((0.6, stats.t.ppf(0.975, freedom) * sum(errors) ** 0.5))


def test_values_that_do_not_vary_have_no_margin() -> None:
    assert statistics.mean_and_margin({("0", "a"): 0.5, ("1", "a"): 0.5}) == (0.5, 0.0)


def test_five_of_five_are_the_fewest_that_are_more_than_half() -> None:
    assert statistics.is_more_than_half(5, 5)
    assert not statistics.is_more_than_half(4, 4)
    assert statistics.is_fewer_than_half(0, 5)
    assert not statistics.is_fewer_than_half(1, 5)


def test_the_floor_is_the_best_guess_in_the_direction_of_leakage() -> None:
    guesses = {"noise": 3.0, "mid-grey": 5.0, "public mean": 5.0}
    assert statistics.best_guess(guesses, higher_is_better=True) == ("mid-grey", 5.0)
    assert statistics.best_guess(guesses, higher_is_better=False) == ("noise", 3.0)
    name, floor = statistics.best_guess({}, higher_is_better=True)
    assert name == ""
    assert np.isnan(floor)


def test_a_gain_is_paired_and_counted_towards_leakage() -> None:
    values, floors = np.array([1.0, 2.0]), np.array([0.5, 3.0])
    assert statistics.gains(values, floors, higher_is_better=True).tolist() == [0.5, -1.0]
    assert statistics.gains(values, floors, higher_is_better=False).tolist() == [-0.5, 1.0]
