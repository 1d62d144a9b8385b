"""`fedsim sweep --app`: defenses x attacks x seeds of a Flower app, by the same file as of experiments."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedsim
from fedsim.base.errors import ConfigError
from tests.support.commands import Call
from tests.support.flower_apps import ATTACK, write_app

SWEEP = """
[sweep]
seeds = [0, 1]
[sweep.axes]
defense = [{ name = "update-noise", clip = 0.5, noise_multiplier = 0.3, label = "noise" }]
"run_config.lr" = [0.05]
attack = [{ name = "spear-ica" }, { name = "analytic" }]
"""


@pytest.fixture(autouse=True)
def fresh_modules() -> Iterator[None]:
    path = list(sys.path)
    yield
    sys.path[:] = path
    sys.modules.pop("small_task", None)


def test_an_app_is_swept_over_defenses_attacks_and_seeds(tmp_path: Path, call: Call) -> None:
    app = write_app(tmp_path / "app")
    sys.path.insert(0, str(app))
    truth = fedsim.write_truth(tmp_path / "truth", __import__("small_task").load_partition, range(3))
    table = "".join(f'{client} = "{path}"\n' for client, path in truth.items())
    attack = ATTACK.replace('[[attack]]\nname = "spear-ica"\n', "")
    file = tmp_path / "sweep.toml"
    file.write_text(f"{attack}[run_config]\nevaluate = 1.0\n[truth]\n{table}{SWEEP}")
    words = ("sweep", file, "--app", app, "--out", tmp_path / "out")
    planned = call(*words, "--dry-run")
    assert planned.stdout.count("(control)") == 4, planned.stderr
    done = call(*words)
    assert done.returncode == 1, done.stderr + done.stdout  # exact attacks have nothing to work with under noise
    result = fedsim.Sweep(tmp_path / "out")
    assert list(result.cells.state) == ["failed"] * 4 + ["done"] * 4
    assert list(result.cells.added) == [0] * 4 + [1] * 4
    for attack, reason in zip(result.cells.attack[:4], result.cells.reason[:4], strict=True):
        assert reason.count("round 1, client") == reason.count(f"{attack}, round 1, client") == 3
    assert f"--app {app}" in " ".join(done.stdout.split())
    assert "training.local_epochs" not in done.stdout
    scores = result.table
    psnr = scores[(scores.metric == "psnr") & (scores.attack == "spear-ica")].groupby("defense").value
    assert psnr.min()["none"] > 60
    assert list(psnr.groups) == ["none"]
    assert scores.accuracy.between(0, 1).all()
    controls = dict(zip(result.cells.cell, result.cells.control, strict=True))
    assert set(controls.values()) < set(controls)
    assert len(list((tmp_path / "out" / "runs").iterdir())) == 4  # two attacks share what was recorded
    assert "noise" in (tmp_path / "out" / "sweep.html").read_text()
    # The same sweep finds all of it done.
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.safetensors")}
    assert call(*words).returncode == 1
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.safetensors")} == times
    (app / "small_client.py").write_text((app / "small_client.py").read_text() + "\n# other code\n")
    assert call(*words).returncode == 1
    assert len(list((tmp_path / "out" / "runs").iterdir())) == 8  # another app


def test_what_a_sweep_of_an_app_cannot_have_is_refused(tmp_path: Path) -> None:
    app = write_app(tmp_path / "app")
    base = {"attack": [{"name": "sme"}]}
    for sweep, words in (
        ({"workers": 2}, "sweep.workers: cells of an app run one after the other"),
        ({"on": "ray"}, "sweep.on: cells of an app run on this machine"),
        ({"axes": {"data": [{"name": "digits"}]}}, "'data' names no key of an experiment file"),
        ({"axes": {"run_config.lr": ["fast"]}}, "run_config.lr: expected float"),
        ({"axes": {"defense": [{"name": "soteria"}]}}, "'soteria' cannot act on the update of an app"),
        ({"axes": {"run_config.lr": [1, 1.0]}}, "two values are called|have the same settings"),
    ):
        with pytest.raises(ConfigError, match=words):
            fedsim.sweep({"sweep": sweep, **base}, tmp_path / "out", app=app)
    assert not (tmp_path / "out").exists()
