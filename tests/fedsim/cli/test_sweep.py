"""`fedsim sweep` advises commands that go on with the sweep that was run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedsim.api import sweeping
from fedsim.cli import sweep
from tests.support.commands import Call

FILE = """
[sweep]
seeds = [1, 2]
[data]
name = "digits"
[federation]
clients = 2
[[attack]]
name = "dlg"
"""


def test_what_is_advised_repeats_the_settings(tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    advised: list[str] = []

    def keep_words(folder: Path, words: Sequence[str], *, quiet: bool) -> None:
        advised.extend(words)

    board = SimpleNamespace(plan=SimpleNamespace(left_out=[]), failure_summaries=[])
    monkeypatch.setattr(sweeping, "run_sweep", lambda *_, **__: board)
    monkeypatch.setattr(sweep, "_show_left_out", lambda plan: None)
    monkeypatch.setattr(sweep, "_show_results", keep_words)
    (tmp_path / "s.toml").write_text(FILE)
    given = [str(tmp_path / "s.toml"), "--set", "adversary.knowledge.defenses=true", "--set", "sweep.seeds=[1]"]
    given += ["--out", str(tmp_path / "out"), "--cells", str(tmp_path / "cells")]
    result = call("sweep", *given)
    assert result.returncode == 0, result.stderr
    assert advised == ["fedsim", "sweep", *given]
