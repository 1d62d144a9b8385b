"""Each check of a metric fails where one breaks what it asks for, and says how."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from fedsim.contract import common, metrics
from fedsim.contract.checks import Check
from fedsim.interfaces.metric import ExampleContext, ExampleMetric, Metric
from tests.support.checked_classes import check_class


class Sound(ExampleMetric):
    """Largest difference of a value."""

    title = "largest difference"
    higher_is_better = False
    lowest = 0.0
    highest = 1.0
    modalities: ClassVar[frozenset[str]] = frozenset({"numeric"})

    def measure(self, claimed: Tensor, true: Tensor, context: ExampleContext) -> Tensor | str:
        return (claimed - true).abs().flatten(1).amax(1)


class Indirect(Sound):
    """Say nothing of the direction."""

    higher_is_better = None  # type: ignore[assignment]


class Reversed(Sound):
    """Take an error for a similarity."""

    higher_is_better = True
    highest = float("inf")


class OffItsBest(Sound):
    """Never reach the value that it declares as best."""

    def measure(self, claimed: Tensor, true: Tensor, context: ExampleContext) -> Tensor | str:
        return (claimed - true).abs().flatten(1).amax(1) / 2 + 0.25


class Padded(Sound):
    """Have a title that begins with a space."""

    title = " difference"


class OneSentence(Sound):
    """Explain itself by a text in place of several."""

    explanations = "how to read it"  # type: ignore[assignment]


class OfAll(Sound):
    """Measure examples and deny it."""

    of_examples = False


class OneNumber(Sound):
    """Return the mean."""

    def measure(self, claimed: Tensor, true: Tensor, context: ExampleContext) -> Tensor | str:
        return (claimed - true).abs().mean()


class BeyondRange(Sound):
    """Leave the declared range."""

    highest = 0.5


class Ranks(Sound):
    """Compare examples with one another."""

    def measure(self, claimed: Tensor, true: Tensor, context: ExampleContext) -> Tensor | str:
        differences = (claimed - true).abs().flatten(1).amax(1)
        return differences * differences / differences.max().clamp_min(1e-9)


class KnowsPlaces(Sound):
    """Give each place a weight."""

    def measure(self, claimed: Tensor, true: Tensor, context: ExampleContext) -> Tensor | str:
        return (claimed - true).abs().flatten(1).amax(1) / torch.arange(1, 1 + len(true))


class Draws(Sound):
    """Draw a pixel from the global generator."""

    def measure(self, claimed: Tensor, true: Tensor, context: ExampleContext) -> Tensor | str:
        return (claimed - true).abs().flatten(1)[:, int(torch.randint(4, ()))]


class Clears(Sound):
    """Change the claims."""

    def measure(self, claimed: Tensor, true: Tensor, context: ExampleContext) -> Tensor | str:
        return claimed.sub_(true).abs_().flatten(1).amax(1)


class Counts(Sound):
    """Return something else each time."""

    calls: ClassVar[list[int]] = []

    def measure(self, claimed: Tensor, true: Tensor, context: ExampleContext) -> Tensor | str:
        self.calls.append(1)
        return (claimed - true).abs().flatten(1).amax(1) / len(self.calls)


class OfNobody(Sound):
    """Measure what nobody knows."""

    modalities = frozenset({"smell"})


class Refuses(Sound):
    """Say that there is no value."""

    def measure(self, claimed: Tensor, true: Tensor, context: ExampleContext) -> Tensor | str:
        return "it is night"


class Duck:
    """Look like a metric."""

    best_value = 1.0


class Facts(Metric):
    """Declare what an evaluator computes."""

    title = "facts"
    higher_is_better = True


BROKEN: list[tuple[Check, type, str]] = [
    (common.is_made, Indirect, "Indirect: has no direction; add higher_is_better = True"),
    (metrics.is_a_metric, Duck, "Duck does not derive from fedsim.Metric"),
    (metrics.declares_its_facts, Padded, "its title ' difference' begins or ends with a space"),
    (
        metrics.declares_its_facts,
        OneSentence,
        "explanations: expected a tuple of sentences, got 'how to read it'",
    ),
    (metrics.declares_its_facts, OfAll, "it measures examples: leave of_examples out"),
    (
        metrics.measures_each_example,
        OneNumber,
        "the metric returned torch.float32 of shape (), expected 5 real numbers",
    ),
    (metrics.measures_each_example, BeyondRange, "declared are 0 to 0.5"),
    (metrics.rewards_perfect_claims, Reversed, "without any relation to the truth are better than the truth itself"),
    (metrics.rewards_perfect_claims, OffItsBest, "that equal the truth it gives [0.25"),
    (metrics.measures_examples_by_themselves, Ranks, "alone examples get"),
    (metrics.measures_examples_by_themselves, KnowsPlaces, "in another order examples get"),
    (metrics.is_a_pure_function, Draws, "it draws from torch's global generator"),
    (metrics.is_a_pure_function, Clears, "it changes the examples"),
    (metrics.is_a_pure_function, Counts, "of the same examples it gives something else"),
]


@pytest.mark.parametrize(("check", "cls", "sentence"), BROKEN, ids=[f"{case[1].__name__}" for case in BROKEN])
def test_a_metric_that_breaks_the_contract_is_told_how(check: Check, cls: type, sentence: str, tmp_path: Path) -> None:
    result = check_class(check, "metrics", cls, tmp_path)
    assert result.verdict == "failed"
    assert sentence in result.reason


@pytest.mark.parametrize("cls", [Sound, Facts])
def test_a_metric_that_keeps_to_the_contract_passes(cls: type, tmp_path: Path) -> None:
    assert [
        result for check in metrics.CHECKS if not (result := check_class(check, "metrics", cls, tmp_path)).is_good
    ] == []


@pytest.mark.parametrize(
    ("cls", "reason"), [(OfNobody, "is installed: smell"), (Refuses, "examples it returns: it is night")]
)
def test_a_metric_without_values_is_not_checked(cls: type, reason: str, tmp_path: Path) -> None:
    result = check_class(metrics.measures_each_example, "metrics", cls, tmp_path)
    assert result.verdict == "not checked"
    assert reason in result.reason


def test_each_check_is_broken_by_something_here() -> None:
    of_others = {common.survives_copying, common.is_documented}
    assert {case[0] for case in BROKEN} == set(metrics.CHECKS) - of_others
