"""What a report computes once for all of its findings is what each would have alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedsim.audit.evaluation import examples, reconstructions
from fedsim.audit.evaluation.reconstructions import ReconstructionEvaluator
from fedsim.audit.evaluation.truth import Truth
from fedsim.base import metrics
from fedsim.base.errors import RunError
from fedsim.federation.run_folder import read_rows
from fedsim.interfaces.findings import Reconstruction
from fedsim.report.finding_views import _Viewer
from fedsim.report.pictures import Gallery

NOISE = "noise; there are no public data to guess by"
ABOUT = {"attack": "sme", "variant": "a", "round": "1", "victim": "0", "repeat": "0"}


class OtherEvaluator(ReconstructionEvaluator):
    """Evaluator of a stranger, whose guess depends on the whole claim."""

    def guess(self, finding: Reconstruction, *args: Any) -> Tensor:
        """Return the claim itself."""
        return finding.data


def make_viewer() -> _Viewer:
    guesses = {("sme", "a", "1", victim, "0"): NOISE for victim in "01"}
    case: Any = SimpleNamespace(seed=3, public=lambda: None)
    return _Viewer(
        audit=SimpleNamespace(case=case),  # type: ignore[arg-type]  # no more of it is asked for
        notes=[],
        titles={},
        gallery=Gallery(),
        guesses=guesses,
        scores={},
        card_examples={},
    )


def test_the_guess_beside_a_victims_claims_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    guess_examples = reconstructions.guess_examples

    def count_call(*args: Any) -> Any:
        made.append(1)
        return guess_examples(*args)

    monkeypatch.setattr(reconstructions, "guess_examples", count_call)
    rng = torch.Generator().manual_seed(20261128)
    truth = Truth(data=torch.rand(2, 1, 6, 6, generator=rng), labels=torch.tensor([0, 1]), modality="image")
    claims = [Reconstruction(data=torch.rand(2, 1, 6, 6, generator=rng), labels=truth.labels) for _ in range(3)]
    viewer = make_viewer()
    shared = [viewer.guess(ReconstructionEvaluator(), claim, ABOUT, truth) for claim in claims]
    alone = [make_viewer().guess(ReconstructionEvaluator(), claim, ABOUT, truth) for claim in claims]
    assert len(made) == 1 + len(claims)
    for one, other in zip(shared, alone, strict=True):
        assert one is not None
        assert other is not None
        assert one[0] == other[0] == NOISE
        assert torch.equal(one[1], other[1])
    # Of another victim, or with other claimed labels, it is made anew.
    viewer.guess(ReconstructionEvaluator(), claims[0], ABOUT | {"victim": "1"}, truth)
    fewer = Reconstruction(data=claims[0].data, labels=torch.tensor([1, 1]))
    viewer.guess(ReconstructionEvaluator(), fewer, ABOUT, truth)
    assert len(made) == 3 + len(claims)
    # What another evaluator makes its guesses of, nobody knows.
    for claim in claims:
        own = viewer.guess(OtherEvaluator(), claim, ABOUT, truth)
        assert own is not None
        assert own[1] is claim.data


@pytest.mark.parametrize("count", [1, 3, 5])
def test_snapshots_are_paired_as_each_would_be_alone(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    rng = torch.Generator().manual_seed(20261128)
    true, snapshots = torch.rand(3, 3, 8, 8, generator=rng), torch.rand(7, count, 3, 8, 8, generator=rng)
    alone = [metrics.psnr(metrics.pair_examples(data, true), true).mean() for data in snapshots]
    assert torch.equal(examples._snapshot_psnr(snapshots, true), torch.stack(alone))
    monkeypatch.setattr(examples, "_SNAPSHOT_VALUES", 2 * snapshots[0].numel())
    assert torch.equal(examples._snapshot_psnr(snapshots, true), torch.stack(alone))


def test_rows_of_a_table_are_read_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "scores.csv"
    path.write_text('a,b,c\n1,"x, y",2\n\n3,z\n', encoding="utf-8")
    expected = [
        {"a": "1", "b": "x, y", "c": "2"},
        {"a": "3", "b": "z", "c": None},
    ]
    assert read_rows(path, ("a", "b"), ("a", "c")) == expected
    with pytest.raises(RunError, match="line 3 lacks c"):
        read_rows(path, ("a", "c"))
    with pytest.raises(RunError, match="could not convert string to float: 'x, y'"):
        read_rows(path, (), ("b",))
