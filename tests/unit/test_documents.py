"""The documents lead where they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedsim.attack import Knowledge
from fedsim.findings import Reconstruction
from fedsim.messages import Update
from fedsim.registry import load_object
from fedsim.transcript import Recorder, Transcript

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
    Recorder(tmp_path / "transcript").write(1, [Update(round=1, client=0, before=before, after=after, num_examples=2)])
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
