"""What a finding has to look like is said before it is kept, without the truth."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedsim.audit.evaluation.evaluator import FindingSpec, check_claim, evaluator_of
from fedsim.base.errors import AttackError
from fedsim.base.task import Task
from fedsim.interfaces.attack import Knowledge, PartialRecords, Records
from fedsim.interfaces.findings import (
    Finding,
    Inference,
    LocalModel,
    Membership,
    PropertyPresence,
    Reconstruction,
    Representatives,
    Texts,
    client_ids,
)

IMAGES, WORDS, NUMBERS = Task((1, 4, 4), 3), Task((5,), 3, vocabulary=9), Task((1, 4, 4), 0)
BEFORE = {"w": torch.zeros(2, 3), "b": torch.zeros(2)}
HELD = Records(inputs=torch.zeros(4, 6), labels=torch.zeros(4, dtype=torch.long))
PARTIAL = PartialRecords(**vars(HELD), column="c", features=slice(0, 2), categories=("yes", "no"))
SNAPSHOTS: dict[str, Any] = {"snapshots": torch.zeros(1, 2, 1, 4, 4), "snapshot_iterations": torch.tensor([0])}


def make_spec(task: Task | None = IMAGES, **known: Any) -> FindingSpec:
    knowledge = Knowledge(**known)
    return FindingSpec(where="round 1, client 0", knowledge=knowledge, before=lambda: BEFORE, task=task, clients=3)


def data(*shape: int, labels: torch.Tensor | None = None, **more: Any) -> Reconstruction:
    kinds = torch.zeros(shape[0], dtype=torch.long) if labels is None else labels
    return Reconstruction(data=torch.zeros(shape), labels=kinds, **more)


def typical(*shape: int) -> Representatives:
    return Representatives(data=torch.zeros(shape), labels=torch.zeros(shape[0], dtype=torch.long))


def words(*shape: int) -> Texts:
    return Texts(tokens=torch.zeros(shape, dtype=torch.long), labels=torch.zeros(shape[0], dtype=torch.long))


def inferred(of: Any, records: int, *candidates: int) -> Inference:
    return Inference(of=of, candidates=client_ids(candidates), scores=torch.zeros(records, len(candidates)))


def present(*clients: int) -> PropertyPresence:
    scores, rounds = torch.zeros(len(clients)), torch.ones(len(clients), dtype=torch.long)
    return PropertyPresence(clients=client_ids(clients), rounds=rounds, scores=scores, shares=torch.tensor([0.0, 1.0]))


@pytest.mark.parametrize(
    ("rule", "finding"),
    [
        (make_spec(), data(2, 1, 4, 4, **SNAPSHOTS)),
        (make_spec(), data(1, 1, 4, 4)),
        (make_spec(), data(99, 1, 4, 4, claims="federation")),
        (make_spec(), typical(7, 1, 4, 4)),
        (make_spec(WORDS), words(2, 5)),
        (make_spec(NUMBERS), data(2, 1, 4, 4, labels=torch.zeros(2))),
        (make_spec(None), data(9, 8)),
        (make_spec(None, input_shape=(8,)), data(9, 8)),
        (make_spec(), LocalModel(state=BEFORE)),
        (make_spec(records=HELD), inferred("source", 4, 0, 2)),
        (replace(make_spec(), clients=None), inferred("source", 4, 0, (1 << 64) - 1)),
        (make_spec(), present(0, 2)),
        (make_spec(partial_records=PARTIAL), inferred("attribute", 4, 0, 1)),
    ],
)
def test_a_finding_of_the_right_form_passes(rule: FindingSpec, finding: Finding) -> None:
    evaluator_of(finding).check_form(finding, rule)


@pytest.mark.parametrize(
    ("rule", "finding", "sentence"),
    [
        (make_spec(), data(3, 2, 2), "examples of shape (2, 2), expected (1, 4, 4)"),
        (make_spec(), typical(7, 4, 4), "examples of shape (4, 4), expected (1, 4, 4)"),
        (make_spec(WORDS), words(2, 6), "examples of shape (6,), expected (5,)"),
        (make_spec(), words(2, 5), "data that are texts, expected numbers"),
        (make_spec(WORDS), data(2, 5), "data that are numbers, expected texts"),
        (make_spec(NUMBERS), data(2, 1, 4, 4), "labels that are classes, expected targets of a regression"),
        (make_spec(None, input_shape=(8,)), data(9, 7), "examples of shape (7,), expected (8,)"),
        (make_spec(), data(2, 1, 4, 4, labels=torch.tensor([0, 3])), "labels up to 3, expected at most 2"),
        (
            make_spec(WORDS),
            Texts(tokens=torch.tensor([[0, 1, 2, 3, 9]] * 2), labels=torch.tensor([0, 1])),
            "tokens up to 9, expected at most 8",
        ),
        (
            make_spec(),
            LocalModel(state={"w": BEFORE["w"]}),
            "a model whose b is missing, expected of torch.float32, shape (2,)",
        ),
        (
            make_spec(),
            LocalModel(state={**BEFORE, "w": torch.zeros(3, 2)}),
            "a model whose w is of torch.float32, shape (3, 2), expected of torch.float32, shape (2, 3)",
        ),
        (
            make_spec(),
            LocalModel(state={**BEFORE, "b": torch.zeros(2, dtype=torch.float64)}),
            "a model whose b is of torch.float64, shape (2,), expected of torch.float32, shape (2,)",
        ),
        (
            make_spec(),
            LocalModel(state={**BEFORE, "v": torch.zeros(1)}),
            "a model whose v is of torch.float32, shape (1,), expected missing",
        ),
        (make_spec(records=HELD), inferred("source", 5, 0, 2), "scores of records numbering 5, expected 4"),
        (make_spec(records=HELD), inferred("source", 4, 0, 3), "candidates [0, 3], expected numbers from 0 to 2"),
        (make_spec(), inferred("source", 1, 0, 1 << 63), f"candidates [0, {1 << 63}], expected numbers from 0 to 2"),
        (make_spec(), present(1, 1 << 63), f"messages of clients up to {1 << 63}, expected at most 2"),
        (
            make_spec(partial_records=PARTIAL),
            inferred("attribute", 4, 0, 1, 2),
            "candidates [0, 1, 2], expected numbers from 0 to 1",
        ),
    ],
)
def test_a_finding_of_another_form_is_one_sentence(rule: FindingSpec, finding: Finding, sentence: str) -> None:
    whole = f"round 1, client 0: the attack claims {sentence}; fix the attack"
    with pytest.raises(AttackError, match=f"^{re.escape(whole)}$"):
        evaluator_of(finding).check_form(finding, rule)


@pytest.mark.parametrize(
    ("finding", "fact"),
    [
        (Membership(scores=torch.zeros(4)), "candidates"),
        (inferred("source", 4, 0, 2), "records"),
        (inferred("attribute", 4, 0, 1), "partial_records"),
        (present(0, 2), "property_records"),
    ],
)
def test_claims_about_what_was_not_granted_are_refused(finding: Finding, fact: str) -> None:
    with pytest.raises(AttackError, match=f"is about {fact}, which it was not given; name '{fact}' in its 'needs'"):
        check_claim(finding, make_spec())


@pytest.mark.parametrize("name", ["psnr", "mse"])
def test_a_curve_that_only_the_evaluator_can_compute_is_refused(name: str) -> None:
    curve = torch.zeros(2)
    check_claim(data(2, 1, 4, 4, trace={"objective": curve, "l_sim": curve}), make_spec())
    with pytest.raises(AttackError) as refused:
        check_claim(data(2, 1, 4, 4, trace={name: curve}), make_spec())
    assert str(refused.value) == (
        f"round 1, client 0: the attack calls a curve of its trace '{name}', which only the evaluator can know; "
        "rename the curve"
    )
