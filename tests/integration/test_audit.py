"""Recordings attacked and scored: what goes on, what fails alone, and that no attack sees the truth."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import linecache
import pickle
import shutil
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fedsim.audit.architecture import Architecture
from fedsim.audit.audit import Audit, open_audit
from fedsim.audit.evaluation import examples
from fedsim.audit.evaluation.case import Case
from fedsim.audit.finding_files import load_finding, save_finding
from fedsim.audit.round_attacks import attack_round
from fedsim.audit.threat_model import grant_knowledge
from fedsim.base.errors import ConfigError, DataError, KnowledgeError, PluginError
from fedsim.base.task import Task
from fedsim.data import Dataset, Examples
from fedsim.federation.adversary_tables import AdversaryTable
from fedsim.federation.build_plugins import build_attacks
from fedsim.federation.config import AttackFile
from fedsim.federation.experiment import Experiment
from fedsim.federation.open_run import OpenRun
from fedsim.federation.run_folder import read_rows
from fedsim.federation.table_validation import validate_tables
from fedsim.interfaces.findings import Reconstruction
from fedsim.interfaces.knowledge import FACTS
from fedsim.inversion import batched_call, inversion_task, matching
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.report import finding_views
from fedsim.report.page import write_report
from fedsim.report.summary import summarise
from tests.support.experiments import IMAGE_METRICS, make_tiny_config, run_serial
from tests.support.shared import make_once

ATTACKS = [{"name": "sme", "iterations": 4}, {"name": "inverting-gradients", "label": "ig", "iterations": 4}]


@pytest.fixture(scope="module")
def recorded_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rounds with attacks in its file, none of them made yet."""
    config = make_tiny_config(
        federation={"seed": 0},
        partition={"samples_per_client": 6},
        adversary={"victims": [0, 2], "rounds": "all", "workers": 1},
        attack=ATTACKS,
    )
    return make_once(tmp_path_factory, "audit", lambda folder: run_serial(config, folder / "run")) / "run"


@pytest.fixture
def run(recorded_run: Path, tmp_path: Path) -> Path:
    """A copy of it to do anything to."""
    return Path(shutil.copytree(recorded_run, tmp_path / "run"))


