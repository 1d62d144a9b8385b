"""The likelihood of a message, number by number."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedsim.inversion.likelihoods import MessageLikelihood, estimate_deviation


def distance(gradient: Tensor, sent: Tensor, variance: Tensor, bound: Tensor, step: float = 0.0) -> float:
    target = [sent, variance, bound, torch.tensor(step)]
    return MessageLikelihood()([gradient], target).item()


def test_gaussian_noise_divides_squared_residuals_by_twice_the_variance() -> None:
    none = torch.zeros(2)
    assert distance(torch.tensor([1.0, 0.0]), none, torch.tensor([4.0, 1.0]), none) == 1 / 8


def test_a_number_that_was_left_out_adds_nothing() -> None:
    none = torch.zeros(1)
    assert distance(torch.tensor([7.0]), none, torch.tensor([math.inf]), none) == 0


def test_a_number_that_was_too_small_adds_what_is_beyond_its_bound() -> None:
    sizes, none, bound = torch.tensor([0.4, -1.5]), torch.zeros(2), torch.full((2,), 0.5)
    assert distance(sizes, none, torch.full((2,), 0.5), bound) == 1.0


def test_rounding_is_least_sure_between_two_levels() -> None:
    """The variance of 1.5 at levels 2 apart is 1.5 x 0.5."""
    none = torch.zeros(1)
    rounded = distance(torch.tensor([1.5]), torch.tensor([2.0]), none, none, step=2.0)
    assert rounded == pytest.approx(0.5**2 / (2 * 0.75))


def test_rounding_is_not_differentiated() -> None:
    """Else a number would flee to where its rounding is least sure."""
    gradient = torch.tensor([0.5], requires_grad=True)
    target = [torch.tensor([0.5]), torch.zeros(1), torch.zeros(1), torch.tensor(1.0)]
    MessageLikelihood()([gradient], target).backward()
    assert gradient.grad is not None
    assert gradient.grad.item() == 0


def test_noise_is_estimated_beyond_the_rank_of_the_data() -> None:
    """The signal has a hundred times the size of the noise, and rank 3."""
    rng = torch.Generator().manual_seed(0)
    signal = 10 * torch.randn(60, 3, generator=rng) @ torch.randn(3, 80, generator=rng)
    noise = 0.1 * torch.randn(60, 80, generator=rng)
    estimate = estimate_deviation([signal + noise, torch.ones(5)], 3)
    assert estimate is not None
    assert 0.09 < estimate < 0.11
    assert estimate_deviation([torch.ones(5), torch.ones(3, 80)], 3) is None
