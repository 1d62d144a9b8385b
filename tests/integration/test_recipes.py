"""The recipes of the README: each of their lines is run, in an empty folder and in their order."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import tomli_w

from tests.support.commands import call_fedsim
from tests.support.forks import ForkedCommand

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
Run = Callable[[str], str]


def section(title: str) -> str:
    """What is below a heading, up to the next one."""
    [found] = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## )", README, re.DOTALL | re.MULTILINE)
    return str(found)


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[str]:
    return [line.partition("#")[0].strip() for block in blocks(text, "sh") for line in block.splitlines()]


def write_files(text: str) -> None:
    """Each block of TOML under the name that its first line says."""
    for block in blocks(text, "toml"):
        name = block.splitlines()[0].removeprefix("# ")
        Path(name).write_text(block, encoding="utf-8")


def shorten(file: str, **adversary: object) -> None:
    """Fewer iterations and another adversary, so that the test is fast."""
    tables = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    for table in tables.get("attack", []):
        table["iterations"] = 5
    for table in tables.get("sweep", {}).get("axes", {}).get("attack", []):
        table["iterations"] = 5
    if adversary:
        tables["adversary"] |= adversary
    Path(file).write_text(tomli_w.dumps(tables), encoding="utf-8")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Runs one line in an empty folder, without data; returns what it prints, where it ends well."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDSIM_DATA", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def call(line: str) -> str:
        words = shlex.split(line)
        assert words[0] == "fedsim"
        done = call_fedsim(*words[1:], capfd=capfd)
        assert not done.returncode, done.stderr + done.stdout
        return done.stdout

    return call


def test_audit_my_flower_app(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of the three lines, in the app that the page names; `test_curious_grid.py` has the other two."""
    from flwr.app import ArrayRecord, ConfigRecord
    from flwr.serverapp.strategy import FedAvg

    from fedsim.federation.engines import serial

    monkeypatch.setattr(serial, "_FIRST_NODE", 2**64 - 2)  # Flower draws ids from all of 64 bits
    recipe = section("Audit my Flower app")
    for file in (ROOT / "examples" / "audit-a-flower-app").glob("*.py"):
        shutil.copy(file, file.name)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    import client_app
    import task

    [code] = blocks(recipe, "python")
    names = {"FedAvg": lambda: FedAvg(fraction_evaluate=0.0)}
    exec("\n".join(code.splitlines()[:3]), names)
    names["strategy"].start(
        grid=serial.InProcessGrid(client_app.app, nodes=2),
        initial_arrays=ArrayRecord(task.make_model().state_dict()),
        num_rounds=1,
        train_config=ConfigRecord({"learning-rate": 0.01}),
    )
    for module in ("client_app", "task"):
        monkeypatch.delitem(sys.modules, module)
    write_files(recipe)
    shorten("attack.toml")
    inspected, attacked = [run(line) for line in commands(recipe)]
    assert re.search(r"^ updates +2\b", inspected, re.MULTILINE), inspected
    assert "recording/run-1/report.html" in attacked
    assert list(Path("recording/run-1/findings/sme").glob("*.png"))


@pytest.mark.parametrize(
    "short", [pytest.param(True, marks=pytest.mark.thorough), pytest.param(False, marks=pytest.mark.slow)]
)
def test_does_this_defense_stop_that_attack(short: bool, run: Run) -> None:
    recipe = section("Does this defense stop that attack, and at which accuracy?")
    write_files(recipe)
    new, dry, sweep = commands(recipe)
    assert "my-audit.toml" in run(new)
    if short:
        shorten("my-audit.toml", victims=[0])
        shorten("does-it-stop.toml")
        sweep += " --set sweep.seeds=[1]"
    assert "18 cells on 9 federations" in run(dry)
    assert "runs/does-it-stop/sweep.html" in run(sweep)
    table = pd.read_csv("runs/does-it-stop/sweep.csv")
    assert set(table["attack"]) == {"inverting-gradients", "sme"}
    assert set(table["defense"]) == {"none", "update-noise", "top-k"}
    assert table["accuracy"].between(0, 1).all()
    page = Path("runs/does-it-stop/sweep.html").read_text(encoding="utf-8")
    reports = re.findall(r'href="([^"]+/report\.html)"', page)
    assert reports
    assert all(Path("runs/does-it-stop", report).is_file() for report in reports)
    if not short:
        psnr = table[table["metric"] == "psnr"].groupby("defense")["value"].mean()
        assert psnr["none"] > psnr["top-k"] > psnr["update-noise"]


@pytest.mark.thorough
def test_add_my_attack(run: Run) -> None:
    new, check, first, again = commands(section("Add my attack"))
    assert "written: my_attack.py, my_attack.toml" in run(new)
    assert "failed" not in run(check)
    shorten("my_attack.toml", victims=[0])
    assert "Scores of my_attack:MyAttack" in run(first)
    assert Path("runs/my_attack/report.html").is_file()
    found = {path.read_bytes() for path in Path("runs/my_attack/findings").glob("my_attack*/*.safetensors")}
    assert len(found) == 1
    text = Path("my_attack.py").read_text(encoding="utf-8")
    Path("my_attack.py").write_text(text.replace("dummy.clamp_(0, 1)", "dummy.clamp_(0.4, 0.6)"), encoding="utf-8")
    command = ForkedCommand(*shlex.split(again)[1:], folder=Path(), before=lambda: sys.modules.pop("my_attack"))
    code, _, said = command.finish()  # a process that imports the file anew
    assert code == 0, said
    changed = {path.read_bytes() for path in Path("runs/my_attack/findings").glob("my_attack*/*.safetensors")}
    assert len(changed) == 1
    assert changed != found
