"""The Python interface: a run made, read, attacked and reported without the command line."""

from __future__ import annotations

import gc
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import tomli_w
import torch
from flwr.serverapp.strategy import FedAvg
from safetensors.torch import save_file
from torch import nn

import fedsim
from adversaries.inversion.surrogate_model import SurrogateModelExtension
from clients.defenses.update_noise import UpdateNoise
from fedsim import Run, Transcript
from fedsim.api import pipeline, runs
from fedsim.api.adversaries import read_adversary
from fedsim.api.frames import SUMMARY_COLUMNS
from fedsim.api.in_memory import _infer_classes
from fedsim.api.logs import listen
from fedsim.api.runs import Report
from fedsim.audit.audit import open_audit
from fedsim.audit.finding_files import read_facts
from fedsim.base import progress
from fedsim.base.errors import (
    AttackCrash,
    AttackError,
    ConfigError,
    FedsimError,
    KnowledgeError,
    PluginError,
    RunError,
    TranscriptError,
)
from fedsim.federation.open_run import OpenRun
from tests.support.garbage import count_frozen_objects

TABLES: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"name": "iid", "samples_per_client": 4},
    "model": {"name": "mlp"},
    "training": {"local_epochs": 1, "batch_size": 4},
    "federation": {"clients": 3, "rounds": 1, "engine": "serial"},
    "adversary": {"victims": [0]},
    "attack": [{"name": "inverting-gradients", "iterations": 3}],
}


@dataclass(frozen=True, kw_only=True)
class Grey(fedsim.Attack):
    """Claims grey examples."""

    value: float = 0.5
    needs: ClassVar[frozenset[str]] = frozenset({"input_shape"})
    paper: ClassVar[fedsim.Paper] = fedsim.Paper(title="Grey", authors="Nobody", venue="Nowhere", year=2026)

    def _run(self, target: Any, progress: Any) -> Any:
        if self.value < 0:
            raise AttackError("grey: below black")
        update = target.read_update()
        data = torch.full((update.num_examples, *target.knowledge.input_shape), self.value)
        return fedsim.Reconstruction(data=data, labels=torch.zeros(update.num_examples, dtype=torch.int64))


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def strategy() -> FedAvg:
    return FedAvg(min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1)


@pytest.fixture(scope="module")
def made_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return fedsim.run(TABLES, tmp_path_factory.mktemp("runs") / "made")


@pytest.fixture
def finished_run(made_run: Run, tmp_path: Path) -> Run:
    """Return a copy of that run, of which no other test sees what is done with it."""
    return fedsim.open(shutil.copytree(made_run.path, tmp_path / "made"))


def is_a_sentence(error: FedsimError) -> bool:
    text = str(error)
    return "\n" not in text and not text.endswith(".")


# Making and reading.


def test_a_run_of_a_dict_leaves_what_the_command_leaves_and_is_read_as_frames(finished_run: Run) -> None:
    for name in ("experiment.toml", "report.html", "log.txt", "metrics.csv", "scores.csv", "manifest.json"):
        assert (finished_run.path / name).stat().st_size > 0, name
    assert list(finished_run.metrics["round"]) == [1]
    assert finished_run.metrics["accuracy"].dtype == float
    assert set(finished_run.scores["attack"]) == {"inverting-gradients"}
    assert finished_run.scores.query("metric == 'psnr'")["value"].item() > 0
    update = finished_run.transcript.update(1, 0)
    assert update.num_examples == 4
    assert [(found.attack, found.victim, found.round) for found in finished_run.findings] == [
        ("inverting-gradients", 0, "1")
    ]


def test_a_path_a_dict_and_a_config_give_the_same_transcript_and_set_changes_settings(
    finished_run: Run, tmp_path: Path
) -> None:
    text = (finished_run.path / "experiment.toml").read_text()
    (tmp_path / "tiny.toml").write_text(text)
    alone = {"adversary.when": "never"}
    changed = {"federation.seed": 3, **alone}
    hashes = [
        fedsim.run(tmp_path / "tiny.toml", tmp_path / "a", set=alone).transcript.hash(),
        fedsim.run(fedsim.Config.model_validate(tomllib.loads(text)), tmp_path / "b", set=alone).transcript.hash(),
    ]
    assert hashes == [finished_run.transcript.hash()] * 2
    assert fedsim.run(TABLES, tmp_path / "c", set=changed).transcript.hash() != finished_run.transcript.hash()
    assert "seed" not in TABLES["federation"]


