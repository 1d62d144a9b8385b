"""The pictures of the README are what its commands lead to."""

from __future__ import annotations

import re
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
NUMBER = r"\d+(?:\.\d+)?"
OTHERS = r"(±|client|round) [\d.]+"
"""Numbers that depend on rounding: intervals, and which examples are the best, median and worst."""
CLOSE = 0.1
"""By how much, relatively, another machine's scores may differ, whose sums are rounded otherwise."""


PICTURES = run_path(str(ROOT / "docs" / "readme_pictures.py"))["PICTURES"]


def kept(name: str) -> tuple[Image.Image, str]:
    """A picture as it stands in docs/pictures, and the words that it shows."""
    with Image.open(ROOT / "docs" / "pictures" / f"{name}.png") as picture:
        picture.load()
        return picture, str(picture.info["Description"])


def test_the_readme_shows_each_picture() -> None:
    shown = re.findall(r"!\[[^]]+\]\(docs/pictures/([\w-]+)\.png\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert shown == list(PICTURES)
    assert [name for name in shown if not kept(name)[1]] == []


@pytest.mark.parametrize("name", ["quickstart", pytest.param("does-it-stop", marks=pytest.mark.slow)])
def test_the_commands_lead_to_the_picture(name: str, browser: Any, tmp_path: Path) -> None:
    """The same words, and scores that are close; where this fails, run python docs/readme_pictures.py."""
    made = PICTURES[name]
    picture, words = made.taken(browser, made.page(tmp_path))
    before, said = kept(name)
    assert re.sub(r"\d[\d.]*", "#", words) == re.sub(r"\d[\d.]*", "#", said)
    scores = [[float(number) for number in re.findall(NUMBER, re.sub(OTHERS, "", text))] for text in (words, said)]
    assert scores[0] == pytest.approx(scores[1], rel=CLOSE)
    assert picture.height == pytest.approx(before.height, rel=CLOSE)  # fonts differ
