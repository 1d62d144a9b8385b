"""Findings that anybody may have written: each is judged and drawn, or named in one sentence, as are the others."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from fedsim.audit.audit import Audit, open_audit
from fedsim.audit.finding_files import load_claim, save_finding, tensors_to_save
from fedsim.base.errors import TranscriptError
from fedsim.interfaces.findings import Finding, Inference, LocalModel, Reconstruction, Representatives, Texts
from fedsim.report.attack_traits import find_attack_traits, name_attacks, read_metadata, read_scores
from fedsim.report.finding_views import read_findings
from tests.support.experiments import make_tiny_config, run_serial

CURVE = {"objective": torch.tensor([2.0, 1.0])}
SOUND: dict[str, Finding] = {
    "reconstruction": Reconstruction(
        data=torch.full((2, 1, 8, 8), 0.5),
        labels=torch.tensor([1, 2]),
        trace=CURVE,
        snapshots=torch.zeros(1, 2, 1, 8, 8),
        snapshot_iterations=torch.tensor([1]),
    ),
    "representatives": Representatives(data=torch.full((2, 1, 8, 8), 0.5), labels=torch.tensor([1, 2]), trace=CURVE),
    "texts": Texts(tokens=torch.tensor([[1, 2], [3, 4]]), labels=torch.tensor([1, 2]), trace=CURVE),
    "source": Inference(of="source", candidates=torch.tensor([0, 1]), scores=torch.rand(2, 2), trace=CURVE),
    "attribute": Inference(of="attribute", candidates=torch.tensor([0, 1]), scores=torch.rand(2, 2), trace=CURVE),
    "model": LocalModel(state={"of another": torch.zeros(10)}, trace=CURVE),  # one of ours takes a second to judge
}
ABOUT: dict[str, Any] = {
    "attack": "odd", "plugin": "shared-model", "round": "1", "rounds": [1], "members": [], "first_round": 1,
    "victim": 0, "repeat": 0,
    "settings": {}, "changed": {}, "granted": [], "partial_records": "", "fingerprint": "", "variant": "0a1b",
    "knowledge": {}, "app": {}, "command": "", "code": None, "model_code": None, "warnings": [], "seconds": 1.0,
}  # fmt: skip
ODD = st.sampled_from([None, True, -1, 0, 99, 1 << 70, 0.5, "", "x", "1-9", [], [0], [[1]], {}, {"x": "<b>"}])
FILLS = st.sampled_from([0.0, 0.5, 1.0, -1.0, 3.0, 1e30, float("nan"), float("inf")])
TYPES = st.sampled_from(
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool]
)
SHAPES = st.sampled_from([(2, 1, 8, 8), (3, 1, 8, 8), (2,), (3,), (2, 2), (1, 2, 1, 8, 8), (10, 64), ()]) | st.lists(
    st.integers(0, 3), max_size=5
).map(tuple)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    kind, shape, fill = draw(TYPES), draw(SHAPES), draw(FILLS)
    return torch.full(shape, fill, dtype=torch.float64).to(kind)


@st.composite
def files(draw: st.DrawFn) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A sound finding of which a tensor or two, and perhaps a fact, are others or are missing."""
    held = tensors_to_save(draw(st.sampled_from(list(SOUND.values()))))
    for name in draw(
        st.lists(st.sampled_from([*held, "claims", "trace/psnr", "data", "labels"]), min_size=1, max_size=2)
    ):
        held.pop(name, None)
        if draw(st.integers(0, 3)):
            held[name] = draw(tensors())
    return held, ABOUT | draw(st.dictionaries(st.sampled_from(list(ABOUT)), ODD, max_size=1))


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Audit]:
    config = make_tiny_config(
        partition={"samples_per_client": 2},
        model={"name": "linear"},
        federation={"clients": 2, "rounds": 1},
        attack=[{"name": "shared-model"}],
        adversary={"when": "never", "victims": [0], "workers": 1},
    )
    folder = run_serial(config, tmp_path_factory.mktemp("odd") / "run")
    sound = folder.findings / "sound" / "f.safetensors"
    save_finding(SOUND["source"], sound, ABOUT | {"attack": "sound"})
    folder.manifest.note(sound)
    logging.disable(logging.CRITICAL)  # each is told in `failures`, too
    yield open_audit(folder.path, None)
    logging.disable(logging.NOTSET)


