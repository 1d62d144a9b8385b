"""`fedsim.score`: one's own tensors beside their floor, and one sentence where they do not fit together."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fedsim
from fedsim.base.errors import ConfigError, PluginError
from fedsim.interfaces.findings import Reconstruction

RNG = torch.Generator().manual_seed(0)
TRUE, PUBLIC = torch.rand(4, 1, 12, 12, generator=RNG), torch.rand(120, 1, 12, 12, generator=RNG)
TOKENS, PUBLIC_TOKENS = torch.randint(1, 40, (3, 9), generator=RNG), torch.randint(1, 40, (50, 9), generator=RNG)
LABELS, PUBLIC_LABELS = torch.tensor([0, 1, 1, 2]), torch.arange(120) % 3


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """LPIPS takes seconds to load."""
    monkeypatch.setattr("fedsim.api.scoring.find_weights_folder", lambda: None)


def test_exact_claims_in_another_order_are_recovered_and_leak() -> None:
    scores = fedsim.score(TRUE.flip(0), TRUE, public=PUBLIC)
    assert scores["mse"].value == 0
    assert scores["identified"].value == 1 > scores["identified"].floor
    verdicts = scores.frame.set_index("metric")["verdict"]
    assert (verdicts["identified"], verdicts["recovered"]) == ("leaks", "leaks")
    assert "label_accuracy" not in scores


def test_claims_that_say_nothing_do_not_leak() -> None:
    scores = fedsim.score(torch.rand(4, 1, 12, 12, generator=RNG), TRUE, public=PUBLIC)
    assert "leaks" not in set(scores.frame["verdict"])


def test_a_finding_is_scored_like_its_tensors() -> None:
    claimed = TRUE.mul(0.9)
    scores = fedsim.score(fedsim.Reconstruction(data=claimed, labels=LABELS), TRUE, public=PUBLIC)
    plain = fedsim.score(claimed, TRUE, public=PUBLIC)
    assert scores["psnr"] == plain["psnr"]
    assert list(scores) == list(plain)


def test_labels_are_scored_where_they_are_claimed() -> None:
    claimed = torch.tensor([0, 1, 1, 1])
    given: dict[str, Any] = {"true_labels": LABELS, "public": PUBLIC, "public_labels": PUBLIC_LABELS}
    assert fedsim.score(TRUE, TRUE, labels=claimed, **given)["label_accuracy"].value == 0.75
    finding = fedsim.Reconstruction(data=TRUE, labels=claimed)
    assert fedsim.score(finding, TRUE, **given)["label_accuracy"].value == 0.75
    assert "label_accuracy" not in fedsim.score(TRUE, TRUE, **given)


def test_the_value_range_is_that_of_all_tensors() -> None:
    scaled = fedsim.score(TRUE * 0.5 * 6 - 3, TRUE * 6 - 3, public=PUBLIC * 6 - 3, value_range=(-3, 3))
    plain = fedsim.score(TRUE * 0.5, TRUE, public=PUBLIC)
    assert scaled["mse"].value == pytest.approx(plain["mse"].value, rel=1e-4)
    assert scaled["mse"].floor == pytest.approx(plain["mse"].floor, rel=1e-4)


def test_other_units_than_those_of_the_truth_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    fedsim.score(TRUE, TRUE * 255, public=PUBLIC * 255, value_range=(0, 255))
    assert "score: claimed: varies far less than the truth; if its unit is another, use that of val" in caplog.text
    caplog.clear()
    grey = Reconstruction(data=torch.full_like(TRUE, 0.5), labels=torch.zeros(len(TRUE), dtype=torch.int64))
    fedsim.score(grey, TRUE, public=PUBLIC)  # findings are in units of the range anyway
    assert "far less" not in caplog.text
    with pytest.raises(ConfigError, match=r"score: public: of the value_range it spans 0\.0039 and the truth"):
        fedsim.score(TRUE * 255, TRUE * 255, public=PUBLIC, value_range=(0, 255))


def test_true_examples_are_not_public(caplog: pytest.LogCaptureFixture) -> None:
    apart = fedsim.score(TRUE, TRUE, public=PUBLIC)
    mixed = fedsim.score(TRUE, TRUE, public=torch.cat([TRUE[:2], PUBLIC]))
    assert "score: public: 2 of 122 examples equal a true one and are left out" in caplog.text
    assert {name: mixed[name].floor for name in mixed} == pytest.approx(
        {name: apart[name].floor for name in apart}, nan_ok=True
    )
    with pytest.raises(ConfigError, match="holds true examples alone"):
        fedsim.score(TRUE, TRUE, public=TRUE)


def test_an_example_that_the_client_holds_twice_is_identified_twice() -> None:
    twice = torch.cat([TRUE, TRUE[:2]])
    scores = fedsim.score(TRUE, twice, public=PUBLIC)
    assert scores["identified"].value == 1
    assert fedsim.score(TRUE[2:], twice, public=PUBLIC)["identified"].value == pytest.approx(1 / 3)


def test_texts_and_arrays_of_other_kinds_are_scored() -> None:
    texts = fedsim.score(TOKENS.flip(0).numpy(), TOKENS.numpy(), public=PUBLIC_TOKENS.numpy(), padding=0)
    assert texts["recovered"].value == 1
    rows = fedsim.score(np.full((2, 5), 0.5), np.full((2, 5), 0.25))
    assert rows["mse"].value == pytest.approx(0.0625)


def test_texts_of_padding_alone_count_for_nothing() -> None:
    texts = torch.cat([TOKENS, torch.zeros_like(TOKENS[:1])])
    scores = fedsim.score(texts, texts, public=PUBLIC_TOKENS, padding=0)
    assert f"{len(TOKENS)} of {len(TOKENS)} examples" in scores.frame.set_index("metric").loc["recovered", "why"]
    none = fedsim.score(TOKENS, torch.zeros_like(TOKENS), public=PUBLIC_TOKENS, padding=0)
    assert set(none.frame["why"]) == {"no text has any token"}


def test_the_text_is_a_short_table() -> None:
    text = repr(fedsim.score(TRUE.mul(0.9), TRUE))
    lines = text.splitlines()
    assert lines[0].split() == ["metric", "score", "best", "guess", "verdict"]
    assert max(map(len, lines)) <= 100
    assert len(lines) < 20
    assert "hand over public examples" in text
    assert "tensor(" not in text


def test_scores_are_read_by_metric() -> None:
    scores = fedsim.score(TRUE, TRUE)
    assert set(scores) == set(scores.frame["metric"])
    assert len(scores) == len(scores.frame)
    assert math.isnan(scores["identified"].value)
    assert "<table" in scores._repr_html_()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: fedsim.score(TRUE, TRUE[:, :, :6]), "claimed: has examples of shape (1, 12, 12), those of the truth"),
        (lambda: fedsim.score(TRUE, TRUE, public=PUBLIC[..., :6]), "public: has examples of shape (1, 12, 6)"),
        (lambda: fedsim.score(TRUE * 2, TRUE), "claimed: has values from"),
        (lambda: fedsim.score(TOKENS, TRUE), "claimed: holds integers (tokens), the truth floating point numbers"),
        (lambda: fedsim.score((TRUE * 255).byte(), TRUE), "claimed: integers are tokens"),
        (lambda: fedsim.score(-TOKENS, TOKENS), "claimed: integers are tokens"),
        (lambda: fedsim.score("image.png", TRUE), "claimed: expected a tensor or an array, got str"),
        (lambda: fedsim.score(TRUE[:0], TRUE), "claimed: is empty"),
        (lambda: fedsim.score(TRUE / 0, TRUE), "claimed: holds values that are NaN, infinite or complex"),
        (lambda: fedsim.score(TRUE.flatten(), TRUE), "claimed: expected examples along the first"),
        (lambda: fedsim.score(fedsim.Membership(scores=torch.ones(2)), TRUE), "a Membership claims no examples"),
        (lambda: fedsim.score(TRUE, TRUE, modality="series"), "'series' has numbers with the axes channel, time"),
        (lambda: fedsim.score(TRUE[..., None], TRUE[..., None]), "name it, as modality='series'"),
        (lambda: fedsim.score(TRUE, TRUE, value_range=(1, 0)), "score: value_range: expected the lowest below"),
        (lambda: fedsim.score(TRUE, TRUE, value_range=([0, 0], [1, 1])), "2 values do not fit the 1 channels"),
        (lambda: fedsim.score(TRUE, TRUE, labels=LABELS), "true_labels: labels are claimed"),
        (lambda: fedsim.score(TRUE, TRUE, true_labels=LABELS[:2]), "expected one for each of 4 examples"),
        (lambda: fedsim.score(TRUE, TRUE, true_labels=-LABELS), "expected classes from 0"),
        (lambda: fedsim.score(TRUE, TRUE, labels=LABELS / 2, true_labels=LABELS), "labels: are of another kind"),
        (lambda: fedsim.score(TRUE, TRUE, true_labels=LABELS, public=PUBLIC), "public_labels: guesses know"),
        (lambda: fedsim.score(TRUE, TRUE, public_labels=LABELS), "there are no public examples"),
        (
            lambda: fedsim.score(fedsim.Reconstruction(data=TRUE, labels=LABELS), TRUE, labels=LABELS),
            "the finding claims labels already",
        ),
    ],
)
def test_what_does_not_fit_is_one_sentence(call: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call()
    text = str(caught.value)
    assert text.startswith("score: ")
    assert says in text
    assert "\n" not in text


def test_an_unknown_modality_is_named() -> None:
    with pytest.raises(PluginError, match="nothing is called 'picture', known: image"):
        fedsim.score(TRUE, TRUE, modality="picture")
