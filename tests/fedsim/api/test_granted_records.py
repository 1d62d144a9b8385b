"""Records that are handed to `fedsim.attack`: none that is the client's own passes for one of nobody."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedsim
from fedsim.api.granted_records import drop_overlap
from fedsim.base.errors import ConfigError
from fedsim.interfaces.attack import Attack, KnownCandidates, PropertyRecords, Records, Target
from fedsim.interfaces.findings import Reconstruction
from fedsim.interfaces.knowledge import FACTS


def table(*numbers: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A record of two features for each number; its label is the number, too."""
    own = torch.tensor(numbers)
    return {"inputs": torch.stack([own, own + 100], dim=1).to(dtype), "labels": own}


def inputs(known: dict[str, Any], name: str) -> list[int]:
    return [int(number) for number in known[name].inputs[:, 0]]


def test_auxiliary_records_that_are_the_clients_own_are_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    members = torch.tensor([True, False])
    known = {
        "records": Records(**table(1, 2)),
        "known_candidates": KnownCandidates(**table(3, 4), members=members),
        "auxiliary": Records(**table(1, 5, 3, 4, dtype=torch.float64)),
        "property_records": PropertyRecords(**table(2, 6, 7), has=torch.tensor([True, False, True])),
    }
    with caplog.at_level(logging.WARNING, "fedsim"):
        kept = drop_overlap(known)
    assert inputs(kept, "auxiliary") == [5, 4]
    assert kept["auxiliary"].labels.tolist() == [5, 4]
    assert inputs(kept, "property_records") == [6, 7]
    assert kept["property_records"].has.tolist() == [False, True]
    assert [record.getMessage() for record in caplog.records] == [
        "attack: auxiliary: 2 of 4 records are left out, because each is equal to one that the client trains on",
        "attack: property_records: 1 of 3 records are left out, because each is equal to one that the client trains on",
    ]
    assert inputs(known, "auxiliary") == [1, 5, 3, 4]  # the caller's own are as they were


def test_a_record_with_another_label_is_no_twin() -> None:
    other = Records(inputs=table(1)["inputs"], labels=torch.tensor([0]))
    kept = drop_overlap({"records": Records(**table(1)), "auxiliary": other})
    assert kept["auxiliary"] is other


@pytest.mark.parametrize(
    ("known", "told"),
    [
        (
            {"records": Records(**table(1, 2)), "auxiliary": Records(**table(2, 1, 2))},
            "auxiliary: each of the 3 records is equal to one that the client trains on; hand over others",
        ),
        (
            {"candidates": Records(**table(1, 2, 1))},
            "candidates: record 2 is equal to record 0 of candidates, which is indistinguishable from it; remove",
        ),
        (
            {
                "candidates": Records(**table(1, 2)),
                "known_candidates": KnownCandidates(**table(3, 2), members=torch.tensor([True, False])),
            },
            "known_candidates: record 1 is equal to record 1 of candidates, which is indistinguishable from it; remove",
        ),
        (
            {"auxiliary": Records(inputs=torch.zeros(2, 2), labels=torch.zeros(3))},
            "auxiliary: got 2 inputs, 3 labels; hand over as many of each, and at least one",
        ),
        (
            {"auxiliary": Records(inputs=[1], labels=torch.zeros(1))},  # type: ignore[arg-type]
            "auxiliary: expected tensors of inputs and labels; hand over both",
        ),
    ],
)
def test_records_that_cannot_be_used_are_one_sentence(known: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=f"^attack: {re.escape(told)}"):
        drop_overlap(known)


class Told(Attack):
    """Claims the auxiliary records that it is handed."""

    uses = frozenset({"auxiliary", "records"})

    def _run(self, target: Target, progress: Any) -> Reconstruction:
        knowledge = target.knowledge
        assert knowledge.auxiliary is not None
        return Reconstruction(data=knowledge.auxiliary.inputs / 200, labels=knowledge.auxiliary.labels)


def test_an_attack_is_handed_none_of_the_clients_records_as_auxiliary() -> None:
    assert {"records", "auxiliary", "candidates", "known_candidates", "property_records"} <= set(FACTS)
    network = nn.Linear(2, 3)
    records = {"records": Records(**table(1, 2)), "auxiliary": Records(**table(1, 5))}
    finding = fedsim.attack(network, network, model=network, num_examples=2, attack=Told(), **records)
    assert isinstance(finding, Reconstruction)
    assert finding.labels is not None
    assert finding.labels.tolist() == [5]
