"""Texts without any token cannot be recovered, and are left out of what is said about the others."""

from __future__ import annotations

import pytest
import torch

from fedsim.audit.evaluation.scoring import score_examples
from fedsim.audit.evaluation.truth import Truth
from fedsim.interfaces.findings import Texts
from fedsim.interfaces.modality import PublicExamples

PADDING = 0
TEXTS = torch.tensor([[3, 4, 5], [6, 7, PADDING], [PADDING] * 3, [8, 9, 3]])
LABELS = torch.tensor([0, 1, 0, 1])
PUBLIC = PublicExamples(
    data=torch.randint(1, 10, (40, 3), generator=torch.Generator().manual_seed(1)), labels=LABELS.repeat(10)
)


@pytest.mark.parametrize("claimed", [[0, 1, 3], [3, 2, 1, 0]])
def test_three_texts_that_are_found_whole_beside_an_empty_one_reach_the_ceiling(claimed: list[int]) -> None:
    finding = Texts(tokens=TEXTS[claimed], labels=LABELS[claimed])
    truth = Truth(data=TEXTS, labels=LABELS, padding=PADDING)
    found = {item.metric: item for item in score_examples(finding, truth, public=PUBLIC, rng=torch.Generator())}
    for metric in ("recover_rate", "tokens_found", "recovered", "words_found"):
        assert found[metric].value == pytest.approx(found[metric].ceiling) == 1.0
        assert 0 <= found[metric].floor <= 1


def test_where_all_texts_are_empty_nothing_is_said_and_why() -> None:
    finding, truth = Texts(tokens=TEXTS[:1], labels=LABELS[:1]), Truth(data=TEXTS[2:3], labels=LABELS[2:3], padding=0)
    found = {item.metric: item for item in score_examples(finding, truth, public=PUBLIC, rng=torch.Generator())}
    assert found["recover_rate"].missing == "no text has any token"
