"""`fedsim sweep --app`: defenses x attacks x seeds of a Flower app, by the same file as of experiments."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedsim
from fedsim.api.app_sweeps import _find_failures, build_app_cells
from fedsim.api.pipeline import AuditResult
from fedsim.base.errors import ConfigError
from fedsim.federation.app_file import AppFile
from fedsim.federation.flower_app import read_app
from fedsim.federation.run_folder import RunFolder
from fedsim.sweeps.file import read_sweep
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
    attack = ATTACK.replace('[[attack]]\nname = "spear-ica"\n', "").replace('victims = "all"', "victims = [0, 1, 2]")
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


def test_cells_are_told_apart_by_the_settings_of_their_attack(tmp_path: Path) -> None:
    """Cells of one run share a folder, which keeps what earlier settings found."""
    app = write_app(tmp_path / "app")
    sys.path.insert(0, str(app))
    truth = fedsim.write_truth(tmp_path / "truth", __import__("small_task").load_partition, range(3))
    table = "".join(f'{client} = "{path}"\n' for client, path in truth.items())
    attack = ATTACK.replace('[[attack]]\nname = "spear-ica"\n', "")

    def sweep(*iterations: int) -> dict[str, list[float]]:
        values = ", ".join(f'{{ name = "sme", iterations = {number} }}' for number in iterations)
        file = tmp_path / "sweep.toml"
        file.write_text(f"{attack}[truth]\n{table}[sweep]\n[sweep.axes]\nattack = [{values}]\n")
        scores = fedsim.sweep(file, tmp_path / "out", app=app).table
        psnr = scores[scores.metric == "psnr"].groupby("attack").value
        return {str(name): list(group) for name, group in psnr}

    both = sweep(1, 20)
    assert [len(values) for values in both.values()] == [3, 3]
    assert both["sme iterations=1"] != both["sme iterations=20"]
    assert sweep(1) == {"sme": both["sme iterations=1"]}
    assert sweep(20) == {"sme": both["sme iterations=20"]}


def test_a_run_is_another_where_code_that_made_it_was_edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = write_app(tmp_path / "app")
    (app / "settings.yaml").write_text("depth: 1\n")
    (tmp_path / "halving.py").write_text(HALVING)
    (tmp_path / "half.py").write_text("HALF = 0.5\n")
    file = tmp_path / "sweep.toml"
    file.write_text('[[attack]]\nname = "sme"\n[sweep.axes]\ndefense = [[], [{ name = "halving:Halve" }]]\n')
    monkeypatch.syspath_prepend(tmp_path)

    def build_runs() -> list[str]:
        for name in ("halving", "half"):  # as in the process of a new command
            sys.modules.pop(name, None)
        cells = build_app_cells(read_sweep(file, (), AppFile), read_app(app))
        assert [cell.control for cell in cells] == [cells[0].key] * 2
        return [cell.run for cell in cells]

    first = build_runs()
    (tmp_path / "half.py").write_text("HALF = 0.25\n")
    second = build_runs()
    assert (first[0] == second[0], first[1] == second[1]) == (True, False)
    (app / "settings.yaml").write_text("depth: 2\n")
    assert not set(build_runs()) & set(second)


HALVING = """
from dataclasses import dataclass
from fedsim.interfaces.defense import Defense
from half import HALF

@dataclass(frozen=True)
class Halve(Defense):
    def on_update(self, update, context):
        return {name: HALF * tensor for name, tensor in update.items()}
"""


def test_a_failure_belongs_to_the_attack_with_the_longest_title_that_it_begins_with(tmp_path: Path) -> None:
    done = AuditResult(folder=RunFolder(tmp_path), failures=["sme-2, round 1, client 0: NaN", "not scored: disk"])
    titles = {"a": "sme", "b": "sme-2"}
    assert _find_failures("sme", titles, done) == "not scored: disk"
    assert _find_failures("sme-2", titles, done) == "sme-2, round 1, client 0: NaN; not scored: disk"


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
