"""The report of a run in a browser: who reads it by keyboard, in the dark, on a phone or without a network can."""

from __future__ import annotations

import io
import re
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import fedsim
from fedsim.data import Examples

SHEET = 700
"""CSS pixels between the margins of a sheet of A4."""
RUN: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"name": "iid", "samples_per_client": 8, "test_fraction": 0.25},
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"local_steps": 1, "batch_size": 3, "learning_rate": 0.1},
    "federation": {"engine": "serial", "seed": 3, "clients": 3, "rounds": 2},
    "defense": [{"name": "update-noise", "clip": 1.0, "noise_multiplier": 0.001}],
    "measure": [{"name": "gradient-norm"}],
    "adversary": {"victims": "all", "workers": 1, "knowledge": {"labels": True, "defenses": True}},
    "attack": [{"name": "inverting-gradients", "iterations": 4}, {"name": "sme", "iterations": 4}],
}
TABLE = RUN | {
    "defense": [],
    "data": {"name": "leaf-synthetic", "features": 6, "clients": 3},
    "partition": {"name": "natural", "samples_per_client": 4, "test_fraction": 0.25},
    "attack": [{"name": "inverting-gradients", "iterations": 4}],
}

TEXT = RUN | {
    "defense": [],
    "measure": [],
    "partition": {"name": "iid", "samples_per_client": 2},
    "model": {"name": "text-cnn", "kernels": [3], "channels": 8, "dimension": 8, "pool": 2},
    "training": {"local_epochs": None, "local_steps": 1, "batch_size": 2, "dropout": False},
    "strategy": {"name": "fedsgd", "learning_rate": 0.01},
    "federation": {"engine": "serial", "clients": 2, "rounds": 1},
    "attack": [
        {"name": "tgias-ro-text", "gradients": 1, "optimizer": "adam", "distance": "cosine", "layers": "equal",
         "step_size": 0.1, "iterations": 4, "labels": "bias"},
        {"name": "embedding-rows"},
    ],
}  # fmt: skip
WORDS = ("<pad>", *(f"<b>&word{place}" for place in range(48)))
"""Words that HTML would trip over."""


