"""Scores of single examples, and which of them stand for an attack."""

from __future__ import annotations

import math

import pytest

from fedsim.audit.scores import IMAGE_SCORE_COLUMNS
from fedsim.federation.open_run import OpenRun
from fedsim.report import image_scores


def key(victim="0", attack="sme", variant=""):
    return attack, variant, "1", victim, "0"


def ranked_images(found):
    return [(item.rank, item.key[3], item.image, item.value) for item in found]


def test_best_median_and_worst_are_taken_over_all_findings_of_the_attack_alone():
    values = {
        key("0"): {"psnr": [12.0, 30.0]},
        key("1"): {"psnr": [20.0, 9.0, 15.0]},
        key("2", attack="dlg"): {"psnr": [99.0]},
        key("2", variant="0a1b"): {"psnr": [1.0]},
    }
    assert ranked_images(image_scores.extreme_examples(values, ("sme", ""))) == [
        ("best", "0", 1, 30.0),
        ("median", "1", 2, 15.0),
        ("worst", "1", 1, 9.0),
    ]


def test_a_small_distance_is_better_than_a_large_one():
    values = {key(): {"lpips": [0.5, 0.1, 0.9], "psnr": [1.0, 2.0, 3.0]}}
    assert ranked_images(image_scores.extreme_examples(values, ("sme", ""), "lpips")) == [
        ("best", "0", 1, 0.1),
        ("median", "0", 0, 0.5),
        ("worst", "0", 2, 0.9),
    ]


def test_an_image_that_is_the_same_is_best_and_one_without_a_score_is_none():
    values = {key(): {"psnr": [math.nan, 20.0, math.inf]}}
    assert ranked_images(image_scores.extreme_examples(values, ("sme", ""))) == [
        ("best", "0", 2, math.inf),
        ("worst", "0", 1, 20.0),
    ]


def test_one_example_is_told_once_and_none_not_at_all():
    assert ranked_images(image_scores.extreme_examples({key(): {"mse": [0.5]}}, ("sme", ""), "psnr")) == [
        ("best", "0", 0, 0.5)
    ]
    assert image_scores.extreme_examples({key(): {"label_accuracy": [0.5]}}, ("sme", "")) == []


def test_values_stand_at_the_places_of_their_images(tmp_path):
    folder = OpenRun(tmp_path)
    rows = [
        dict(zip(IMAGE_SCORE_COLUMNS, ("sme", 0, 1, 0, place, "psnr", value, "", "{}", "model"), strict=True))
        for place, value in ((2, 7.0), (0, 5.0))
    ]
    folder.write_table(folder.images, IMAGE_SCORE_COLUMNS, rows)
    [own] = image_scores.read_example_scores(folder)[key()].values()
    assert own == pytest.approx([5.0, math.nan, 7.0], nan_ok=True)


def test_words_that_were_found_are_one_example_of_their_finding():
    row = {"attack": "embedding-rows", "variant": "", "round": "1", "victim": "4", "repeat": "0", "missing": ""}
    rows = [
        row | {"metric": "words_found", "value": "0.75"},
        row | {"metric": "recover_rate", "value": "0.1"},
        row | {"victim": "5", "metric": "words_found", "value": "nan", "missing": "unknown"},
    ]
    where = key("4", "embedding-rows")
    found = image_scores.add_whole_findings({where: {"recover_rate": [0.0, 0.2]}}, rows)
    assert found == {where: {"recover_rate": [0.0, 0.2], "words_found": [0.75]}}
