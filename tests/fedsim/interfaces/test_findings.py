"""A finding is checked when it is made, and again when it is read: what is kept can be judged and drawn."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fedsim.audit.finding_files import load_claim, load_finding, read_facts, save_finding
from fedsim.base.errors import AttackError, TranscriptError
from fedsim.interfaces.findings import (
    Finding,
    Inference,
    LabelDistribution,
    LocalModel,
    PropertyPresence,
    Reconstruction,
    Representatives,
    Texts,
    client_ids,
)

GREY, KINDS = torch.full((2, 1, 4, 4), 0.5), torch.tensor([0, 1])
ABOUT: dict[str, Any] = {
    "attack": "sme", "plugin": "sme", "round": "1", "rounds": [1], "members": [], "first_round": 1, "victim": 0,
    "repeat": 0, "settings": {}, "changed": {}, "granted": [], "partial_records": "", "fingerprint": "",
    "variant": "0a1b", "knowledge": {}, "app": {},
    "command": "", "code": None, "model_code": None, "warnings": [], "seconds": 1.0,
}  # fmt: skip


def images(**parts: Any) -> Reconstruction:
    return Reconstruction(**{"data": GREY, "labels": KINDS, **parts})


def texts(**parts: Any) -> Texts:
    return Texts(**{"tokens": torch.zeros((2, 5), dtype=torch.long), "labels": KINDS, **parts})


def model(**parts: Any) -> LocalModel:
    return LocalModel(**{"state": {"w": torch.zeros(3)}, **parts})


def guess(**parts: Any) -> Inference:
    return Inference(**{"of": "source", "candidates": torch.tensor([0, 4]), "scores": torch.zeros(3, 2), **parts})


def curve(name: str, values: Any) -> dict[str, Any]:
    return {"trace": {name: values}}


def steps(*shape: int, at: Any, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {"snapshots": torch.zeros(shape, dtype=dtype), "snapshot_iterations": at}


BAD: list[tuple[Callable[..., Finding], dict[str, Any], str]] = [
    (
        images,
        {"labels": torch.tensor([[0, 1], [1, 0]])},
        "labels of torch.int64, shape (2, 2), expected one for each of",
    ),
    (images, {"labels": torch.tensor(1)}, "labels of torch.int64, shape (), expected one for each of 2 examples"),
    (images, {"labels": torch.tensor([0])}, "2 examples but 1 labels"),
    (images, {"labels": torch.tensor([True, False])}, "labels of torch.bool, shape (2,), expected integers"),
    (images, {"labels": torch.tensor([0j, 1j])}, "labels of torch.complex64, shape (2,), expected a dense tensor"),
    (images, {"labels": torch.tensor([0, -1])}, "labels that are not class indices"),
    (images, {"labels": torch.tensor([0, 1 << 40])}, "labels that are not class indices"),
    (images, {"labels": torch.tensor([0.0, float("inf")])}, "targets that are NaN or infinite"),
    (images, {"labels": [0, 1]}, "labels of type list, expected a torch.Tensor"),
    (images, {"data": GREY * 3}, "data outside [0, 1], or NaN"),
    (images, {"data": GREY * float("nan")}, "data outside [0, 1], or NaN"),
    (images, {"data": GREY.double()}, "data of torch.float64, shape (2, 1, 4, 4), expected torch.float32"),
    (images, {"data": GREY > 0}, "data of torch.bool, shape (2, 1, 4, 4), expected torch.float32"),
    (images, {"data": GREY * 1j}, "data of torch.complex64, shape (2, 1, 4, 4), expected a dense tensor"),
    (images, {"data": GREY.to_sparse()}, "data of torch.sparse_coo, torch.float32, shape (2, 1, 4, 4), expected a"),
    (images, {"data": GREY.to("meta")}, "data of torch.float32, shape (2, 1, 4, 4), expected a dense tensor"),
    (images, {"data": GREY[0, 0, 0]}, "data of torch.float32, shape (4,), expected example by its axes"),
    (images, {"data": GREY[:0], "labels": KINDS[:0]}, "data of torch.float32, shape (0, 1, 4, 4), expected at least"),
    (images, curve("l_sim", torch.zeros(0)), "a curve 'l_sim' of torch.float32, shape (0,), expected at least one"),
    (images, curve("objective", torch.zeros(3, 2)), "a curve 'objective' of torch.float32, shape (3, 2), expected one"),
    (images, curve("objective", torch.tensor(1.0)), "a curve 'objective' of torch.float32, shape (), expected one"),
    (images, curve("objective", torch.tensor([1, 2])), "a curve 'objective' of torch.int64, shape (2,), expected one"),
    (images, curve("objective", [1.0]), "a curve 'objective' of type list, expected a torch.Tensor"),
    (images, curve("<b>$x^2$", torch.zeros(2)), "calls a curve of its trace '<b>$x^2$', expected at most 40 letters"),
    (images, {"trace": [1.0]}, "returns a trace that is list, expected names to curves"),
    (images, steps(1, 2, 1, 4, 5, at=torch.tensor([0])), "snapshots of torch.float32, shape (1, 2, 1, 4, 5), expected"),
    (images, steps(1, 2, 1, 4, 4, at=None), "snapshots without snapshot_iterations, or the other way round"),
    (images, steps(1, 2, 1, 4, 4, at=torch.tensor([0, 1])), "snapshot_iterations of torch.int64, shape (2,), expected"),
    (
        images,
        steps(1, 2, 1, 4, 4, at=torch.tensor([0.5])),
        "snapshot_iterations of torch.float32, shape (1,), expected",
    ),
    (texts, {"tokens": torch.zeros(2, 5)}, "tokens of torch.float32, shape (2, 5), expected integers, example by"),
    (texts, {"tokens": torch.zeros((2, 5), dtype=torch.bool)}, "tokens of torch.bool, shape (2, 5), expected integers"),
    (texts, {"tokens": torch.full((2, 5), 1 << 40)}, "tokens below 0 or from 16777216 on"),
    (texts, curve("objective", torch.zeros(0)), "a curve 'objective' of torch.float32, shape (0,), expected at least"),
    (model, {"state": {}}, "a model without tensors, expected a mapping of names to tensors"),
    (model, {"state": {"w": [1.0]}}, "a model whose w is of type list, expected a torch.Tensor"),
    (model, {"state": {"w": torch.zeros(3) * 1j}}, "a model whose w is of torch.complex64, shape (3,), expected a"),
    (model, curve("objective", torch.zeros(3, 2)), "a curve 'objective' of torch.float32, shape (3, 2), expected one"),
    (guess, {"of": "tokens"}, "infers 'tokens', expected 'source' or 'attribute'"),
    (guess, {"scores": torch.zeros(3, 2, dtype=torch.long)}, "scores of torch.int64, shape (3, 2), expected floating"),
    (guess, {"scores": torch.zeros(0, 2)}, "scores of torch.float32, shape (0, 2), expected at least one value"),
    (guess, {"scores": torch.zeros(3)}, "scores candidates as (3,), expected records by 2 candidates"),
    (guess, {"candidates": torch.tensor([1, 1])}, "names a candidate twice, expected each once"),
    (guess, {"candidates": torch.tensor([0.0, 1.0])}, "candidates of torch.float32, shape (2,), expected integers"),
    (guess, {"candidates": torch.tensor([-1, 1])}, "candidates below 0 or from 18446744073709551616 on"),
]


@pytest.mark.parametrize(("make", "parts", "sentence"), BAD, ids=[f"{n}: {b[2][:40]}" for n, b in enumerate(BAD)])
def test_what_could_not_be_judged_or_drawn_is_refused_when_it_is_made(
    make: Callable[..., Finding], parts: dict[str, Any], sentence: str
) -> None:
    make()  # as it is without these parts, it is fine
    with pytest.raises(AttackError) as caught:
        make(**parts)
    verb = "" if sentence.split()[0] in ("calls", "returns", "infers", "scores", "names") else "claims "
    told = [f"the attack {verb}{sentence}", f"the attack claims {sentence}"]
    assert str(caught.value).startswith(tuple(told))
    assert "\n" not in str(caught.value)


def test_curves_may_have_gaps_and_leave_the_range_of_numbers() -> None:
    images(trace={"objective": torch.tensor([float("nan"), float("inf"), 1.0])})


@pytest.mark.parametrize("make", [images, texts, model, guess])
def test_a_finding_survives_its_file(make: Callable[..., Finding], tmp_path: Path) -> None:
    finding, path = make(trace={"objective": torch.tensor([2.0, 1.0])}), tmp_path / "finding.safetensors"
    save_finding(finding, path, ABOUT)
    again, about = load_claim(path)
    assert type(again) is type(finding)
    assert about == ABOUT
    assert all(torch.equal(tensor, finding.tensors[name]) for name, tensor in again.tensors.items())


@pytest.mark.parametrize(
    ("kind", "tensors", "why"),
    [
        ("reconstruction", {"data": GREY, "labels": torch.zeros(2, 2, dtype=torch.long)}, "claims labels of"),
        ("reconstruction", {"data": GREY, "labels": KINDS, "trace/l_sim": torch.zeros(0)}, "a curve 'l_sim' of"),
        (
            "reconstruction",
            {"data": GREY, "labels": KINDS, "trace/objective": torch.zeros(3, 2)},
            "a curve 'objective'",
        ),
        ("reconstruction", {"data": GREY * float("nan"), "labels": KINDS}, "claims data outside"),
        ("reconstruction", {"labels": KINDS}, "it has no 'data'"),
        (
            "reconstruction",
            {"data": GREY, "labels": KINDS, "snapshots": torch.zeros(1, 2, 1, 4, 4)},
            "without snapshot_iterations",
        ),
        ("representatives", {"data": GREY[0, 0, 0], "labels": KINDS}, "claims data of"),
        ("texts", {"tokens": GREY, "labels": KINDS}, "claims tokens of"),
        ("inference", {"source/scores": torch.zeros(3, 2)}, "it has no 'source/candidates'"),
        ("of nobody", {"data": GREY, "labels": KINDS}, "it is of the kind 'of nobody'"),
    ],
)
def test_a_file_that_holds_no_sound_finding_is_one_sentence(
    kind: str, tensors: dict[str, Any], why: str, tmp_path: Path
) -> None:
    path = tmp_path / "finding.safetensors"
    save_file(tensors, path, metadata=facts({**ABOUT, "kind": kind, "order_of_tensors": list(tensors)}))
    with pytest.raises(
        TranscriptError, match=r"finding.safetensors: is damaged \(.+\); remove it and attack again$"
    ) as e:
        load_finding(path)
    assert why in str(e.value)


def facts(about: Any) -> dict[str, str]:
    return {"about": json.dumps(about)}


@pytest.mark.parametrize("about", [[], None, {}])
def test_a_file_without_facts_is_one_sentence(about: Any, tmp_path: Path) -> None:
    path = tmp_path / "finding.safetensors"
    save_file({"data": GREY, "labels": KINDS}, path, metadata=facts(about))
    for read in (load_finding, load_claim, read_facts):
        with pytest.raises(TranscriptError, match=r"^[^\n]+: is damaged \([^\n]+\); remove it and attack again$"):
            read(path)


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("victim", "../0"),
        ("victim", -1),
        ("victim", 10**30),
        ("round", "one"),
        ("repeat", True),
        ("granted", "labels"),
        ("settings", [1]),
        ("settings", None),
        ("changed", None),
        ("seconds", "long"),
        ("seconds", None),
        ("rounds", None),
        ("warnings", None),
        ("variant", None),
        ("command", None),
        ("fingerprint", None),
        ("partial_records", None),
        ("knowledge", ["labels"]),
        ("app", None),
        ("attack", ["sme"]),
    ],
)
def test_a_fact_about_a_finding_that_cannot_be_is_named(fact: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "finding.safetensors"
    save_finding(images(), path, ABOUT | {fact: value})
    for read in (load_claim, read_facts):
        with pytest.raises(TranscriptError) as caught:
            read(path)
        assert str(caught.value) == f"{path}: is damaged ({fact} is {value!r}); remove it and attack again"


@pytest.mark.parametrize("fact", ABOUT)
def test_a_finding_that_lacks_a_fact_is_refused(fact: str, tmp_path: Path) -> None:
    path = tmp_path / "finding.safetensors"
    save_finding(images(), path, {key: value for key, value in ABOUT.items() if key != fact})
    for read in (load_claim, read_facts):
        with pytest.raises(TranscriptError) as caught:
            read(path)
        assert str(caught.value) == f"{path}: is damaged (it does not say its {fact}); remove it and attack again"


def test_representatives_are_checked_like_reconstructions() -> None:
    with pytest.raises(AttackError, match="data outside"):
        Representatives(data=GREY - 1, labels=KINDS)


def test_the_same_finding_is_the_same_bytes(tmp_path: Path) -> None:
    """Its hash is in the manifest; the library writes several keys of metadata in any order."""
    found = Reconstruction(data=torch.zeros(2, 1, 4, 4), labels=torch.zeros(2, dtype=torch.long))
    written = set()
    for number in range(20):
        save_finding(found, tmp_path / str(number), {"attack": "x", "victim": 1, "round": 1})
        written.add((tmp_path / str(number)).read_bytes())
    assert len(written) == 1
    assert load_finding(tmp_path / "0")[1] == {"attack": "x", "victim": 1, "round": 1}


HUGE = [0, 1 << 63, (1 << 64) - 1]


@pytest.mark.parametrize("clients", [[3, 5, 7], HUGE])
def test_all_ids_of_clients_survive_being_saved(clients: list[int], tmp_path: Path) -> None:
    messages = {"rounds": torch.ones(3, dtype=torch.long), "scores": torch.rand(3), "shares": torch.tensor([0.0, 1.0])}
    claims = [
        Inference(of="source", candidates=client_ids(clients), scores=torch.eye(3)),
        PropertyPresence(clients=client_ids(clients), **messages),
    ]
    for claim in claims:
        save_finding(claim, tmp_path / claim.kind, ABOUT)
    source, present = (load_finding(tmp_path / claim.kind)[0] for claim in claims)
    assert isinstance(source, Inference)
    assert isinstance(present, PropertyPresence)
    assert source.predictions.tolist() == present.clients.tolist() == clients


def test_what_is_no_id_of_a_client_may_not_be_as_large() -> None:
    with pytest.raises(AttackError, match=r"candidates of torch.uint64.* expected integers of shape \(3,\)"):
        Inference(of="attribute", candidates=client_ids(HUGE), scores=torch.eye(3))
    with pytest.raises(AttackError, match=r"rounds of torch.uint64.* expected integers of shape \(3,\)"):
        LabelDistribution(rounds=client_ids(HUGE), shares=torch.eye(3))


def test_a_large_id_that_is_named_twice_is_refused() -> None:
    with pytest.raises(AttackError, match="names a candidate twice"):
        Inference(of="source", candidates=client_ids([HUGE[2], HUGE[2]]), scores=torch.eye(2))


def test_a_finding_shows_shapes_and_ranges_never_contents() -> None:
    finding = images(data=torch.linspace(0, 0.75, 32).reshape(2, 1, 4, 4), **curve("objective", torch.ones(500)))
    assert repr(finding) == (
        "Reconstruction(data=<float32 2x1x4x4, 0 to 0.75>, labels=<int64 2, 0 to 1>, claims='update', "
        "trace={objective: <float32 500, 1 to 1>})"
    )


def test_a_large_model_shows_its_first_tensors() -> None:
    state = {f"layer{number}.weight": torch.zeros(3) for number in range(60)}
    assert repr(model(state=state)).endswith("layer2.weight: <float32 3, 0 to 0>, 57 more})")


def test_a_finding_of_another_package_is_short_too() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Echo(Finding):
        kind = "echo"
        sound: torch.Tensor

    assert repr(Echo(sound=client_ids([1 << 63, 3]))) == "Echo(sound=<uint64 2, 3 to 9223372036854775808>)"


def test_fields_that_are_numbers_are_saved_and_read_as_they_are() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Loudness(Finding):
        kind = "loudness"
        sounds: int
        level: float
        curve: torch.Tensor

    finding = Loudness(sounds=3, level=0.1, curve=torch.ones(2))
    again = Loudness.from_tensors(finding.claim_tensors, {})
    assert (again.sounds, again.level, again.curve.tolist()) == (3, 0.1, [1.0, 1.0])
    with pytest.raises(AttackError, match=r"claims sounds of torch.float32, shape \(\), expected one integer"):
        Loudness.from_tensors(finding.claim_tensors | {"sounds": torch.tensor(3.5)}, {})
