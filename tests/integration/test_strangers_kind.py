"""A stranger's kind of finding: found by name, checked, judged and shown without an edit of the core."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsim.federation.run_folder import read_rows
from tests.support.packages import run_fedsim, write_package

pytestmark = pytest.mark.isolated

MODULE = '''
from dataclasses import dataclass

import torch

from fedsim.interfaces.attack import Attack, Paper
from fedsim.audit.evaluation.display import Display
from fedsim.audit.evaluation.evaluator import Evaluator, Judgement
from fedsim.audit.evaluation.score import Score
from fedsim.interfaces.findings import Finding
from fedsim.interfaces.metric import Metric


class BrightnessError(Metric):
    """Difference of the claimed and the true brightness."""

    title = "brightness error"
    higher_is_better = False
    lowest = 0.0
    highest = 1.0


@dataclass(frozen=True, kw_only=True)
class Brightness(Finding):
    """How bright the victim's images are on average."""

    kind = "brightness"
    level: float


@dataclass(frozen=True)
class Brightnesses(Evaluator[Brightness]):
    """Off by how much."""

    finding = Brightness

    def check_form(self, finding, spec):
        if not 0 <= finding.level <= 1:
            spec.expect("a brightness of", finding.level, "one from 0 to 1")

    def truth(self, finding, about, case):
        return case.truth(int(about["victim"]), about["first_round"])

    def judge(self, finding, about, context):
        true = self.truth(finding, about, context.case).data.mean().item()
        guess = context.public.data.mean().item()
        floors = {"public mean": abs(guess - true)}
        score = Score.against_guesses("brightness_error", abs(finding.level - true), floors)
        return Judgement(scores=[score], examples=1)


@dataclass(frozen=True, kw_only=True)
class Dim(Attack):
    """Say that all is of one brightness.

    Args:
        level: how bright.
    """

    level: float = 0.25
    paper = Paper(title="None", authors="Nobody", venue="nowhere", year=2026)

    def _run(self, target, progress):
        return Brightness(level=self.level, trace={"objective": torch.tensor([2.0, 1.0])})
'''
ENTRIES = {
    "attacks": {"dim": "Dim"},
    "findings": {"brightness": "Brightnesses"},
    "metrics": {"brightness_error": "BrightnessError"},
}
FILE = """
[partition]
samples_per_client = 6

[model]
name = "mlp"
hidden = [8]

[training]
local_epochs = 1
batch_size = 6

[federation]
clients = 2

[adversary]
victims = [0, 1]
workers = 1

[[attack]]
name = "dim"
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder to work in, beside an installed package."""
    write_package(tmp_path / "site", "their_kind", MODULE, ENTRIES)
    (tmp_path / "one.toml").write_text(FILE)
    return tmp_path


@pytest.mark.slow
def test_it_is_judged_and_shown_and_where_it_is_not_installed_it_is_named(work: Path) -> None:
    done = run_fedsim(work, "run", "one.toml")
    assert done.returncode == 0, done.stderr
    rows = read_rows(work / "runs" / "one" / "scores.csv")
    assert [(row["attack"], row["victim"], row["metric"]) for row in rows] == [
        ("dim", client, "brightness_error") for client in "01"
    ]
    assert all(0 < float(row["value"]) < 0.5 and float(row["floor"]) < 0.1 for row in rows)
    page = (work / "runs" / "one" / "report.html").read_text()
    assert "brightness" in page
    assert "is left out" not in page

    wrong = run_fedsim(work, "attack", "runs/one", "--set", "attack.dim.level=3")
    assert wrong.returncode == 1
    assert "client 0: the attack claims a brightness of 3.0, expected one from 0 to 1; fix the attack" in wrong.stderr

    alone = run_fedsim(work, "report", "runs/one", installed=False)
    assert alone.returncode == 1
    assert "it is of the kind 'brightness', for which no evaluator is installed" in alone.stderr
