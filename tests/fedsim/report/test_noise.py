"""Claims that explain the message and look like noise are said to be so, and good ones never."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import fedsim
from fedsim.data import Dataset
from fedsim.interfaces.attack import Attack, Paper, Progress, Target
from fedsim.interfaces.findings import Reconstruction
from fedsim.report import cards
from fedsim.report.finding_views import FindingView
from fedsim.report.noise import explain_noise, relative_roughness, usual_roughness
from fedsim.report.verdicts import LEAKS, UNDECIDED
from tests.support.experiments import TINY
from tests.support.tensors import draw_uniform

SETTINGS = {"step_size": 1.0, "signed": False, "tv_weight": 0.01}


def view(roughness: float, l_sim: float | None, settings: dict[str, Any] | None = None, **about: Any) -> FindingView:
    curves = {} if l_sim is None else {"l_sim": (np.arange(2.0), np.array([1.0, l_sim]))}
    about = {"settings": SETTINGS if settings is None else settings, **about}
    return FindingView(about=about, hash="", curves=curves, num_examples=1, has_truth=False, roughness=roughness)


def test_the_sentence_says_what_is_seen_and_what_to_try() -> None:
    assert explain_noise([view(3.0, 0.001), view(2.0, 0.003)]) == (
        "It matches the message (L_sim 0.002), but its claims look like noise, 2.5 times as rough as public "
        "images. So its settings may not fit this network and data; try fedsim tune, which chooses settings on public "
        "data, step_size = 0.1 with signed = true and a stronger prior (tv_weight = 0.1)."
    )


@pytest.mark.parametrize(
    ("settings", "about", "remedies"),
    [
        ({}, {"tuned": "9 trials"}, "try more iterations."),
        ({"signed": True}, {}, "try fedsim tune, which chooses settings on public data."),
        ({"tv_weight": 0.0}, {"tuned": "9 trials"}, "try a stronger prior (tv_weight = 0.01)."),
    ],
)
def test_only_what_the_attack_has_and_was_not_tried_is_named(
    settings: dict[str, Any], about: dict[str, Any], remedies: str
) -> None:
    assert explain_noise([view(3.0, 0.001, settings, **about)]).endswith(remedies)


@pytest.mark.parametrize(
    "findings",
    [
        [],
        [view(1.2, 0.001)],  # as rough as some photographs
        [view(3.0, 0.3)],  # the message is not explained, so a longer descent may help
        [view(3.0, None)],
        [view(float("nan"), 0.001)],  # no images, or nothing public
        [view(3.0, 0.001), view(1.0, 0.001), view(1.0, 0.001)],  # most are not noisy
    ],
)
def test_nothing_is_said_of_what_is_no_noise_or_does_not_explain_the_message(findings: list[FindingView]) -> None:
    assert explain_noise(findings) == ""


@pytest.mark.parametrize(
    ("spoil", "is_noise"),
    [
        (lambda images: images, False),
        (lambda images: (images + 0.05 * draw_uniform(*images.shape)).clamp(0, 1), False),
        (lambda images: draw_uniform(*images.shape).round(), True),
    ],
)
def test_real_digits_are_no_noise_and_saturated_patches_are(
    digits: Dataset, spoil: Callable[[Tensor], Tensor], is_noise: bool
) -> None:
    claimed = spoil(digits.to_unit_range(digits.train.inputs(slice(0, 8))))
    roughness = relative_roughness(claimed, usual_roughness(digits.to_unit_range(digits.test.inputs())))
    assert (roughness >= 1.5) == is_noise


def test_there_is_no_roughness_of_tables_or_without_public_images() -> None:
    images = draw_uniform(2, 1, 4, 4)
    assert math.isnan(relative_roughness(torch.rand(4, 7), usual_roughness(torch.rand(9, 7))))
    assert math.isnan(relative_roughness(images, usual_roughness(None)))
    assert math.isnan(relative_roughness(images, usual_roughness(torch.zeros(2, 1, 4, 4))))


@dataclass(frozen=True, kw_only=True)
class PretendedMatch(Attack):
    """Claims saturated noise, or grey, and that it explains the message."""

    signed: bool = False
    smooth: bool = False

    paper: ClassVar[Paper] = Paper(authors="Nobody", title="Nothing", year=2026, venue="nowhere")
    uses: ClassVar[frozenset[str]] = frozenset({"labels"})

    def _run(self, target: Target, progress: Progress) -> Reconstruction:
        count = target.read_update().num_examples
        noise = torch.rand(count, 1, 8, 8, generator=target.rng).round()
        data = torch.full_like(noise, 0.5) if self.smooth else noise
        labels = torch.zeros(count, dtype=torch.int64)
        return Reconstruction(data=data, labels=labels, trace={"l_sim": torch.tensor([0.5, 0.001])})


@pytest.mark.thorough
def test_the_card_of_the_attack_says_it_and_the_others_do_not(tmp_path: Path) -> None:
    tables = {
        **TINY,
        "adversary": {"victims": [0, 1]},
        "federation": {**TINY["federation"], "rounds": 1},
        "attack": [PretendedMatch(), PretendedMatch(smooth=True).with_title("smooth")],
    }
    run = fedsim.run(tables, tmp_path / "run")
    page = (run.path / "report.html").read_text()
    assert page.count("It matches the message (L_sim 0.001), but its claims look like noise") == 1


@pytest.mark.parametrize(
    ("verdict", "metric", "is_said"),
    [
        (UNDECIDED, "psnr", True),
        (LEAKS, "psnr", False),
        (LEAKS, "identified", True),  # by noise, which other settings may make an image
    ],
)
def test_of_images_that_are_closer_than_guesses_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, verdict: str, metric: str, is_said: bool
) -> None:
    reading = SimpleNamespace(summary=SimpleNamespace(attack="sme", metric=metric), verdict=verdict, remark="")
    monkeypatch.setattr("fedsim.report.adaptive.merge_equal_attacks", lambda readings: readings)
    monkeypatch.setattr(cards, "reported_readings", lambda readings: {"sme": readings})
    findings = [view(3.0, 0.001, attack="sme", title="sme", victim=0, round="1", repeat=0, variant="")]
    (card,) = cards.attack_cards([reading], findings, {}, {}, {})  # type: ignore[list-item]
    assert bool(card.noise) == is_said
