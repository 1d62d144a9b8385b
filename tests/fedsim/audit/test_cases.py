"""What differs between a run of our own and a recording made elsewhere stands in the two cases."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fedsim.audit
from fedsim.audit.evaluation.evaluator import EvaluationContext
from fedsim.audit.evaluation.foreign_recording import ForeignRecording
from fedsim.audit.scores import _judge
from fedsim.interfaces.findings import Finding, Inference, LocalModel, Membership, PropertyPresence
from fedsim.interfaces.knowledge import Knowledge
from fedsim.recording.transcript import Transcript

AUDIT = Path(fedsim.audit.__file__).parent


def test_no_module_of_the_audit_asks_which_of_the_two_a_recording_is() -> None:
    question = re.compile(r"experiment is (?:not )?None|isinstance\([^)]*(?:OwnRun|ForeignRecording)|OwnRun\(files")
    found = [text for path in AUDIT.rglob("*.py") for text in question.findall(path.read_text(encoding="utf-8"))]
    assert found == ["OwnRun(files"]  # the case is made at one place


FINDINGS: list[Finding] = [
    LocalModel(state={"w": torch.zeros(2)}),
    Membership(scores=torch.zeros(2)),
    Inference(scores=torch.zeros(2, 2), candidates=torch.arange(2), of="source"),
    PropertyPresence(
        scores=torch.zeros(1),
        clients=torch.zeros(1).long(),
        rounds=torch.ones(1).long(),
        shares=torch.tensor([0.2, 0.8]),
    ),
]


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: finding.kind)
def test_what_only_an_experiment_could_judge_is_not_scored_and_is_no_failure(
    finding: Finding, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def no_optimum(client: int, *, other_start: bool = False) -> Any:
        raise AssertionError

    context = EvaluationContext(
        case=ForeignRecording({}),
        open_recording=lambda: Transcript(tmp_path),
        knowledge=Knowledge(),
        optimum=no_optimum,
    )
    failures: list[str] = []
    about = {"attack": "some", "victim": 3, "round": "1"}
    with caplog.at_level(logging.WARNING):
        judgement = _judge(finding, about, lambda _: context, failures)
    assert (list(judgement.scores), failures) == ([], [])
    assert caplog.messages == ["some, client 3: not scored: only an experiment says what the victim held"]
