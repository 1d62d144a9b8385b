"""Objects of a Python program in a run: each is used as it is, and never taken for another or for an earlier one."""

from __future__ import annotations

import enum
import gc
import importlib
import json
import re
import shutil
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import tomli_w
import torch
from torch import nn

import fedsim
from adversaries.inversion.inverting_gradients import InvertingGradients
from fedsim import Run
from fedsim.base.errors import AttackError, ConfigError, FedsimError, PluginError, RunError
from fedsim.interfaces.defense_checks import check_defense
from fedsim.interfaces.local_context import LocalContext

PAPER = fedsim.Paper(title="Test", authors="Nobody", venue="Nowhere", year=2026)
TABLES: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"name": "iid", "samples_per_client": 4},
    "model": {"name": "mlp"},
    "training": {"local_epochs": 1, "batch_size": 4},
    "federation": {"clients": 2, "rounds": 1, "engine": "serial", "seed": 1},
    "adversary": {"when": "never", "workers": 1},
}
SOURCE = """
from dataclasses import dataclass
from typing import ClassVar

import torch

import fedsim

PAPER = fedsim.Paper(title="Test", authors="Nobody", venue="Nowhere", year=2026)


@dataclass(frozen=True, kw_only=True)
class Shade(fedsim.Attack):
    paper: ClassVar[fedsim.Paper] = PAPER

    def _run(self, target, progress):
        return fedsim.Reconstruction(data=torch.full((1, 1, 8, 8), VALUE), labels=torch.zeros(1, dtype=torch.int64))


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Softplus(VALUE), torch.nn.Linear(64, 10))


@dataclass(frozen=True, kw_only=True)
class Shift(fedsim.Defense):
    paper: ClassVar[fedsim.Paper] = PAPER

    def on_update(self, update, context):
        return {name: torch.full_like(tensor, VALUE) for name, tensor in update.items()}
"""


@dataclass(frozen=True, kw_only=True)
class Clip(fedsim.Defense):
    """Clips each number of an update, unless `to` is None."""

    to: float | None = 1e-6
    paper: ClassVar[fedsim.Paper] = PAPER

    def on_update(self, update: Any, context: LocalContext) -> Any:
        return update if self.to is None else {name: t.clamp(-self.to, self.to) for name, t in update.items()}


def factory_defense(value: float) -> fedsim.Defense:
    @dataclass(frozen=True, kw_only=True)
    class Constant(fedsim.Defense):
        paper: ClassVar[fedsim.Paper] = PAPER

        def on_update(self, update: Any, context: LocalContext) -> Any:
            return {name: torch.full_like(tensor, value) for name, tensor in update.items()}

    return Constant()


def factory_attack(value: float) -> fedsim.Attack:
    @dataclass(frozen=True, kw_only=True)
    class Constant(fedsim.Attack):
        paper: ClassVar[fedsim.Paper] = PAPER

        def _run(self, target: Any, progress: Any) -> Any:
            if value < 0:
                raise ValueError("below black")
            return grey(value)

    return Constant()


def grey(value: float) -> fedsim.Reconstruction:
    return fedsim.Reconstruction(data=torch.full((1, 1, 8, 8), value), labels=torch.zeros(1, dtype=torch.int64))


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def first_number(run: Run) -> float:
    """The first number of the update of client 0 in round 1."""
    update = run.transcript.update(1, 0)
    name = next(iter(update.after))
    return float((update.after[name] - update.before[name]).flatten()[0])


def data() -> fedsim.Dataset:
    raw = torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    part = fedsim.Examples(raw=raw, labels=torch.arange(40) % 10, scale=1.0)
    return fedsim.Dataset(name="mine", train=part, test=part, num_classes=10, source="drawn", licence="none")


@pytest.fixture
def plain(tmp_path: Path) -> Run:
    return fedsim.run(TABLES, tmp_path / "plain")


@pytest.fixture
def edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that writes the module `edited_plugins` with a value, and imports or reloads it."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(value: float) -> ModuleType:
        (tmp_path / "edited_plugins.py").write_text(SOURCE.replace("VALUE", str(value)))
        importlib.invalidate_caches()
        known = sys.modules.get("edited_plugins")
        return importlib.reload(known) if known else importlib.import_module("edited_plugins")

    yield write
    sys.modules.pop("edited_plugins", None)


# The code and the data of this run, not of an earlier one.


