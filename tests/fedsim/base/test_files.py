"""Temporary folders: none outlives its process for long, and none is taken from a process that lives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fedsim.base.files import temporary_folder

HOLDS = """
import time
from fedsim.base.files import temporary_folder
with temporary_folder() as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


def test_what_a_killed_process_left_is_removed_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | {"PYTHONPATH": path, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    theirs = Path(process.stdout.readline().strip())
    (theirs / "copied").mkdir()
    (tmp_path / "fedsim-results").mkdir()  # somebody else's
    with temporary_folder() as ours, temporary_folder():
        assert theirs.is_dir()
        assert ours.is_dir()
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        with temporary_folder():
            assert not theirs.exists()
            assert ours.is_dir()
    assert list(tmp_path.iterdir()) == [tmp_path / "fedsim-results"]
