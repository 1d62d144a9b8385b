"""Modalities: what a data set names, what guesses get, and what a page lets through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedsim.audit.evaluation.scoring import guess_examples
from fedsim.audit.evaluation.series_metrics import Correlation, SymmetricPercentageError
from fedsim.audit.evaluation.truth import Truth, write_truth
from fedsim.base import metrics
from fedsim.base.errors import DataError, PluginError
from fedsim.base.randomness import generator
from fedsim.base.task import Task, infer_modality
from fedsim.interfaces.findings import Reconstruction
from fedsim.interfaces.knowledge import Knowledge
from fedsim.interfaces.metric import ExampleContext
from fedsim.interfaces.modality import GuessMaterial, Modality, PublicExamples
from fedsim.inversion.priors import total_variation
from fedsim.modalities import check_modality, find_modality, known_modality, smooth_dimensions
from fedsim.modalities.drawing import clean_drawing
from fedsim.modalities.series import find_period, repeat_season

SERIES = ExampleContext(modality="series")


def make_material(public: PublicExamples | None, labels: Tensor, shape: tuple[int, ...]) -> GuessMaterial:
    return GuessMaterial(count=len(labels), shape=shape, labels=labels, public=public, rng=generator(0))


def test_a_named_modality_goes_before_the_number_of_axes() -> None:
    assert Task((3, 8, 8), 10).modality == "image"
    assert Task((2, 8), 10).modality == "series"
    assert Task((8,), 10).modality == "table"
    assert Task((8,), 10, vocabulary=5).modality == "text"
    assert Task((2, 8), 10, modality="pairs").modality == "pairs"
    assert infer_modality((2, 3, 4, 5)) == ""


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        (Task((2, 3, 4, 5), 2), r"names no modality, and none is known for inputs of shape \(example, 2, 3, 4, 5\)"),
        (Task((2, 8), 2, modality="serie"), "names the modality 'serie', and .* did you mean 'series'"),
        (
            Task((1, 8, 8), 2, modality="series"),
            r"shape \(example, 1, 8, 8\), but its modality 'series' has the axes channel, time; correct",
        ),
        (Task((8,), 2, modality="text"), "'text', whose inputs are tokens, but it holds numbers"),
        (Task((8,), 2, vocabulary=9, modality="table"), "'table', whose inputs are numbers, but it holds tokens"),
    ],
)
def test_data_that_do_not_fit_their_modality_are_one_sentence(task: Task, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence) as refused:
        check_modality(task, "mine")
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith("data: 'mine' ")


@pytest.mark.parametrize("shape", [(1, 8, 8), (4,), (2, 16)])
def test_data_that_fit_are_let_through(shape: tuple[int, ...]) -> None:
    check_modality(Task(shape, 2), "mine")


def test_an_adversary_infers_what_nobody_named() -> None:
    assert known_modality(Knowledge(input_shape=(1, 8, 8))) == "image"
    assert known_modality(Knowledge(input_shape=(2, 8), modality="pairs")) == "pairs"
    assert known_modality(Knowledge()) == ""
    assert (smooth_dimensions("image"), smooth_dimensions("series")) == ((2, 3), (2,))
    assert smooth_dimensions("table") == smooth_dimensions("") == ()


def test_total_variation_goes_along_the_smooth_axes_alone() -> None:
    series = torch.tensor([[[0.0, 1.0, 1.0], [5.0, 5.0, 5.0]]])
    assert total_variation(series, (2,)) == pytest.approx(1 / 4)
    assert total_variation(series, (1, 2)) == pytest.approx((1 / 4 + (5 + 4 + 4) / 3) / 2)
    assert total_variation(series, ()) == 0


def test_digits_are_guessed_by_their_medians() -> None:
    """Strokes that most digits of a class share are white in the median, and what few have is black."""
    rng = generator("digits")
    digits = (torch.rand((40, 1, 16, 16), generator=rng) < 0.2).float()
    digits[:, :, 4:8] = 1
    public = PublicExamples(data=digits[:30], labels=torch.zeros(30).long())
    guesses = find_modality("image").guess_examples(make_material(public, torch.tensor([0]), (1, 16, 16)))
    truth = torch.zeros(1, 1, 16, 16)
    truth[:, :, 4:8] = 1
    similarities = {name: metrics.ssim(guess, truth).item() for name, guess in guesses.items()}
    assert similarities["medians of public data by class"] > similarities["class means of public data"] + 0.05


def test_series_are_guessed_by_their_last_value_and_their_season() -> None:
    turns = torch.arange(32) * torch.pi / 4
    waves = torch.stack([0.5 + 0.4 * torch.sin(turns), torch.full((32,), 0.25)])[:, None]
    public = PublicExamples(data=waves, labels=torch.tensor([0, 1]))
    guesses = find_modality("series").guess_examples(make_material(public, torch.tensor([0, 1]), (1, 32)))
    assert {"noise", "mid-range", "mean of public data", "class means of public data"} <= guesses.keys()
    assert torch.equal(guesses["last value"][0], waves[0, :, -1:].expand(1, 32))
    assert torch.equal(guesses["last value"][1], waves[1])
    assert torch.allclose(guesses["seasonal mean"], waves, atol=1e-6)
    targets = torch.tensor([-1.0, 1.0])
    regression = replace(public, labels=targets)
    guesses = find_modality("series").guess_examples(make_material(regression, targets, (1, 32)))
    assert torch.allclose(guesses["last value"][0], waves.mean(0)[:, -1:].expand(1, 32))


def test_a_season_is_the_strongest_wave_that_fits_twice() -> None:
    times = torch.arange(60.0)
    wave = torch.sin(2 * torch.pi * times / 12) + 3 * times / 60
    assert find_period(wave.reshape(1, 1, -1)) == 12
    assert find_period(torch.ones(2, 1, 10)) == 10
    assert torch.equal(repeat_season(torch.tensor([0.0, 4, 8, 2, 6]), 3), torch.tensor([1.0, 5, 8, 1, 5]))


def test_series_metrics_are_those_of_their_formulas() -> None:
    true = torch.rand(3, 2, 20, generator=generator(1))
    assert torch.allclose(Correlation().measure(0.5 * true + 0.1, true, SERIES), torch.ones(3))
    assert torch.allclose(Correlation().measure(1 - true, true, SERIES), -torch.ones(3))
    other = torch.rand(3, 2, 20, generator=generator(2))
    expected = [
        sum(float(torch.corrcoef(torch.stack([a, b]))[0, 1]) for a, b in zip(x, y, strict=True)) / 2
        for x, y in zip(other, true, strict=True)
    ]
    assert Correlation().measure(other, true, SERIES).tolist() == pytest.approx(expected, abs=1e-5)
    assert SymmetricPercentageError().measure(true, true, SERIES).tolist() == [0, 0, 0]
    assert SymmetricPercentageError().measure(
        torch.tensor([[[0.5, 0.0, 1.0, 0.0]]]), torch.tensor([[[0.25, 0.0, 0.0, 1.0]]]), SERIES
    ).item() == pytest.approx((2 * 0.25 / 0.75 + 0 + 2 + 2) / 4)


def test_a_constant_claim_correlates_with_nothing_and_a_constant_truth_counts_for_nothing() -> None:
    true = torch.stack([torch.linspace(0, 1, 8), torch.ones(8)])[None]
    claimed = torch.stack([torch.full((8,), 0.5), torch.linspace(0, 1, 8)])[None]
    assert Correlation().measure(claimed, true, SERIES).tolist() == [0]
    assert Correlation().measure(true, true, SERIES).tolist() == pytest.approx([1])
    reason = Correlation().measure(claimed, torch.full((1, 2, 8), 0.1), SERIES)
    assert reason == "1 of 1 true series are constant, with which nothing correlates"


def test_faint_series_correlate_as_strong_ones_do_and_rounding_is_no_signal() -> None:
    true = 1e-8 * torch.rand(2, 1, 20, generator=generator(1))
    assert Correlation().measure(true, true, SERIES).tolist() == pytest.approx([1, 1])
    # The mean of these equal values differs from them in its last digit.
    constant = torch.full((1, 1, 3), 0.1)
    assert Correlation().measure(constant, torch.tensor([[[0.0, 0.5, 1.0]]]), SERIES).tolist() == [0]


def test_lines_show_each_channel_of_the_claim_over_the_truth() -> None:
    series = find_modality("series")
    claimed, true = torch.rand(2, 2, 30, generator=generator(3))
    drawing = series.draw_example(claimed, true)
    assert (drawing.count('class="true"'), drawing.count('class="claimed"')) == (2, 2)
    assert drawing.index('class="true"') < drawing.index('class="claimed"')
    assert "true" not in series.draw_example(claimed, None)
    # 0 is at the bottom of its channel and 1 at the top; a long line is thinned.
    flat = series.draw_example(torch.tensor([[0.0, 1.0]]), None)
    assert 'd="M0.0,54.0 L240.0,2.0"' in flat
    assert len(series.draw_example(torch.rand(1, 100_000), None)) < 5_000


@pytest.mark.parametrize(
    ("svg", "sentence"),
    [
        ("<svg><script>alert(1)</script></svg>", "draws with <script>, which no page lets through"),
        ('<svg onload="alert(1)"></svg>', 'draws a <svg> with onload="alert'),
        ('<svg><a href="javascript:alert(1)"><text>x</text></a></svg>', "draws with <a>"),
        ('<svg><rect fill="url(http://x.example)"/></svg>', 'with fill="url'),
        ('<svg><path style="x"/></svg>', 'with style="x"'),
        ("<svg><text>a < b</text></svg>", "not a well-formed SVG"),
        ("<div/>", "draws with <div>"),
        ("<g/>", "draws a <g>, expected an <svg>"),
        (None, "not a well-formed SVG"),
    ],
)
def test_a_drawing_that_does_more_than_draw_is_refused(svg: str, sentence: str) -> None:
    with pytest.raises(PluginError, match=sentence) as refused:
        clean_drawing(svg, "example", "mine")
    assert "\n" not in str(refused.value)


def test_text_in_a_drawing_stays_text() -> None:
    svg = '<svg xmlns="http://www.w3.org/2000/svg"><text x="1">&lt;script&gt;alert(1)&lt;/script&gt;</text></svg>'
    drawing = clean_drawing(svg, 'of "a" & <b>', "mine")
    assert "<script" not in drawing
    assert "&lt;script&gt;" in drawing
    assert 'aria-label="of &quot;a&quot; &amp; &lt;b&gt;"' in drawing
    assert "xmlns" not in drawing


def guess_by(guess: Tensor, data: Tensor) -> None:
    """Ask a modality that makes this guess for the floors of `data`."""

    class Guesser(WrongFloors):
        def guess_examples(self, material: GuessMaterial) -> Mapping[str, Tensor]:
            return {"bad": guess}

    labels = torch.tensor([0, 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedsim.audit.evaluation.scoring.find_modality", lambda name: Guesser())
        truth = Truth(data=data, labels=labels, modality="theirs")
        guess_examples(Reconstruction(data=data, labels=labels), truth, None, generator(0))


@pytest.mark.parametrize(
    "guess", [torch.full((2, 2, 8), 1.1), torch.full((2, 2, 8), -0.1), torch.full((2, 2, 8), torch.nan)]
)
def test_a_floor_beyond_the_data_is_one_sentence(guess: Tensor) -> None:
    data = torch.rand(2, 2, 8)
    guess_by(data + 1e-7, data)  # rounding
    with pytest.raises(PluginError, match=r"the floor 'bad' of 'theirs' is torch.float32 from .*, expected numbers in"):
        guess_by(guess, data)
    with pytest.raises(PluginError, match=r"'theirs' is torch.int64 from 0 to 0, expected numbers in \[0, 1\]"):
        guess_by(torch.zeros(2, 2, 8).long(), data)


@dataclass(frozen=True)
class WrongFloors(Modality):
    """Modality whose floor has another shape than its data."""

    axes = ("channel", "time")

    def guess_examples(self, material: GuessMaterial) -> Mapping[str, Tensor]:
        return {"good": torch.zeros(material.count, *material.shape), "flat": torch.zeros(material.count, 16)}


def test_a_floor_of_another_shape_is_one_sentence() -> None:
    data = torch.rand(2, 2, 8)
    finding = Reconstruction(data=data, labels=torch.tensor([0, 1]))
    truth = Truth(data=data, labels=torch.tensor([0, 1]), modality=f"{__name__}:WrongFloors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedsim.audit.evaluation.scoring.find_modality", lambda name: WrongFloors())
        with pytest.raises(PluginError, match=r"the floor 'flat' of .* has the shape \(2, 16\), expected \(2, 2, 8\)"):
            guess_examples(finding, truth, None, generator(0))


def load_truth(table: Mapping[str, str]) -> Truth:
    (path,) = table.values()
    return Truth.load(Path(path))


def test_a_truth_file_says_its_modality_or_it_is_inferred(tmp_path: Path) -> None:
    series = (torch.rand(3, 2, 8), torch.tensor([0, 1, 0]))
    inferred = write_truth(tmp_path, lambda client: series, [0])
    assert load_truth(inferred).modality == "series"
    named = write_truth(tmp_path, lambda client: series, [1], modality="pairs")
    assert load_truth(named).modality == "pairs"
    with pytest.raises(DataError, match="or of a modality given to write_truth"):
        write_truth(tmp_path, lambda client: (torch.rand(3, 1, 2, 2, 2), torch.zeros(3).long()), [2])


def test_the_guess_by_position_wastes_none_on_padding() -> None:
    """Most texts end before the second position, where padding never counts as right."""
    public = PublicExamples(data=torch.tensor([[5, 6, 0], [5, 0, 0], [7, 0, 0]]), labels=torch.zeros(3).long())
    material = replace(make_material(public, torch.tensor([0]), (3,)), padding=0)
    guesses = find_modality("text").guess_examples(material)
    assert guesses["most frequent token per position"].tolist() == [[5, 6, 0]]


def test_random_guesses_are_of_the_claimed_classes_where_these_are_public() -> None:
    """By LPIPS, random images of the class are nearer than all other guesses."""
    public = PublicExamples(data=torch.rand(40, 1, 8, 8), labels=torch.arange(40) % 4)
    material = replace(make_material(public, torch.tensor([3, 0, 3, 9]), (1, 8, 8)), count=5)
    drawn = find_modality("image").guess_examples(material)["random public examples of the class"]
    places = [int((public.data == example).flatten(1).all(1).nonzero()) for example in drawn]
    assert [int(public.labels[place]) for place in places[:3]] == [3, 0, 3]
    assert len(drawn) == 5
