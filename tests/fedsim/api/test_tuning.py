"""Settings are chosen on simulated clients of public data, and nothing of the victims' is looked at."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fedsim
from fedsim.api.tuning import trials as trials_module
from fedsim.api.tuning.simulated_clients import simulated_experiment
from fedsim.api.tuning.trials import SettingTrial, finalist_changes, find_best_trial, prior_changes, step_size_changes
from fedsim.audit.finding_files import read_facts
from fedsim.base.errors import ConfigError, DataError, FedsimError, KnowledgeError, RunError
from fedsim.federation.config import Config
from fedsim.federation.experiment import Experiment
from fedsim.federation.resolve import resolve
from fedsim.federation.states import read_state
from tests.support.commands import Call
from tests.support.experiments import make_tiny_config, run_serial

IG = {"name": "inverting-gradients", "iterations": 6}
FEW_STEPS: list[dict[str, Any]] = [{}, {"step_size": 0.5, "signed": True}]


@pytest.fixture(autouse=True)
def few_trials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only two step sizes are tried, and one weight of the prior."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trials_module, "step_size_changes", lambda attack: FEW_STEPS)
    monkeypatch.setattr(trials_module, "_FACTORS", ((10.0,),))


def make_config(**tables: Any) -> Config:
    tables = {"partition": {"samples_per_client": 2}, "federation": {"rounds": 1}, "attack": [IG], **tables}
    return make_tiny_config(**{"adversary": {"when": "never", "workers": 1, "knowledge": {"labels": True}}, **tables})


def simulate(config: Config, folder: Path, **options: Any) -> Experiment:
    arguments: dict[str, Any] = {"broadcast": None, "victim": 0, "clients": 3, **options}
    return Experiment(simulated_experiment(resolve(config), folder=folder, **arguments))


def test_the_chosen_settings_are_in_an_attack_file_that_says_how_they_were_chosen(tmp_path: Path) -> None:
    run = run_serial(make_config(attack=[{**IG, "step_size": 1e-6}]), tmp_path / "run")
    tuning = fedsim.tune(run.path, "tuned.toml", iterations=3)
    assert tuning.settings["inverting-gradients"]["step_size"] > 0.1
    # The longest trials decide, by the public examples.
    trials = tuning.trials
    finalists = trials[trials["iterations"] == 6]
    assert len(finalists) >= 2
    assert finalists.loc[finalists["chosen"], "score"].item() == finalists["score"].max()
    file = tomllib.loads(tuning.path.read_text())
    (table,) = file["attack"]
    assert {name: table[name] for name in tuning.settings["inverting-gradients"]} == tuning.settings[
        "inverting-gradients"
    ]
    assert table["iterations"] == 6
    assert table["tuned"].startswith(f"{len(trials)} trials on 2 simulated clients of 2 public examples of 'digits'")
    assert table["tuned"].endswith("trained from the weights of round 1; the best by psnr of these examples")
    assert file["adversary"]["knowledge"] == {"labels": True}
    # The finding keeps the note, and the page shows it.
    assert call_attack(run.path, Path("tuned.toml"))["tuned"] == table["tuned"]
    assert f"chosen in {table['tuned'][:20]}" in (run.path / "report.html").read_text()


def call_attack(run: Path, file: Path) -> dict[str, Any]:
    """Attack by a file, and return what the finding declares."""
    from fedsim.api import pipeline
    from fedsim.api.adversaries import read_adversary
    from fedsim.federation.open_run import OpenRun

    folder = OpenRun(run)
    assert not pipeline.attack(folder, read_adversary(folder, file)).failures
    return read_facts(next((run / "findings").glob("*/*.safetensors")))


def test_the_same_call_makes_no_trial_again_and_a_changed_experiment_makes_all_of_them() -> None:
    first = fedsim.tune(make_config(), "tuned.toml", iterations=3)
    paths = sorted(first.folder.glob("findings/*/*.safetensors"))
    times = [path.stat().st_mtime_ns for path in paths]
    second = fedsim.tune(make_config(), "tuned.toml", iterations=3)
    assert [path.stat().st_mtime_ns for path in paths] == times
    assert second.trials.equals(first.trials)
    assert len(paths) == 2 * len(first.trials)
    other = fedsim.tune(make_config(training={"learning_rate": 0.5}), "tuned.toml", iterations=3)
    assert other.trials["score"].tolist() != first.trials["score"].tolist()


def test_simulated_clients_hold_as_many_public_examples_as_the_victim_and_no_others(tmp_path: Path) -> None:
    config = make_config()
    whole, simulated = Experiment(config), simulate(config, tmp_path)
    assert simulated.data.counts == [2, 2, 2]
    shares = whole.data.train_by_client(range(whole.data.clients))
    held = {image.numpy().tobytes() for inputs, _ in shares for image in inputs}
    drawn = {image.numpy().tobytes() for image in simulated.dataset.train.inputs()}
    assert len(drawn) == 6
    # Nobody trains on them, and they are not among what guesses may use.
    assert drawn.isdisjoint(held)
    assert drawn.isdisjoint(image.numpy().tobytes() for image in whole.dataset.test.inputs())
    assert drawn.isdisjoint(image.numpy().tobytes() for image in simulated.dataset.test.inputs())


def test_simulated_clients_train_as_the_victim_does(tmp_path: Path) -> None:
    config = make_config(training={"local_epochs": 3, "momentum": 0.5})
    whole = Experiment(config)
    weights = {name: tensor + 1 for name, tensor in whole.initial_state().items()}
    simulated = simulate(config, tmp_path, broadcast=weights)
    assert simulated.training == whole.training
    start = simulated.initial_state()
    assert all(torch.equal(start[name], tensor) for name, tensor in weights.items())
    # Inputs are standardised as the whole data set is, not as the few public examples are.
    assert simulated.data.moments() == whole.data.moments()
    assert simulated.data.value_range() == whole.data.value_range()
    assert simulated.seed != whole.seed


def test_without_w_t_simulated_clients_start_from_the_first_weights(tmp_path: Path) -> None:
    config = make_config()
    simulated = simulate(config, tmp_path)
    start = read_state(Path(str(simulated.config.model.start)), Experiment(config).initial_state(), "mlp")
    assert all(torch.equal(start[name], tensor) for name, tensor in Experiment(config).initial_state().items())


def test_a_defense_is_as_strong_as_over_all_rounds_of_the_victim(tmp_path: Path) -> None:
    defense = {"name": "dp-sgd", "clip": 1.0, "epsilon": 5.0, "delta": 1e-3}
    config = make_config(federation={"rounds": 50}, defense=[defense])
    simulated = simulate(config, tmp_path)
    strength = Experiment(resolve(config)).client_defenses(0)[0].noise_multiplier  # type: ignore[attr-defined]
    assert simulated.client_defenses(0)[0].noise_multiplier == strength  # type: ignore[attr-defined]
    one_round = Experiment(resolve(make_config(defense=[defense]))).client_defenses(0)[0]
    assert strength > one_round.noise_multiplier  # type: ignore[attr-defined]


def test_the_examples_decide_and_not_the_distance_to_the_message() -> None:
    noise = SettingTrial(changes={"tv_weight": 0.0}, iterations=9, metric="psnr", score=9.0, objective=0.0, l_sim=0.0)
    image = SettingTrial(changes={}, iterations=9, metric="psnr", score=18.0, objective=0.3, l_sim=0.1)
    assert find_best_trial([noise, image]) is image


def test_failed_trials_come_last_and_lower_may_be_better() -> None:
    failed = SettingTrial(changes={}, iterations=9)
    high, low = (
        SettingTrial(changes={}, iterations=9, score=score, higher_is_better=False, metric="mse") for score in (2, 1)
    )
    assert math.isnan(failed.score)
    assert find_best_trial([failed, high, low]) is low


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [({"step_size": 1.0}, 3), ({"step_size": 0.2}, 4), ({"step_size": 1.0, "signed": False}, 6)],
)
def test_the_present_settings_are_tried_first_and_once(settings: Mapping[str, Any], sizes: int) -> None:
    changes = STEP_SIZE_CHANGES(SimpleNamespace(**settings))
    assert changes[0] == {}
    assert len(changes) == 1 + sizes
    assert all(change != settings for change in changes[1:])


STEP_SIZE_CHANGES = step_size_changes


def test_a_prior_that_is_off_is_tried_with_weights_of_its_own() -> None:
    changes = prior_changes(SimpleNamespace(tv_weight=0.0), {"step_size": 0.1}, [10.0])
    assert [change["tv_weight"] for change in changes] == [0.001, 0.01, 0.1]
    assert prior_changes(SimpleNamespace(), {}, [10.0]) == []


def test_where_the_present_settings_are_best_smaller_steps_are_tried_all_the_same() -> None:
    attack = SimpleNamespace(iterations=400, step_size=0.4)
    assert finalist_changes(attack, {}, 100) == [{}, {"step_size": 0.2}, {"step_size": 0.1}]


REFUSED: Sequence[tuple[dict[str, Any], str | None, type[FedsimError], str]] = [
    ({"attack": []}, None, ConfigError, "names no attack; name one with --attack"),
    ({"attack": [{"name": "analytic"}]}, None, ConfigError, "'analytic' has no step size, so there is nothing to tune"),
    ({}, "analytic", ConfigError, "'analytic' has no step size, so there is nothing to tune"),
    ({}, "tgias-ro", ConfigError, "'tgias-ro' reads several rounds"),
    ({"secure_aggregation": {}, "federation": {"rounds": 1}}, None, KnowledgeError, "sees sums over clients alone"),
    (
        {"partition": {"samples_per_client": 1200}, "federation": {"clients": 1}},
        None,
        DataError,
        "has 238 public examples, and the victim trains on 1200",
    ),
]


@pytest.mark.parametrize(("tables", "attack", "kind", "sentence"), REFUSED)
def test_what_cannot_be_tuned_is_refused_in_a_sentence(
    tables: dict[str, Any], attack: str | None, kind: type[FedsimError], sentence: str
) -> None:
    with pytest.raises(kind, match=sentence):
        fedsim.tune(make_config(**tables), "tuned.toml", attack=attack)
    assert not Path("tuned.toml").exists()


def test_a_file_that_cannot_be_written_is_named_before_any_trial() -> None:
    with pytest.raises(RunError, match=r"^/proc/tuned.toml: cannot be written .*; choose another --out"):
        fedsim.tune(make_config(), "/proc/tuned.toml")


def test_without_public_data_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = make_config()
    nothing = (Experiment(config).dataset.train, torch.zeros(0, dtype=torch.long).numpy())
    monkeypatch.setattr("fedsim.federation.federated_data.FederatedData.auxiliary_examples", lambda self: nothing)
    with pytest.raises(DataError, match=r"no public examples .* hold some out with partition.test_fraction"):
        simulate(config, tmp_path)


def test_a_recording_made_elsewhere_has_no_public_data(call: Call, tmp_path: Path) -> None:
    run = run_serial(make_config(), tmp_path / "run")
    run.experiment.unlink()
    result = call("tune", str(run.path))
    assert result.returncode == 2
    assert "was recorded elsewhere, so there are no public examples" in result.stderr


def test_the_command_prints_the_trials_and_names_its_file(call: Call) -> None:
    Path("mine.toml").write_text(
        '[partition]\nname = "iid"\nsamples_per_client = 1\n[model]\nname = "mlp"\nhidden = [8]\n'
        "[adversary]\nworkers = 1\n[[attack]]\n"
        'name = "inverting-gradients"\niterations = 2\n[[attack]]\nname = "analytic"\n'
    )
    result = call("tune", "mine.toml", "--clients", "1", "-q")
    assert result.returncode == 0
    assert "step_size = 0.5, signed = true" in result.stdout
    assert "attack file: mine-tuned.toml" in result.stdout
    assert [table["name"] for table in tomllib.loads(Path("mine-tuned.toml").read_text())["attack"]] == [IG["name"]]