@pytest.fixture(scope="module")
def images(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of attacks on images, naive and adaptive, with what clients measured of themselves."""
    return fedsim.run(RUN, out=tmp_path_factory.mktemp("images") / "run").path / "report.html"


@pytest.fixture(scope="module")
def table(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of an attack on records of a table."""
    return fedsim.run(TABLE, out=tmp_path_factory.mktemp("table") / "run").path / "report.html"


@pytest.fixture(scope="module")
def texts(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of attacks on texts: whole ones, and the words that occur."""
    raw = [1 + torch.randperm(48, generator=torch.Generator().manual_seed(seed)).reshape(8, 6) for seed in (0, 1)]
    train, test = (Examples(raw=part, labels=torch.arange(8) % 2, scale=None) for part in raw)
    data = fedsim.Dataset(
        name="texts", train=train, test=test, num_classes=2, vocabulary=49, source="here", licence="any", tokens=WORDS
    )
    run = fedsim.run(TEXT | {"data": data}, out=tmp_path_factory.mktemp("texts") / "run")
    return run.path / "report.html"


def test_the_page_of_attacks_on_images_is_for_everybody(images, is_for_everybody):
    is_for_everybody(images)


def test_the_page_of_an_attack_on_a_table_is_for_everybody(table, is_for_everybody):
    is_for_everybody(table)


def test_the_page_of_attacks_on_texts_is_for_everybody(texts, is_for_everybody):
    is_for_everybody(texts)


def test_texts_are_shown_word_by_word(texts, look):
    page = look(texts).page
    whole = page.locator("#texts .true", has=page.get_by_text("true", exact=True)).first
    true = whole.locator("td").inner_text().split()
    assert len(true) == 6
    assert all(word.startswith("<b>&word") for word in true)
    claimed = page.locator("#texts .texts").locator("mark, del").all_text_contents()
    assert len(claimed) > len(true)
    assert {*claimed} <= {*WORDS}
    assert page.locator("#texts b").count() == 0


def test_on_a_phone_rows_of_records_keep_their_names(table, look):
    heads = look(table, width=390).page.locator(".victim[open] .records tbody th")
    assert set(heads.all_inner_texts()) == {"true", "inverting-gradients"}
    widths = heads.evaluate_all("all => all.map(one => one.getBoundingClientRect().width)")
    assert 80 < min(widths) <= max(widths) < 130


def test_on_paper_nothing_is_cut_off(images, table, texts, look):
    for path in (images, table, texts):
        page = look(path, width=SHEET).page
        page.emulate_media(media="print")
        wide = "width => [...document.querySelectorAll('.tile, td, th, .card')]"
        wide += ".filter(one => one.getBoundingClientRect().right > width).map(one => one.outerHTML)"
        assert page.evaluate(wide, SHEET) == []
        assert page.locator(".tools:visible, nav:visible").count() == 0


def test_on_paper_the_victims_that_are_folded_are_shown(images, look):
    page = look(images).page
    page.evaluate("for (const one of document.querySelectorAll('.victim')) one.open = false")
    folded = page.locator(".victim .grid").last
    shown = "one => one.checkVisibility({ contentVisibilityAuto: true }) && one.getBoundingClientRect().height > 0"
    assert not folded.evaluate(shown)
    page.emulate_media(media="print")
    assert folded.evaluate(shown)


def test_without_javascript_the_page_says_the_same(images, look):
    without = look(images, javascript=False).page.inner_text("body")
    for said in ("What leaked", "inverting-gradients", "How to reproduce this page", "Threat model"):
        assert said in without


def test_a_file_is_saved_as_it_is_shown(images, look):
    page = look(images).page
    with page.expect_download() as saving:
        page.click("a[download='experiment.toml']")
    saved = Path(saving.value.path()).read_text(encoding="utf-8")
    [linked] = re.findall(r'download="experiment.toml" href="data:[^,]*,([^"]*)"', images.read_text(encoding="utf-8"))
    assert saved == b64decode(linked).decode()
    assert saving.value.suggested_filename == "experiment.toml"


def focused(page: Any, wanted: str, most: int = 200) -> bool:
    """Whether Tab, pressed again and again from the top of the page, comes to an element that is `wanted`."""
    page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    for _ in range(most):
        page.keyboard.press("Tab")
        if page.evaluate("wanted => document.activeElement.matches(wanted)", wanted):
            return True
    return False


def column(page: Any, place: int) -> list[str]:
    """What stands in a column of the table of scores, of the rows that are shown."""
    return page.evaluate(
        "place => [...document.querySelector('table.scores.sortable').tBodies[0].rows].filter(row => !row.hidden)"
        ".map(row => row.cells[place].textContent.trim())",
        place,
    )


def test_scores_are_sorted_and_filtered_by_keyboard(images, look):
    page = look(images).page
    assert focused(page, "table.scores.sortable thead button")
    heads = page.eval_on_selector_all("table.scores.sortable thead th", "all => all.map(one => one.textContent)")
    place = heads.index("Metric")
    before = column(page, place)
    page.evaluate(
        "place => document.querySelectorAll('table.scores.sortable thead th')[place].querySelector('button').focus()",
        place,
    )
    page.keyboard.press("Enter")
    ascending = page.evaluate("words => words.toSorted((one, other) => one.localeCompare(other))", before)
    assert column(page, place) == ascending[::-1] != before
    page.keyboard.press("Enter")
    assert column(page, place) == ascending
    sorts = "one => one.getAttribute('aria-sort')"
    assert page.eval_on_selector_all("table.scores.sortable thead th", f"all => all.map({sorts})")[place] == "ascending"
    page.keyboard.press("Enter")
    assert column(page, place) == before

    assert focused(page, ".filters select")
    page.keyboard.type("inv")
    attacks = set(column(page, heads.index("Attack")))
    assert attacks
    assert all(attack.startswith("inv") for attack in attacks)
    assert len(column(page, place)) < len(before)


def test_earlier_iterations_are_reached_by_keyboard(images, look):
    page = look(images).page
    tile = "tr[data-steps] .tile"
    looks = "one => getComputedStyle(one).backgroundImage + getComputedStyle(one).backgroundPosition"
    end = page.eval_on_selector(tile, looks)
    assert focused(page, ".tools .progress")
    page.keyboard.press("Home")
    first = page.eval_on_selector(tile, looks)
    assert first != end
    assert "numbers are of the end" in page.inner_text("#progress-told")
    page.keyboard.press("End")
    assert page.eval_on_selector(tile, looks) == end


def test_images_are_enlarged_and_left_again_by_keyboard(images, look):
    page = look(images).page
    assert focused(page, ".grid .tile")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    name = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert name.startswith("image 2 by ")
    page.keyboard.press("Enter")
    told = ".zoom[open] .told"
    assert name in page.inner_text(told)
    assert page.locator(".zoom[open] figure").count() == 3  # the original, the claim, and their difference
    page.keyboard.press("ArrowLeft")
    assert "image 1 by " in page.inner_text(told)
    page.keyboard.press("Escape")
    assert page.locator(".zoom[open]").count() == 0
    assert page.evaluate("document.activeElement.matches('.grid .tile')")


def test_images_are_sorted_from_the_best_in_the_direction_of_each_metric(images, look):
    page = look(images).page
    options = page.eval_on_selector_all(
        "select.order option:not([value=''])", "all => all.map(one => [one.value, one.dataset.better])"
    )
    assert ["psnr", "higher"] in options
    assert ["mse", "lower"] in options
    originals = page.locator(".victim").first.locator("tr.original td")
    for metric, better in options:
        page.select_option("select.order", metric)
        texts = originals.evaluate_all("(all, name) => all.map(one => one.getAttribute(name))", f"data-{metric}")
        values = [float(text.replace("Infinity", "inf")) for text in texts if text != "NaN"]
        assert values == sorted(values, reverse=better == "higher")


def pixels(locator: Any) -> np.ndarray:
    """`height width` of what is seen of a tile, without the line around it."""
    grey = Image.open(io.BytesIO(locator.screenshot())).convert("L")
    return np.asarray(grey, dtype=float)[2:-2, 2:-2]


def test_the_difference_is_that_of_an_image_to_the_original_above_it(images, look):
    page = look(images).page
    table = page.locator(".victim[open] .grid").first
    original, claim = table.locator("tr.original .tile").nth(1), table.locator("tr.claim .tile").nth(1)
    truth, claimed = pixels(original), pixels(claim)
    assert np.abs(truth - claimed).max() > 50
    assert focused(page, ".tools .difference")
    page.keyboard.press("Space")
    page.evaluate("document.activeElement.blur()")
    np.testing.assert_allclose(pixels(claim), np.abs(truth - claimed), atol=2)
    np.testing.assert_array_equal(pixels(original), truth)


def test_curves_say_their_values_by_keyboard(images, look):
    page = look(images).page
    assert focused(page, ".chart svg[tabindex='0']")
    page.keyboard.press("ArrowRight")
    told = page.evaluate("document.activeElement.closest('.chart').querySelector('.readout').textContent")
    assert re.search(r"\d", told)