def test_a_second_run_of_the_same_experiment_reads_its_data_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shaded_data.py").write_text(
        "import torch\nfrom fedsim import Dataset, Examples\n\n\n"
        "def shaded(path: str) -> Dataset:\n"
        "    raw = torch.full((40, 1, 8, 8), float(open(path).read()))\n"
        "    part = Examples(raw=raw, labels=torch.arange(40) % 10, scale=1.0)\n"
        "    return Dataset(name='s', train=part, test=part, num_classes=10, source='drawn', licence='none')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    tables = {**TABLES, "data": {"name": "shaded_data:shaded", "path": str(tmp_path / "shade"), "standardise": False}}
    hashes = []
    for shade in ("0.25", "0.75"):
        (tmp_path / "shade").write_text(shade)
        hashes.append(fedsim.run(tables, tmp_path / f"run-{shade}").transcript.hash())
    assert hashes[0] != hashes[1]


def test_a_second_run_uses_a_defense_that_was_edited_and_reloaded(tmp_path: Path, edited: Any) -> None:
    for value in (0.5, 2.0):
        module = edited(value)
        run = fedsim.run({**TABLES, "defense": [module.Shift()]}, tmp_path / str(value))
        assert first_number(run) == pytest.approx(value, abs=1e-5)


def test_an_attack_that_was_edited_and_reloaded_is_made_anew(plain: Run, edited: Any) -> None:
    for value in (0.25, 0.75):
        finding = plain.attack(edited(value).Shade(), victim=0, round=1)
        assert finding.data.mean().item() == value


def test_a_run_is_not_rebuilt_with_a_model_or_a_defense_that_was_edited_since(tmp_path: Path, edited: Any) -> None:
    edited(1.0)
    tables = {**TABLES, "model": {"name": "edited_plugins:net"}}
    model = fedsim.run(tables, tmp_path / "model")
    defended = fedsim.run({**TABLES, "defense": [{"name": "edited_plugins:Shift"}]}, tmp_path / "defended")
    assert model.attack("sme", victim=0, round=1, iterations=1)
    edited(2.0)
    told = "the code of the plug-in changed after the run was made, so the run cannot be rebuilt"
    for again in (model, fedsim.open(model.path, trust=True)):
        with pytest.raises(ConfigError, match=rf"experiment.toml: model: {told}"):
            again.attack("sme", victim=0, round=1, iterations=2)
    (failure,) = model.report().failures
    assert told in failure
    assert "The experiment file is not used" in (model.path / "report.html").read_text()
    assert defended.attack("sme", victim=0, round=1, iterations=1)  # what was sent is in the recording
    with pytest.raises(ConfigError, match=rf"experiment.toml: defense.0: {told}"):
        defended.resume()
    edited(1.0)
    assert model.attack("sme", victim=0, round=1, iterations=2)


def test_findings_of_older_code_are_not_scored_beside_those_of_new_code(plain: Run, edited: Any) -> None:
    """Whatever the settings that they were made with."""
    assert plain.attack(edited(0.25).Shade(), victim=0, round=1)
    assert plain.attack(edited(0.75).Shade(), victim=0, round=1, knowledge={"labels": False})
    scores = plain.scores[plain.scores["metric"] == "mse"]
    assert len(scores) == 1


