"""A federation on texts, attacked, scored and reported."""

from __future__ import annotations

import runpy
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedsim.audit.audit import Audit, open_audit
from fedsim.audit.finding_files import load_finding
from fedsim.base.errors import KnowledgeError
from fedsim.data import Dataset
from fedsim.federation.config import AttackFile
from fedsim.federation.data_folder import find_data_folder
from fedsim.federation.experiment import Experiment
from fedsim.federation.experiment_file import load_config
from fedsim.federation.open_run import OpenRun
from fedsim.federation.resolve import resolve
from fedsim.federation.run_folder import read_rows
from fedsim.federation.table_validation import validate_tables
from fedsim.interfaces.findings import Texts
from fedsim.report.page import write_report
from tests.support.experiments import make_tiny_config, run_serial

GOLDEN = Path(__file__).parents[1] / "golden" / "golden_material.py"
EXAMPLES = Path(__file__).parents[2] / "examples"
ATTACKS = [
    {"name": "tgias-ro-text", "gradients": 2, "optimizer": "adam", "distance": "cosine", "layers": "relative",
     "step_size": 0.1, "iterations": 50, "labels": "bias"},
    {"name": "embedding-rows"},
]  # fmt: skip


def make() -> Dataset:
    """The texts of the golden experiments, of words that HTML would trip over."""
    texts: Dataset = runpy.run_path(str(GOLDEN))["texts"]()
    return replace(texts, tokens=("<pad>", *(f"<b>&{place}" for place in range(48))))


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    module = ModuleType("own_texts")
    module.make = make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return {
        "data": {"name": "own_texts:make"},
        "partition": {"name": "iid", "samples_per_client": 2},
        "model": {"name": "text-cnn", "kernels": [3], "channels": 32, "dimension": 24, "pool": 2},
        "training": {"local_epochs": None, "local_steps": 1, "batch_size": 2, "batches": "fixed", "dropout": False,
                     "learning_rate": None},
        "federation": {"clients": 2, "rounds": 2},
        "strategy": {"name": "fedsgd", "learning_rate": 0.01},
        "adversary": {"when": "never", "victims": [0, 1], "rounds": "all", "workers": 1},
    }  # fmt: skip


def test_a_text_network_that_an_attack_does_not_read_is_refused_before_any_training(
    tables: dict[str, Any], tmp_path: Path
) -> None:
    config = make_tiny_config(**tables, attack=[{"name": "dager"}, {"name": "embedding-rows"}])
    experiment = Experiment(resolve(config))
    audit = Audit(
        folder=OpenRun(tmp_path), spec=config, experiment=experiment, base_folder=tmp_path, awaits_run=True, trust=True
    )
    [reason] = audit.refusal_reasons.values()
    assert reason.startswith("dager does not apply: the network: the model is a ")
    assert "expected one of transformer-encoder and" in reason


def test_a_federation_on_texts_is_attacked_scored_and_reported(tables: dict[str, Any], tmp_path: Path) -> None:
    run = run_serial(make_tiny_config(**tables, attack=ATTACKS), tmp_path / "run")
    audit = open_audit(run.path, None, trust=True)
    assert audit.run() == []
    finding, about = load_finding(run.findings / "tgias-ro-text" / "round-1-2-client-0-repeat-0.safetensors")
    assert isinstance(finding, Texts)
    assert "value_range" not in about["granted"]  # type: ignore[operator]
    audit.score()
    rows = read_rows(run.scores)
    names = ["recover_rate", "tokens_found", "recovered", "words_found", "identified", "label_accuracy"]
    assert [row["metric"] for row in rows] == names * 6
    temporal = [row for row in rows if row["attack"] == "tgias-ro-text" and row["metric"] == "tokens_found"]
    assert all(float(row["value"]) >= 0.5 > float(row["floor"]) for row in temporal)
    words = [row for row in rows if row["attack"] == "embedding-rows" and row["metric"] == "words_found"]
    assert all(float(row["value"]) > 0.9 for row in words)
    html = write_report(audit.folder, audit).read_text()
    assert "<h2>Texts</h2>" in html
    assert "&lt;b&gt;&amp;" in html
    assert "<b>" not in html
    truth = audit.case.truth(0, 1)
    assert truth is not None
    assert truth.padding == 0
    assert experiment_words(truth.data[0].tolist()) in html
    assert "<del>" in html


