"""`fedsim train`: states of training, and experiments that start from one."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fedsim.federation.training_states
from fedsim.base.errors import ConfigError, RunError
from fedsim.federation import lock
from fedsim.federation.config import Config
from fedsim.federation.experiment import Experiment
from fedsim.federation.experiment_file import load_config
from fedsim.federation.states import TrainingStates
from fedsim.federation.training_states import make_states
from fedsim.recording.transcript import Transcript
from tests.support.experiments import make_tiny_config, run_serial
from tests.support.tensors import are_equal

ALL = {"rounds": [0, 1, 3], "epochs": [0, 1, 3]}


@pytest.fixture(autouse=True)
def states_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def config(**states: Any) -> Config:
    return make_tiny_config(
        federation={"rounds": 3},
        training={"momentum": 0.5, "learning_rate": 0.1, "batch_size": 24},
        states=states or ALL,
        model={"name": "mlp", "hidden": [8], "dropout": 0.1},
    )


def read(states: TrainingStates, name: str) -> dict[str, torch.Tensor]:
    return {key: tensor.clone() for key, tensor in load_file(states.path(name)).items()}  # not mapped any more


def test_states_of_both_kinds_are_kept_with_how_good_they_are(states_cache: Path) -> None:
    states = make_states(config(), "tiny", None)
    assert states_cache in states.folder.parents
    manifest = states.manifest()
    assert list(manifest["states"]) == ["round-0", "round-1", "round-3", "epoch-0", "epoch-1", "epoch-3"]
    accuracies = {name: about.get("accuracy") for name, about in manifest["states"].items()}
    assert accuracies["epoch-3"] > accuracies["epoch-1"] > accuracies["epoch-0"]
    assert manifest["experiment"]["model"]["hidden"] == [8]
    assert manifest["versions"]["torch"] == version("torch")
    assert are_equal(read(states, "round-0"), read(states, "epoch-0"))
    assert not are_equal(read(states, "round-3"), read(states, "epoch-3"))


def test_a_folder_is_held_while_epochs_are_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, real = list[bool](), fedsim.federation.training_states.train_centrally

    def watched(*arguments: Any) -> None:
        held.append((tmp_path / "out").resolve() in lock._locks)
        real(*arguments)

    monkeypatch.setattr(fedsim.federation.training_states, "train_centrally", watched)
    make_states(config(epochs=[1]), "tiny", tmp_path / "out")
    assert held == [True]


def test_round_states_are_what_the_clients_of_the_next_round_received(tmp_path: Path) -> None:
    states = make_states(config(), "tiny", None)
    recorded = Transcript(run_serial(config(), tmp_path / "run").path)
    for number in (0, 1):
        sent = dict(sorted(recorded.update(number + 1, 0).before.items()))
        assert are_equal(read(states, f"round-{number}"), sent)
    assert not list((states.folder.parent / "transcript").glob("*"))


def test_what_is_there_is_not_made_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    states = make_states(config(), "tiny", None)
    before = {path: path.stat().st_mtime_ns for path in states.folder.glob("*.safetensors")}
    with caplog.at_level(logging.INFO, "fedsim"):
        again = make_states(config(), "tiny", None)
    assert "all 6 states are there already" in caplog.text
    assert {path: path.stat().st_mtime_ns for path in again.folder.glob("*.safetensors")} == before


def test_an_interrupted_central_training_ends_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = config(epochs=[1, 2, 4], decay_at=[2])
    whole = make_states(spec, "tiny", tmp_path / "whole")
    real = fedsim.federation.training_states._CentralTraining.epoch

    def killed(self: Any, number: int) -> float:
        if number == 3:
            raise KeyboardInterrupt
        return real(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(fedsim.federation.training_states._CentralTraining, "epoch", killed)
        with pytest.raises(KeyboardInterrupt):
            make_states(spec, "tiny", tmp_path / "parts")
    assert list(TrainingStates(tmp_path / "parts" / "states").manifest()["states"]) == ["epoch-1", "epoch-2"]
    parts = make_states(spec, "tiny", tmp_path / "parts")
    for name in ("epoch-1", "epoch-2", "epoch-4"):
        assert are_equal(read(whole, name), read(parts, name))


def test_later_epochs_go_on_and_earlier_ones_begin_anew(tmp_path: Path) -> None:
    whole = make_states(config(epochs=[1, 2, 3]), "tiny", tmp_path / "whole")
    make_states(config(epochs=[2]), "tiny", tmp_path / "parts")
    make_states(config(epochs=[2, 3]), "tiny", tmp_path / "parts")
    parts = make_states(config(epochs=[1, 2, 3]), "tiny", tmp_path / "parts")
    for name in ("epoch-1", "epoch-2", "epoch-3"):
        assert are_equal(read(whole, name), read(parts, name))


def test_the_learning_rate_decays_when_told(tmp_path: Path) -> None:
    def state_distance(states: TrainingStates, start: str, end: str) -> float:
        one, other = read(states, start), read(states, end)
        return sum((one[name] - other[name]).square().sum().item() for name in one) ** 0.5

    plain = make_states(config(epochs=[2, 3]), "tiny", tmp_path / "plain")
    decayed = make_states(config(epochs=[2, 3], decay_at=[2], decay=0.01), "tiny", tmp_path / "decayed")
    assert are_equal(read(plain, "epoch-2"), read(decayed, "epoch-2"))
    assert state_distance(decayed, "epoch-2", "epoch-3") < 0.1 * state_distance(plain, "epoch-2", "epoch-3")


def test_a_federation_starts_from_a_state(tmp_path: Path) -> None:
    states = make_states(config(), "tiny", None)
    model = {"name": "mlp", "hidden": [8], "dropout": 0.1, "start": str(states.path("epoch-3"))}
    folder = run_serial(make_tiny_config(model=model), tmp_path / "run")
    broadcast = dict(sorted(Transcript(folder.path).update(1, 0).before.items()))
    assert are_equal(broadcast, read(states, "epoch-3"))
    again = folder.read_experiment()
    assert again is not None
    assert again.model.start == model["start"]


def test_a_federation_that_withholds_statistics_starts_from_central_training(tmp_path: Path) -> None:
    tables: dict[str, Any] = {"training": {"batch_norm_statistics": "withheld"}, "states": {"epochs": [1]}}
    model = {"name": "mlp", "hidden": [8], "batch_norm": True}
    states = make_states(make_tiny_config(model=model, **tables), "tiny", None)
    trained = read(states, "epoch-1")
    start = Experiment(
        make_tiny_config(model={**model, "start": str(states.path("epoch-1"))}, **tables)
    ).initial_state()
    assert {name.split(".")[-1] for name in set(trained) - set(start)} == {"running_mean", "running_var"}
    assert are_equal({name: trained[name] for name in start}, start)


def test_a_relative_start_is_beside_the_experiment_file(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('[model]\nname = "mlp"\nstart = "states/x.safetensors"\n')
    assert load_config(tmp_path / "a.toml").model.start == str(tmp_path / "states" / "x.safetensors")


def write(path: Path, state: dict[str, torch.Tensor]) -> Path:
    save_file(state, path)
    return path


def first(state: dict[str, torch.Tensor], value: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**state, next(iter(state)): value}


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda path, state: path.unlink(), "is not a readable safetensors file .*; `fedsim train` makes one"),
        (lambda path, state: path.write_bytes(path.read_bytes()[:-9]), "is not a readable safetensors file"),
        (lambda path, state: path.write_bytes(b"hello"), "is not a readable safetensors file"),
        (
            lambda path, state: write(path, {n: t + 1 for n, t in state.items()}),
            r"not the file that its manifest\.json",
        ),
        (
            lambda path, state: write(path.with_name("y.safetensors"), {}),
            "is not a state of 'mlp': expected .* got nothing",
        ),
        (
            lambda path, state: write(path.with_name("y.safetensors"), {**state, "extra": torch.ones(1)}),
            "is not a state of 'mlp', which has no extra",
        ),
        (
            lambda path, state: write(path.with_name("y.safetensors"), {n: t * float("nan") for n, t in state.items()}),
            "holds NaN or infinite values",
        ),
        (
            lambda path, state: write(path.with_name("y.safetensors"), {n: t[:1] for n, t in state.items()}),
            r"expected 1\.weight of shape \(8, 64\), got \(1, 64\); name the model that it was trained with",
        ),
    ],
)
def test_a_start_that_cannot_be_is_one_sentence(
    damage: Callable[[Path, dict[str, torch.Tensor]], object], sentence: str
) -> None:
    states = make_states(config(epochs=[0]), "tiny", None)
    path = states.path("epoch-0")
    damage(path, read(states, "epoch-0"))
    other = path.with_name("y.safetensors")
    model = {"name": "mlp", "hidden": [8], "dropout": 0.1, "start": str(other if other.exists() else path)}
    with pytest.raises(ConfigError, match=f"^model.start: .*{sentence}") as caught:
        Experiment(make_tiny_config(model=model)).check()
    assert "\n" not in str(caught.value)


def test_a_damaged_state_is_made_again(tmp_path: Path) -> None:
    states = make_states(config(epochs=[0, 2]), "tiny", None)
    kept = read(states, "epoch-2")
    states.path("epoch-2").write_bytes(b"rubbish")
    assert are_equal(read(make_states(config(epochs=[0, 2]), "tiny", None), "epoch-2"), kept)


def test_a_lost_state_of_a_finished_federation_is_said() -> None:
    states = make_states(config(rounds=[1]), "tiny", None)
    states.path("round-1").unlink()
    with pytest.raises(RunError, match=r"round-1\.safetensors: was made once and is gone; remove .* and train again"):
        make_states(config(rounds=[1]), "tiny", None)


def test_a_folder_of_another_experiment_is_left_alone(tmp_path: Path) -> None:
    make_states(config(epochs=[0]), "tiny", tmp_path / "out")
    other = make_tiny_config(federation={"seed": 4}, states={"epochs": [0]})
    with pytest.raises(ConfigError, match="holds states of another experiment; choose another --out"):
        make_states(other, "tiny", tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("dear")
    with pytest.raises(ConfigError, match="is not empty"):
        make_states(other, "tiny", tmp_path / "full")


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({}, "states: no state is asked for"),
        ({"states": {"rounds": [9]}}, r"round 9 of federation\.rounds = 2; raise it"),
        ({"states": {"epochs": [-1]}}, r"states\.epochs"),
        (
            {"recording": {"rounds": []}, "attack": [{"name": "sme"}], "adversary": {"when": "at-end"}},
            "nothing is recorded",
        ),
    ],
)
def test_a_request_that_cannot_be(tables: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_states(make_tiny_config(**tables), "tiny", None)


def test_a_training_that_diverges_keeps_what_it_had(tmp_path: Path) -> None:
    spec = make_tiny_config(training={"learning_rate": 1e20}, states={"epochs": [0, 1]})
    with pytest.raises(RunError, match=r"central training diverged: .* after epoch 1; lower training\.learning_rate"):
        make_states(spec, "tiny", tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "states" / "manifest.json").read_text())
    assert list(manifest["states"]) == ["epoch-0"]
