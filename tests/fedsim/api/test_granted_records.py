"""Records that are handed to `fedsim.attack`: none that is the client's own passes for one of nobody."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedsim
from clients.defenses.update_noise import UpdateNoise
from fedsim.api.granted_records import check_records, drop_overlap
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


def test_an_image_with_another_label_is_the_clients_own() -> None:
    images = torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    known = {
        "records": Records(inputs=images[:1], labels=torch.tensor([1])),
        "auxiliary": Records(inputs=images, labels=torch.tensor([5, 6, 7])),
    }
    assert drop_overlap(known)["auxiliary"].labels.tolist() == [6, 7]


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
    ],
)
def test_records_that_cannot_be_told_apart_are_one_sentence(known: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=f"^attack: {re.escape(told)}"):
        drop_overlap(known)


IMAGES, CLASSES = torch.rand(6, 1, 2, 2), torch.arange(6) % 3
FACTS_OF_MODEL = {"input_shape": (1, 2, 2), "num_classes": 3, "value_range": ([0.0], [1.0])}


@pytest.mark.parametrize(
    ("images", "labels", "told"),
    [
        (IMAGES, CLASSES[:3], "got 6 inputs, 3 labels; hand over as many of each, and at least one"),
        ([1], CLASSES, "expected tensors of inputs and labels; hand over both"),
        (IMAGES.log() / 0, CLASSES, "a record holds NaN or infinite values; correct it, or leave it out"),
        (IMAGES, CLASSES * torch.nan, "a record holds NaN or infinite values; correct it, or leave it out"),
        (
            IMAGES.expand(-1, 3, -1, -1),
            CLASSES,
            "its records are of shape (3, 2, 2), and input_shape is (1, 2, 2); hand over records of the same shape",
        ),
        (
            torch.full((6, 1, 2, 2), 255, dtype=torch.uint8),
            CLASSES,
            "its values are from 255 to 255, outside value_range; hand over records in the units in which the client",
        ),
        (torch.zeros(6, 1, 2, 2) - 0.5, CLASSES, "its values are from -0.5 to -0.5, outside value_range;"),
        (
            IMAGES,
            CLASSES - 1,
            "its labels, torch.int64 from -1 to 1, are not one of the classes 0 to 2 for each record;",
        ),
        (
            IMAGES,
            CLASSES + 1,
            "its labels, torch.int64 from 1 to 3, are not one of the classes 0 to 2 for each record;",
        ),
        (IMAGES, CLASSES.float(), "its labels, torch.float32 from 0 to 2, are not one of the classes 0 to 2 for"),
    ],
)
def test_records_that_the_model_cannot_be_fed_with_are_one_sentence(images: Any, labels: Tensor, told: str) -> None:
    """Values beyond the range, and classes that do not exist, would else make claims of nonsense."""
    known = {"auxiliary": Records(inputs=images, labels=labels), **FACTS_OF_MODEL}
    with pytest.raises(ConfigError, match=f"^attack: auxiliary: {re.escape(told)}"):
        check_records(known, "classes")


def test_records_have_the_types_that_the_model_is_fed_with() -> None:
    whole = (IMAGES > 0.5).to(torch.uint8)
    known = {"candidates": Records(inputs=whole, labels=CLASSES.to(torch.int32)), **FACTS_OF_MODEL}
    checked = check_records(known, "classes")["candidates"]
    assert (checked.inputs.dtype, checked.labels.dtype) == (torch.float32, torch.int64)
    tokens = Records(inputs=CLASSES[:, None], labels=CLASSES)
    assert check_records({"auxiliary": tokens}, "classes")["auxiliary"].inputs.dtype == torch.int64


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


class AsDefended(Attack):
    """Claims as many examples as it knows defenses."""

    uses = frozenset({"defenses"})

    def _run(self, target: Target, progress: Any) -> Reconstruction:
        count = len(target.knowledge.defenses or ())
        return Reconstruction(data=torch.zeros(count, 2), labels=torch.zeros(count, dtype=torch.int64))


def test_the_clients_defenses_can_be_known_without_a_run() -> None:
    network = nn.Linear(2, 3)

    def attack(known: Any) -> Any:
        return fedsim.attack(network, network, model=network, num_examples=1, attack=AsDefended(), defenses=known)

    assert len(attack([UpdateNoise(clip=1.0, noise_multiplier=0.1)]).data) == 1
    with pytest.raises(ConfigError, match=r"^attack: defenses: expected a list of objects of fedsim\.Defense"):
        attack(["update-noise"])
