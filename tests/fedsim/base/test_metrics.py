"""Each metric against a second way of computing it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.ndimage import gaussian_filter
from torch import Tensor

from fedsim.base import metrics
from tests.support.tensors import draw_uniform


def test_mse_and_psnr_of_a_known_difference() -> None:
    black, grey = torch.zeros(2, 1, 8, 8), torch.zeros(2, 1, 8, 8)
    grey[0], grey[1, :, :4] = 0.1, 0.5
    assert metrics.mse(grey, black).tolist() == pytest.approx([0.01, 0.125])
    assert metrics.psnr(grey, black).tolist() == pytest.approx([20.0, 10 * math.log10(1 / 0.125)], abs=1e-4)


def test_psnr_is_of_each_image_with_a_data_range_of_one() -> None:
    """Not of the batch as a whole, and not with a range guessed from the data."""
    claimed, true = draw_uniform(5, 3, 9, 9) * 0.3, draw_uniform(5, 3, 9, 9, seed=1) * 0.3
    by_hand = [
        10 * math.log10(1.0 / float(np.mean((c - t) ** 2)))
        for c, t in zip(claimed.numpy().astype(np.float64), true.numpy().astype(np.float64), strict=True)
    ]
    assert metrics.psnr(claimed, true).tolist() == pytest.approx(by_hand, abs=1e-3)


def test_identical_images_are_perfect_by_every_metric() -> None:
    true = draw_uniform(3, 1, 20, 20)
    assert metrics.mse(true, true).tolist() == [0, 0, 0]
    assert metrics.psnr(true, true).isinf().all()
    assert metrics.ssim(true, true).tolist() == pytest.approx([1, 1, 1], abs=1e-6)


def ssim_by_hand(claimed: Tensor, true: Tensor, sigma: float) -> float:
    """Scikit-image's convention with scipy's filter: local values wherever the window lies inside."""
    values, border = [], int(3.5 * sigma + 0.5)
    for x, y in zip(claimed.double().numpy(), true.double().numpy(), strict=True):

        def blur(z: np.ndarray) -> np.ndarray:
            return gaussian_filter(z, sigma, truncate=3.5)

        mx, my = blur(x), blur(y)
        vx, vy, vxy = blur(x * x) - mx * mx, blur(y * y) - my * my, blur(x * y) - mx * my
        c1, c2 = 0.01**2, 0.03**2
        local = ((2 * mx * my + c1) * (2 * vxy + c2)) / ((mx**2 + my**2 + c1) * (vx + vy + c2))
        values.append(local[border:-border, border:-border].mean())
    return float(np.mean(values))


@pytest.mark.parametrize(
    ("height", "width", "sigma"), [(28, 28, 1.5), (16, 20, 1.5), (11, 11, 1.5), (10, 30, 0.5), (8, 8, 0.5), (5, 5, 0.5)]
)
def test_ssim_is_that_of_scikit_image_without_the_border(height: int, width: int, sigma: float) -> None:
    true = draw_uniform(4, 3, height, width)
    claimed = (true + 0.2 * torch.randn(true.shape, generator=torch.Generator().manual_seed(2))).clamp(0, 1)
    by_hand = [ssim_by_hand(c, t, sigma) for c, t in zip(claimed, true, strict=True)]
    assert metrics.ssim(claimed, true).tolist() == pytest.approx(by_hand, abs=1e-4)


def test_images_too_small_for_the_window_of_ssim_have_none() -> None:
    assert metrics.ssim(draw_uniform(2, 1, 4, 9), draw_uniform(2, 1, 4, 9)).isnan().all()
    assert metrics.explain_missing_ssim(draw_uniform(2, 1, 4, 9)) == "images of 4 x 9 are smaller than its window"
    assert not metrics.explain_missing_ssim(draw_uniform(2, 1, 5, 5))


@pytest.mark.parametrize("name", ["mse", "psnr", "ssim"])
def test_a_score_does_not_depend_on_the_other_images_of_the_batch(name: str) -> None:
    claimed, true = draw_uniform(6, 1, 12, 12), draw_uniform(6, 1, 12, 12, seed=1)
    metric = getattr(metrics, name)
    alone = torch.cat([metric(claimed[i : i + 1], true[i : i + 1]) for i in range(6)])
    torch.testing.assert_close(metric(claimed, true), alone)
    assert alone.shape == (6,)


@pytest.mark.parametrize("name", ["mse", "psnr", "ssim"])
def test_scores_worsen_with_noise(name: str) -> None:
    true = draw_uniform(2, 1, 20, 20)
    noise = torch.randn(true.shape, generator=torch.Generator().manual_seed(3))
    values = [getattr(metrics, name)((true + s * noise).clamp(0, 1), true).mean().item() for s in (0.02, 0.1, 0.4)]
    assert values == sorted(values, reverse=name != "mse")


@given(count=st.integers(1, 9), seed=st.integers(0, 10_000))
@settings(max_examples=40)
def test_matching_finds_any_permutation(count: int, seed: int) -> None:
    true = draw_uniform(count, 1, 3, 3, seed=seed)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed + 1))
    assert torch.equal(metrics.pair_examples(true[order], true), true)


@given(count=st.integers(1, 5), seed=st.integers(0, 10_000))
@settings(max_examples=40)
def test_no_other_pairing_of_images_has_a_larger_psnr(count: int, seed: int) -> None:
    claimed, true = draw_uniform(count, 1, 2, 2, seed=seed), draw_uniform(count, 1, 2, 2, seed=seed + 1)
    chosen = metrics.pair_examples(claimed, true)
    assert {tuple(x.flatten().tolist()) for x in chosen} == {tuple(x.flatten().tolist()) for x in claimed}
    totals = [metrics.psnr(claimed[list(o)], true).sum().item() for o in itertools.permutations(range(count))]
    assert metrics.psnr(chosen, true).sum().item() == pytest.approx(max(totals), rel=1e-4)


@given(count=st.integers(1, 5), seed=st.integers(0, 10_000))
@settings(max_examples=40)
def test_no_other_pairing_of_rows_has_a_smaller_error(count: int, seed: int) -> None:
    claimed, true = draw_uniform(count, 4, seed=seed), draw_uniform(count, 4, seed=seed + 1)
    chosen = metrics.pair_examples(claimed, true, metrics.mean_squared_errors)
    assert {tuple(x.flatten().tolist()) for x in chosen} == {tuple(x.flatten().tolist()) for x in claimed}
    cost = [metrics.mse(claimed[list(order)], true).sum().item() for order in itertools.permutations(range(count))]
    assert metrics.mse(chosen, true).sum().item() == pytest.approx(min(cost), rel=1e-4)


def test_a_clear_image_stands_under_its_original_even_where_another_is_far_from_all() -> None:
    """Least squared error would pair the clear one (.53) with white, to spare black the distance of 1."""
    true = torch.stack([torch.full((1, 4, 4), grey) for grey in (0.5, 1.0)])
    claimed = torch.stack([torch.full((1, 4, 4), grey) for grey in (0.0, 0.53)])
    assert torch.equal(metrics.pair_examples(claimed, true), claimed[[1, 0]])


def test_exact_copies_are_paired_like_all_others() -> None:
    """Two of three are exact, one is better than noise; infinities must neither stop the pairing nor hide the third."""
    true = draw_uniform(3, 1, 5, 5)
    claimed = torch.stack([(true[2] + 0.05).clamp(0, 1), true[0], true[1]])
    assert torch.equal(metrics.pair_examples(claimed, true), claimed[[1, 2, 0]])
    assert torch.equal(metrics.pair_examples(true.clone(), true), true)


def test_how_well_a_claim_fits_all_examples_takes_no_time_in_the_assignment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims that fit all examples about alike, as noise does, otherwise compete for them, and 6000 take minutes."""
    solved, solve = [], scipy.optimize.linear_sum_assignment
    monkeypatch.setattr(scipy.optimize, "linear_sum_assignment", lambda cost: solved.append(cost) or solve(cost))
    cost, of_claim = draw_uniform(6, 6).double(), torch.arange(6) * 10.0
    assignments = [metrics.assign_by_costs(values, lambda: torch.zeros(6, 1)) for values in (cost, cost + of_claim)]
    assert torch.equal(*assignments)
    assert solved[0] == pytest.approx(solved[1])


def test_of_more_claims_than_examples_those_that_fit_worst_are_left_over() -> None:
    cost = torch.tensor([[9.0, 2.0, 1.0], [9.5, 1.0, 3.0]], dtype=torch.float64)
    assert metrics.assign_by_costs(cost, lambda: torch.zeros(2, 1)).tolist() == [2, 1]
