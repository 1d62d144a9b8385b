"""Grids of images: each pixel once, originals and guesses shared, as many as there is room for."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from fedsim.audit.evaluation.display import ImageGrid
from fedsim.report.pictures import Gallery, VictimImages, encode_png, images_as_bytes

TRUE = torch.linspace(0, 1, 3 * 16).reshape(3, 1, 4, 4)
GUESS = torch.full_like(TRUE, 0.5)


def about(attack="sme", victim=0):
    return {"attack": attack, "round": 1, "victim": victim, "who": f"client {victim}"}


def sheet(claimed=TRUE, true=TRUE, **more):
    return ImageGrid(claimed=claimed, true=true, psnr=[10.0, 20.0, 30.0][: len(claimed)], **more)


def add(gallery, *, attack="sme", victim=0, guess=("public mean", GUESS), scores=None, of=None):
    gallery.add(about(attack, victim), of or sheet(), typical=False, guess=lambda: guess, scores=scores or {})


def pixels(png):
    return np.asarray(Image.open(io.BytesIO(png)))


def test_images_lie_side_by_side_and_iterations_below_one_another():
    steps = torch.stack([TRUE, TRUE.flip(0)])
    found = pixels(encode_png(images_as_bytes(steps.flatten(0, 1)).reshape(2, 3, 4, 4)))
    assert found.shape == (8, 12)
    np.testing.assert_array_equal(found[:4, 4:8], images_as_bytes(TRUE)[1])
    np.testing.assert_array_equal(found[4:, :4], images_as_bytes(TRUE)[2])


@pytest.mark.parametrize(("channels", "shape"), [(1, (3, 4, 4)), (2, (3, 4, 4)), (3, (3, 4, 4, 3))])
def test_three_channels_are_colours_and_others_become_grey(channels, shape):
    images = torch.zeros(3, channels, 4, 4)
    images[:, 0] = 1
    found = images_as_bytes(images)
    assert found.shape == shape
    assert found[0, 0, 0].tolist() == {1: 255, 2: 128, 3: [255, 0, 0]}[channels]


def test_values_out_of_range_are_cut_and_what_is_no_number_is_black():
    assert images_as_bytes(torch.tensor([-1.0, 2.0, float("nan")]).reshape(3, 1, 1, 1)).flatten().tolist() == [
        0,
        255,
        0,
    ]


def test_attacks_on_one_message_share_the_original_and_the_guess():
    gallery = Gallery()
    add(gallery, attack="sme")
    add(gallery, attack="dlg")
    [grid] = gallery.grids.values()
    assert grid.attacks == ["sme", "dlg"]
    [guess] = grid.guesses
    assert guess.about == {"attack": "public mean", "judged_attacks": ["sme", "dlg"]}
    assert guess.psnr == pytest.approx([10 * np.log10(1 / ((t - 0.5) ** 2).mean()) for t in TRUE.numpy()], rel=1e-4)


def test_guesses_that_differ_stand_apart():
    gallery = Gallery()
    add(gallery, attack="sme")
    add(gallery, attack="dlg", guess=("public class mean", GUESS / 2))
    [grid] = gallery.grids.values()
    assert [guess.about["judged_attacks"] for guess in grid.guesses] == [["sme"], ["dlg"]]


def test_victims_and_what_they_held_have_grids_of_their_own():
    gallery = Gallery()
    add(gallery, victim=0)
    add(gallery, victim=1)
    add(gallery, victim=1, of=sheet(true=TRUE.flip(0)))
    assert len(gallery.grids) == 3


def test_images_are_sorted_by_the_best_that_any_attack_made_of_them():
    gallery = Gallery()
    add(gallery, attack="sme", scores={"lpips": [0.3, 0.2, 0.1], "recovered": [1.0, 1.0, 1.0]})
    add(gallery, attack="dlg", scores={"lpips": [0.1, float("nan"), 0.4]})
    [grid] = gallery.grids.values()
    assert grid.scores == {"psnr": [10.0, 20.0, 30.0], "lpips": [0.1, 0.2, 0.1]}


def test_a_full_page_takes_no_further_victim_and_counts_it():
    gallery = Gallery(room=1)
    add(gallery, victim=0, attack="sme")
    add(gallery, victim=0, attack="dlg")
    add(gallery, victim=1)
    assert [grid.about["victim"] for grid in gallery.grids.values()] == [0]
    assert (gallery.count, gallery.shown, gallery.full) == (3, 2, True)


def test_without_room_for_iterations_the_images_are_there_still():
    steps = torch.stack([GUESS, TRUE])
    gallery = Gallery(room_for_steps=1)
    for victim in (0, 1):
        add(gallery, victim=victim, of=sheet(steps=steps, iterations=[0, 20]))
    first, second = (grid.rows[0] for grid in gallery.grids.values())
    assert first.iterations == [0, 20]
    np.testing.assert_array_equal(pixels(first.steps.png)[4:], pixels(first.strip.png))
    assert (second.steps, gallery.with_steps, gallery.without_steps) == (None, 1, 1)


def test_of_many_large_iterations_the_first_and_the_last_are_kept(monkeypatch):
    monkeypatch.setattr("fedsim.report.pictures._LARGEST_STEPS", 3 * images_as_bytes(TRUE).nbytes)
    gallery = Gallery()
    add(gallery, of=sheet(steps=TRUE.expand(9, -1, -1, -1, -1), iterations=list(range(0, 90, 10))))
    [grid] = gallery.grids.values()
    assert grid.rows[0].iterations == [0, 40, 80]
    assert grid.rows[0].steps.lines == 3


@pytest.mark.parametrize("side", [8, 28, 32, 64, 224])
def test_small_images_have_whole_pixels_and_large_ones_fit_on_paper(side):
    grid = VictimImages(about={}, size=(side, side), original=None, typical=False)
    assert grid.width % side == grid.narrow_width % side == 0
    assert grid.printed_width <= 68
    assert side > 68 or grid.printed_width % side == 0