def test_a_module_of_the_same_name_in_another_folder_is_not_taken_for_the_one_beside_the_experiment(
    tmp_path: Path, edited: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    edited(1.0)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "edited_plugins.py").write_text(SOURCE.replace("VALUE", "3.0"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(PluginError, match=r"elsewhere/edited_plugins.py is meant, but .* was loaded under that name"):
        fedsim.run({**TABLES, "model": {"name": "edited_plugins:net"}}, tmp_path / "run")


# Classes that a function made.


def test_classes_of_one_source_are_not_taken_for_one_another(tmp_path: Path, plain: Run) -> None:
    defended = [fedsim.run({**TABLES, "defense": [factory_defense(v)]}, tmp_path / str(v)) for v in (0.5, 2.0)]
    assert [first_number(run) for run in defended] == pytest.approx([0.5, 2.0], abs=1e-5)
    findings = [plain.attack(factory_attack(value), victim=0, round=1) for value in (0.25, 0.75)]
    assert [finding.data.mean().item() for finding in findings] == [0.25, 0.75]


def test_a_run_keeps_its_objects_when_another_of_the_same_class_is_deleted(tmp_path: Path) -> None:
    tables = {**TABLES, "defense": [factory_defense(0.5)]}
    first = fedsim.run(tables, tmp_path / "first")
    second = fedsim.run(tables, tmp_path / "second")
    del second
    gc.collect()
    assert first.attack("sme", victim=0, round=1, iterations=1)


def test_a_run_of_objects_that_failed_can_be_attacked_and_resumed(tmp_path: Path) -> None:
    tables = {**TABLES, "model": network(), "attack": [factory_attack(-1.0)], "adversary": {"victims": [0]}}
    with pytest.raises(RunError, match="below black"):
        fedsim.run(tables, tmp_path / "failed")
    assert fedsim.open(tmp_path / "failed").attack("sme", victim=0, round=1, iterations=1)

    def stop(what: str, done: int, total: int) -> None:
        if what == "rounds" and done == 1:
            raise KeyboardInterrupt

    longer = {**TABLES, "model": network(), "federation": {**TABLES["federation"], "rounds": 2}}
    with pytest.raises(KeyboardInterrupt):
        fedsim.run(longer, tmp_path / "stopped", progress=stop)
    assert fedsim.open(tmp_path / "stopped").resume().transcript.rounds == [1, 2]


# What an experiment file cannot hold.


def test_none_is_not_replaced_by_a_default(tmp_path: Path) -> None:
    by_name = {"name": f"{__name__}:Clip", "to": None}
    for defense in (Clip(to=None), by_name):
        with pytest.raises(ConfigError, match=r"defense\.0\.to: None cannot be written in an experiment file"):
            fedsim.run({**TABLES, "defense": [defense]}, tmp_path / "run")


class Kept(Clip):
    """Could keep on itself what it saw of one client until the next, as no class with a decorator can."""


class Undecorated(Clip):
    """No dataclass of its own, so its `__init__` would be lost."""

    def __init__(self, strength: float) -> None:
        object.__setattr__(self, "strength", strength)


@dataclass(frozen=True, kw_only=True)
class Base(fedsim.Attack):
    paper: ClassVar[fedsim.Paper] = PAPER

    def _run(self, target: Any, progress: Any) -> Any:
        return grey(0.5)


class Counts(Base):
    """Keeps on itself how many victims it has seen, which only an undecorated class can."""


def test_a_class_that_is_no_frozen_dataclass_is_refused(tmp_path: Path, plain: Run) -> None:
    with pytest.raises(PluginError, match=r"Undecorated: expected a frozen dataclass"):
        fedsim.run({**TABLES, "defense": [Undecorated(3.0)]}, tmp_path / "run")
    with pytest.raises(PluginError, match=r"Kept: expected a frozen dataclass"):
        fedsim.run({**TABLES, "defense": [{"name": f"{__name__}:Kept"}]}, tmp_path / "run")
    for attack in (Counts(), f"{__name__}:Counts"):
        with pytest.raises(PluginError, match=r"Counts: expected a frozen dataclass"):
            plain.attack(attack, victim=0, round=1)


def test_a_hook_on_an_instance_is_refused() -> None:
    defense = Clip()
    object.__setattr__(defense, "on_gradient", lambda gradient, context: gradient)
    with pytest.raises(PluginError, match="'on_gradient' is set on an instance, where it is never called"):
        check_defense(defense)


def test_two_attacks_of_one_class_are_told_apart_by_their_titles(tmp_path: Path) -> None:
    attacks = [InvertingGradients(iterations=count).with_title(title) for count, title in ((1, "one"), (2, "two"))]
    run = fedsim.run({**TABLES, "attack": attacks, "adversary": {"victims": [0], "workers": 1}}, tmp_path / "run")
    assert set(run.scores["attack"]) == {"one", "two"}


# What is beside the recording is of the same run.


def test_a_data_set_that_was_changed_in_place_is_refused(tmp_path: Path) -> None:
    own = data()
    run = fedsim.run({**TABLES, "data": own}, tmp_path / "run")
    run.attack("sme", victim=0, round=1, iterations=1)
    own.train.raw.copy_(1 - own.train.raw)
    with pytest.raises(PluginError, match="the tensors of this data set were changed after it was handed over"):
        run.attack("sme", victim=0, round=1, iterations=2)


def test_a_recording_beside_the_experiment_of_another_run_is_refused(tmp_path: Path, plain: Run) -> None:
    other = fedsim.run(TABLES, tmp_path / "other", set={"federation.seed": 99})
    for name, experiment in (("same", plain), ("mixed", other)):
        shutil.copytree(plain.path / "transcript", tmp_path / name / "transcript")
        shutil.copy(experiment.path / "experiment.toml", tmp_path / name)
    assert fedsim.open(tmp_path / "same").attack("sme", victim=0, round=1, iterations=1)
    with pytest.raises(ConfigError, match="so the recording is of another run"):
        fedsim.open(tmp_path / "mixed").attack("sme", victim=0, round=1, iterations=1)
    assert not (tmp_path / "mixed" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (
            "training.learning_rate",
            0.25,
            "was trained with learning_rate = .*, and this experiment says 0.25, so the rec",
        ),
        (
            "partition.samples_per_client",
            3,
            "has N = 4 of client 0, and in this experiment N is 3, so the recording is of",
        ),
        ("federation.clients", 1, "is of client 1, too, and this experiment has 1 client, so the recording is of"),
    ],
)
def test_a_recording_beside_an_edited_experiment_is_refused(
    key: str, value: float, words: str, tmp_path: Path, plain: Run
) -> None:
    """Else it is scored against examples on which nobody trained; with its manifest, the manifest says so."""
    shutil.copytree(plain.path / "transcript", tmp_path / "transcript")
    content = tomllib.loads((plain.path / "experiment.toml").read_text())
    table, name = key.split(".")
    content[table][name] = value
    (tmp_path / "experiment.toml").write_text(tomli_w.dumps(content))
    with pytest.raises(ConfigError, match=words):
        fedsim.open(tmp_path).attack("sme", victim=0, round=1, iterations=1)


def test_a_recording_beside_its_own_experiment_is_attacked_whatever_the_server_adds_to_settings(tmp_path: Path) -> None:
    run = fedsim.run({**TABLES, "strategy": {"name": "fedprox", "proximal_mu": 0.1}}, tmp_path / "fedprox")
    (run.path / "manifest.json").unlink()
    fedsim.open(run.path).attack("analytic", victim=0, round=1)


def test_a_table_that_was_deleted_does_not_pass_for_an_empty_one(plain: Run) -> None:
    plain.attack("sme", victim=0, round=1, iterations=1)
    for name in ("metrics", "scores"):
        (plain.path / f"{name}.csv").unlink()
        with pytest.raises(RunError, match=re.escape(f"{name}.csv: is missing, though this run wrote it")) as caught:
            getattr(plain, name)
        assert isinstance(caught.value, FedsimError)


def test_the_experiment_of_another_run_is_no_attack_file(tmp_path: Path, plain: Run) -> None:
    text = (plain.path / "experiment.toml").read_text() + '[[attack]]\nname = "sme"\n'
    (tmp_path / "same.toml").write_text(text)
    (tmp_path / "other.toml").write_text(text.replace("batch_size = 4", "batch_size = 2", 1))
    assert fedsim.open(plain.path, file=tmp_path / "same.toml")
    with pytest.raises(ConfigError, match=r"other.toml: training.batch_size: the run was made with 4, this file"):
        fedsim.open(plain.path, file=tmp_path / "other.toml")


# What an attack is, and what it claims.


class Form(enum.Enum):
    """A setting that JSON does not know."""

    ROUND = "round"


@dataclass(frozen=True, kw_only=True)
class Odd(fedsim.Attack):
    """Has settings of several types, and may claim a kind of finding that it did not register."""

    form: Form = Form.ROUND
    weights: Path = Path("here")
    names: Any = None
    derived: bool = False
    paper: ClassVar[fedsim.Paper] = PAPER

    def _run(self, target: Any, progress: Any) -> Any:
        kind = Derived if self.derived else fedsim.Reconstruction
        return kind(data=torch.zeros(1, 1, 8, 8), labels=torch.zeros(1, dtype=torch.int64))


@dataclass(frozen=True, kw_only=True)
class Derived(fedsim.Reconstruction):
    """Would lose `more`, if it were kept as a Reconstruction."""

    more: Any = None


def test_a_path_and_an_enumeration_are_settings_and_a_set_is_refused_before_work(plain: Run) -> None:
    assert plain.attack(f"{__name__}:Odd", victim=0, round=1, weights=Path("there"))
    assert json.loads(plain.scores["settings"][0]) == {"weights": "there"}
    with pytest.raises(ConfigError, match="names: expected a number, a text or a list of them, got set"):
        plain.attack(Odd(names={1, 2}), victim=0, round=1)


def test_a_class_derived_from_a_kind_of_finding_is_not_kept_as_that_kind(plain: Run) -> None:
    told = "returned a Derived of the kind 'reconstruction', which is a Reconstruction; give it its own kind"
    with pytest.raises(AttackError, match=told):
        plain.attack(Odd(derived=True), victim=0, round=1)


def test_the_name_of_an_attack_is_no_setting(plain: Run) -> None:
    with pytest.raises(ConfigError, match=r"run.attack: name: the attack is named by the first argument; leave this"):
        plain.attack("inverting-gradients", victim=0, round=1, name="sme")