def test_progress_is_told_to_the_callback(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    fedsim.run(TABLES, tmp_path / "run", progress=lambda *step: told.append(step))
    assert ("rounds", 1, 1) in told
    assert ("inverting-gradients, round 1, client 0", 3, 3) in told


def test_the_report_shows_in_a_notebook(finished_run: Run) -> None:
    page = finished_run.report()
    assert page.path == finished_run.path / "report.html"
    assert page.failures == ()
    assert page._repr_html_().startswith("<iframe")
    assert "&lt;html" in page._repr_html_()


def test_a_finished_run_resumes_to_itself(finished_run: Run) -> None:
    before = finished_run.transcript.hash(), finished_run.scores.to_csv()
    assert finished_run.resume() is finished_run
    assert (finished_run.transcript.hash(), finished_run.scores.to_csv()) == before


@pytest.mark.parametrize(
    ("model", "whose"), [("", ""), ("shared", " of the shared model"), ("personal", " of the clients' own models")]
)
def test_a_run_says_whose_models_its_accuracy_is_of(
    model: str, whose: str, finished_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"client": "server", "accuracy": "0.5", "model": model}
    monkeypatch.setattr(runs, "read_metrics", lambda folder: [row])
    assert repr(fedsim.open(finished_run.path)).endswith(f", accuracy 50.0 %{whose})")


def test_a_run_and_its_findings_are_shown_in_a_line(finished_run: Run) -> None:
    text = repr(fedsim.open(finished_run.path))
    assert text.startswith(f"Run('{finished_run.path}', 1 recorded round, 1 finding of inverting-gradients")
    assert re.search(r", accuracy \d+\.\d %\)$", text)
    found = repr(finished_run.findings[0])
    assert found.startswith("AttackFinding(attack='inverting-gradients', victim=0, round='1', repeat=0, finding=")
    assert "tensor(" not in found
    assert "about=" not in found


def test_a_run_that_cannot_be_read_is_still_shown(tmp_path: Path) -> None:
    assert repr(Run(tmp_path)) == f"Run({str(tmp_path)!r})"


def test_the_summary_has_the_verdicts_of_the_report(finished_run: Run) -> None:
    summary = finished_run.summary()
    assert list(summary.columns) == list(SUMMARY_COLUMNS)
    first = summary.iloc[0]
    assert (first["attack"], first["metric"], first["victims"]) == ("inverting-gradients", "psnr", 1)
    assert first["value"] == finished_run.scores.query("metric == 'psnr'")["value"].mean()
    assert first["verdict"] in ("beyond the floor", "not beyond the floor")
    assert first["why"] == "one victim only"


def test_the_summary_of_a_run_without_scores_is_empty(tmp_path: Path) -> None:
    run = fedsim.run(TABLES, tmp_path / "run", set={"adversary.when": "never"})
    assert run.summary().empty
    assert list(run.summary().columns) == list(SUMMARY_COLUMNS)


@pytest.mark.parametrize("table", ["metrics", "ledger", "exposure", "epsilons", "scores"])
def test_a_table_that_a_run_does_not_have_has_columns_and_no_rows(table: str, tmp_path: Path) -> None:
    """As the accuracy of a run whose first round failed, or the ledger of clients without a defense."""
    (tmp_path / "experiment.toml").write_bytes(Path("examples/quickstart.toml").read_bytes())
    frame = getattr(fedsim.open(tmp_path), table)
    assert (len(frame), "client" in frame or "victim" in frame) == (0, True)


# Attacking.


def test_only_the_victims_that_were_asked_for_are_printed(finished_run: Run, tmp_path: Path) -> None:
    shutil.copytree(finished_run.path, tmp_path / "run")
    folder = OpenRun(tmp_path / "run")
    done = pipeline.attack(folder, read_adversary(folder, None, ["adversary.victims=[1, 2]"]))
    assert {reading.summary.count for reading in done.readings if not reading.summary.missing} == {2}
    assert "Findings of 1 further victim, from earlier attacks, are in the report" in done.remarks[-1]
    again = pipeline.attack(folder, read_adversary(folder, None, ["adversary.victims=[0, 1, 2]"]))
    assert {reading.summary.count for reading in again.readings if not reading.summary.missing} == {3}
    assert not any("further victim" in remark for remark in again.remarks)


def test_an_attack_is_scored_and_kept_like_any_other(finished_run: Run) -> None:
    before = len(finished_run.scores)
    finding = finished_run.attack("sme", victim=1, iterations=3)
    assert isinstance(finding, fedsim.Reconstruction)
    own = finished_run.scores.query("attack == 'sme' and victim == 1")
    assert 0 < len(own) == len(finished_run.scores) - before
    [kept] = [found for found in finished_run.findings if (found.attack, found.victim) == ("sme", 1)]
    assert torch.equal(kept.finding.data, finding.data)  # type: ignore[union-attr]
    assert "run.attack('sme', victim=1, iterations=3)" in kept.about["command"]
    again = fedsim.open(finished_run.path).attack("sme", victim=1, iterations=3)
    assert torch.equal(again.data, finding.data)  # type: ignore[union-attr]


def test_two_settings_of_one_attack_are_kept_beside_one_another_and_each_call_returns_its_own(
    finished_run: Run,
) -> None:
    first, second = (finished_run.attack("sme", victim=2, iterations=count) for count in (2, 4))
    again = finished_run.attack("sme", victim=2, iterations=2)
    assert torch.equal(again.data, first.data)  # type: ignore[union-attr]
    assert not torch.equal(second.data, first.data)  # type: ignore[union-attr]


def test_an_attack_of_this_program_is_compared_with_the_others(finished_run: Run) -> None:
    finding = finished_run.attack(Grey(value=0.25), victim=0)
    assert torch.equal(finding.data, torch.full((4, 1, 8, 8), 0.25))  # type: ignore[union-attr]
    assert "Grey" in set(finished_run.scores["attack"])
    assert "Grey" in finished_run.report().path.read_text()


def test_an_instance_of_a_registered_attack_is_called_by_its_name(finished_run: Run) -> None:
    finished_run.attack(SurrogateModelExtension(iterations=2), victim=0)
    [kept] = [found for found in finished_run.findings if found.attack == "sme" and found.victim == 0]
    assert kept.about["plugin"] == "sme"


def test_knowledge_is_granted_and_withheld(finished_run: Run) -> None:
    with pytest.raises(KnowledgeError, match="value_range"):
        finished_run.attack("sme", victim=0, iterations=2, knowledge={"value_range": False})


# Bad input: one sentence each, nothing computed is lost.


@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [
        (lambda run: run.attack("sme", victim=77), ConfigError, "client 77 is not recorded; recorded: 0, 1, 2"),
        (lambda run: run.attack("sme", round=9), ConfigError, "round 9 is not recorded"),
        (lambda run: run.attack("sme", round=[1, 1]), ConfigError, "reads one round"),
        (lambda run: run.attack("smee"), PluginError, "did you mean 'sme'"),
        (lambda run: run.attack("sme", iteration=3), ConfigError, "did you mean 'iterations'"),
        (lambda run: run.attack(Grey(), value=3.0), ConfigError, "the attack is an object"),
        (lambda run: run.attack(Grey(value=-1.0), victim=0), AttackError, "below black"),
        (lambda run: fedsim.open(run.path / "nowhere"), ConfigError, "no such run folder"),
        (lambda run: fedsim.open(run.path.parent), ConfigError, "holds no run"),
        (lambda run: fedsim.run({"federation": {"clientz": 3}}, run.path / "x"), ConfigError, "did you mean 'clients'"),
        (lambda run: fedsim.run({"dta": {}}, run.path / "x"), ConfigError, "did you mean 'data'"),
        (lambda run: fedsim.run({"model": 3}, run.path / "x"), ConfigError, "torch.nn.Module, got int"),
        (lambda run: fedsim.run({"defense": [3]}, run.path / "x"), ConfigError, "fedsim.Defense"),
        (lambda run: fedsim.run(3, run.path / "x"), ConfigError, "expected a path, a dict or a Config"),
        (lambda run: fedsim.run(TABLES), ConfigError, "name the run folder"),
        (lambda run: fedsim.run(TABLES, run.path), ConfigError, "is not empty"),
        (lambda run: fedsim.run(TABLES, run.path / "x", set={"model.name.x": 1}), ConfigError, "is a value"),
        (lambda run: fedsim.run(TABLES, run.path / "x", set={"federation.roundz": 1}), ConfigError, "mean 'rounds'"),
        (lambda run: fedsim.run(TABLES, run.path / "x", set={3: 1}), ConfigError, "keys such as 'federation.rounds'"),
        (lambda run: fedsim.run(TABLES, run.path / "x", set=["a=1"]), ConfigError, "set: expected a dict"),
        (lambda run: fedsim.run(TABLES, 3), ConfigError, "out: expected a path, got int"),
        (lambda run: fedsim.open(None), ConfigError, "open: expected a path, got NoneType"),
        (lambda run: run.attack("sme", victim=-1), ConfigError, "client -1 is not recorded"),
        (lambda run: run.attack("sme", victim="0"), ConfigError, "valid integer, got '0'"),
        (lambda run: run.attack("sme", iterations=torch.tensor(2)), ConfigError, "iterations: expected a number"),
        (lambda run: run.attack("sme", knowledge=["labels"]), ConfigError, "knowledge: expected a dict, got list"),
        (lambda run: run.attack("sme", knowledge={"modl": True}), ConfigError, "did you mean 'model'"),
        (lambda run: run.attack("sme", knowledge={"model": network()}), ConfigError, "model: expected a number"),
    ],
)
def test_bad_input_is_one_sentence_and_loses_nothing(
    call: Callable[[Run], object], kind: type[FedsimError], says: str, finished_run: Run
) -> None:
    before = finished_run.transcript.hash(), finished_run.scores.to_csv(), len(finished_run.findings)
    with pytest.raises(kind, match=re.escape(says)) as caught:
        call(finished_run)
    assert is_a_sentence(caught.value), caught.value
    assert (finished_run.transcript.hash(), finished_run.scores.to_csv(), len(finished_run.findings)) == before
    assert not (finished_run.path / "x").exists()


