"""The example of an audited Flower app: enough victims for a verdict, and a tutorial that can be followed."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fedsim
from fedsim.report.verdicts import MIN_VICTIMS

ROOT = Path(__file__).parents[2]
APP = ROOT / "examples" / "audit-a-flower-app"
TUTORIAL = (ROOT / "docs" / "tutorials" / "audit-an-app.md").read_text(encoding="utf-8")


def count_nodes() -> int:
    [number] = re.findall(r"num-supernodes=(\d+)", (APP / "run.sh").read_text(encoding="utf-8"))
    return int(number)


def test_all_of_enough_clients_are_attacked() -> None:
    assert count_nodes() >= MIN_VICTIMS
    assert tomllib.loads((APP / "attack.toml").read_text(encoding="utf-8"))["adversary"]["victims"] == "all"
    assert "few-victims" not in [pitfall.name for pitfall in fedsim.lint(APP / "attack.toml")]


def test_the_tutorial_prints_the_truth_of_all_clients_as_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [code] = [block for block in re.findall(r"(?s)```python\n(.*?)```", TUTORIAL) if "write_truth" in block]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(APP)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(code, {})
    finally:
        sys.modules.pop("task", None)
    attack_file = (APP / "attack.toml").read_text(encoding="utf-8") + printed.getvalue()
    truth = tomllib.loads(attack_file)["truth"]
    assert list(truth) == [str(client) for client in range(count_nodes())]
    assert all(Path(path).is_file() for path in truth.values())


def test_a_superlink_that_does_not_start_ends_the_script(tmp_path: Path) -> None:
    shutil.copytree(APP, tmp_path / "app")
    script = tmp_path / "app" / "run.sh"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script.write_text(script.read_text(encoding="utf-8").replace("18077", str(port)), encoding="utf-8")
    for name, text in (("flower-superlink", "exit 3"), ("flwr", f"touch {tmp_path}/called")):
        command = tmp_path / name
        command.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        command.chmod(0o755)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"FLWR_BIN": str(tmp_path), "PATH": path}
    result = subprocess.run(["sh", script], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert "the SuperLink ended" in result.stderr
    assert not (tmp_path / "called").exists()
