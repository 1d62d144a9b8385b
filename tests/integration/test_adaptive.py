"""Attacks made twice, without and with knowledge of the clients' defenses: in a run, by a file, from Python."""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedsim
from fedsim.audit.audit import open_audit
from fedsim.audit.finding_files import load_claim, load_finding, read_facts
from fedsim.base.errors import ConfigError
from fedsim.federation.config import AttackFile
from fedsim.federation.table_validation import validate_tables
from tests.support.experiments import make_tiny_config, run_serial

INVERTING = {"name": "inverting-gradients", "iterations": 3}
DECODING = {"name": "strangers_who_adapt:Decoder", "label": "decoder"}
STRANGERS = '''
"""Attacks of somebody else."""
from dataclasses import dataclass
import torch
from fedsim.interfaces.attack import Attack, Paper
from fedsim.interfaces.findings import LocalModel, Reconstruction

@dataclass(frozen=True, kw_only=True)
class Decoder(Attack):
    """Claims the broadcast weights, or zeros where it knows that some numbers were not sent."""
    paper = Paper(title="T", authors="A", venue="V", year=2020)
    uses = frozenset({"defenses"})

    def _run(self, target, progress):
        update, knowledge = target.read_update(), target.knowledge
        known = [type(defense).__name__ for defense in knowledge.defenses or ()]
        factor = 0 if known == ["RandomMask"] else 1
        return LocalModel(state={name: factor * tensor for name, tensor in update.before.items()})

@dataclass(frozen=True, kw_only=True)
class Sizes(Attack):
    """Claims grey images of the size of the model that it builds on."""
    paper = Paper(title="T", authors="A", venue="V", year=2020)
    needs = frozenset({"input_shape"})
    uses = frozenset({"defenses"})
    source: str = "decoder"

    @property
    def builds_on(self):
        return self.source

    def _run(self, target, progress):
        update, knowledge = target.read_update(), target.knowledge
        size = min(sum(tensor.abs().sum().item() for tensor in knowledge.models[target.victim].values()), 1.0)
        data = torch.full((update.num_examples, *knowledge.input_shape), size / (2 if knowledge.defenses else 1))
        return Reconstruction(data=data, labels=torch.zeros(update.num_examples, dtype=torch.long))
'''


@pytest.fixture(scope="module")
def record_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """A new run folder with the same recording of defended clients each time."""
    config = make_tiny_config(
        defense=[{"name": "random-mask"}],
        partition={"samples_per_client": 8},
        federation={"rounds": 1},
        attack=[],
    )
    folder = tmp_path_factory.mktemp("runs")
    run = run_serial(config, folder / "run").path
    numbers = itertools.count()
    return lambda: Path(shutil.copytree(run, folder / f"copy-{next(numbers)}"))


def spec(*attacks: dict[str, Any], defenses: bool = True, **adversary: Any) -> AttackFile:
    table = {"victims": [0, 2], "rounds": [1], "workers": 1, "knowledge": {"labels": True, "defenses": defenses}}
    return validate_tables(AttackFile, {"adversary": table | adversary, "attack": list(attacks)}, "attack.toml")