def test_an_attack_that_fails_in_a_run_is_raised_and_all_else_is_kept(tmp_path: Path) -> None:
    tables = {**TABLES, "attack": [*TABLES["attack"], Grey(value=-1.0)]}
    with pytest.raises(RunError, match=r"below black.*all else is kept, fedsim\.open"):
        fedsim.run(tables, tmp_path / "run")
    assert set(fedsim.open(tmp_path / "run").scores["attack"]) == {"inverting-gradients"}


def test_an_edited_table_or_finding_is_not_read_as_if_it_were_the_runs(tmp_path: Path) -> None:
    run = fedsim.run(TABLES, tmp_path / "run")
    [finding] = run.path.glob("findings/*/*.safetensors")
    with (run.path / "scores.csv").open("a") as file:
        file.write("sme,0,1,0,psnr,99.0\n")
    finding.write_bytes(b"garbage")
    with pytest.raises(RunError, match=r"scores\.csv: is not what this run wrote"):
        _ = run.scores
    with pytest.raises(RunError, match="is not what this run found"):
        _ = run.findings
    (run.path / "transcript" / "round-000001.safetensors").unlink(missing_ok=True)
    for path in run.path.glob("transcript/*"):
        path.unlink()
    with pytest.raises(TranscriptError, match="holds no recording"):
        _ = run.transcript


