"""Words, order and structure of what people read are what they were; see golden_pages.py."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

import pytest

from tests.support.scripts import load_script

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    "name", ["list", "show", "errors", "report", pytest.param("sweep", marks=pytest.mark.thorough)]
)
def test_what_people_read_has_not_moved(name: str, tmp_path: Path) -> None:
    golden = load_script(HERE / "golden.py")
    same_machine = json.loads(golden.EXPECTED.read_text())["machine"] == golden.machine()
    if name in ("report", "sweep") and not same_machine:
        pytest.skip("verdicts follow from figures, which another machine rounds otherwise")
    pages = load_script(HERE / "golden_pages.py")
    before = (pages.PAGES / f"{name}.txt").read_text().splitlines()
    now = pages.text_of(name, tmp_path).splitlines()
    moved = "\n".join(difflib.unified_diff(before, now, "before", "now", lineterm="", n=1))
    assert not moved, f"{moved}\nif these words are meant: python tests/golden/golden_pages.py"