@pytest.fixture(scope="module")
def first_attacked_run(recorded_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run after all attacks of its file."""

    def attack_all(folder: Path) -> None:
        assert open_audit(Path(shutil.copytree(recorded_run, folder / "run")), None).run() == []

    return make_once(tmp_path_factory, "attacked", attack_all) / "run"


@pytest.fixture
def attacked_run(first_attacked_run: Path, tmp_path: Path) -> Path:
    """A copy of it to do anything to."""
    return Path(shutil.copytree(first_attacked_run, tmp_path / "run"))


def attack_file(attacks: list[dict[str, Any]] | None = None, **tables: Any) -> AttackFile:
    adversary = {"victims": [0, 2], "rounds": "all", "workers": 1} | tables.pop("adversary", {})
    return validate_tables(AttackFile, {"adversary": adversary, "attack": attacks or ATTACKS, **tables}, "attack.toml")


def findings(run: Path) -> dict[str, Reconstruction]:
    found = sorted((run / "findings").glob("*/*.safetensors"))
    return {f"{path.parent.name}/{path.stem}": load_finding(path)[0] for path in found}


def same(one: Reconstruction, other: Reconstruction) -> bool:
    return (
        torch.equal(one.data, other.data)
        and torch.equal(one.labels, other.labels)
        and one.trace.keys() == other.trace.keys()
        and all(torch.equal(one.trace[key], other.trace[key]) for key in one.trace)
    )


def test_every_attack_meets_every_victim_and_each_is_scored(run: Path) -> None:
    audit = open_audit(run, None)
    assert audit.run() == []
    assert sorted(findings(run)) == [
        f"{title}/round-{number}-client-{victim}-repeat-0"
        for title in ("ig", "sme")
        for number in (1, 2)
        for victim in (0, 2)
    ]
    audit.score()
    rows = read_rows(OpenRun(run).scores)
    assert [row["metric"] for row in rows] == IMAGE_METRICS * 8
    assert {(row["attack"], row["victim"], row["round"], row["repeat"]) for row in rows} == {
        (title, victim, number, "0") for title in ("ig", "sme") for number in "12" for victim in "02"
    }
    for row in rows:
        assert row["missing"] or float(row["floor"]) == float(row["floor"])
        assert row["examples"] == "6"
    images = read_rows(OpenRun(run).images)
    assert len(images) == 8 * 6 * 6
    for row in rows:
        if row["metric"] in ("psnr", "ssim", "mse"):
            keys = ("attack", "victim", "round", "repeat", "metric")
            own = [float(i["value"]) for i in images if all(i[k] == row[k] for k in keys)]
            assert float(row["value"]) == pytest.approx(sum(own) / 6, rel=1e-4)


def test_what_is_there_is_kept_and_what_is_set_otherwise_stands_beside_it(attacked_run: Path) -> None:
    run = attacked_run

    def stamps() -> dict[str, int]:
        return {path.parent.name + path.name: path.stat().st_mtime_ns for path in (run / "findings").glob("*/*")}

    first = stamps()
    assert open_audit(run, None).run() == []
    assert stamps() == first
    again = attack_file([ATTACKS[0] | {"iterations": 5}, ATTACKS[1]], adversary={"rounds": [1]})
    assert open_audit(run, again).run() == []
    after = stamps()
    assert {name: after[name] for name in first} == first
    assert len(set(after) - set(first)) == 2
    assert all(name.startswith("sme-") for name in set(after) - set(first))


@pytest.mark.parametrize(
    "change",
    [
        {"attacks": [ATTACKS[0], {"name": "sme", "label": "ig", "iterations": 4}]},
        {"adversary": {"knowledge": {"labels": True}}},
        {"adversary": {"knowledge": {"learning_rate": False}}},
    ],
    ids=["another attack under the same label", "labels granted", "learning rate withheld"],
)
def test_a_finding_of_another_threat_model_is_not_taken_for_done(attacked_run: Path, change: dict[str, Any]) -> None:
    run = attacked_run
    before = load_finding(run / "findings" / "ig" / "round-1-client-0-repeat-0.safetensors")[1]
    first = {"rounds": [1], "victims": [0]} | change.get("adversary", {})
    assert open_audit(run, attack_file(**change | {"adversary": first})).run() == []
    [beside] = (run / "findings").glob("ig-*/round-1-client-0-repeat-0.safetensors")
    after = load_finding(beside)[1]
    assert before["fingerprint"] != after["fingerprint"]
    assert beside.parent.name == f"ig-{after['variant']}" != f"ig-{before['variant']}"
    assert load_finding(run / "findings" / "ig" / "round-1-client-0-repeat-0.safetensors")[1] == before


def test_attacking_again_with_other_settings_keeps_what_was_found(run: Path) -> None:
    """Both are there, scored and shown, each with its settings and with the command that makes it again."""
    adversary = {"rounds": [1], "victims": [0]}
    first = open_audit(run, attack_file([ATTACKS[0]], adversary=adversary))
    assert first.run() == []
    before = findings(run)
    command = "fedsim attack RUN --set attack.sme.iterations=7"
    again = attack_file([ATTACKS[0] | {"iterations": 7}], adversary=adversary)
    for _ in range(2):  # the second time both are there
        audit = open_audit(run, again, command=command)
        assert audit.run() == []
        after = findings(run)
        assert len(after) == 2
        assert all(same(after[name], finding) for name, finding in before.items())
    audit.score()
    rows = read_rows(OpenRun(run).scores)
    assert {(row["attack"], row["settings"]) for row in rows} == {
        ("sme", '{"iterations": 4}'),
        ("sme", '{"iterations": 7}'),
    }
    assert len({row["variant"] for row in rows}) == 2
    assert {row["settings"] for row in read_rows(OpenRun(run).images)} == {row["settings"] for row in rows}
    assert {item.attack for item in summarise(rows)} == {"sme (iterations=4)", "sme (iterations=7)"}
    page = write_report(OpenRun(run)).read_text()  # by the run's own file, whose settings are the first ones
    for text in ("sme (iterations=4)", "sme (iterations=7)", "iterations = 7", "<code>fedsim attack RUN</code>"):
        assert text in page
    assert f"<code>{command}</code>" in page
    assert first.run() == []
    assert findings(run).keys() == after.keys()


def test_findings_with_other_knowledge_are_scored_by_themselves(run: Path) -> None:
    for labels in (False, True):
        adversary = {"rounds": [1], "victims": [0], "knowledge": {"labels": labels}}
        audit = open_audit(run, attack_file([ATTACKS[0]], adversary=adversary))
        assert audit.run() == []
    names = {(item.attack, item.metric) for item in summarise(audit.score())}
    assert ("sme (without labels)", "label_accuracy") in names
    assert ("sme (with labels)", "psnr") in names
    assert ("sme (with labels)", "label_accuracy") not in names


def test_attacks_that_the_file_no_longer_names_stay_scored(run: Path) -> None:
    adversary = {"rounds": [1], "victims": [0]}
    open_audit(run, attack_file([ATTACKS[0]], adversary=adversary)).run()
    other = open_audit(run, attack_file([ATTACKS[1]], adversary=adversary))
    other.run()
    assert {row["attack"] for row in other.score()} == {"sme", "ig"}


def test_repeats_start_elsewhere_and_are_all_scored(run: Path) -> None:
    audit = open_audit(run, attack_file([ATTACKS[0]], adversary={"repeats": 3, "rounds": [2], "victims": [2]}))
    assert audit.run() == []
    found = list(findings(run).values())
    assert len(found) == 3
    assert not any(same(found[i], found[j]) for i in range(3) for j in range(i))
    assert {row["repeat"] for row in audit.score()} == {0, 1, 2}


def test_another_run_seed_is_another_random_start(run: Path, tmp_path: Path) -> None:
    """And nothing else: the messages are the same."""
    other = Path(shutil.copytree(run, tmp_path / "other"))
    text = (other / "experiment.toml").read_text()
    (other / "experiment.toml").write_text(text.replace("seed = 0", "seed = 1"))
    (other / "manifest.json").unlink()  # or it would be refused, as another run than was made
    for path in (run, other):
        assert open_audit(path, attack_file([ATTACKS[0]], adversary={"rounds": [1], "victims": [0]})).run() == []
    [one], [two] = findings(run).values(), findings(other).values()
    assert one.snapshots is not None
    assert two.snapshots is not None
    assert not torch.equal(one.snapshots[0], two.snapshots[0])


def test_no_attack_asks_for_the_truth(
    first_attacked_run: Path, recorded_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the truth out of reach the findings are the same, tensor for tensor."""
    blind = Path(shutil.copytree(recorded_run, tmp_path / "blind"))

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("an attack looked at the truth")

    monkeypatch.setattr(Case, "truth", refuse)
    monkeypatch.setattr("fedsim.federation.federated_data.FederatedData.train", refuse)
    assert open_audit(blind, None).run() == []
    seeing, unseeing = findings(first_attacked_run), findings(blind)
    assert seeing.keys() == unseeing.keys()
    assert all(same(seeing[key], unseeing[key]) for key in seeing)


def test_the_granted_model_carries_no_experiment(run: Path) -> None:
    audit = open_audit(run, None)
    model = grant_knowledge(audit.spec.adversary, audit.case, run).model
    assert isinstance(model, Architecture)
    assert all(isinstance(held, str | int | dict | Task) for held in vars(model).values())
    assert model() is not model()
    assert audit.experiment is not None
    ours, fresh = model().state_dict(), audit.experiment.new_model().state_dict()
    assert list(ours) == list(fresh)
    assert all(torch.equal(ours[name], tensor) for name, tensor in fresh.items())
    assert model.seed != audit.experiment.seed
    again = pickle.loads(pickle.dumps(model))
    assert "_network" not in vars(again)
    assert all(torch.equal(tensor, fresh[name]) for name, tensor in again().state_dict().items())


NET = """
from fedsim.training.models.mlp import Mlp
from fedsim.base.task import Task

def build():
    return Mlp(hidden=(16,)).build(Task((1, 8, 8), 10))
"""


def test_a_bare_recording_with_knowledge_written_out_gives_the_same_findings(
    first_attacked_run: Path, tmp_path: Path
) -> None:
    """No experiment file, no data set: only the messages, and what the attack file says."""
    run = first_attacked_run
    audit = open_audit(run, None)
    assert audit.experiment is not None
    low, high = (end[0] for end in audit.experiment.data.value_range())
    shutil.copytree(run / "transcript", tmp_path / "elsewhere" / "transcript")
    (tmp_path / "net_of_elsewhere.py").write_text(NET)
    knowledge = {
        "model": "net_of_elsewhere:build",
        "input_shape": [1, 8, 8],
        "num_classes": 10,
        "value_range": [low, high],
        "input_mean": [0.0],
        "input_std": [1.0],
        "learning_rate": 0.1,
        "local_epochs": 1,
        "batch_size": 8,
    }
    bare = open_audit(tmp_path / "elsewhere", attack_file(adversary={"knowledge": knowledge}), tmp_path)
    assert bare.run() == []
    one, other = findings(run), findings(tmp_path / "elsewhere")
    assert one.keys() == other.keys()
    assert all(same(one[key], other[key]) for key in one)
    assert bare.score() == []  # nobody says what the clients held


TANH = """
def build():
    from torch.nn import Tanh
    net = _build()
    net[-2] = Tanh()
    return net
"""


@pytest.mark.parametrize("elsewhere", [True, False])
def test_an_edited_model_is_attacked_anew(
    elsewhere: bool, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The one that an attack file names: its architecture may fit as before and compute something else."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    caplog.set_level("INFO")
    if elsewhere:
        (run / "experiment.toml").unlink()
    name = f"net_that_changes_{elsewhere}"
    knowledge = {"model": f"{name}:build", "input_shape": [1, 8, 8], "value_range": [-2.0, 2.0]}
    spec = attack_file([ATTACKS[0]], adversary={"knowledge": knowledge, "rounds": [1], "victims": [0]})

    def work(source: str) -> Reconstruction:
        (tmp_path / f"{name}.py").write_text(source)
        sys.modules.pop(name, None)
        importlib.invalidate_caches()
        caplog.clear()
        assert open_audit(run, spec, tmp_path).run() == []
        return findings(run)["sme/round-1-client-0-repeat-0"]

    first = work(NET)
    assert same(work(NET), first)
    assert "already there" in caplog.text
    edited = NET.replace("def build", "def _build") + TANH
    assert not same(work(edited), first)
    assert "attacked anew, because the code of the model has changed" in caplog.text


def test_truth_files_score_a_recording_made_elsewhere(run: Path, tmp_path: Path) -> None:
    audit = open_audit(run, None)
    truth = audit.case.truth(0, 1)
    assert truth is not None
    save_file({"data": truth.data, "labels": truth.labels}, tmp_path / "zero.safetensors")
    (run / "experiment.toml").unlink()
    (tmp_path / "net_of_truth.py").write_text(NET)
    knowledge = {"model": "net_of_truth:build", "input_shape": [1, 8, 8], "value_range": [-2.0, 2.0]}
    spec = attack_file(adversary={"knowledge": knowledge, "rounds": [1]}, truth={"0": "zero.safetensors"})
    bare = open_audit(run, spec, tmp_path)
    assert bare.run() == []
    rows = bare.score()
    assert {row["victim"] for row in rows} == {0}
    assert all("there are no public data to guess by" in row["floor_guess"] for row in rows if row["floor_guess"])


def test_labels_are_granted_from_the_truth_or_not_at_all(run: Path, tmp_path: Path) -> None:
    spec = attack_file([ATTACKS[0]], adversary={"knowledge": {"labels": True}, "rounds": [1]})
    audit = open_audit(run, spec)
    assert audit.run() == []
    for victim in (0, 2):
        truth = audit.case.truth(victim, 1)
        finding, about = load_finding(run / "findings" / "sme" / f"round-1-client-{victim}-repeat-0.safetensors")
        assert truth is not None
        assert finding.labels.tolist() == truth.labels.sort().values.tolist()
        assert "labels" in about["granted"]  # type: ignore[operator]
    assert "label_accuracy" not in {row["metric"] for row in audit.score()}


def test_what_an_attack_does_not_declare_is_neither_handed_over_nor_part_of_its_finding(run: Path) -> None:
    """`sra-gradient` finds labels of its own, so granting them changes nothing: it is not attacked again."""
    table = {"name": "sra-gradient", "iterations": 2}
    stamps, scores = [], []
    for granted in (False, True):
        spec = attack_file([table], adversary={"knowledge": {"labels": granted}, "rounds": [1], "victims": [0]})
        audit = open_audit(run, spec)
        assert audit.run() == []
        [path] = (run / "findings" / "sra-gradient").glob("*.safetensors")
        about = load_finding(path)[1]
        assert about["granted"] == [name for name in FACTS if name in build_attacks(spec)[0][1].declared_facts()]
        stamps.append((path.stat().st_mtime_ns, about["fingerprint"]))
        scores.append(audit.score())
    assert stamps[0] == stamps[1]
    assert scores[0] == scores[1] != []


def rewritten(run: Path, number: int, **config: Any) -> None:
    """Record a round again, as if the server had sent other facts along."""
    transcript = Transcript(run)
    updates = [transcript.update(number, client) for client in transcript.clients(number)]
    said = {key.replace("_", "-"): value for key, value in config.items()}
    Recorder(run / "transcript", resume=True).write(number, updates, config=transcript.header(number).config | said)


def test_an_attack_gets_the_learning_rate_of_its_round(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a strategy lets it decay: the experiment file has that of the first round."""
    rewritten(run, 2, learning_rate=0.025, momentum=0.5)
    seen: list[tuple[float | None, float | None]] = []

    def noting(attack: Any, target: Any, progress: Any) -> Any:
        seen.append((target.knowledge.learning_rate, target.knowledge.momentum))
        return own(attack, target, progress)

    kind = type(build_attacks(attack_file([ATTACKS[0]]))[0][1])
    own = kind._run
    monkeypatch.setattr(kind, "_run", noting)
    assert open_audit(run, attack_file([ATTACKS[0]], adversary={"victims": [0]})).run() == []
    assert seen == [(0.1, 0.0), (0.025, 0.5)]
    about = load_finding(run / "findings/sme/round-2-client-0-repeat-0.safetensors")[1]
    [warning] = about["warnings"]  # type: ignore[misc]
    assert warning == "sme on round 2, client 0: assumes plain SGD, but clients train with momentum 0.5; expect less"


def test_a_value_that_contradicts_the_recording_is_refused(run: Path) -> None:
    spec = attack_file([ATTACKS[0]], adversary={"victims": [0], "rounds": [1], "knowledge": {"learning_rate": 0.5}})
    [failure] = open_audit(run, spec).run()
    assert failure == (
        "sme, round 1, client 0: adversary.knowledge.learning_rate: 0.5 is written out, but the server sent 0.1 in "
        "round 1, as the recording says; leave the key out"
    )


def test_granted_labels_that_nobody_knows_are_an_error(run: Path, tmp_path: Path) -> None:
    """Never a silent fall back to counting them, which is another threat model."""
    truth = open_audit(run, None).case.truth(0, 1)
    assert truth is not None
    save_file({"data": truth.data, "labels": truth.labels}, tmp_path / "zero.safetensors")
    (run / "experiment.toml").unlink()
    (tmp_path / "net_of_labels.py").write_text(NET)
    knowledge = {
        "model": "net_of_labels:build",
        "input_shape": [1, 8, 8],
        "value_range": [-2.0, 2.0],
        "labels": True,
    }
    adversary = {"knowledge": knowledge, "rounds": [1]}
    with pytest.raises(ConfigError, match=r"labels: there is no truth to take them from; add a \[truth\] table"):
        open_audit(run, attack_file(adversary=adversary), tmp_path).run()
    some = open_audit(run, attack_file([ATTACKS[0]], adversary=adversary, truth={"0": "zero.safetensors"}), tmp_path)
    [failure] = some.run()
    assert failure == "sme, truth: labels are granted, but no file is named for client 2; name one"
    assert list(findings(run)) == ["sme/round-1-client-0-repeat-0"]


def test_a_missing_truth_file_is_an_error_before_any_work(run: Path) -> None:
    with pytest.raises(DataError, match=r"truth: .*none\.safetensors is not a safetensors file"):
        open_audit(run, attack_file(truth={"0": "none.safetensors"})).run()
    assert not (run / "findings").exists()


@pytest.mark.parametrize(
    ("knowledge", "kind", "sentence"),
    [
        ({"model": False}, KnowledgeError, "sme needs model, which the threat model withholds"),
        ({"input_shape": False, "loss": False}, KnowledgeError, "needs input_shape, loss, which"),
        (
            {"value_range": [1.0, 0.0]},
            ConfigError,
            r"value_range: expected \[lowest, highest\], or of each .*, got \[1.0, 0.0\]",
        ),
        ({"value_range": [1.0]}, ConfigError, r"value_range: expected \[lowest, highest\]"),
        ({"local_epochs": -1}, ConfigError, r"^adversary\.knowledge\.local_epochs: expected at least 1, got -1$"),
        ({"batch_size": 0}, ConfigError, r"^adversary\.knowledge\.batch_size: expected at least 1, got 0$"),
        ({"learning_rate": -0.1}, ConfigError, "learning_rate: expected a finite value above 0, got -0.1"),
        ({"num_classes": 1}, ConfigError, "num_classes: expected at least 2, got 1"),
        ({"input_shape": [1, -8]}, ConfigError, r"input_shape: expected sizes of at least 1, got \[1, -8\]"),
        ({"input_std": [0.0]}, ConfigError, r"input_std: expected finite values above 0, got \[0.0\]"),
        ({"model": "no_such:thing"}, LookupError, "'no_such:thing' does not load: ModuleNotFoundError"),
    ],
)
def test_a_threat_model_that_does_not_hold_is_an_error_before_any_work(
    run: Path, knowledge: dict[str, Any], kind: type[Exception], sentence: str
) -> None:
    with pytest.raises(kind, match=sentence):
        open_audit(run, attack_file(adversary={"knowledge": knowledge})).run()
    assert not (run / "findings").exists()


@pytest.mark.parametrize(
    ("knowledge", "kind", "sentence"),
    [
        ({"model": "net_of_nothing:number"}, PluginError, "net_of_nothing:number gives int, expected a function that"),
        ({"model": "net_of_nothing:broken"}, PluginError, "net_of_nothing:broken raised KeyError: 'width'$"),
        ({"model": "net_of_nothing:wordy"}, PluginError, "net_of_nothing:wordy raised OSError: no file$"),
        (
            {"model": "net_of_nothing:build", "num_classes": True},
            ConfigError,
            "a recording made elsewhere has none to",
        ),
    ],
)
def test_what_is_written_out_wrongly_for_a_bare_recording_is_an_error_before_any_work(
    run: Path,
    tmp_path: Path,
    knowledge: dict[str, Any],
    kind: type[Exception],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "net_of_nothing", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    (run / "experiment.toml").unlink()
    broken = "\n\ndef number():\n    return 3\n\n\ndef broken():\n    return {}['width']\n"
    wordy = "\n\ndef wordy():\n    raise OSError('no file.\\nLook for it.')\n"
    (tmp_path / "net_of_nothing.py").write_text(NET + broken + wordy)
    with pytest.raises(kind, match=sentence):
        open_audit(run, attack_file(adversary={"knowledge": knowledge}), tmp_path).run()
    assert not (run / "findings").exists()


@pytest.mark.parametrize("name", ["victims", "rounds"])
def test_a_list_of_nobody_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=rf"adversary\.{name}: the list is empty; leave the key out, or name"):
        attack_file(adversary={name: []})


def test_a_device_that_is_not_there_is_an_error_before_any_work(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"adversary\.device: 'gpu' is not usable here"):
        open_audit(run, attack_file(adversary={"device": "gpu"})).run()


def damage(run: Path, number: int) -> None:
    path = run / "transcript" / f"round-{number:06d}.safetensors"
    content = bytearray(path.read_bytes())
    tensors = 8 + int.from_bytes(content[:8], "little")
    for place in range(tensors, len(content), 64):
        content[place] ^= 0xFF
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    "harm", ["a byte", *(pytest.param(harm, marks=pytest.mark.thorough) for harm in ("the header", "everything"))]
)
def test_a_damaged_round_costs_that_round_only(run: Path, harm: str) -> None:
    path = run / "transcript" / "round-000001.safetensors"
    if harm == "a byte":
        damage(run, 1)
    else:
        path.write_bytes(path.read_bytes()[:300] if harm == "the header" else b"")
    audit = open_audit(run, None)
    failures = audit.run()
    assert failures
    assert all("round-000001.safetensors: is damaged" in failure for failure in failures)
    assert {key.split("/")[1] for key in findings(run)} >= {
        "round-2-client-0-repeat-0",
        "round-2-client-2-repeat-0",
    }
    assert not any("round-1-client-2" in key for key in findings(run))
    assert {row["round"] for row in audit.score() if row["victim"] == 2} == {"2"}


def without(run: Path, number: int, client: int, failures: dict[int, str] | None = None) -> None:
    """Record round `number` once more, without `client`."""
    updates = [update for update in Transcript(run).restrict_to([number]).updates() if update.client != client]
    Recorder(run / "transcript", resume=True).write(number, updates, failures)


@pytest.mark.parametrize(
    ("failed", "sentence"),
    [({}, "client 2 is not recorded; recorded: [0, 1, 3]"), ({2: "gone"}, "client 2 failed there (gone)")],
)
def test_a_victim_who_is_not_in_the_round_fails_alone(run: Path, failed: dict[int, str], sentence: str) -> None:
    without(run, 1, 2, failed)
    failures = open_audit(run, attack_file([ATTACKS[0]], adversary={"victims": [0, 2], "rounds": [1]})).run()
    assert failures == [f"sme, round 1: {sentence}"]
    assert list(findings(run)) == ["sme/round-1-client-0-repeat-0"]


def test_a_victim_whom_the_run_never_sampled_fails_alone(run: Path) -> None:
    for number in (1, 2):
        without(run, number, 2)
    config = OpenRun(run).read_experiment()
    assert config is not None
    attacks = attack_file([ATTACKS[0]]).attack
    own = config.model_copy(
        update={"adversary": AdversaryTable(victims=[0, 2], rounds=[1], workers=1), "attack": attacks}
    )
    [failure] = open_audit(run, own).run()
    assert failure.endswith("client 2 is not recorded; recorded: [0, 1, 3]")
    assert len(findings(run)) == 1


@pytest.mark.parametrize(("at_once", "kept"), [(False, [0]), (True, [])])
@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (torch.AcceleratorError("CUDA error: unspecified launch failure\nmore"), "the device failed or was lost (CUDA"),
        (torch.OutOfMemoryError("CUDA out of memory."), "the device's memory does not last for one restart (CUDA"),
    ],
    ids=["lost", "too small"],
)
def test_a_device_that_is_lost_midway_keeps_findings_and_is_one_sentence_a_victim(
    run: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, sentence: str, at_once: bool, kept: list[int]
) -> None:
    calls = count()

    def lose_device(compute: Callable[..., Any]) -> Callable[..., Any]:
        def compute_until_lost(*arguments: Any) -> Any:
            if next(calls) == 3:
                monkeypatch.setattr(inversion_task, "objective_and_gradients", fail)
                monkeypatch.setattr(batched_call.BatchedCall, "compute", fail)
                raise error
            return compute(*arguments)

        return compute_until_lost

    def fail(*arguments: Any) -> Any:
        raise error

    attacks = attack_file([{"name": "sme", "iterations": 3}], adversary={"victims": [0, 1, 3], "rounds": [1]})
    with monkeypatch.context() as patch:
        patch.setattr(matching, "batching_is_faster", lambda device: at_once)
        if at_once:
            compute = lose_device(batched_call.BatchedCall.compute)
            patch.setattr(batched_call.BatchedCall, "compute", compute)
        else:
            patch.setattr(
                inversion_task, "objective_and_gradients", lose_device(inversion_task.objective_and_gradients)
            )
        failures = open_audit(run, attacks).run()
    monkeypatch.undo()
    assert list(findings(run)) == [f"sme/round-1-client-{client}-repeat-0" for client in kept]
    assert len(failures) == 3 - len(kept)
    assert all(failure.startswith("sme, round 1") and sentence in failure for failure in failures)
    assert open_audit(run, attacks).run() == []
    assert len(findings(run)) == 3


def test_a_victim_who_is_recorded_nowhere_is_an_error_before_any_work(run: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^adversary\.victims: client 9 is not recorded; recorded: 0, 1, 2, 3$"
    ) as caught:
        open_audit(run, attack_file([ATTACKS[0]], adversary={"victims": [0, 9], "rounds": [1]})).run()
    assert caught.value.exit_code == 2
    assert not (run / "findings").exists()


def test_a_round_that_is_not_recorded_is_an_error(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"adversary\.rounds: round 7 is not recorded; recorded: 1, 2"):
        open_audit(run, attack_file(adversary={"rounds": [7]})).run()


def test_by_default_the_first_recorded_victim_and_round_are_attacked(run: Path) -> None:
    spec = validate_tables(AttackFile, {"attack": [ATTACKS[0]], "adversary": {"workers": 1}}, "x")
    assert open_audit(run, spec).run() == []
    assert list(findings(run)) == ["sme/round-1-client-0-repeat-0"]


def test_folders_that_are_no_runs_are_one_sentence(tmp_path: Path, run: Path) -> None:
    with pytest.raises(ConfigError, match="none: no such run folder"):
        open_audit(tmp_path / "none", None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="was recorded elsewhere, so it names no attacks; give an attack file"):
        open_audit(tmp_path / "empty", None)
    shutil.rmtree(run / "transcript")
    with pytest.raises(ConfigError, match="holds no recording; name the folder that has transcript/ or rounds in it"):
        open_audit(run, None)
    with pytest.raises(ConfigError, match=r"no attack is named; add an \[\[attack\]\] table"):
        open_audit(run, validate_tables(AttackFile, {}, "x"))


def test_a_damaged_finding_is_not_scored_and_is_attacked_anew(attacked_run: Path) -> None:
    run = attacked_run
    audit = open_audit(run, None)
    path = run / "findings" / "sme" / "round-1-client-0-repeat-0.safetensors"
    path.write_bytes(b"garbage")
    assert len({(r["attack"], r["victim"], r["round"]) for r in audit.score()}) == 7
    assert audit.run() == []
    assert len({(r["attack"], r["victim"], r["round"]) for r in audit.score()}) == 8


def test_rounds_still_to_come_do_not_stop_an_attack_between_rounds(run: Path, tmp_path: Path) -> None:
    """`when = "in-round"` attacks round 1 while round 2 of the file is not recorded yet."""
    later = tmp_path / "later"
    (run / "transcript" / "round-000002.safetensors").rename(later)
    text = (run / "experiment.toml").read_text()
    (run / "experiment.toml").write_text(text.replace('rounds = "all"', "rounds = [1, 2]"))
    attack_round(run, 1)
    assert len(findings(run)) == 4
    later.rename(run / "transcript" / "round-000002.safetensors")
    attack_round(run, 2)
    assert len(findings(run)) == 8
    assert open_audit(run, None).run() == []


def test_nothing_recorded_yet_is_no_error_between_rounds(run: Path) -> None:
    shutil.rmtree(run / "transcript")
    (run / "transcript").mkdir()
    attack_round(run, 1)


STRANGERS = '''
"""Attacks of somebody else."""
from dataclasses import dataclass
import torch
from fedsim.interfaces.attack import Attack, Paper
from fedsim.interfaces.findings import Reconstruction
from fedsim.base.task import Task

PAPER = Paper(title="T", authors="A, B", venue="V", year=2020)

@dataclass(frozen=True, kw_only=True)
class Grey(Attack):
    """Claim grey images."""
    level: float = 0.5
    paper = PAPER
    def _run(self, target, progress):
        n = target.read_update().num_examples
        return Reconstruction(data=torch.full((n, 1, 8, 8), self.level), labels=torch.zeros(n, dtype=torch.long))

@dataclass(frozen=True, kw_only=True)
class Raises(Attack):
    """Break."""
    paper = PAPER
    def _run(self, target, progress):
        raise ZeroDivisionError("of a stranger\\nin two lines")

@dataclass(frozen=True, kw_only=True)
class Nothing(Attack):
    """Return nothing."""
    paper = PAPER
    def _run(self, target, progress):
        return None

@dataclass(frozen=True, kw_only=True)
class TooSmall(Grey):
    """Claim images of another size."""
    def _run(self, target, progress):
        return Reconstruction(data=torch.zeros(6, 1, 4, 4), labels=torch.zeros(6, dtype=torch.long))

@dataclass(frozen=True, kw_only=True)
class Ours(Grey):
    """Claim one black image, of somebody."""
    claims: str = "update"
    def _run(self, target, progress):
        return Reconstruction(data=torch.zeros(1, 1, 8, 8), labels=torch.tensor([3]), claims=self.claims)
'''


@pytest.fixture
def strangers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with attacks of somebody else, importable by name."""
    (tmp_path / "strangers_attacks.py").write_text(STRANGERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("strangers_attacks", None)  # that of the test before
    return "strangers_attacks"


def test_a_strangers_attack_without_a_trace_is_scored(run: Path, strangers: str) -> None:
    spec = attack_file([{"name": f"{strangers}:Grey", "label": "grey"}], adversary={"rounds": [1]})
    audit = open_audit(run, spec)
    assert audit.run() == []
    rows = [row for row in audit.score() if row["metric"] == "mse"]
    assert rows
    assert all(row["floor_guess"] for row in rows)
    for row in rows:
        truth = audit.case.truth(int(row["victim"]), 1)
        assert truth is not None
        assert row["value"] == pytest.approx((truth.data - 0.5).square().mean().item(), rel=1e-4)
    l_sim = [row for row in audit.score() if row["metric"] == "l_sim"]  # the evaluator's, so it has one, too
    assert all(0 < row["value"] < 2 and row["floor_guess"] for row in l_sim)
    assert len(l_sim) == len(rows)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Raises", "bad, round 1, client 0: ZeroDivisionError: of a stranger ({file}:{line}; the traceback is in "),
        ("Nothing", "bad, round 1, client 0: bad returned NoneType, expected a Finding"),
    ],
    ids=["raises", "nothing"],
)
def test_a_strangers_broken_attack_breaks_only_itself(
    run: Path, strangers: str, tmp_path: Path, name: str, sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    line = 1 + STRANGERS.splitlines().index('        raise ZeroDivisionError("of a stranger\\nin two lines")')
    sentence = sentence.format(file=tmp_path / "strangers_attacks.py", line=line)
    bad = {"name": f"{strangers}:{name}", "label": "bad"}
    audit = open_audit(run, attack_file([bad, ATTACKS[0]], adversary={"rounds": [1], "victims": [0]}))
    [failure] = audit.run()
    assert failure.startswith(sentence)
    assert "\n" not in failure
    assert ("Traceback" in caplog.text) == (name == "Raises")
    assert list(findings(run)) == ["sme/round-1-client-0-repeat-0"]


def test_a_claim_of_another_shape_is_not_scored_but_the_others_are(
    run: Path, strangers: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad = {"name": f"{strangers}:TooSmall", "label": "bad"}
    audit = open_audit(run, attack_file([bad, ATTACKS[0]], adversary={"rounds": [1], "victims": [0]}))
    sentence = "bad, round 1, client 0: the attack claims {}, expected {}; fix the attack"
    for _ in range(2):  # nothing of it is left that could spoil the next time
        assert audit.run() == [sentence.format("examples of shape (1, 4, 4)", "(1, 8, 8)")]
        failures: list[str] = []
        assert {row["attack"] for row in audit.score(failures)} == {"sme"}
        assert failures == []
    assert "not scored" not in caplog.text
    assert list(findings(run)) == ["sme/round-1-client-0-repeat-0"]


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ("labels=torch.zeros(6, 2, dtype=torch.long)", "claims labels of torch.int64, shape (6, 2), expected one for "),
        ("labels=zeros, trace={'l_sim': torch.zeros(0)}", "claims a curve 'l_sim' of torch.float32, shape (0,), "),
        ("labels=zeros, trace={'x': torch.zeros(3, 2)}", "claims a curve 'x' of torch.float32, shape (3, 2), expected"),
    ],
)
def test_a_finding_of_no_form_names_attack_victim_and_round(
    run: Path, tmp_path: Path, parts: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And everybody else is scored and shown."""
    source = STRANGERS.replace(
        "return None",
        f"zeros = torch.zeros(6, dtype=torch.long); return Reconstruction(data=torch.zeros(6, 1, 8, 8), {parts})",
    )
    (tmp_path / "of_no_form.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("of_no_form", None)  # that of the test before
    bad = {"name": "of_no_form:Nothing", "label": "bad"}
    audit = open_audit(run, attack_file([bad, ATTACKS[0]], adversary={"rounds": [2], "victims": [2]}))
    [failure] = audit.run()
    assert failure.startswith(f"bad, round 2, client 2: the attack {sentence}")
    failures: list[str] = []
    assert {row["attack"] for row in audit.score(failures)} == {"sme"}
    write_report(audit.folder, audit, failures)
    assert failures == []


def test_what_breaks_the_scoring_or_the_drawing_of_one_finding_leaves_the_others_alone(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = open_audit(run, attack_file(adversary={"rounds": [1], "victims": [2]}))
    assert audit.run() == []
    cursed = findings(run)["sme/round-1-client-2-repeat-0"].data

    def breaking(work: Callable[..., Any]) -> Callable[..., Any]:
        def broken(finding: Any, *rest: Any, **more: Any) -> Any:
            if torch.equal(getattr(finding, "data", torch.zeros(0)), cursed):
                raise ZeroDivisionError("of a stranger\nin two lines")
            return work(finding, *rest, **more)

        return broken

    monkeypatch.setattr("fedsim.audit.evaluation.examples.score_examples", breaking(examples.score_examples))
    monkeypatch.setattr("fedsim.report.finding_views._view_finding", breaking(finding_views._view_finding))
    failures: list[str] = []
    assert {row["attack"] for row in audit.score(failures)} == {"ig"}
    assert {row["attack"] for row in read_rows(OpenRun(run).scores)} == {"ig"}
    page = write_report(audit.folder, audit, failures).read_text()
    assert failures == [
        "sme, round 1, client 2: not scored: ZeroDivisionError: of a stranger in two lines",
        "sme, round 1, client 2 is left out: ZeroDivisionError: of a stranger in two lines",
    ]
    assert failures[1] in page
    assert (run / "findings/ig/round-1-client-2-repeat-0.png").is_file()
    assert not (run / "findings/sme/round-1-client-2-repeat-0.png").is_file()


@pytest.mark.parametrize("claims", ["update", "client", "federation"])
def test_a_finding_may_claim_fewer_examples_and_those_of_the_whole_federation(
    run: Path, strangers: str, claims: str
) -> None:
    table = {"name": f"{strangers}:Ours", "label": "ours", "claims": claims}
    audit = open_audit(run, attack_file([table], adversary={"rounds": [1], "victims": [0]}))
    assert audit.run() == []
    rows = {row["metric"]: row for row in audit.score()}
    assert audit.experiment is not None
    data = audit.experiment.data
    held = data.train(0)[1] if claims != "federation" else torch.cat([y for _, y in data.train_by_client(range(4))])
    assert rows["psnr"]["examples"] == len(held)
    assert rows["label_accuracy"]["value"] == pytest.approx(min(1, int((held == 3).sum())) / len(held))
    assert ("l_sim" in rows) == (claims == "update")
    write_report(audit.folder, audit)


def test_a_claim_that_does_not_fit_the_truth_file_is_a_failure_that_names_the_attack(
    run: Path, strangers: str, tmp_path: Path
) -> None:
    save_file({"data": torch.zeros(5, 1, 9, 9), "labels": torch.zeros(5, dtype=torch.long)}, tmp_path / "truth")
    grey = {"name": f"{strangers}:Grey", "label": "grey"}
    adversary = {"rounds": [1], "victims": [0]}
    audit = open_audit(run, attack_file([grey], adversary=adversary, truth={"0": "truth"}), tmp_path)
    assert audit.run() == []
    failures: list[str] = []
    assert audit.score(failures) == []
    [failure] = failures
    assert failure.startswith(
        "grey, round 1, client 0: not scored: truth: the victim held examples of shape (1, 9, 9), the attack claims "
    )


def fresh(name: str) -> None:
    """Let the module be imported anew, from its file and not from what Python made of it."""
    del sys.modules[name]
    linecache.clearcache()
    importlib.invalidate_caches()


def test_an_edited_plug_in_is_attacked_anew(
    run: Path, strangers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the class's own file, or of one that it derives from; other attacks are kept."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    caplog.set_level("INFO")
    (tmp_path / "strangers_heirs.py").write_text(
        f"from dataclasses import dataclass\nfrom {strangers} import Grey\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Heir(Grey):\n    'Inherit.'\n",
        encoding="utf-8",
    )
    grey = {"name": "strangers_heirs:Heir", "label": "grey"}
    spec = attack_file([grey, ATTACKS[0]], adversary={"rounds": [1]})

    def levels(spec: AttackFile) -> dict[int, float]:
        audit = open_audit(run, spec)
        assert audit.run() == []
        kept = {r["victim"] for r in audit.score() if r["attack"] == "grey" and r["metric"] == "mse"}
        return {v: findings(run)[f"grey/round-1-client-{v}-repeat-0"].data.max().item() for v in kept}

    assert levels(spec) == {0: 0.5, 2: 0.5}
    caplog.clear()
    assert levels(spec) == {0: 0.5, 2: 0.5}
    assert caplog.text.count("already there") == 4
    edited = STRANGERS.replace("self.level)", "self.level / 2)")
    (tmp_path / f"{strangers}.py").write_text(edited, encoding="utf-8")
    for module in (strangers, "strangers_heirs"):
        fresh(module)
    caplog.clear()
    one = attack_file([grey, ATTACKS[0]], adversary={"rounds": [1], "victims": [0]})
    assert levels(one) == {0: 0.25}  # that of client 2 is of the code before, and would share the mean
    assert (
        "grey on client 0, round 1: attacked anew, because the code of strangers_heirs:Heir has changed" in caplog.text
    )
    assert caplog.text.count("already there") == 1
    assert levels(spec) == {0: 0.25, 2: 0.25}


def test_the_fingerprint_of_a_built_in_attack_knows_nothing_of_code(run: Path) -> None:
    """Findings of earlier versions are still taken for done."""
    audit = open_audit(run, attack_file([ATTACKS[0]], adversary={"rounds": [1], "victims": [0]}))
    assert audit.run() == []
    _, about = load_finding(run / "findings" / "sme" / "round-1-client-0-repeat-0.safetensors")
    [(_, attack)] = build_attacks(audit.spec)
    header = Transcript(run).header(1).to_json()
    table = audit.spec.adversary.knowledge.model_dump()
    granted = {name: table[name] for name in about["granted"]}  # type: ignore[attr-defined]
    text = json.dumps([repr(attack), granted, None, 0, [header]], sort_keys=True)
    assert about["fingerprint"] == hashlib.sha256(text.encode()).hexdigest()
    assert about["code"] is None


@pytest.mark.isolated
def test_an_attack_whose_code_is_in_no_file_is_refused(
    run: Path, strangers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was typed into a notebook: no process of its own could import it."""
    module = ModuleType("of_a_notebook")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(STRANGERS, vars(module))
    spec = attack_file([{"name": "of_a_notebook:Grey", "label": "grey"}], adversary={"rounds": [1], "victims": [0]})
    [failure] = open_audit(run, spec).run()
    assert "'of_a_notebook': a separate process cannot import what is in no module file; put it into a" in failure
    assert not findings(run)


def test_settings_of_the_run_are_those_of_the_file(first_attacked_run: Path) -> None:
    run = first_attacked_run
    _, about = load_finding(run / "findings" / "ig" / "round-2-client-2-repeat-0.safetensors")
    assert about["attack"] == "ig"
    assert about["victim"] == 2
    assert dict(about["settings"])["iterations"] == 4  # type: ignore[call-overload]
    config = OpenRun(run).read_experiment()
    assert config is not None
    assert config.attack[1].settings == dict(about["settings"])  # type: ignore[call-overload]
    assert dataclasses.is_dataclass(open_audit(run, None))


def numbers(count: int = 12) -> Dataset:
    raw = torch.rand((count, 3), generator=torch.Generator().manual_seed(0))
    part = Examples(raw=raw, labels=torch.linspace(-1, 1, count), scale=1.0)
    return Dataset(name="numbers", train=part, test=part, num_classes=0, source="here", licence="any")


def texts(count: int = 12) -> Dataset:
    part = Examples(raw=torch.arange(count * 6).reshape(count, 6) % 9, labels=torch.arange(count) % 2, scale=None)
    return Dataset(name="texts", train=part, test=part, num_classes=2, vocabulary=9, source="here", licence="any")


def own(monkeypatch: pytest.MonkeyPatch, make: Callable[..., Dataset]) -> dict[str, Any]:
    """The `[data]` table of a data set that `make` gives."""
    module = ModuleType("numbers_and_texts")
    module.make = make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return {"name": f"{module.__name__}:make"}


def test_a_regression_is_attacked_and_scored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    adversary = {"victims": [0], "rounds": [1], "workers": 1, "knowledge": {"labels": True}}
    tables = {"data": own(monkeypatch, numbers), "model": {"name": "linear"}}
    run = run_serial(make_tiny_config(**tables, adversary=adversary, attack=ATTACKS), tmp_path / "regression")
    audit = open_audit(run.path, None, trust=True)
    assert audit.run() == []
    rows = audit.score()
    assert {row["metric"] for row in rows} == {"mse", "exact", "l_sim", "l_sim_line", "identified"}
    assert {row["attack"] for row in rows} == {"sme", "ig"}
    write_report(audit.folder, audit)
    path = next(run.findings.glob("*/*.safetensors"))
    finding, about = load_finding(path)
    save_finding(dataclasses.replace(finding, labels=torch.zeros(len(finding.labels), dtype=torch.long)), path, about)
    failures: list[str] = []
    assert {row["attack"] for row in audit.score(failures)} == {"sme", "ig"} - {path.parent.name}
    assert len(failures) == 1


def test_an_attack_on_numbers_says_that_texts_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tables = {"data": own(monkeypatch, texts), "model": {"name": "text-cnn"}}
    experiment = Experiment(make_tiny_config(**tables, attack=ATTACKS))
    audit = Audit(folder=OpenRun(tmp_path), spec=experiment.config, experiment=experiment, base_folder=tmp_path)
    with pytest.raises(KnowledgeError, match=r"^sme is an attack on numbers, and 'texts' holds texts; choose"):
        audit.check()