# Objects in place of names.


def test_a_network_a_strategy_a_defense_and_an_attack_may_be_objects(tmp_path: Path) -> None:
    net = network()
    parts = {"model": net, "strategy": strategy(), "defense": [UpdateNoise(clip=0.5)], "attack": [Grey(value=0.25)]}
    run = fedsim.run({**TABLES, **parts}, tmp_path / "run")
    sent = run.transcript.update(1, 0).before
    assert all(torch.equal(sent[name], tensor) for name, tensor in net.state_dict().items())
    recorded = tomllib.loads((run.path / "experiment.toml").read_text())
    assert recorded["defense"][0]["name"] == "update-noise"
    assert recorded["defense"][0]["clip"] == 0.5
    assert re.fullmatch(r"python-object Sequential [0-9a-f]{8}", recorded["model"]["name"])
    assert set(run.scores["attack"]) == {"Grey"}
    run.attack("sme", victim=0, iterations=2)
    assert set(run.scores["attack"]) == {"Grey", "sme"}


def test_an_attack_that_works_beside_the_data_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Local(Grey):
        """As a class of a notebook, which no other process can import."""

    run = fedsim.run({**TABLES, "attack": [Local(), Grey()]}, tmp_path / "run")
    about = [read_facts(path) for path in (run.path / "findings").glob("*/*.safetensors")]
    noted = {finding["attack"] for finding in about if any("same process as" in text for text in finding["warnings"])}
    assert noted == {"Local"}, "the report and the findings say it, too"
    told = [record.getMessage() for record in caplog.records if "same process as the data" in record.getMessage()]
    assert [text.partition(":")[0] for text in told] == ["Local"]


