"""Files of one's own that used to be read as something else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedsim.base.errors import DataError
from fedsim.data.image_folder import ImageFolder
from fedsim.data.tables import Csv

HALF = np.arange(16)[None] // 8 == 0
"""The left half of an image."""


def pixels(bright: float, dark: float, kind: type) -> np.ndarray:
    return np.where(HALF, bright, dark).repeat(16, 0).astype(kind)


KINDS: dict[str, tuple[str, Callable[[], Image.Image], float, float]] = {
    "16 bits": ("png", lambda: Image.fromarray(pixels(65535, 13107, np.uint16)), 1.0, 0.2),
    "32 bits": ("tif", lambda: Image.fromarray(pixels(65535, 13107, np.int32)), 1.0, 0.2),
    "real numbers": ("tif", lambda: Image.fromarray(pixels(1.0, 0.2, np.float32)), 1.0, 0.2),
    "transparent": (
        "png",
        lambda: Image.fromarray(np.dstack([np.zeros((16, 16, 3), np.uint8), pixels(0, 204, np.uint8)])),
        1.0,
        0.2,
    ),
    "grey": ("png", lambda: Image.fromarray(pixels(255, 51, np.uint8)), 1.0, 0.2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_images_keep_their_contrast(kind: str, tmp_path: Path) -> None:
    ending, make, bright, dark = KINDS[kind]
    for name in ("train/a", "train/b", "test/a", "test/b"):
        (tmp_path / name).mkdir(parents=True)
        make().save(tmp_path / name / f"image.{ending}")
    image = ImageFolder(path=str(tmp_path), size=16).load(None).train.inputs()[0]
    assert image[:, :, 0].mean().item() == pytest.approx(bright, abs=0.005)
    assert image[:, :, -1].mean().item() == pytest.approx(dark, abs=0.005)


@pytest.mark.parametrize("value", [-0.5, 300.0, float("nan")])
def test_real_numbers_of_no_known_range_are_refused_by_the_name_of_the_file(value: float, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(3):
            Image.fromarray(pixels(value, 0.2, np.float32)).save(tmp_path / name / f"{number}.tif")
    with pytest.raises(DataError, match=r"a/0\.tif: has values from .*, expected from 0 to 1 in an image of real"):
        ImageFolder(path=str(tmp_path), size=16).load(None)


def table(folder: Path, rows: list[tuple[object, ...]]) -> Csv:
    text = "\n".join(["x,k,y", *(",".join(map(str, row)) for row in rows)])
    (folder / "table.csv").write_text(text + "\n")
    return Csv(path=str(folder / "table.csv"), target="y")


@pytest.mark.parametrize("word", ["NA", "?", "None", "-", "n/a", "NULL"])
@pytest.mark.parametrize("column", [0, 1, 2])
def test_a_word_for_no_value_is_no_category(word: str, column: int, tmp_path: Path) -> None:
    rows: list[list[object]] = [[number, "ab"[number % 2], number // 2 % 2] for number in range(20)]
    rows[7][column] = word
    with pytest.raises(DataError, match=r"column '[xky]' has '.*', which stands for no value, in line 9 \(1 in all\)"):
        table(tmp_path, [tuple(row) for row in rows]).load(None)


def test_equal_numbers_are_one_class(tmp_path: Path) -> None:
    rows: list[tuple[object, ...]] = [(n * n, "ab"[n % 2], ("0", "1", "0.0", "1.0")[n % 4]) for n in range(40)]
    data = table(tmp_path, rows).load(None)
    assert data.num_classes == 2
    assert data.class_names == ("0", "1")


def test_codes_that_begin_with_a_zero_stay_apart(tmp_path: Path) -> None:
    rows: list[tuple[object, ...]] = [(n * n, "ab"[n % 2], ("1", "01")[n // 2 % 2]) for n in range(40)]
    assert table(tmp_path, rows).load(None).num_classes == 2
