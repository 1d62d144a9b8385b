"""Claims in another unit than the truth are scored, and the doubt stands beside the verdict."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fedsim
from fedsim.audit.evaluation.claim_units import doubt_units
from fedsim.audit.evaluation.doubts import collect_doubts

DRAW = torch.Generator().manual_seed(0)
SMOOTH = torch.nn.functional.interpolate(torch.rand((4, 3, 3, 3), generator=DRAW), scale_factor=4, mode="bilinear")
NOISE = torch.rand(SMOOTH.shape, generator=DRAW)


def find_doubts(claimed: Tensor, true: Tensor = SMOOTH) -> list[str]:
    with collect_doubts() as doubts:
        doubt_units(claimed, true, "attack, client 0")
    return doubts


OTHER_UNITS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "levels of 0 to 255": (lambda x: (255 * x).clamp(0, 1), "% of the claimed values are 1, and"),
    "divided twice": (lambda x: x / 255, "in another unit"),
    "standardised": (lambda x: ((x - 0.5) / 0.25).clamp(0, 1), "in another unit"),
    "inputs in [-1, 1]": (lambda x: (2 * x - 1).clamp(0, 1), "in another unit"),
    "negatives": (lambda x: 1 - x, "multiplied by -1 and shifted by 1, the claimed values are"),
    "channels in reverse": (lambda x: x.flip(1), "channels in reverse order"),
}


@pytest.mark.parametrize("name", OTHER_UNITS)
def test_claims_in_another_unit_are_doubted(name: str) -> None:
    change, expected = OTHER_UNITS[name]
    (doubt,) = find_doubts(change(SMOOTH)[[2, 0, 3, 1]])
    assert expected in doubt


HONEST: dict[str, Tensor] = {
    "exact": SMOOTH[[1, 0, 3, 2]],
    "overshoots a little": (1.1 * SMOOTH - 0.05).clamp(0, 1),
    "noisy": (SMOOTH + 0.3 * (NOISE - 0.5)).clamp(0, 1),
    "dim": 0.7 * SMOOTH,
    "of half the contrast": SMOOTH.mean((1, 2, 3), keepdim=True).lerp(SMOOTH, 0.5),
    "very noisy": (0.3 * SMOOTH + 0.7 * NOISE),
    "noise": NOISE,
    "saturated noise": (10 * (NOISE - 0.5) + 0.5).clamp(0, 1),
    "blurred": torch.nn.functional.avg_pool2d(SMOOTH, 5, 1, 2, count_include_pad=False),
    "grey": torch.full_like(SMOOTH, 0.5),
    "mean of all": SMOOTH.mean(0, keepdim=True).expand_as(SMOOTH),
    "one claim of four": SMOOTH[:1],
    "more claims than examples": torch.cat([NOISE, SMOOTH]),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_claims_are_not_doubted(name: str) -> None:
    assert find_doubts(HONEST[name]) == []


def test_black_and_white_claims_of_black_and_white_images_are_not_doubted() -> None:
    sketch = torch.zeros(2, 1, 12, 12)
    sketch[:, :, 3:5, 2:9] = 1
    assert find_doubts(torch.zeros_like(sketch), sketch) == []
    assert find_doubts(sketch, sketch) == []


def test_a_tint_is_no_reversed_order_of_channels() -> None:
    image = 0.5 + 0.1 * (SMOOTH[:1] - 0.5)
    tint = torch.tensor([0.3, 0.0, -0.3]).view(3, 1, 1)
    assert not any("channels" in doubt for doubt in find_doubts(image - tint, image + tint))


def test_a_score_in_doubt_says_so_once_below_its_table() -> None:
    scores = fedsim.score(1 - SMOOTH, SMOOTH)
    assert scores.doubt.startswith("score: claimed: multiplied by -1 and shifted by 1")
    assert repr(scores).count("in doubt") == scores._repr_html_().count("in doubt") == 1
    assert fedsim.score(SMOOTH, SMOOTH).doubt == ""