def test_a_data_set_may_be_an_object(tmp_path: Path) -> None:
    raw = torch.rand(60, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    part = fedsim.Examples(raw=raw, labels=torch.arange(60) % 10, scale=1.0)
    data = fedsim.Dataset(name="mine", train=part, test=part, num_classes=10, source="drawn", licence="none")
    run = fedsim.run({**TABLES, "data": data}, tmp_path / "run")
    assert run.metrics["num_examples"].item() == 60


def test_two_objects_of_one_class_are_not_mistaken_for_one_another(tmp_path: Path) -> None:
    runs = []
    for place in range(2):
        with torch.no_grad():
            net = network()
            net[1].bias.fill_(float(place))  # type: ignore[index,union-attr,operator]
        runs.append(fedsim.run({**TABLES, "model": net, "adversary": {"when": "never"}}, tmp_path / str(place)))
    assert [run.transcript.update(1, 0).before["1.bias"][0].item() for run in runs] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("where", "changed"),
    [
        ("federation.engine: 'ray'", {"federation": {**TABLES["federation"], "engine": "ray"}}),
        ("federation.engine: 'flower'", {"federation": {**TABLES["federation"], "engine": "flower"}}),
        ("adversary.when: 'in-round'", {"adversary": {"when": "in-round"}}),
        ("adversary.workers", {"adversary": {"workers": 2}}),
    ],
)
def test_what_works_in_other_processes_is_not_handed_an_object(
    where: str, changed: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(where)) as caught:
        fedsim.run({**TABLES, **changed, "model": network()}, tmp_path / "run")
    assert "imported by name" in str(caught.value)
    assert is_a_sentence(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_run_of_objects_says_that_its_file_cannot_rebuild_it_and_what_is_there_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fedsim.run({**TABLES, "model": network()}, tmp_path / "run")
    monkeypatch.setattr("fedsim.plugins.inline._objects", {})  # as in another program
    run = fedsim.open(tmp_path / "run")
    before = run.scores.to_csv()
    for call in (lambda: run.attack("sme", victim=0), run.resume):
        with pytest.raises(ConfigError, match="so the run cannot be rebuilt from its file") as caught:
            call()
        assert is_a_sentence(caught.value)
    assert run.scores.to_csv() == before
    assert len(run.findings) == 1
    assert "cannot be rebuilt from its file" in run.report().path.read_text()


def test_numbers_out_of_a_data_frame_are_taken(finished_run: Run) -> None:
    victim, iterations = finished_run.scores["victim"].to_numpy()[0], np.int64(2)
    finding = finished_run.attack("sme", victim=victim, round=np.int64(1), iterations=iterations)
    assert torch.equal(finding.data, finished_run.attack("sme", victim=0, round=1, iterations=2).data)  # type: ignore[union-attr]


def damaged(finished_run: Run, tmp_path: Path) -> Run:
    shutil.copytree(finished_run.path, tmp_path / "run")
    [finding] = (tmp_path / "run" / "findings" / "inverting-gradients").glob("*.safetensors")
    finding.write_bytes(b"garbage")
    return fedsim.open(tmp_path / "run")


def test_an_attack_beside_a_damaged_finding_is_kept_and_the_damaged_one_is_named(
    finished_run: Run, tmp_path: Path
) -> None:
    run = damaged(finished_run, tmp_path)
    with pytest.raises(RunError, match=r"is not what this run found.*; what was found is kept in .*sme") as caught:
        run.attack("sme", victim=1, iterations=5)
    assert is_a_sentence(caught.value)
    assert "left out" in run.report()._repr_html_()


def test_a_run_whose_folder_is_gone_does_not_pass_for_one_without_findings(finished_run: Run, tmp_path: Path) -> None:
    shutil.copytree(finished_run.path, tmp_path / "run")
    run = fedsim.open(tmp_path / "run")
    page = run.report()
    shutil.rmtree(run.path)
    for read in (lambda: run.scores, lambda: run.metrics, lambda: run.findings):
        with pytest.raises(ConfigError, match="no such run folder"):
            read()
    for call in (lambda: run.attack("sme"), run.report, run.resume, page._repr_html_):
        with pytest.raises(FedsimError) as caught:
            call()
        assert is_a_sentence(caught.value)


def test_what_a_report_shows_in_a_notebook_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text('<script>"&</script>')
    shown = Report(tmp_path / "report.html", ("<b> cannot be shown",))._repr_html_()
    assert "<script>" not in shown
    assert "&lt;script&gt;&quot;&amp;&lt;/script&gt;" in shown
    assert "<p>&lt;b&gt; cannot be shown</p>" in shown


# A recording made elsewhere.


FOREIGN: dict[str, Any] = {
    "model": "network_of_theirs:build", "input_shape": (1, 8, 8), "num_classes": 10, "value_range": (0, 1),
}  # fmt: skip


@pytest.fixture
def foreign(finished_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the recording alone; the module of its network lies in the present folder."""
    shutil.copytree(finished_run.path / "transcript", tmp_path / "foreign" / "transcript")
    (tmp_path / "network_of_theirs.py").write_text(
        "from fedsim.training.models.mlp import Mlp\nfrom fedsim.base.task import Task\n\n\n"
        "def build():\n    return Mlp().build(Task((1, 8, 8), 10))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "network_of_theirs", raising=False)
    return tmp_path / "foreign"


def test_a_recording_made_elsewhere_is_attacked_with_the_knowledge_that_is_handed_over(foreign: Path) -> None:
    run = fedsim.open(foreign)
    with pytest.raises(KnowledgeError, match="sme needs input_shape, model, value_range"):
        run.attack("sme", victim=0, iterations=2)
    finding = run.attack("sme", victim=0, iterations=2, knowledge=FOREIGN)
    assert finding.data.shape == (4, 1, 8, 8)  # type: ignore[union-attr]
    [kept] = run.findings
    assert "'network_of_theirs:build'" in kept.about["command"]
    assert run.scores.empty
    assert run.metrics.empty
    assert run.report().failures == ()


def test_a_module_in_the_folder_of_a_recording_is_not_imported_unasked(foreign: Path, tmp_path: Path) -> None:
    (foreign / "theirs.py").write_text("raise SystemExit('imported')")
    with pytest.raises(PluginError, match="No module named 'theirs'"):
        fedsim.open(foreign).attack("sme", victim=0, iterations=2, knowledge={**FOREIGN, "model": "theirs:build"})


def test_a_recording_made_elsewhere_is_attacked_and_scored_by_an_attack_file(
    foreign: Path, finished_run: Run, tmp_path: Path
) -> None:
    audit = open_audit(finished_run.path, None)
    truth, experiment = audit.case.truth(1, None), audit.experiment
    assert truth is not None
    assert experiment is not None
    save_file({"data": truth.data, "labels": truth.labels}, tmp_path / "held.safetensors")
    facts = {key: list(value) if isinstance(value, tuple) else value for key, value in FOREIGN.items()}
    facts["value_range"] = [end[0] for end in experiment.data.value_range()]  # the run standardises
    tables = {"adversary": {"victims": [1], "knowledge": facts}, "truth": {"1": "held.safetensors"}}
    (tmp_path / "attack.toml").write_text(tomli_w.dumps(tables))
    run = fedsim.open(foreign, file=tmp_path / "attack.toml")
    run.attack("sme", iterations=2)
    run.attack("idlg", iterations=2, knowledge={"labels": True})
    assert set(run.scores["attack"]) == {"sme", "idlg"}
    assert set(run.scores["victim"]) == {1}
    run.attack("sme", victim=2, iterations=2)
    assert set(run.scores["victim"]) == {1}
    for file, says in (("nothing.toml", "cannot be read"), (3, "file: expected a path, got int")):
        with pytest.raises(ConfigError, match=says) as caught:
            fedsim.open(foreign, file=file)  # type: ignore[arg-type]
        assert is_a_sentence(caught.value)


# In memory.


@pytest.fixture
def update(finished_run: Run) -> dict[str, Any]:
    from fedsim.federation.experiment import Experiment
    from fedsim.federation.table_validation import validate_tables

    seen, tables = (
        finished_run.transcript.update(1, 0),
        tomllib.loads((finished_run.path / "experiment.toml").read_text()),
    )
    model = Experiment(validate_tables(fedsim.Config, tables, "made")).new_model()
    return {"before": seen.before, "after": seen.after, "model": model, "num_examples": 4}


KNOWN: dict[str, Any] = {"input_shape": (1, 8, 8), "value_range": (0, 1), "settings": {"iterations": 2}}


def test_an_update_in_memory_is_attacked_without_a_run(update: dict[str, Any]) -> None:
    steps: list[tuple[str, int, int]] = []
    state = {name: tensor.clone() for name, tensor in update["model"].state_dict().items()}
    finding = fedsim.attack(**update, attack="sme", **KNOWN, progress=lambda *step: steps.append(step))
    assert finding.data.shape == (4, 1, 8, 8)  # type: ignore[union-attr]
    assert steps[-1] == ("sme", 2, 2)
    again = fedsim.attack(**update, attack=SurrogateModelExtension(iterations=2), **{**KNOWN, "settings": None})
    assert torch.equal(again.data, finding.data)  # type: ignore[union-attr]
    assert all(torch.equal(update["model"].state_dict()[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize(
    ("changed", "kind", "says"),
    [
        ({"input_shape": (3, 8, 8)}, ConfigError, "does not take inputs of shape (3, 8, 8)"),
        ({"input_shape": (0, 8)}, ConfigError, "sizes of at least 1"),
        ({"value_range": (1, 0)}, ConfigError, "the lowest below the highest"),
        ({"value_range": 3}, ConfigError, "expected (lowest, highest)"),
        ({"input_shap": 1}, ConfigError, "did you mean 'input_shape'"),
        ({"num_examples": 0}, ConfigError, "at least 1, got 0"),
        ({"before": {"x": torch.zeros(1)}}, ConfigError, "before: has no"),
        ({"after": 3}, ConfigError, "after: expected a state dict or a network, got int"),
        ({"model": nn.Linear(3, 2)}, ConfigError, "hand over states of this model"),
        ({"model": "mlp"}, ConfigError, "expected a torch.nn.Module, got str"),
        ({"attack": "smee"}, PluginError, "did you mean 'sme'"),
        (
            {"attack": "differencing", "settings": {}},
            KnowledgeError,
            "on answers to queries, and these clients train a",
        ),
        ({"attack": "dager", "settings": {}}, ConfigError, "does not take texts of shape (1, 8, 8)"),
        ({"settings": {"iteration": 2}}, ConfigError, "did you mean 'iterations'"),
        ({"value_range": None}, KnowledgeError, "value_range"),
        ({"value_range": (0, float("inf"))}, ConfigError, "both finite"),
        ({"num_examples": "4"}, ConfigError, "at least 1, got '4'"),
        ({"num_classes": 30}, ConfigError, "at most the 10 outputs of the model, got 30"),
        ({"learning_rate": -1.0}, ConfigError, "learning_rate: expected a finite value above 0, got -1.0"),
        ({"local_epochs": 0}, ConfigError, "local_epochs: expected at least 1, got 0"),
        ({"labels": [1, 2, 3, 4]}, ConfigError, "labels: expected a tensor"),
        ({"labels": torch.tensor([1, 2])}, AttackError, "2 labels are granted"),
        ({"records": 3}, ConfigError, "records: expected fedsim.interfaces.knowledge.Records, got 3"),
        ({"model": nn.Flatten()}, ConfigError, "this Flatten has no weights"),
        ({"model": nn.LazyLinear(10)}, ConfigError, "does not say how large"),
        ({"after": network()}, ConfigError, "after: has no"),
        ({"loss": "mse"}, ConfigError, "loss: expected a function"),
        ({"loss": lambda outputs, labels: 1 / 0}, AttackCrash, "sme: ZeroDivisionError: division by zero"),
        ({"settings": 3}, ConfigError, "settings: expected a dict"),
    ],
)
def test_what_does_not_fit_in_memory_is_one_sentence(
    changed: dict[str, Any], kind: type[FedsimError], says: str, update: dict[str, Any]
) -> None:
    with pytest.raises(kind, match=re.escape(says)) as caught:
        fedsim.attack(**{**update, **KNOWN, **changed})
    assert is_a_sentence(caught.value)


@pytest.mark.parametrize(
    ("state", "change", "says"),
    [
        ("after", lambda tensor: tensor * float("nan"), "holds NaN or infinite values"),
        ("after", lambda tensor: tensor.flatten(), "with shape (12800,), expected (200, 64)"),
    ],
)
def test_a_state_that_does_not_fit_is_one_sentence(
    state: str, change: Callable[[torch.Tensor], torch.Tensor], says: str, update: dict[str, Any]
) -> None:
    changed = {name: change(tensor) for name, tensor in update[state].items()}
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        fedsim.attack(**{**update, **KNOWN, state: changed})
    assert str(caught.value).startswith(f"attack: {state}: ")
    assert is_a_sentence(caught.value)


def test_an_update_of_a_regression_has_no_classes() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(3, 1))
    known = _infer_classes(net, {"input_shape": (3,)}, texts=False)
    assert known == {}
    assert _infer_classes(network(), {"input_shape": (1, 8, 8)}, texts=False) == {"num_classes": 10}


# The host program.


@pytest.fixture
def host() -> Callable[[], dict[str, Any]]:
    """What belongs to the host program, as it is when this is called."""
    fedsim_logger = logging.getLogger("fedsim")

    def seen() -> dict[str, Any]:
        return {
            "environment": dict(os.environ),
            "handlers": [list(logger.handlers) for logger in (logging.getLogger(), fedsim_logger)],
            "levels": [(logger.level, logger.propagate) for logger in (logging.getLogger(), fedsim_logger)],
            "listeners": list(progress._listeners),
            "dtype": torch.get_default_dtype(),
            "grad": torch.is_grad_enabled(),
            "threads of torch": torch.get_num_threads(),
            "random": torch.random.get_rng_state().tolist(),
            "threads": set(threading.enumerate()),
            "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)],
            "folder": Path.cwd(),
        }

    return seen


def test_a_run_and_its_attacks_leave_the_host_program_as_it_was(
    finished_run: Run, tmp_path: Path, host: Callable[[], dict[str, Any]]
) -> None:
    before = host()
    run = fedsim.run(TABLES, tmp_path / "run")
    run.attack("sme", victim=1, iterations=2)
    run.report()
    with pytest.raises(FedsimError):
        run.attack("sme", victim=99)
    after = host()
    assert {key: after[key] for key in before} == before
    assert not ("ray" in sys.modules and sys.modules["ray"].is_initialized())


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_on_ray_leaves_no_ray_behind(tmp_path: Path, host: Callable[[], dict[str, Any]]) -> None:
    import ray

    before = host()
    federation = {**TABLES["federation"], "engine": "ray", "actors": 1}
    fedsim.run({**TABLES, "federation": federation, "adversary": {"when": "never"}}, tmp_path / "run")
    after = host()
    assert not ray.is_initialized()
    assert {key: after[key] for key in ("environment", "handlers", "levels", "dtype", "signals")} == {
        key: before[key] for key in ("environment", "handlers", "levels", "dtype", "signals")
    }


def test_the_hosts_own_logging_gets_what_it_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    run = fedsim.run({**TABLES, "adversary": {"when": "never"}}, tmp_path / "run")
    assert [record for record in caplog.records if record.levelno < logging.WARNING] == []
    assert "round 1/1" in (run.path / "log.txt").read_text()


def test_whoever_listens_last_leaves_the_hosts_logging_as_it_was() -> None:
    """As with two runs in two threads, of which the first to begin ends first."""
    logger = logging.getLogger("fedsim.tests.listening")
    logger.setLevel(logging.ERROR)
    heard = [logging.NullHandler(), logging.NullHandler()]
    first = listen(logger, heard[:1], logging.INFO)
    second = listen(logger, heard[1:], logging.DEBUG)
    first.__enter__()
    second.__enter__()
    assert (logger.level, logger.propagate, logger.handlers) == (logging.DEBUG, False, heard)
    first.__exit__(None, None, None)
    assert (logger.level, logger.propagate, logger.handlers) == (logging.DEBUG, False, heard[1:])
    second.__exit__(None, None, None)
    assert (logger.level, logger.propagate, logger.handlers) == (logging.ERROR, True, [])


def test_what_the_host_has_frozen_stays_frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is conftest.py, which freezes what is there before each module."""
    frozen = count_frozen_objects()
    try:
        fedsim.run({**TABLES, "adversary": {"when": "never"}}, tmp_path / "run")
        assert count_frozen_objects() >= frozen * 0.9 > 0  # some of it is released
        gc.unfreeze()
        monkeypatch.setattr(gc, "get_freeze_count", count_frozen_objects)
        fedsim.run({**TABLES, "adversary": {"when": "never"}}, tmp_path / "again")
        assert count_frozen_objects() == 0
    finally:
        gc.freeze()


def test_curious_and_the_other_public_names_are_there() -> None:
    from strategies.curious import Curious

    assert fedsim.Curious is Curious
    assert fedsim.Transcript is Transcript
    assert sorted(fedsim.__all__) == sorted(fedsim._HOMES)
    assert all(getattr(fedsim, name) is not None for name in fedsim.__all__)
    with pytest.raises(AttributeError, match="no attribute 'curious'"):
        _ = fedsim.curious


def test_the_code_in_the_documentation_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "python.md").read_text()
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) >= 4
    for block in blocks:
        exec(compile(block, "python.md", "exec"), names)
    told = re.findall(r"print\(error\)  # (.*)", page)
    assert told == capsys.readouterr().out.splitlines()[-1:]


def test_importing_fedsim_loads_neither_torch_nor_flower() -> None:
    code = (
        "import sys, time; started = time.process_time(); import fedsim; spent = time.process_time() - started\n"
        "assert not {'torch', 'flwr', 'numpy', 'pandas', 'pydantic'} & set(sys.modules)\n"
        "assert spent < 0.3, spent"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
