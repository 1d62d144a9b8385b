"""A dossier in a browser: readable by everybody, in light, in the dark and on a phone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import fedsim
from tests.browser.test_sweep import RUN


def test_a_dossier_is_for_everybody(tmp_path: Path, is_for_everybody: Callable[[Path], None]) -> None:
    run = fedsim.run(RUN, tmp_path / "run").path
    is_for_everybody(fedsim.write_dossier(run, fail_if=["leaks"]).page)
