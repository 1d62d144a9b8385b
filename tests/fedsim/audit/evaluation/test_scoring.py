"""Findings meet the truth: floors, ceilings, labels, and claims that are none."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fedsim.audit.evaluation.evaluator import FindingSpec
from fedsim.audit.evaluation.example_metrics import Ssim, reach_psnr
from fedsim.audit.evaluation.examples import check_kinds
from fedsim.audit.evaluation.label_distributions import LabelDistributionEvaluator
from fedsim.audit.evaluation.score import Score
from fedsim.audit.evaluation.scoring import (
    frequency_guess_accuracy,
    label_accuracy,
    score_examples,
    uniform_guess_accuracy,
)
from fedsim.audit.evaluation.truth import Truth
from fedsim.audit.finding_files import load_finding, save_finding
from fedsim.base import metrics
from fedsim.base.errors import AttackError, DataError, TranscriptError
from fedsim.base.randomness import generator
from fedsim.interfaces.findings import LabelDistribution, Reconstruction, Texts
from fedsim.interfaces.knowledge import Knowledge
from fedsim.interfaces.modality import PublicExamples
from fedsim.modalities.diverse_guesses import medians_of_claims


def images(count: int, seed: int = 0, size: int = 8) -> Tensor:
    return torch.rand((count, 1, size, size), generator=torch.Generator().manual_seed(seed))


LABELS = torch.tensor([0, 0, 1, 2])
TRUTH = Truth(data=images(4), labels=LABELS)
PUBLIC = PublicExamples(data=images(60, seed=9), labels=torch.arange(60) % 10)


def judge(finding: Reconstruction, public: PublicExamples | None = PUBLIC, **options: Any) -> dict[str, Score]:
    scores = score_examples(finding, TRUTH, public=public, rng=torch.Generator().manual_seed(1), **options)
    return {item.metric: item for item in scores}


def test_claiming_all_auxiliary_records_is_a_guess() -> None:
    """Some of many are near the truth, whatever a message says."""
    alike = 0.8 * TRUTH.data + 0.2 * images(4, seed=3)
    records = PublicExamples(data=torch.cat([alike, images(46, seed=4)]), labels=torch.arange(50) % 10)
    finding = Reconstruction(data=records.data, labels=records.labels)
    for metric in ("psnr", "mse"):
        assert judge(finding)[metric].value != pytest.approx(judge(finding)[metric].floor)
        score = judge(finding, auxiliary=records)[metric]
        assert score.value == pytest.approx(score.floor)
        assert score.floor_guess == "auxiliary records"
    few = Reconstruction(data=records.data[:4], labels=LABELS)
    assert judge(few, auxiliary=records)["psnr"] == judge(few)["psnr"]


def test_the_truth_itself_in_another_order_reaches_every_ceiling() -> None:
    order = torch.tensor([2, 0, 3, 1])
    scores = judge(Reconstruction(data=TRUTH.data[order], labels=LABELS[order]))
    assert list(scores) == ["psnr", "ssim", "mse", "lpips", "recovered", "exact", "identified", "label_accuracy"]
    assert scores["psnr"].value == math.inf
    assert scores["psnr"].ceiling is None
    for metric in ("ssim", "mse", "recovered", "exact", "identified", "label_accuracy"):
        ceiling = scores[metric].ceiling
        assert ceiling is not None
        assert scores[metric].value == pytest.approx(ceiling, abs=1e-6)


def test_every_computed_score_has_a_floor_that_names_its_guess() -> None:
    for item in judge(Reconstruction(data=images(4, seed=5), labels=LABELS)).values():
        if item.missing:
            assert math.isnan(item.value)
        else:
            assert math.isfinite(item.floor), item.metric
            assert item.floor_guess, item.metric


@pytest.mark.parametrize(
    ("truth", "guess"),
    [
        (torch.full((4, 1, 8, 8), 0.5), "mid-grey"),
        (PUBLIC.data.mean(0).expand(4, -1, -1, -1), "mean of public data"),
        (torch.stack([PUBLIC.data[PUBLIC.labels == c].mean(0) for c in LABELS.tolist()]), "class means of public data"),
        (medians_of_claims(PUBLIC, LABELS), "medians of public data by class"),
        (torch.rand((4, 1, 8, 8), generator=torch.Generator().manual_seed(1)), "noise"),
    ],
    ids=["mid-grey", "mean of public data", "class means of public data", "medians by class", "noise"],
)
def test_the_floor_is_the_best_guess_by_that_metric(truth: Tensor, guess: str) -> None:
    """Were the truth itself a guess, that guess would be the floor, at the ceiling of the metric."""
    finding = Reconstruction(data=images(4, seed=5), labels=LABELS)
    rng = torch.Generator().manual_seed(1)
    scores = {s.metric: s for s in score_examples(finding, Truth(data=truth, labels=LABELS), public=PUBLIC, rng=rng)}
    assert {scores[metric].floor_guess for metric in ("psnr", "ssim", "mse")} == {guess}
    assert scores["mse"].floor == pytest.approx(0, abs=1e-12)
    assert scores["ssim"].floor == pytest.approx(1, abs=1e-4)


def test_random_public_examples_are_a_guess() -> None:
    """The third draw of the generator, after the noise: were they the truth, they would be the floor."""
    rng = torch.Generator().manual_seed(1)
    torch.rand((4, 1, 8, 8), generator=rng)
    drawn = PUBLIC.data[torch.randint(60, (4,), generator=rng)]
    finding = Reconstruction(data=images(4, seed=5), labels=LABELS)
    rng = torch.Generator().manual_seed(1)
    scores = {s.metric: s for s in score_examples(finding, Truth(data=drawn, labels=LABELS), public=PUBLIC, rng=rng)}
    assert scores["ssim"].floor_guess == "random public examples"


def test_the_nearest_public_example_stands_beside_the_floor_and_is_no_guess() -> None:
    """Each true image is a public one with a little noise, and two of them are the same one."""
    near = [7, 7, 30, 59]
    truth = (PUBLIC.data[near] + 0.01 * (images(4, seed=3) - 0.5)).clamp(0, 1)
    finding = Reconstruction(data=images(4, seed=5), labels=LABELS)
    rng = torch.Generator().manual_seed(1)
    scores = {s.metric: s for s in score_examples(finding, Truth(data=truth, labels=LABELS), public=PUBLIC, rng=rng)}
    expected = (truth - PUBLIC.data[near]).square().mean().item()
    assert scores["mse"].nearest_public == pytest.approx(expected, rel=1e-4)
    assert scores["mse"].floor > 10 * expected
    assert scores["psnr"].nearest_public > 40 > scores["psnr"].floor
    assert math.isnan(judge(finding, public=None)["mse"].nearest_public)
    assert math.isnan(scores["label_accuracy"].nearest_public)


def test_floors_are_matched_like_claims() -> None:
    """The noise guess gets the same one-to-one matching, or it would look worse than guessing is."""
    noise = torch.rand((4, 1, 8, 8), generator=torch.Generator().manual_seed(1))
    shuffled = Truth(data=noise[torch.tensor([3, 2, 1, 0])], labels=LABELS)
    finding = Reconstruction(data=images(4, seed=5), labels=LABELS)
    rng = torch.Generator().manual_seed(1)
    scores = {s.metric: s for s in score_examples(finding, shuffled, public=None, rng=rng)}
    assert scores["mse"].floor == pytest.approx(0, abs=1e-12)


def test_labels_that_are_wrong_lower_no_floor() -> None:
    """Classes look alike within and differ between: guesses by a wrong class are worse than by none."""
    patterns = images(10, seed=4)
    labels = torch.arange(200) % 10
    public = PublicExamples(data=(0.9 * patterns[labels] + 0.1 * images(200, seed=5)), labels=labels)
    truth = Truth(data=patterns[:4], labels=torch.arange(4))
    floors = {}
    for name, claimed in {"right": [3, 1, 0, 2], "wrong": [9, 9, 9, 9], "others": [5, 6, 7, 8]}.items():
        finding = Reconstruction(data=images(4, seed=6), labels=torch.tensor(claimed))
        scores = score_examples(finding, truth, public=public, rng=torch.Generator().manual_seed(1))
        floors[name] = next(score for score in scores if score.metric == "psnr")
    assert floors["right"].floor_guess.startswith("class means of public")
    assert floors["wrong"].floor_guess == "k-means of public data"
    assert floors["wrong"].floor == floors["others"].floor < floors["right"].floor


def test_without_public_data_the_floors_are_noise_and_grey_and_say_so() -> None:
    scores = judge(Reconstruction(data=images(4, seed=5), labels=LABELS), public=None, num_classes=10)
    nothing = "; there are no public data to guess by"
    guesses = {f"noise{nothing}", f"mid-grey{nothing}", "every class as often"}
    assert {s.floor_guess for s in scores.values() if not s.missing} <= guesses


def test_a_class_without_public_examples_falls_back_to_the_public_mean() -> None:
    scores = judge(Reconstruction(data=images(4, seed=5), labels=torch.tensor([0, 0, 1, 77])))
    assert math.isfinite(scores["mse"].floor)


def test_floors_are_the_same_each_time() -> None:
    finding = Reconstruction(data=images(4, seed=5), labels=LABELS)
    assert judge(finding) == judge(finding)


@pytest.mark.parametrize(
    ("claimed", "true", "accuracy"),
    [
        ([0, 1, 2, 3], [3, 2, 1, 0], 1.0),
        ([0, 0, 0, 0], [0, 1, 2, 3], 0.25),
        ([0, 0, 1, 1], [0, 1, 1, 1], 0.75),
        ([5, 5], [9, 9], 0.0),
    ],
)
def test_labels_are_compared_as_multisets(claimed: list[int], true: list[int], accuracy: float) -> None:
    assert label_accuracy(torch.tensor(claimed), torch.tensor(true)) == accuracy


def test_granted_labels_are_not_scored() -> None:
    finding = Reconstruction(data=images(4, seed=5), labels=LABELS)
    assert "label_accuracy" in judge(finding)
    assert "label_accuracy" not in judge(finding, labels_granted=True)


@pytest.mark.parametrize(
    ("true", "classes"),
    [
        ([0, 1, 2, 3], 6),
        ([5, 5, 5, 5], 6),
        ([5, 4, 5, 4], 6),
        ([0, 1, 1, 2, 2, 2, 2], 3),
        ([0, 1, 2], 3),
        ([0, 0, 0, 2, 2], 4),
    ],
)
def test_the_floor_of_labels_is_the_mean_over_all_guesses_of_every_class_as_often(
    true: list[int], classes: int
) -> None:
    often, left = divmod(len(true), classes)
    guesses = [[*range(classes)] * often + list(more) for more in itertools.combinations(range(classes), left)]
    hits = [sum((Counter(guess) & Counter(true)).values()) / len(true) for guess in guesses]
    assert uniform_guess_accuracy(torch.tensor(true), classes) == pytest.approx(sum(hits) / len(hits))


@pytest.mark.parametrize("frequencies", [[0.5, 0.3, 0.2], [0.7, 0.15, 0.15], [0.25] * 4, [1.0, 0.0], [0.6, 0.4, 0.0]])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_guess_by_frequencies_is_the_best_that_these_allow(frequencies: list[float], count: int) -> None:
    """All guesses of so many labels on all draws of so many labels: the best mean is the mean of this guess."""
    classes = range(len(frequencies))
    chances = {draw: math.prod(frequencies[c] for c in draw) for draw in itertools.product(classes, repeat=count)}

    def mean_of(right: Callable[[tuple[int, ...]], float]) -> float:
        return sum(chance * right(draw) for draw, chance in chances.items())

    def hits(guess: tuple[int, ...]) -> float:
        return mean_of(lambda draw: sum((Counter(guess) & Counter(draw)).values()) / count)

    best = max(map(hits, itertools.combinations_with_replacement(classes, count)))
    own = mean_of(lambda draw: frequency_guess_accuracy(torch.tensor(draw), torch.tensor(frequencies)))
    assert own == pytest.approx(best)


def test_public_class_frequencies_are_a_guess_of_labels() -> None:
    """Nine in ten public examples are of class 3: whoever claims it four times is right about three of these four."""
    public = PublicExamples(data=images(20), labels=torch.tensor([3] * 18 + [0, 1]))
    truth = Truth(data=TRUTH.data, labels=torch.tensor([3, 3, 3, 1]))
    finding = Reconstruction(data=images(4, seed=5), labels=torch.tensor([0, 3, 3, 3]))
    rng = torch.Generator().manual_seed(1)
    (item,) = [s for s in score_examples(finding, truth, public=public, rng=rng) if s.metric == "label_accuracy"]
    assert (item.value, item.floor, item.floor_guess) == (0.75, 0.75, "public class frequencies")


def test_the_floor_of_labels_does_not_depend_on_what_classes_are_called() -> None:
    finding = Reconstruction(data=images(4, seed=5), labels=LABELS)
    floors = set()
    for labels in ([0, 0, 1, 2], [9, 9, 8, 7]):
        rng = torch.Generator().manual_seed(1)
        truth = Truth(data=TRUTH.data, labels=torch.tensor(labels))
        (item,) = [s for s in score_examples(finding, truth, public=PUBLIC, rng=rng) if s.metric == "label_accuracy"]
        floors.add((round(item.floor, 12), item.floor_guess))
    assert floors == {(0.3, "every class as often")}  # 4 of 10 classes are guessed, 3 of them are there


def test_the_value_is_the_mean_over_the_images() -> None:
    item = judge(Reconstruction(data=images(4, seed=5), labels=LABELS))["psnr"]
    assert len(item.per_image) == 4
    assert item.value == pytest.approx(sum(item.per_image) / 4, rel=1e-5)


def test_another_shape_than_the_truth_is_one_sentence() -> None:
    with pytest.raises(DataError, match=r"held examples of shape \(1, 8, 8\), the attack claims \(1, 9, 9\)"):
        judge(Reconstruction(data=images(4, size=9), labels=LABELS))


def test_a_modality_with_other_axes_than_the_truth_is_one_sentence() -> None:
    """The metrics of rows and of series would have values for images, too."""
    finding = Reconstruction(data=TRUTH.data, labels=LABELS)
    for modality, axes in (("table", "feature"), ("series", "channel, time")):
        with pytest.raises(DataError, match=rf"\(1, 8, 8\), but their modality '{modality}' has the axes {axes};"):
            score_examples(finding, replace(TRUTH, modality=modality), public=None, rng=generator(0))


def test_a_file_of_tokens_says_its_modality(tmp_path: Path) -> None:
    tensors = {"tokens": torch.zeros(2, 3, dtype=torch.int64), "labels": torch.zeros(2, dtype=torch.int64)}
    for modality in ("codes", ""):
        save_file(tensors, tmp_path / "truth", metadata={"modality": modality})
        assert Truth.load(tmp_path / "truth").modality == (modality or "text")


def test_an_image_is_recovered_from_20_dB_on() -> None:
    """Apart by .09 everywhere is 20.9 dB, by .11 19.2 dB."""
    truth = Truth(data=torch.full((4, 1, 8, 8), 0.5), labels=LABELS)
    data = torch.stack([torch.full((1, 8, 8), 0.5 + apart) for apart in (0.09, 0.09, 0.11, 0.11)])
    scores = score_examples(Reconstruction(data=data, labels=LABELS), truth, public=None, rng=torch.Generator())
    (item,) = [item for item in scores if item.metric == "recovered"]
    assert (item.value, sorted(item.per_image), item.ceiling) == (0.5, [0, 0, 1, 1], 1)


def test_what_is_not_claimed_counts_as_mid_grey_and_is_not_recovered() -> None:
    """One of four is claimed, exactly: the others are what saying nothing gets."""
    scores = judge(Reconstruction(data=TRUTH.data[2:3], labels=LABELS[2:3]))
    grey = torch.full_like(TRUTH.data, 0.5)
    expected = (TRUTH.data - grey).square().flatten(1).mean(1)
    expected[2] = 0
    assert scores["mse"].per_image == pytest.approx(expected.tolist())
    assert scores["recovered"].per_image == (0, 0, 1, 0)
    assert scores["label_accuracy"].value == 0.25


def test_claiming_nothing_worth_having_is_never_beyond_the_floor() -> None:
    item = judge(Reconstruction(data=torch.full((1, 1, 8, 8), 0.5), labels=LABELS[:1]))["psnr"]
    assert item.value <= item.floor


def test_of_many_claims_the_best_count_and_guesses_are_as_many() -> None:
    """Who claims all public examples gets what all public examples get."""
    order = torch.randperm(60, generator=torch.Generator().manual_seed(2))
    truth = Truth(data=(PUBLIC.data[:4] + 0.01).clamp(0, 1), labels=LABELS)
    finding = Reconstruction(data=PUBLIC.data[order], labels=PUBLIC.labels[order])
    rng = torch.Generator().manual_seed(1)
    scores = {s.metric: s for s in score_examples(finding, truth, public=PUBLIC, rng=rng)}
    assert scores["recovered"].value == 1
    assert scores["psnr"].value == pytest.approx(scores["psnr"].nearest_public)
    few = {
        s.metric: s
        for s in score_examples(
            Reconstruction(data=images(4, 5), labels=LABELS), truth, public=PUBLIC, rng=torch.Generator().manual_seed(1)
        )
    }
    assert scores["recovered"].floor > few["recovered"].floor
    assert scores["label_accuracy"].value == 4 / 60  # of sixty labels that are claimed


def test_the_claim_that_gains_most_on_mid_grey_is_placed_first() -> None:
    """The one claim is nearest to the grey image, where mid-grey is as good; it gains more at the white one."""
    truth = torch.stack([torch.full((1, 4, 4), grey) for grey in (0.52, 1.0)])
    claimed = torch.full((1, 1, 4, 4), 0.75)
    assert torch.equal(
        metrics.pair_examples(claimed, truth), torch.stack([torch.full((1, 4, 4), g) for g in (0.5, 0.75)])
    )


def test_whose_examples_are_claimed_is_saved_and_nothing_else_is_accepted(tmp_path: Path) -> None:
    for kind in (
        Reconstruction(data=images(4), labels=LABELS, claims="federation"),
        Texts(tokens=torch.ones(4, 3).long(), labels=LABELS, claims="client"),
        Reconstruction(data=images(4), labels=LABELS),
    ):
        save_finding(kind, tmp_path / "f.safetensors", {})
        loaded, _ = load_finding(tmp_path / "f.safetensors")
        assert isinstance(loaded, Reconstruction | Texts)
        assert loaded.claims == kind.claims
    with pytest.raises(AttackError, match="examples of 'all', expected one of update, client, federation"):
        Reconstruction(data=images(4), labels=LABELS, claims="all")  # type: ignore[arg-type]


def test_texts_that_are_not_claimed_have_no_token_found() -> None:
    truth = Truth(data=torch.arange(1, 13).reshape(4, 3), labels=LABELS)
    scores = score_examples(
        Texts(tokens=truth.data[1:3], labels=LABELS[1:3]), truth, public=None, rng=torch.Generator()
    )
    values = {item.metric: item.per_image or item.value for item in scores}
    assert values["recover_rate"] == values["tokens_found"] == values["recovered"] == (0, 1, 1, 0)
    assert values["words_found"] == 0.5


def test_lpips_is_missing_with_its_reason() -> None:
    item = judge(Reconstruction(data=images(4, seed=5), labels=LABELS))["lpips"]
    assert "too small" in item.missing
    assert item.per_image == ()


def test_a_guess_without_a_value_leaves_no_floor_that_is_too_low(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = Ssim.measure

    def refuse_grey(self: Ssim, claimed: Tensor, *arguments: Any) -> Tensor | str:
        has_grey = bool((claimed == 0.5).flatten(1).all(1).any())  # guesses are measured together at first
        return "grey has none" if has_grey else measure(self, claimed, *arguments)

    finding = Reconstruction(data=images(4, seed=5), labels=LABELS)
    assert judge(finding)["ssim"].missing == ""
    monkeypatch.setattr(Ssim, "measure", refuse_grey)
    assert judge(finding)["ssim"].missing == "the guess 'mid-grey' has no value: grey has none"


def test_ssim_of_tiny_images_is_missing_with_its_reason() -> None:
    truth, finding = (Truth(data=images(4, size=4), labels=LABELS), Reconstruction(data=images(4, 5, 4), labels=LABELS))
    scores = score_examples(finding, truth, public=None, rng=torch.Generator())
    (item,) = [s for s in scores if s.metric == "ssim"]
    assert item.missing == "images of 4 x 4 are smaller than its window"


@pytest.mark.parametrize(
    ("data", "labels", "sentence"),
    [
        (torch.full((1, 1, 2, 2), math.nan), torch.tensor([0]), "or NaN"),
        (torch.full((1, 1, 2, 2), 1.1), torch.tensor([0]), r"outside \[0, 1\]"),
        (torch.zeros(2, 1, 2, 2), torch.tensor([0]), "2 examples but 1 labels"),
        (torch.zeros(1, 1, 2, 2), torch.tensor([-1]), "not class indices"),
        (torch.zeros(1, 1, 2, 2), torch.tensor([math.nan]), "targets that are NaN"),
    ],
)
def test_a_claim_that_is_none_is_refused_where_it_is_made(data: Tensor, labels: Tensor, sentence: str) -> None:
    with pytest.raises(AttackError, match=sentence):
        Reconstruction(data=data, labels=labels)


def test_findings_survive_saving_whatever_memory_they_share(tmp_path: Path) -> None:
    """An attack may hand out views and tensors that require gradients."""
    snapshots = torch.rand((3, 4, 1, 8, 8)).requires_grad_(True)
    finding = Reconstruction(
        data=snapshots[-1],
        labels=LABELS,
        trace={"objective": torch.arange(3.0)},
        snapshots=snapshots,
        snapshot_iterations=torch.arange(3),
    )
    save_finding(finding, tmp_path / "deep" / "f.safetensors", {"attack": "x"})
    loaded, about = load_finding(tmp_path / "deep" / "f.safetensors")
    assert about == {"attack": "x"}
    assert torch.equal(loaded.data, finding.data)
    assert torch.equal(loaded.labels, LABELS)
    assert loaded.trace["objective"].tolist() == [0, 1, 2]
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["f.safetensors"]


def test_a_damaged_finding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    save_finding(Reconstruction(data=images(4), labels=LABELS), path, {})
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(TranscriptError, match=r"f\.safetensors: is damaged .*attack again"):
        load_finding(path)


def write(path: Path, **tensors: Tensor) -> Path:
    save_file(tensors, path)
    return path


def test_a_truth_file_is_read(tmp_path: Path) -> None:
    truth = Truth.load(write(tmp_path / "t", data=TRUTH.data, labels=LABELS.int()))
    assert torch.equal(truth.data, TRUTH.data)
    assert truth.labels.dtype == torch.int64


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({"data": images(4)}, "'labels'"),
        ({"data": images(4) * 255, "labels": LABELS}, r"lies in \[.*, 25.*\], expected \[0, 1\]"),
        ({"data": images(4) * math.nan, "labels": LABELS}, r"expected \[0, 1\]"),
        ({"data": images(4), "labels": LABELS[:3]}, r"a label for each, got \(4, 1, 8, 8\) and \(3,\)"),
        ({"data": images(4)[:, 0, 0, 0].contiguous(), "labels": LABELS}, r"expected data of shape"),
        ({"data": images(0), "labels": LABELS[:0]}, r"expected data of shape"),
        ({"data": images(4), "labels": LABELS - 1}, r"a label is -1"),
    ],
)
def test_a_bad_truth_file_is_one_sentence(tmp_path: Path, tensors: dict[str, Tensor], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        Truth.load(write(tmp_path / "t", **tensors))


def test_a_missing_or_foreign_truth_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a safetensors file with 'data' and 'labels'"):
        Truth.load(tmp_path / "none")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(DataError, match="is not a safetensors file"):
        Truth.load(tmp_path / "text")


def test_certificates_are_counted_and_wrong_ones_are_told() -> None:
    truth = Truth(data=torch.rand((4, 1, 8, 8), generator=generator("certified")), labels=torch.arange(4))
    data = truth.data.clone()
    data[1] = (data[1] + 0.01).clamp(0, 1)  # 40 dB, which is exact but not certain
    sure = torch.tensor([True, True, False, False])
    finding = Reconstruction(data=data, labels=truth.labels, certified=sure)
    scores = {item.metric: item for item in score_examples(finding, truth, public=None, rng=generator(0))}
    assert scores["certified"].value == 0.5
    assert scores["false_certificates"].value == 0.5
    without = Reconstruction(data=data, labels=truth.labels)
    assert "certified" not in {item.metric for item in score_examples(without, truth, public=None, rng=generator(0))}
    nothing = Reconstruction(data=data, labels=truth.labels, certified=torch.zeros(4, dtype=torch.bool))
    scores = {item.metric: item for item in score_examples(nothing, truth, public=None, rng=generator(0))}
    assert (scores["certified"].value, scores["false_certificates"].value) == (0, 0)


@pytest.mark.parametrize("decibels", [20.0, 40.0])
def test_pairs_at_the_very_limit_are_decided_in_double_precision(decibels: float) -> None:
    images = torch.rand((40, 3, 16, 16), generator=torch.Generator().manual_seed(0)) * 0.8
    limit = 10 ** (-decibels / 20)
    ends = [images[:5].double() + limit * factor for factor in (1 - 1e-6, 1 + 1e-6)]
    claimed = torch.cat(ends).float()
    expected = torch.zeros(10, 40, dtype=torch.bool)
    expected[:5, :5] = torch.eye(5, dtype=torch.bool)
    assert torch.equal(reach_psnr(claimed, images, decibels), expected)


@pytest.mark.parametrize("claimed", [[0, 1, 2, 3], [0, 1, 2, 99]])
def test_a_wild_label_lowers_no_floor_and_few_true_ones_raise_none(claimed: list[int]) -> None:
    finding = Reconstruction(data=images(4, seed=5), labels=torch.tensor(claimed))
    truth = Truth(data=TRUTH.data, labels=torch.arange(4))
    floors = []
    for num_classes in (10, None):
        scores = score_examples(finding, truth, public=None, rng=torch.Generator(), num_classes=num_classes)
        (item,) = [score for score in scores if score.metric == "label_accuracy"]
        floors.append(item.floor)
    assert floors[0] == pytest.approx(0.4)  # 4 of 10 classes are guessed
    assert math.isnan(floors[1]), "nobody knows how many classes there are to guess"


def test_labels_and_shares_beyond_the_known_classes_are_refused() -> None:
    spec = FindingSpec(where="round 1, client 0", knowledge=Knowledge(num_classes=10))
    with pytest.raises(AttackError, match="claims labels up to 99, expected at most 9"):
        check_kinds(Reconstruction(data=images(1), labels=torch.tensor([99])), spec)
    shares = LabelDistribution(rounds=torch.tensor([1]), shares=torch.full((1, 50), 0.02))
    with pytest.raises(AttackError, match="claims shares of classes numbering 50, expected 10"):
        LabelDistributionEvaluator().check_form(shares, spec)