def assert_the_others_are_judged_and_drawn(audit: Audit) -> list[str]:
    """With the odd one named by the manifest, as whoever wrote it into the folder could have it named."""
    failures: list[str] = []
    audit.folder.manifest.note(audit.folder.findings / "odd" / "f.safetensors")
    rows = audit.score(failures)
    score_rows, facts = read_scores(audit.folder), list(read_metadata(audit.folder))
    names = name_attacks(score_rows, facts)
    found = read_findings(audit.folder, audit, [], failures, score_rows=score_rows, names=names)
    assert [row["metric"] for row in rows if row["attack"] == "sound"] == ["source_accuracy"]
    assert any(item.about["title"] == "sound" for item in found)
    assert ("sound", ABOUT["variant"]) in find_attack_traits(names, facts, audit)
    for told in failures:
        assert "\n" not in told
        assert "Traceback" not in told
        assert "Error: " not in told, told  # the name of an exception that nobody expected
    return failures


@settings(max_examples=25)
@given(file=files())
def test_whatever_tensors_a_finding_holds_it_is_judged_or_named(
    audit: Audit, file: tuple[dict[str, Tensor], dict[str, Any]]
) -> None:
    held, about = file
    path = audit.folder.findings / "odd" / "f.safetensors"
    path.parent.mkdir(exist_ok=True)
    save_file(held, path, metadata={"about": json.dumps(about)})
    assert_the_others_are_judged_and_drawn(audit)


@settings(max_examples=15)
@given(kind=st.sampled_from(list(SOUND)), data=st.data())
def test_whatever_bytes_of_a_finding_are_others_it_is_judged_or_named(
    audit: Audit, kind: str, data: st.DataObject
) -> None:
    path = audit.folder.findings / "odd" / "f.safetensors"
    save_finding(SOUND[kind], path, ABOUT)
    raw = bytearray(path.read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(raw) - 1), min_size=1, max_size=3)):
        raw[place] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)) | st.just(len(raw)))])
    assert_the_others_are_judged_and_drawn(audit)


@pytest.mark.parametrize(
    ("fact", "value", "told"),
    [
        ("variant", [0], "is damaged (variant is [0]); remove it and attack again"),
        ("settings", "x", "is damaged (settings is 'x'); remove it and attack again"),
        ("warnings", 0.5, "is damaged (warnings is 0.5); remove it and attack again"),
        ("victim", 99, "client 99: not scored: there is no client 99, expected one from 0 to 1"),
        ("settings", None, "is damaged (settings is None); remove it and attack again"),
        ("variant", None, "is damaged (variant is None); remove it and attack again"),
    ],
)
def test_an_odd_fact_about_a_finding_is_named(audit: Audit, fact: str, value: Any, told: str) -> None:
    path = audit.folder.findings / "odd" / "f.safetensors"
    save_finding(SOUND["source"], path, ABOUT | {fact: value})
    failures = assert_the_others_are_judged_and_drawn(audit)
    assert failures[0].endswith(told)


@pytest.mark.parametrize("claims", [torch.tensor(-1), torch.tensor(3), torch.tensor(0.5), torch.tensor([1])])
def test_claims_that_are_none_are_not_taken_for_others(claims: Tensor, tmp_path: Path) -> None:
    tensors = tensors_to_save(SOUND["texts"]) | {"claims": claims}
    facts = ABOUT | {"kind": "texts", "order_of_tensors": list(tensors)}
    save_file(tensors, tmp_path / "f", metadata={"about": json.dumps(facts)})
    with pytest.raises(TranscriptError, match=r"the attack claims claims of .* expected one integer from 0 to 2"):
        load_claim(tmp_path / "f")
