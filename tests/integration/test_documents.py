"""The documents lead where they say."""

from __future__ import annotations

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedsim.attacks import Knowledge
from fedsim.experiments.run_folder import write_rows
from fedsim.findings import Reconstruction
from fedsim.knowledge import FACTS
from fedsim.plugins.registry import load_object
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.wire.messages import Update
from fedsim.wire.payloads import Payload

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/*.md"), *ROOT.glob("examples/**/*.md")]
)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file(document: Path) -> None:
    links = re.findall(r"\]\((?!https?://|#|mailto:)([^)#]+)", document.read_text(encoding="utf-8"))
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_there_are_links_to_follow() -> None:
    assert "](docs/" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_attack_that_the_page_composes_works(tmp_path: Path) -> None:
    """Loaded as the page says, it gets closer to an update than it was at the start."""
    page = (ROOT / "docs" / "inversion.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "both_ends.py").write_text(code, encoding="utf-8")
    attack = load_object("both_ends:BothEnds", tmp_path)(iterations=30)

    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 4))

    before = build().state_dict()
    after = {name: tensor - 0.1 * torch.randn_like(tensor) for name, tensor in before.items()}
    Recorder(tmp_path / "transcript").write(
        1, [Update(round=1, client=0, before=before, payload=Payload.dense(after, "weights"), num_examples=2)]
    )
    known = Knowledge(
        model=build,
        loss=cross_entropy,
        input_shape=(1, 4, 4),
        num_classes=4,
        value_range=([0.0], [1.0]),
        labels=torch.tensor([0, 1]),
    )
    finding = attack.run(Transcript(tmp_path), known, victim=0, rng=torch.Generator().manual_seed(0))
    assert isinstance(finding, Reconstruction)
    assert finding.trace["objective"][-1] < finding.trace["objective"][0]


def test_the_page_of_signatures_is_what_the_code_says() -> None:
    spec = spec_from_file_location("plugin_interface", ROOT / "docs" / "plugin_interface.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    told = module.PAGE.read_text(encoding="utf-8")
    assert told == module.page(), "the interface has changed: run python docs/plugin_interface.py"
    for name in (
        *FACTS,
        "single_update",
        "sampling",
        "on_batch",
        "on_examples",
        "on_gradient",
        "on_update",
        "num_examples",
        "assign",
        "Task",
    ):
        assert re.search(rf"\b{name}\b", told), name


def test_the_lines_that_compare_runs_print_accuracy_and_scores_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "summarise" in block]
    score = {"attack": "sme", "round": 1, "repeat": 0, "metric": "psnr", "floor": 12, "floor_guess": "public mean"}
    score |= {"ceiling": "", "higher_is_better": True, "missing": ""}
    for name, accuracy, psnr in (("undefended", 0.9, 20), ("defended", "", 11)):
        (tmp_path / "runs" / name).mkdir(parents=True)
        measured = [{"round": r, "client": c, "accuracy": accuracy} for r in (1, 2) for c in ("server", 0)]
        write_rows(tmp_path / "runs" / name / "metrics.csv", ("round", "client", "accuracy"), measured)
        rows = [score | {"victim": victim, "value": psnr + victim} for victim in (0, 2)]
        write_rows(tmp_path / "runs" / name / "scores.csv", list(rows[0]), rows)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == [
        "runs/undefended accuracy 0.9",
        "  sme psnr 21 ± 13 (n = 2) floor 12 (public mean)",
        "runs/defended accuracy not measured",
        "  sme psnr 12 [0, 25] (n = 2) floor 12 (public mean)",
    ]
