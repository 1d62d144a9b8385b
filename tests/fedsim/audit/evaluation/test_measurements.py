"""Each metric measures claims, guesses and public examples; one that fails costs its own value alone."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from fedsim.audit.evaluation import measurements
from fedsim.audit.evaluation.example_metrics import Psnr
from fedsim.audit.evaluation.measurements import (
    find_instruments,
    measure_nearest,
    measure_safely,
    measure_sets,
)
from fedsim.audit.evaluation.truth import Truth
from fedsim.base.errors import DataError, PluginError
from fedsim.interfaces.metric import ExampleContext, ExampleMetric
from fedsim.interfaces.modality import PublicExamples
from fedsim.modalities.image import ImageModality
from tests.support.measurements import measure_claims
from tests.support.tensors import draw_uniform

CONTEXT = ExampleContext(modality="image")
IMAGES = Truth(data=draw_uniform(3, 1, 8, 8), labels=torch.arange(3), modality="image")


class Distance(ExampleMetric):
    """Largest difference of a pixel."""

    title = "distance"
    higher_is_better = False
    lowest = 0.0
    highest = 1.0
    modalities = frozenset({"image", "text"})

    def measure(self, claimed: Tensor, true: Tensor, context: ExampleContext) -> Tensor | str:
        return (claimed - true).abs().flatten(1).amax(1).float()


@dataclass(frozen=True)
class Returns(Distance):
    """Metric that returns what a function makes of its claims."""

    make: Callable[[Tensor], Any] = field(default=len)

    def measure(self, claimed: Tensor, true: Tensor, context: ExampleContext) -> Tensor | str:
        return self.make(claimed)  # type: ignore[no-any-return]


def fail(claimed: Tensor) -> Tensor:
    raise ValueError("no\nsuch thing")


def refuse(claimed: Tensor) -> Tensor:
    raise DataError("weights: are gone; get them again")


def leave(claimed: Tensor) -> Tensor:
    raise SystemExit(3)


def install(monkeypatch: pytest.MonkeyPatch, **metrics: ExampleMetric) -> None:
    monkeypatch.setattr(measurements, "find_example_metrics", lambda modality, is_numeric: metrics)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (fail, r"the metric raised ValueError: no such thing \(.*test_measurements.py:\d+\)"),
        (leave, r"the metric raised .* \(.*test_measurements.py:\d+\)"),
        (refuse, r"weights: are gone; get them again"),
        (lambda claimed: [0.5] * 3, r"the metric returned list, expected a tensor or a reason"),
        (
            lambda claimed: claimed[:, 0, 0, :2],
            r"the metric returned torch.float32 of shape \(3, 2\), .*",
        ),
        (lambda claimed: claimed.mean(), r"the metric returned torch.float32 of shape \(\), expected 3 real numbers"),
        (
            lambda claimed: torch.zeros(3) * 1j,
            r"the metric returned torch.complex64 of shape \(3,\), .*",
        ),
        (
            lambda claimed: torch.tensor([0.5, math.nan, 0.5]),
            r"the metric returned NaN for 1 of 3 examples, expected a number or a reason",
        ),
        (
            lambda claimed: torch.tensor([0.5, 1.5, -0.5]),
            r"the metric returned values from -0.5 to 1.5, declared are 0 to 1",
        ),
        (lambda claimed: "too\ndark", r"too dark"),
        (lambda claimed: "", r"the metric gave no reason"),
    ],
)
def test_what_a_metric_must_not_return_becomes_a_reason(make: Callable[[Tensor], Any], sentence: str) -> None:
    value = measure_safely(Returns(make=make), IMAGES.data, IMAGES.data, CONTEXT)
    assert isinstance(value, str)
    assert re.fullmatch(sentence, value), value


def test_rounding_beyond_the_range_and_whole_numbers_are_no_fault() -> None:
    images = IMAGES.data
    near = measure_safely(Returns(make=lambda claimed: torch.tensor([1 + 1e-6, 0, 1])), images, images, CONTEXT)
    assert isinstance(near, Tensor)
    whole = measure_safely(Returns(make=lambda claimed: torch.tensor([1, 0, 1])), IMAGES.data, IMAGES.data, CONTEXT)
    assert isinstance(whole, Tensor)
    assert whole.dtype == torch.float32


def test_a_metric_that_fails_costs_no_other_value(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, broken=Returns(make=fail), sound=Distance())
    values = measure_claims(IMAGES.data.flip(0), IMAGES, None)
    assert isinstance(values["broken"], str)
    assert torch.equal(torch.as_tensor(values["sound"]), torch.zeros(3))


def test_a_metric_that_changes_its_arguments_changes_no_other_value(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, changing=Returns(make=lambda claimed: claimed.zero_()[:, 0, 0, 0]), sound=Distance())
    values = measure_claims(IMAGES.data, IMAGES, None)
    assert torch.equal(torch.as_tensor(values["sound"]), torch.zeros(3))


@pytest.mark.parametrize("sets_at_once", [1, 2, 100])
def test_sets_that_are_measured_at_once_have_the_values_that_they_have_alone(
    sets_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer claims than examples, as many, and more, and equal ones."""
    truth = Truth(data=draw_uniform(4, 3, 16, 16), labels=torch.arange(4), modality="image")
    noisy = (truth.data + 0.05 * draw_uniform(4, 3, 16, 16, seed=1)).clamp(0, 1)
    claimed_sets = [noisy.flip(0), noisy[:2], torch.cat([noisy, truth.data]), torch.full_like(noisy, 0.5)]
    monkeypatch.setattr(measurements, "BATCH_BYTES", sets_at_once * claimed_sets[2].nbytes)
    together = measure_sets(claimed_sets, truth, None, torch.device("cpu"))
    for claimed, values in zip(claimed_sets, together, strict=True):
        alone = measure_claims(claimed, truth, None)
        assert list(values) == list(alone)
        for name, value in alone.items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(values[name], value, rtol=1e-5, atol=1e-6)
            else:
                assert values[name] == value


