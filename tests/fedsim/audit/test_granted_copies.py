"""Claims that are copies of a victim's records, which the attack was granted, are no reconstruction."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fedsim.audit.attack_runner import check_no_copies
from fedsim.base.errors import AttackError
from fedsim.interfaces.findings import Finding, Membership, Reconstruction, Texts
from fedsim.interfaces.knowledge import Knowledge, Records

INPUTS = torch.rand((6, 1, 4, 4), generator=torch.Generator().manual_seed(0)) * 4 - 2
CANDIDATES = Records(inputs=INPUTS, labels=torch.zeros(6).long())
KNOWN = Knowledge(candidates=CANDIDATES, value_range=([-2.0], [2.0]))


def claim(data: torch.Tensor) -> Reconstruction:
    return Reconstruction(data=data, labels=torch.zeros(len(data)).long())


def test_granted_candidates_are_no_reconstruction() -> None:
    data = torch.cat([(INPUTS + 2)[[4, 1]] / 4, torch.rand((1, 1, 4, 4))])
    with pytest.raises(AttackError, match=r"2 of 3 claimed examples are records .* granted as 'candidates'"):
        check_no_copies(claim(data), KNOWN, "here")


def test_granted_texts_are_no_reconstruction() -> None:
    tokens = torch.arange(12).reshape(3, 4)
    known = Knowledge(records=Records(inputs=tokens, labels=torch.zeros(3).long()))
    with pytest.raises(AttackError, match=r"1 of 1 claimed examples are records .* granted as 'records'"):
        check_no_copies(Texts(tokens=tokens[1:2], labels=torch.zeros(1).long()), known, "here")


@pytest.mark.parametrize(
    ("finding", "knowledge"),
    [
        (lambda: claim((INPUTS + 2)[:2] / 4 + 1e-3 * (INPUTS[:2] < 0)), KNOWN),
        (lambda: claim((INPUTS + 2)[:2] / 4), Knowledge(auxiliary=CANDIDATES, value_range=([-2.0], [2.0]))),
        (lambda: claim(torch.rand(2, 3, 4, 4)), KNOWN),
        (lambda: Membership(scores=torch.zeros(6)), KNOWN),
    ],
    ids=["near", "public", "other shape", "membership"],
)
def test_other_claims_pass(finding: Callable[[], Finding], knowledge: Knowledge) -> None:
    check_no_copies(finding(), knowledge, "here")