@pytest.mark.thorough
def test_transformers_give_the_texts_of_every_client_away_and_other_attacks_go_on(
    tables: dict[str, Any], tmp_path: Path
) -> None:
    """By the weights after one step; for 16 dimensions the texts have too many words."""
    del tables["strategy"]
    tables |= {
        "model": {"name": "transformer-encoder", "dim": 64},
        "training": {"local_epochs": None, "local_steps": 1, "batch_size": 2, "learning_rate": 0.1},
        "adversary": {"when": "never", "victims": [0, 1], "workers": 1},
        "attack": [{"name": "dager"}, {"name": "embedding-rows"}],
    }
    scores = {}
    for dim in (64, 16):
        tables["model"]["dim"] = dim
        run = run_serial(make_tiny_config(**tables), tmp_path / str(dim))
        audit = open_audit(run.path, None, trust=True)
        refused = audit.run()
        assert len(refused) == (0 if dim == 64 else 2)
        assert all("can be read" in str(failure) for failure in refused)
        audit.score()
        scores[dim] = {(row["attack"], row["metric"]): row for row in read_rows(run.scores)}
    for metric in ("recovered", "recover_rate", "label_accuracy"):
        assert float(scores[64]["dager", metric]["value"]) == 1
    assert float(scores[64]["dager", "recovered"]["floor"]) < 0.5
    assert ("dager", "recovered") not in scores[16]
    assert float(scores[16]["embedding-rows", "words_found"]["value"]) > 0.9


def experiment_words(tokens: list[int]) -> str:
    """A true text as the page must show it: without its padding, escaped."""
    return " ".join(f"&lt;b&gt;&amp;{token - 1}" for token in tokens if token)


def test_a_page_without_truth_shows_the_claims_alone(tables: dict[str, Any], tmp_path: Path) -> None:
    run = run_serial(make_tiny_config(**tables, attack=ATTACKS[1:]), tmp_path / "run")
    open_audit(run.path, None, trust=True).run()
    spec = validate_tables(AttackFile, {"adversary": {"knowledge": {}}, "attack": ATTACKS[1:]}, "attack.toml")
    elsewhere = Audit(folder=run, spec=spec, experiment=None, base_folder=tmp_path)
    html = write_report(elsewhere.folder, elsewhere).read_text()
    assert "Only claimed texts are shown, because the true ones are not known here." in html
    assert '<span class="small">words of all texts</span>' in html
    assert '<tr class="true">' not in html


def test_an_attack_on_texts_says_that_images_are_none(tmp_path: Path) -> None:
    experiment = Experiment(make_tiny_config(attack=ATTACKS[1:]))
    audit = Audit(folder=OpenRun(tmp_path), spec=experiment.config, experiment=experiment, base_folder=tmp_path)
    with pytest.raises(
        KnowledgeError,
        match=r"^embedding-rows is an attack on texts, and 'digits' holds numbers; choose an attack on numbers, or",
    ):
        audit.check()


@pytest.mark.slow
@pytest.mark.skipif(find_data_folder() is None, reason="FEDSIM_DATA is not set, which Reuters R8 is looked for in")
def test_the_example_reads_news_back(tmp_path: Path) -> None:
    run = run_serial(load_config(EXAMPLES / "text.toml"), tmp_path / "run")
    audit = open_audit(run.path, None)
    assert audit.run() == []
    rows = {(row["attack"], row["metric"]): row["value"] for row in audit.score()}
    assert rows["tgias-ro-text", "recover_rate"] > 0.9
    assert rows["embedding-rows", "words_found"] > 0.95