def findings(run: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {
        str(path.relative_to(run / "findings")): load_finding(path)[0].tensors  # type: ignore[misc]
        for path in sorted((run / "findings").glob("*/*.safetensors"))
    }


def granted(run: Path) -> dict[str, list[str]]:
    return {
        path.parent.name: list(read_facts(path)["granted"])  # type: ignore[call-overload]
        for path in sorted((run / "findings").glob("*/*.safetensors"))
    }


def test_an_attack_is_made_without_and_with_the_defenses_and_only_the_one_is_handed_them(
    record_run: Callable[[], Path],
) -> None:
    run = record_run()
    assert open_audit(run, spec(INVERTING)).run() == []
    told = granted(run)
    assert told.keys() == {"inverting-gradients", "inverting-gradients adaptive"}
    assert "defenses" not in told["inverting-gradients"]
    assert told["inverting-gradients adaptive"] == sorted(
        [*told["inverting-gradients"], "defenses"], key=list(fedsim.Knowledge.__dataclass_fields__).index
    )
    found = findings(run)
    for victim in (0, 2):
        naive, adaptive = (
            found[f"{title}/round-1-client-{victim}-repeat-0.safetensors"]["data"]
            for title in ("inverting-gradients", "inverting-gradients adaptive")
        )
        assert naive.shape == adaptive.shape
        assert not torch.equal(naive, adaptive)


def test_who_knows_a_defense_whose_view_is_the_gradient_itself_finds_the_same_to_the_bit(tmp_path: Path) -> None:
    config = make_tiny_config(
        defense=[{"name": "dp-sgd", "noise_multiplier": 0.1}], federation={"rounds": 1}, attack=[]
    )
    run = run_serial(config, tmp_path / "run").path
    assert open_audit(run, spec(INVERTING, victims=[0])).run() == []
    naive, adaptive = findings(run).values()
    assert naive.keys() == adaptive.keys()
    assert all(torch.equal(tensor, adaptive[name]) for name, tensor in naive.items())


def test_without_the_grant_or_a_defense_each_attack_is_made_once(
    record_run: Callable[[], Path], tmp_path: Path
) -> None:
    withheld = record_run()
    assert open_audit(withheld, spec(INVERTING, defenses=False)).run() == []
    assert granted(withheld).keys() == {"inverting-gradients"}
    bare = run_serial(make_tiny_config(federation={"rounds": 1}, attack=[]), tmp_path / "bare").path
    assert open_audit(bare, spec(INVERTING)).run() == []
    assert granted(bare).keys() == {"inverting-gradients"}


@pytest.mark.thorough
def test_workers_find_the_same_and_nothing_is_made_twice(record_run: Callable[[], Path]) -> None:
    alone, together = record_run(), record_run()
    assert open_audit(alone, spec(INVERTING)).run() == []
    assert open_audit(together, spec(INVERTING, workers=2)).run() == []
    ours, theirs = findings(alone), findings(together)
    assert ours.keys() == theirs.keys()
    assert len(ours) == 4
    for name, tensors in ours.items():
        assert all(torch.equal(tensor, theirs[name][key]) for key, tensor in tensors.items()), name
    stamps = {path: path.stat().st_mtime_ns for path in together.glob("findings/*/*.safetensors")}
    assert open_audit(together, spec(INVERTING)).run() == []
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert len(list(together.glob("findings/*/*.safetensors"))) == 4


def test_a_naive_finding_stays_when_the_defenses_are_granted_later(record_run: Callable[[], Path]) -> None:
    run = record_run()
    assert open_audit(run, spec(INVERTING, defenses=False)).run() == []
    before = {path: path.stat().st_mtime_ns for path in run.glob("findings/*/*.safetensors")}
    audit = open_audit(run, spec(INVERTING))
    assert audit.run() == []
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert granted(run).keys() == {"inverting-gradients", "inverting-gradients adaptive"}
    rows = audit.score()
    assert {row["attack"] for row in rows} == {"inverting-gradients", "inverting-gradients adaptive"}
    assert not [row for row in rows if row.get("outdated")]


def test_a_program_gets_what_the_one_who_knows_found(record_run: Callable[[], Path]) -> None:
    run = fedsim.open(record_run())
    naive = run.attack("inverting-gradients", victim=0, iterations=3)
    adaptive = run.attack("inverting-gradients", victim=0, iterations=3, knowledge={"defenses": True})
    kept = {path.parent.name: load_claim(path)[0] for path in run.path.glob("findings/*/*.safetensors")}
    assert kept.keys() == {"inverting-gradients", "inverting-gradients adaptive"}
    assert torch.equal(naive.data, kept["inverting-gradients"].data)  # type: ignore[attr-defined]
    assert torch.equal(adaptive.data, kept["inverting-gradients adaptive"].data)  # type: ignore[attr-defined]
    assert set(run.scores["attack"]) == {"inverting-gradients", "inverting-gradients adaptive"}


@pytest.mark.isolated
def test_a_stranger_is_handed_the_defenses_in_a_process_of_its_own(
    record_run: Callable[[], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And who builds on local models builds on those of the attack that it names."""
    (tmp_path / "strangers_who_adapt.py").write_text(STRANGERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("strangers_who_adapt", None)
    run = record_run()
    sizes = [
        {"name": "strangers_who_adapt:Sizes", "label": label, "source": source}
        for label, source in (("sizes", "decoder"), ("sizes of who knows", "decoder adaptive"))
    ]
    assert open_audit(run, spec(DECODING, *sizes, victims=[0]), tmp_path).run() == []
    found = findings(run)
    file = "round-1-client-0-repeat-0.safetensors"
    assert any(tensor.any() for tensor in found[f"decoder/{file}"].values())
    assert not any(tensor.any() for tensor in found[f"decoder adaptive/{file}"].values())
    grey = {name.partition("/")[0]: t["data"].mean().item() for name, t in found.items() if name.startswith("sizes")}
    assert grey == {"sizes": 1, "sizes adaptive": 0.5, "sizes of who knows": 0, "sizes of who knows adaptive": 0}


def test_a_label_that_the_adaptive_attack_would_have_is_refused(record_run: Callable[[], Path]) -> None:
    taken = {**INVERTING, "label": "inverting-gradients adaptive"}
    with pytest.raises(ConfigError, match="is what 'inverting-gradients' is called where it knows the defenses"):
        open_audit(record_run(), spec(INVERTING, taken)).run()
