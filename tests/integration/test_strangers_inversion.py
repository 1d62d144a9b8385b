"""A stranger's gradient inversion: parts of its own on fedsim.inversion, as how-to/compose-an-inversion.md makes it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

import fedsim
from fedsim import inversion
from fedsim.base.metrics import psnr
from fedsim.federation.experiment import Experiment
from fedsim.plugins.registry import load_object
from fedsim.recording.transcript import Transcript
from tests.support.experiments import make_tiny_config, run_serial

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def code() -> str:
    page = (DOCS / "how-to" / "compose-an-inversion.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^`midpoint.py`:\n\n```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    return str(block)


def test_it_is_thirty_lines_that_import_what_is_public(code: str) -> None:
    without_docstring = re.sub(r'    """.*?"""\n', "", code, flags=re.DOTALL)
    assert len([line for line in without_docstring.splitlines() if line.strip()]) <= 30
    imports = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert {ast.unparse(node) for node in imports} == {
        "from dataclasses import dataclass", "import fedsim", "from fedsim import inversion"
    }  # fmt: skip


def test_its_claims_are_closer_than_what_can_be_guessed_from_the_label(code: str, tmp_path: Path) -> None:
    (tmp_path / "midpoint.py").write_text(code, encoding="utf-8")
    attack = load_object("midpoint:Midpoint", tmp_path)(iterations=100)
    config = make_tiny_config(
        partition={"samples_per_client": 1},
        model={"hidden": [32]},
        training={"local_epochs": 3, "batch_size": 1, "learning_rate": 0.05},
        federation={"clients": 2, "rounds": 1},
    )
    experiment, transcript = Experiment(config), Transcript(run_serial(config, tmp_path / "run").path)
    low, high = experiment.data.value_range()
    public = experiment.dataset.test
    for victim in (0, 1):
        update, (true, labels) = transcript.update(1, victim), experiment.data.train(victim)
        finding = fedsim.attack(
            update.before, update.after, model=experiment.model, num_examples=1, attack=attack,
            value_range=(low, high), input_mean=[0.0], input_std=[1.0], input_shape=(1, 8, 8), labels=labels,
        )  # fmt: skip
        assert isinstance(finding, fedsim.Reconstruction)
        class_mean = public.inputs()[public.labels == labels].mean(0, keepdim=True)
        guesses = torch.cat([class_mean, torch.full_like(class_mean, 0.5)])
        assert psnr(finding.data, true).item() > psnr(guesses, true.expand_as(guesses)).max().item() + 5


def test_its_parts_are_its_own(code: str) -> None:
    names = [node.name for node in ast.parse(code).body if isinstance(node, ast.ClassDef)]
    assert names == ["Midway", "NormalisedL1", "Curvature", "Midpoint"]
    assert all(f"{name}()" in code for name in names[:3])


def test_the_reference_page_has_every_public_name() -> None:
    page = (DOCS / "reference" / "inversion.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"auto(?:class|function|data):: (\w+)$", page, re.MULTILINE)) == sorted(inversion.__all__)
