"""Each check of modalities fails where one breaks what it asks for, and says how."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedsim.contract import common, modalities
from fedsim.contract.checks import Check
from fedsim.interfaces.modality import GuessMaterial, Modality
from tests.support.checked_classes import check_class

_CALLS = count()


@dataclass(frozen=True)
class Pairs(Modality):
    """Pairs of measurements."""

    axes = ("member", "feature")
    trial_shape = (2, 6)

    def guess_examples(self, material: GuessMaterial) -> Mapping[str, Tensor]:
        """Return zeros, and random numbers."""
        shape = (material.count, *material.shape)
        return {"zeros": torch.zeros(shape), "noise": torch.rand(shape, generator=material.rng)}

    def draw_example(self, claimed: Tensor, true: Tensor | None) -> str:
        """Return a text of the first number."""
        return f'<svg viewBox="0 0 9 9"><text>{claimed.flatten()[0]:.2f}</text></svg>'


@dataclass(frozen=True)
class NoModality:
    """Something else that makes guesses."""

    def guess_examples(self, material: GuessMaterial) -> None:
        """Return nothing."""


@dataclass(frozen=True, kw_only=True)
class HasSettings(Pairs):
    """Modality that wants to be told something."""

    members: int = 2


@dataclass(frozen=True)
class SameAxes(Pairs):
    """Modality whose axes have one name."""

    axes = ("member", "member")


@dataclass(frozen=True)
class SmoothElsewhere(Pairs):
    """Modality that is smooth along an axis that it lacks."""

    smooth_axes = ("time",)


@dataclass(frozen=True)
class ShownAsImages(Pairs):
    """Modality of two axes whose examples are shown as images."""

    shown_as = "images"


@dataclass(frozen=True)
class TokensAsDrawings(Pairs):
    """Modality of tokens that are drawn."""

    has_tokens = True


@dataclass(frozen=True)
class NoNoun(Pairs):
    """Modality without a word for an example."""

    noun = ""


@dataclass(frozen=True)
class ShortTrial(Pairs):
    """Modality whose trial shape has one axis."""

    trial_shape = (2,)


@dataclass(frozen=True)
class FlatFloor(Pairs):
    """Modality whose floor has another shape than its data."""

    def guess_examples(self, material: GuessMaterial) -> Mapping[str, Tensor]:
        """Return rows."""
        return {"flat": torch.zeros(material.count, 12)}


@dataclass(frozen=True)
class FloorBeyond(Pairs):
    """Modality whose floor leaves the range of the data."""

    def guess_examples(self, material: GuessMaterial) -> Mapping[str, Tensor]:
        """Return twos."""
        return {"twos": torch.full((material.count, *material.shape), 2.0)}


@dataclass(frozen=True)
class IntegerFloor(Pairs):
    """Modality of numbers whose floor is integers."""

    def guess_examples(self, material: GuessMaterial) -> Mapping[str, Tensor]:
        """Return integers."""
        return {"zeros": torch.zeros((material.count, *material.shape), dtype=torch.int64)}


@dataclass(frozen=True)
class GlobalNoise(Pairs):
    """Modality that draws from a global generator."""

    def guess_examples(self, material: GuessMaterial) -> Mapping[str, Tensor]:
        """Return noise."""
        return {"noise": torch.full((material.count, *material.shape), random.random())}


@dataclass(frozen=True)
class CountsCalls(Pairs):
    """Modality whose guesses differ from call to call."""

    def guess_examples(self, material: GuessMaterial) -> Mapping[str, Tensor]:
        """Return a number of calls."""
        return {"calls": torch.full((material.count, *material.shape), 1 / (2 + next(_CALLS)))}


@dataclass(frozen=True)
class AllAlike(Pairs):
    """Modality to which each example is as much like any other."""

    def similarity(self, claimed: Tensor, examples: Tensor) -> Tensor:
        """Return zeros."""
        return torch.zeros(len(claimed), len(examples))


@dataclass(frozen=True)
class LikenessTransposed(Pairs):
    """Modality that gives examples by claims."""

    def similarity(self, claimed: Tensor, examples: Tensor) -> Tensor:
        """Return the correlations the other way round."""
        return super().similarity(claimed, examples).T


@dataclass(frozen=True)
class LikenessOfZeros(Pairs):
    """Modality that divides by zero."""

    def similarity(self, claimed: Tensor, examples: Tensor) -> Tensor:
        """Return NaN."""
        return super().similarity(claimed, examples) / 0


@dataclass(frozen=True)
class ChangesPublic(Pairs):
    """Modality that changes the public examples."""

    def guess_examples(self, material: GuessMaterial) -> Mapping[str, Tensor]:
        """Return zeros."""
        if material.public is not None:
            material.public.data.zero_()
        return {"zeros": torch.zeros((material.count, *material.shape))}


@dataclass(frozen=True)
class PairsFirst(Pairs):
    """Modality that assigns the first claim to all true examples."""

    def assign_claims(self, claimed: Tensor, true: Tensor) -> Tensor:
        """Return zeros."""
        return torch.zeros(len(true), dtype=torch.int64)


@dataclass(frozen=True)
class ReusesClaims(Pairs):
    """Modality that assigns a claim twice where there are too few."""

    def assign_claims(self, claimed: Tensor, true: Tensor) -> Tensor:
        """Return the best claim of each true example."""
        return self.misfits(claimed, true).argmin(1)


@dataclass(frozen=True)
class DrawsScript(Pairs):
    """Modality whose drawing runs something."""

    def draw_example(self, claimed: Tensor, true: Tensor | None) -> str:
        """Return a script."""
        return "<svg><script>alert(1)</script></svg>"


@dataclass(frozen=True)
class DrawsNothing(Modality):
    """Modality that is to draw and does not."""

    axes = ("member", "feature")

    def guess_examples(self, material: GuessMaterial) -> Mapping[str, Tensor]:
        """Return zeros."""
        return {"zeros": torch.zeros((material.count, *material.shape))}


@dataclass(frozen=True)
class DrawsAnew(Pairs):
    """Modality whose drawing differs from call to call."""

    def draw_example(self, claimed: Tensor, true: Tensor | None) -> str:
        """Return a number of calls."""
        return f"<svg><text>{next(_CALLS)}</text></svg>"


@dataclass(frozen=True)
class DrawsMuch(Pairs):
    """Modality whose drawing is too large for a page."""

    def draw_example(self, claimed: Tensor, true: Tensor | None) -> str:
        """Return a long text."""
        return f"<svg><text>{'x' * 200_000}</text></svg>"


@dataclass(frozen=True)
class DividesByValue(Pairs):
    """Modality whose drawing of equal values is no number."""

    def draw_example(self, claimed: Tensor, true: Tensor | None) -> str:
        """Return a text of a normalised number."""
        return f"<svg><text>{((claimed - claimed.min()) / (claimed.max() - claimed.min())).mean():.2f}</text></svg>"


BROKEN: list[tuple[Check, type, str]] = [
    (modalities.is_a_modality, NoModality, "NoModality does not derive from fedsim.Modality"),
    (modalities.is_a_modality, HasSettings, "HasSettings has settings, and no data set could set them"),
    (modalities.names_its_axes, SameAxes, r"axes: expected different names in a tuple, got \('member', 'member'\)"),
    (modalities.names_its_axes, SmoothElsewhere, "smooth_axes: 'time' is not one of its axes"),
    (modalities.names_its_axes, ShownAsImages, "it is shown as images, which have 3 axes, and has 2"),
    (modalities.names_its_axes, TokensAsDrawings, "tokens are shown as texts, and nothing else is"),
    (modalities.names_its_axes, NoNoun, "its noun or its plural is empty"),
    (modalities.names_its_axes, ShortTrial, r"trial_shape: expected a size for each of 2 axes, got \(2,\)"),
    (modalities.floors_are_like_the_data, FlatFloor, r"'flat' has the shape \(5, 12\), expected \(5, 2, 6\)"),
    (modalities.floors_are_like_the_data, FloorBeyond, r"'twos' goes from 2 to 2, expected values in \[0, 1\]"),
    (modalities.floors_are_like_the_data, IntegerFloor, "'zeros' is torch.int64, expected numbers"),
    (modalities.guesses_are_deterministic, GlobalNoise, "draws from Python's global generator"),
    (modalities.guesses_are_deterministic, CountsCalls, "from the same material it makes other guesses"),
    (modalities.guesses_are_deterministic, ChangesPublic, "it changes the public examples|makes other guesses"),
    (modalities.pairs_one_to_one, PairsFirst, r"are paired as \[0, 0, 0, 0, 0\], expected \[1, 3, 4, 0, 2\]"),
    (
        modalities.pairs_one_to_one,
        ReusesClaims,
        "3 claims are assigned to 5 examples as .*, expected each",
    ),
    (modalities.identifies_examples, AllAlike, r"the examples most similar to examples 0, 1, ... are \[0, 0, 0, 0\]"),
    (modalities.identifies_examples, LikenessTransposed, r"has the shape \(5, 4\), expected \(4, 5\)"),
    (modalities.identifies_examples, LikenessOfZeros, "is not finite"),
    (modalities.draws_safely, DrawsScript, "draws with <script>, which no page lets through"),
    (modalities.draws_safely, DrawsNothing, "DrawsNothing draws no example; write draw_example"),
    (modalities.draws_safely, DrawsAnew, "the same example is drawn in another way"),
    (modalities.draws_safely, DrawsMuch, "has 2000.. letters, expected at most 200000"),
    (modalities.draws_safely, DividesByValue, r"its drawing of values in \[0, 1\] holds NaN"),
]


@pytest.mark.parametrize(
    ("check", "cls", "sentence"), [pytest.param(*case, id=f"{case[0].__name__}-{case[1].__name__}") for case in BROKEN]
)
def test_what_breaks_it_fails_and_the_reason_says_how(check: Check, cls: type, sentence: str, tmp_path: Path) -> None:
    result = check_class(check, "modalities", cls, tmp_path)
    assert result.verdict == "failed"
    assert re.search(sentence, result.reason), result.reason
    assert "\n" not in result.reason


def test_what_keeps_to_it_passes_all(tmp_path: Path) -> None:
    results = [check_class(check, "modalities", Pairs, tmp_path) for check in modalities.CHECKS]
    assert [result for result in results if not result.is_good] == []
    assert results[-1].verdict == "passed"


def test_each_check_is_broken_by_something_here() -> None:
    assert {check for check, _, _ in BROKEN} == set(modalities.CHECKS) - set(common.CHECKS)