def test_a_metric_of_another_package_gets_each_set_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may look at all claims of a set together."""
    install(monkeypatch, mean=Returns(make=lambda claimed: claimed.mean().expand(len(claimed))))
    monkeypatch.setattr(measurements, "is_own", lambda plugin: plugin is not Returns)
    claimed_sets = [IMAGES.data, torch.zeros_like(IMAGES.data)]
    first, second = measure_sets(claimed_sets, IMAGES, None, torch.device("cpu"))
    assert torch.equal(torch.as_tensor(second["mean"]), torch.zeros(3))
    assert torch.allclose(torch.as_tensor(first["mean"]), IMAGES.data.mean())


def test_claims_are_measured_in_the_order_of_the_true_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, sound=Distance())
    noisy = IMAGES.data.clone()
    noisy[1] = (noisy[1] + 0.25).clamp(max=1)
    values = torch.as_tensor(measure_claims(noisy[[2, 0, 1]], IMAGES, None)["sound"])
    assert values[[0, 2]].tolist() == [0, 0]
    assert values[1] == pytest.approx(0.25)


def test_a_metric_that_uses_its_tensor_again_changes_no_value() -> None:
    memory = torch.zeros(3)
    metric = Returns(make=lambda claimed: memory.copy_(claimed[:, 0, 0, 0]))
    first = measure_safely(metric, torch.zeros(3, 1, 8, 8), IMAGES.data, CONTEXT)
    measure_safely(metric, torch.ones(3, 1, 8, 8), IMAGES.data, CONTEXT)
    assert torch.as_tensor(first).tolist() == [0, 0, 0]


class Meddler(ImageModality):
    """Modality that changes what it pairs, and pairs in the order of the claims."""

    def assign_claims(self, claimed: Tensor, true: Tensor) -> Tensor:
        true.zero_()
        return torch.arange(len(claimed.zero_()))


class Flattener(ImageModality):
    """Modality whose pairs would be broadcast."""

    def pair_claims(self, claimed: Tensor, true: Tensor) -> Tensor:
        return claimed[:, :, :1]


def test_a_modality_changes_neither_claims_nor_truth_and_scores_are_of_its_assignment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, sound=Distance())
    claimed, true = IMAGES.data.clone(), IMAGES.data.clone()
    monkeypatch.setattr(measurements, "find_modality", lambda name: Meddler())
    values = torch.as_tensor(measure_claims(claimed, IMAGES, None)["sound"])
    assert torch.equal(claimed, IMAGES.data)
    assert torch.equal(true, IMAGES.data)
    assert torch.allclose(values, IMAGES.data.flatten(1).amax(1))
    # An assignment of its own holds for scores, too.
    by_order = Meddler.assign_claims
    monkeypatch.setattr(Meddler, "assign_claims", lambda self, *data: by_order(self, *(part.clone() for part in data)))
    values = torch.as_tensor(measure_claims(IMAGES.data.flip(0), IMAGES, None)["sound"])
    assert values.tolist() == pytest.approx([float(values[0]), 0, float(values[0])])
    assert values[0] > 0.1


def test_pairs_of_another_shape_are_not_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "find_modality", lambda name: Flattener())
    with pytest.raises(PluginError, match=r"'image' pairs claims to the shape \(3, 1, 1, 8\), expected \(3, 1, 8, 8\)"):
        measure_claims(IMAGES.data, IMAGES, None)


def test_scores_by_other_code_of_a_strangers_metric_are_by_another_instrument(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, psnr=Psnr(), theirs=Distance())
    instruments = find_instruments(IMAGES, None)
    assert instruments["psnr"] == ""
    assert re.fullmatch(r"by code [0-9a-f]{10}", instruments["theirs"])


def test_the_nearest_public_images_are_those_of_least_squared_error(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, sound=Distance())
    public = PublicExamples(data=torch.cat([torch.zeros(1, 1, 8, 8), IMAGES.data[:2]]), labels=torch.zeros(3))
    values = torch.as_tensor(measure_nearest(IMAGES, public, None)["sound"])
    assert values[:2].tolist() == [0, 0]
    assert values[2] > 0.1


class Order(Distance):
    """Metric of texts of which higher values are better."""

    higher_is_better = True

    def measure(self, claimed: Tensor, true: Tensor, context: ExampleContext) -> Tensor | str:
        return (claimed == true).float().mean(1)


class Threshold(Order):
    """Metric that ranks no examples."""

    ranks_examples = False


def test_of_public_texts_the_best_counts_by_each_metric_and_an_empty_text_has_no_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, wrong=Returns(make=lambda claimed: claimed[:, 0] / 10), right=Order(), found=Threshold())
    tokens = torch.tensor([[1, 2, 3, 4], [0, 0, 0, 0], [5, 6, 7, 8]])
    truth = Truth(data=tokens, labels=torch.zeros(3).long(), padding=0, modality="text")
    public = PublicExamples(data=torch.tensor([[1, 2, 9, 9], [5, 9, 9, 9], [4, 6, 7, 9]]), labels=torch.zeros(3))
    values = measure_nearest(truth, public, None)
    assert list(values) == ["wrong", "right"]
    assert torch.as_tensor(values["right"]).nan_to_num(-1).tolist() == [0.5, -1, 0.5]
    assert torch.as_tensor(values["wrong"]).nan_to_num(-1).tolist() == pytest.approx([0.1, -1, 0.1])
