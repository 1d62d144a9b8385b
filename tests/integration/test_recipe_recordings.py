"""A run that keeps updates by recipe gives every one of them back to the bit, or says why it cannot."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from flwr.app import Message
from safetensors import safe_open
from torch import Tensor

import fedsim
import strategies.app
from fedsim.audit.isolation import _pickle_without_tensors
from fedsim.base.errors import AttackError, ConfigError, DataError, RunError, TranscriptError, TrustError
from fedsim.federation import update_recipes
from fedsim.federation.config import Config
from fedsim.federation.engines.cohort import CohortGrid
from fedsim.federation.integrity import compare_with_manifest
from fedsim.federation.open_run import OpenRun
from fedsim.federation.run_folder import RunFolder, read_rows
from fedsim.interfaces.defense import Defense, Paper
from fedsim.interfaces.local_context import LocalContext
from fedsim.recording.payloads import State
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.training.local_round import LocalRound
from tests.support.commands import Call
from tests.support.experiments import make_tiny_config, run_serial

RECIPE = {"keep": "recipe"}


@dataclass(frozen=True, kw_only=True)
class CountedSilence(Defense):
    """Keeps silent in every second round, and adds the number of its rounds to the update."""

    paper: ClassVar[Paper] = Paper(title="T", authors="A, B", venue="V", year=2020)

    def on_data(self, local: LocalRound, context: LocalContext) -> Tensor:
        context.memory["rounds"] = context.memory.get("rounds", torch.tensor(0)) + 1
        is_silent = int(context.memory["rounds"]) % 2 == 0
        return torch.arange(0 if is_silent else len(local.labels))

    def on_update(self, update: State, context: LocalContext) -> State:
        return {name: tensor + context.memory["rounds"] for name, tensor in update.items()}


FEDSGD = {
    "strategy": {"name": "fedsgd", "learning_rate": 0.1},
    "training": {"learning_rate": None, "local_epochs": None, "local_steps": 1},
}
WITH_FEEDBACK = {"defense": [{"name": "top-k", "fraction": 0.1, "error_feedback": True}]}
VARIANTS: Mapping[str, dict[str, Any]] = {
    "clients that train at once": {},
    "clients that train in a loop": {"federation": {"vectorise": False}},
    "two groups": {"federation": {"clients": 66, "rounds": 1}, "partition": {"samples_per_client": 2}},
    "unequal shares": {"partition": {"name": "dirichlet", "alpha": 0.3}},
    "gradients": FEDSGD,
    "a proximal term": {"strategy": {"name": "fedprox", "proximal_mu": 1.0}},
    "an adaptive server": {"strategy": {"name": "fedadam"}},
    "every second round": {"recording": {"every": 2}, "federation": {"rounds": 3}},
    "sampled clients that straggle": {
        "strategy": {"name": "fedavg", "fraction_train": 0.6},
        "federation": {"clients": 12, "straggler_probability": 0.3},
    },
    "noise and Poisson sampling": {"defense": [{"name": "dp-sgd", "clip": 1.0, "noise_multiplier": 1.0}]},
    "mixed examples": {"defense": [{"name": "mixup"}]},
    "what was not sent comes later": {**WITH_FEEDBACK, "federation": {"rounds": 3}},
    "the same, of sampled clients": {
        **WITH_FEEDBACK,
        "strategy": {"name": "fedavg", "fraction_train": 0.6},
        "federation": {"clients": 8, "rounds": 3, "vectorise": False},
    },
    "clipping that follows the norms": {
        "defense": [{"name": "update-noise", "clip": 1.0, "noise_multiplier": 0.1, "bit_noise": 1.0, "quantile": 0.5}],
        "federation": {"rounds": 3},
    },
    "gates that close by past values": {
        "defense": [{"name": "gate", "measure": "gradient-norm", "quantile": 0.5}],
        "federation": {"rounds": 4},
    },
    "silence by choice, which is remembered": {
        "defense": [{"name": f"{__name__}:CountedSilence"}],
        "strategy": {"name": "fedavg", "fraction_train": 0.5},
        "federation": {"rounds": 5},
    },
    "withheld statistics of BatchNorm": {
        "model": {"name": "resnet8"},
        "training": {"batch_norm_statistics": "withheld"},
        "partition": {"samples_per_client": 4},
        "federation": {"clients": 2, "rounds": 1},
    },
    "measured exposure": {"measure": [{"name": "gradient-norm"}]},
}

REPRESENTATIVE = {
    "clients that train at once", "gradients", "sampled clients that straggle", "noise and Poisson sampling",
    "what was not sent comes later",
}  # fmt: skip


def run_by_recipe(path: Path, **tables: Any) -> OpenRun:
    config = make_tiny_config(**tables | {"recording": tables.get("recording", {}) | RECIPE})
    return OpenRun(run_serial(config, path).path)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_by_recipe(tmp_path_factory.mktemp("own") / "run").path


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> OpenRun:
    """A copy for a test that changes it."""
    return OpenRun(Path(shutil.copytree(finished_run, tmp_path / "run")))


@pytest.fixture
def otherwise_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine adds a little to what clients train."""
    real = update_recipes.read_state

    def read_state(record: Any) -> Any:
        return {name: tensor + 1e-3 for name, tensor in real(record).items()}

    monkeypatch.setattr(update_recipes, "read_state", read_state)


@pytest.mark.parametrize(
    "tables",
    [
        pytest.param(tables, id=name, marks=() if name in REPRESENTATIVE else pytest.mark.thorough)
        for name, tables in VARIANTS.items()
    ],
)
def test_an_update_is_computed_again_to_the_bit(tables: dict[str, Any], tmp_path: Path) -> None:
    whole = Transcript(run_serial(make_tiny_config(**tables), tmp_path / "whole").path)
    run = run_by_recipe(tmp_path / "recipe", **tables)
    run.trust_code()
    by_recipe = run.recording
    assert by_recipe.rounds == whole.rounds
    for number in reversed(whole.rounds):  # so that nothing of earlier rounds is known
        assert by_recipe.clients(number) == whole.clients(number)
        assert by_recipe.upload_sizes(number) == whole.upload_sizes(number)
        assert by_recipe.count_left_out(number) == len(whole.header(number).replies)
        for client in reversed(whole.clients(number)):
            recorded, computed = whole.recorded_update(number, client), by_recipe.recorded_update(number, client)
            arrays, again = recorded.payload.arrays(), computed.payload.arrays()
            assert list(arrays) == list(again)
            assert all(torch.equal(tensor, again[name]) for name, tensor in arrays.items())
            assert (computed.num_examples, computed.metrics) == (recorded.num_examples, recorded.metrics)
    assert len(list((tmp_path / "recipe" / "transcript").iterdir())) == len(whole.rounds)


def test_an_update_is_computed_where_gradients_are_switched_off(run: OpenRun) -> None:
    with torch.no_grad():
        assert run.recording.update(1, 0).client == 0
    with torch.inference_mode():
        assert run.recording.update(2, 1).client == 1


def test_clients_that_were_asked_one_by_one_after_a_failure_are_computed_so(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class GridAfterFailure(CohortGrid):
        """Sends each client a message of its own, as after nodes failed; groups are as large as before."""

        def _split(self, messages: Sequence[Message]) -> list[list[Message]]:
            return [[message] for message in messages]

    monkeypatch.setattr(strategies.app, "CohortGrid", GridAfterFailure)
    alone = run_by_recipe(tmp_path / "run").recording
    together = Transcript(finished_run)
    hashes = [{reply.sha256 for reply in transcript.header(1).replies} for transcript in (alone, together)]
    assert hashes[0] != hashes[1]
    assert [update.client for update in alone.updates()] == [0, 1, 2, 3] * 2


def test_clients_of_which_rounds_depend_on_earlier_ones_are_known(tmp_path: Path) -> None:
    transcript = run_by_recipe(tmp_path / "run", **WITH_FEEDBACK).recording
    assert [transcript.header(number).recipe["memory"] for number in (1, 2)] == [0, 1]


def test_the_files_hold_no_update(run: OpenRun) -> None:
    for number in (1, 2):
        with safe_open(run.recording.round_path(number), framework="pt") as file:
            assert {key.split("/")[0] for key in file.keys()} == {"broadcast"}  # noqa: SIM118


def test_a_resumed_run_is_computed_again_as_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short, whole = (
        make_tiny_config(**WITH_FEEDBACK, federation={"rounds": rounds}, recording=RECIPE) for rounds in (2, 3)
    )
    run = run_serial(short, tmp_path / "run")
    run_serial(whole, run.path, resume=True)
    transcript = OpenRun(run.path).recording
    assert [transcript.header(number).recipe["rounds"] for number in (1, 2, 3)] == [2, 2, 3]
    # Clients train as in a run of so many rounds, which their defenses may know.
    told = list[int]()
    real = update_recipes.make_simulation

    def make_simulation(config: Config) -> Any:
        told.append(config.federation.rounds)
        return real(config)

    monkeypatch.setattr(update_recipes, "make_simulation", make_simulation)
    assert transcript.update(3, 2).client == 2
    assert told == [2, 2, 3]


# What differs is named.


def test_another_processor_that_rounds_otherwise_is_named(
    run: OpenRun, otherwise_rounding: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = update_recipes.describe_processor()
    monkeypatch.setattr(update_recipes, "describe_processor", lambda: "Z80")
    with pytest.raises(TranscriptError) as caught:
        run.recording.update(1, 2)
    assert str(caught.value) == (
        "round 1, client 2: computed again, its update is not the recorded one to the bit "
        f"(processor is 'Z80', it was '{here}'); compute it where the run was made, or ask there for "
        "`fedsim materialise RUN`"
    )


def test_another_processor_that_rounds_alike_is_as_good(run: OpenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_recipes, "describe_processor", lambda: "Z80")
    assert run.recording.update(1, 2).client == 2


def test_a_run_whose_updates_do_not_come_out_twice_ends_at_once(otherwise_rounding: None, tmp_path: Path) -> None:
    with pytest.raises(
        RunError, match=r"does not hold here: round 1, client 0: .*though processor and versions are the"
    ):
        run_by_recipe(tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "transcript").iterdir()] == ["round-000001.safetensors"]


def test_other_data_are_named(run: OpenRun, otherwise_rounding: None) -> None:
    with run.manifest.edit() as noted:
        noted.data = "0" * 64
    with pytest.raises(DataError, match="data"):
        OpenRun(run.path).recording.update(1, 0)


def test_changed_code_is_named(run: OpenRun, otherwise_rounding: None) -> None:
    with run.manifest.edit() as noted:
        noted.code = {"defense.0": "0" * 64}
    with pytest.raises(ConfigError, match=r"defense\.0: the code of the plug-in changed"):
        OpenRun(run.path).recording.update(1, 0)


def test_a_recording_without_its_experiment_says_what_it_holds(run: OpenRun) -> None:
    with pytest.raises(
        TranscriptError, match=r"round 1, client 0: .* holds its hash alone; .*`fedsim materialise RUN`"
    ):
        Transcript(run.path).update(1, 0)
    run.experiment.unlink()
    with pytest.raises(TranscriptError, match="there is no experiment to compute them again from"):
        OpenRun(run.path).recording.update(1, 0)
    assert OpenRun(run.path).recording.broadcast(1, 0).keys() == Transcript(run.path).broadcast(2, 3).keys()


def test_code_that_a_run_folder_names_runs_with_trust_alone(tmp_path: Path) -> None:
    path = run_by_recipe(tmp_path / "run", model={"name": "fedsim.training.models.mlp:Mlp"}).path
    with pytest.raises(TrustError, match="pass --trust"):
        OpenRun(path).recording.update(1, 0)
    with pytest.raises(TrustError):
        fedsim.open(path).transcript.update(1, 0)
    assert fedsim.open(path, trust=True).transcript.update(1, 0).client == 0


# What no recipe tells is refused before the run.


@pytest.mark.parametrize(
    ("tables", "culprit"),
    [
        ({"secure_aggregation": {}}, r"secure_aggregation: .*; leave it out"),
        ({"recording": {"clients": [0, 1]}}, r"recording\.clients: .* or set federation\.vectorise = false"),
        ({**WITH_FEEDBACK, "recording": {"every": 2}}, r"recording\.every: a defense or an algorithm .*; leave it out"),
        (
            {**WITH_FEEDBACK, "recording": {"rounds": [2]}},
            r"recording\.rounds: a defense or an algorithm .*; leave it out",
        ),
        ({"federation": {"address": "auto"}}, r"federation\.address = 'auto': .*; leave it out"),
        ({"federation": {"device": "cuda"}}, r"federation\.device = 'cuda': .*; use 'cpu'"),
    ],
)
def test_what_no_recipe_tells_is_refused_before_the_run(tables: dict[str, Any], culprit: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=rf'recording\.keep = "recipe" does not go with {culprit}, or set \[recording\]'
    ):
        run_by_recipe(tmp_path / "run", **tables)
    assert not (tmp_path / "run").exists()


def test_an_object_of_a_program_is_refused(tmp_path: Path) -> None:
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    tables = make_tiny_config(recording=RECIPE).model_dump(mode="json", exclude_none=True)
    with pytest.raises(ConfigError, match='"recipe" does not go with model: it is an object of this Python program'):
        fedsim.run(tables | {"model": network}, tmp_path / "run")


# Written out, a recording needs nobody's data.


def test_chosen_updates_are_written_out_and_nothing_else_changes(run: OpenRun, call: Call) -> None:
    before = {number: run.recording.sha256(number) for number in (1, 2)}
    total = run.recording.hash()
    said = " ".join(call("materialise", str(run.path), "--client", "1", "--round", "2").stdout.split())
    assert "1 update written" in said
    assert "updates of these rounds that are still stored as hashes only: 3" in said
    plain = Transcript(run.path)
    assert {number: plain.sha256(number) for number in (1, 2)} == before
    assert (plain.hash(), plain.count_left_out(1), plain.count_left_out(2)) == (total, 4, 3)
    assert torch.equal(plain.update(2, 1).after["1.weight"], run.recording.update(2, 1).after["1.weight"])
    with pytest.raises(TranscriptError, match="hash alone"):
        plain.update(2, 0)
    assert compare_with_manifest(OpenRun(run.path)).differences == []
    # Another call adds the others, and keeps what is there.
    assert "7 updates written" in call("materialise", str(run.path)).stdout
    plain = Transcript(run.path)
    assert [len(list(plain.restrict_to([number]).updates())) for number in (1, 2)] == [4, 4]
    assert plain.hash() == total
    assert "8 updates of 2 rounds, each verified by its SHA-256" in call("inspect", str(run.path)).stdout


def test_who_is_not_recorded_cannot_be_written_out(run: OpenRun, call: Call) -> None:
    missing = call("materialise", str(run.path), "--clients", "9")
    assert (missing.returncode, "--client 9: sent nothing that is recorded" in missing.stderr) == (2, True)
    missing = call("materialise", str(run.path), "--rounds", "9")
    assert (missing.returncode, "--round 9: is not recorded" in missing.stderr) == (2, True)


def test_inspect_says_what_it_did_not_compute(run: OpenRun, call: Call) -> None:
    result = call("inspect", str(run.path), "--rows")
    assert result.returncode == 0
    assert "8 updates of these are stored as their SHA-256, which is verified when they are recomputed" in result.stdout
    assert "8 updates, recomputed when they are read" in result.stdout


def test_an_altered_broadcast_is_noticed_where_no_update_is_read(run: OpenRun, call: Call) -> None:
    path = run.recording.round_path(2)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    result = call("inspect", str(run.path))
    assert (result.returncode, "the bytes of broadcast/0 are not those" in result.stderr) == (1, True)
    with pytest.raises(TranscriptError, match="the bytes of broadcast/0"):
        Transcript(run.path).hash()


# Attacks find the same, and get no way to the data.


def test_the_copy_for_an_isolated_attack_holds_updates_and_no_recipe(run: OpenRun, tmp_path: Path) -> None:
    run.recording.restrict_to([2]).copy_to(tmp_path / "copy")
    copy = Transcript(tmp_path / "copy")
    assert (copy.rounds, copy.header(2).config, copy.header(2).recipe) == ([2], {}, {})
    for update in copy.updates():
        assert torch.equal(update.after["1.weight"], run.recording.update(2, update.client).after["1.weight"])
    assert copy.count_left_out(2) == 0
    for thing in (run, update_recipes.UpdateRecipes(run), OpenRun(run.path).recording):
        with pytest.raises(AttackError, match=r"an? (OpenRun|UpdateRecipes) is not for attacks"):
            _pickle_without_tensors(thing)


def test_an_attack_is_not_told_the_recipe(run: OpenRun) -> None:
    seen = run.recording.restrict_to([1])
    assert (seen.header(1).config, seen.header(1).recipe) == ({}, {})
    assert seen.update(1, 3).client == 3


@pytest.mark.thorough
def test_attacks_scores_report_and_dossier_are_those_of_whole_updates(tmp_path: Path) -> None:
    tables = {
        "partition": {"name": "iid", "samples_per_client": 1},
        "model": {"name": "linear"},
        "training": {"local_epochs": None, "local_steps": 1, "batch_size": 1, "learning_rate": 0.1},
        "adversary": {"when": "at-end", "victims": [1], "rounds": [2], "workers": 1},
        "attack": [{"name": "analytic"}],
    }
    scores = []
    for keep in ("updates", "recipe"):
        config = make_tiny_config(**tables, recording={"keep": keep}).model_dump(mode="json", exclude_none=True)
        run = fedsim.run(config, tmp_path / keep)
        rows = read_rows(RunFolder(run.path).scores)
        scores.append([{key: value for key, value in row.items() if key != "seconds"} for row in rows])
    assert scores[0] == scores[1]
    assert scores[0]
    assert "8 updates are stored by recipe" in (tmp_path / "recipe" / "report.html").read_text()
    # Findings stay those of the recording when it is written out, and a dossier can be verified.
    dossier = fedsim.write_dossier(tmp_path / "recipe")
    assert fedsim.verify_dossier(tmp_path / "recipe").differences == []
    assert dossier
    folder = OpenRun(tmp_path / "recipe")
    times = {path: path.stat().st_mtime_ns for path in folder.findings.glob("*/*.safetensors")}
    folder.recording.write_out(1, folder.recording.round_path(1))
    fedsim.open(folder.path).resume()
    assert {path: path.stat().st_mtime_ns for path in folder.findings.glob("*/*.safetensors")} == times


# A round that turns out not to be told by a recipe is refused when it is recorded.


def test_rounds_that_no_recipe_tells_are_refused(finished_run: Path, tmp_path: Path) -> None:
    updates = list(OpenRun(finished_run).recording.restrict_to([1]).updates())
    other = {name: tensor + 1 for name, tensor in updates[1].before.items()}

    def record(*changed: Any, config: Mapping[str, object] | None = None) -> None:
        recorder = Recorder(tmp_path / "recording", recipe=lambda: {"group_size": 1}, resume=True)
        recorder.write(1, changed, config=config)

    with pytest.raises(RunError, match="the strategy sends clients different models, which no recipe contains"):
        record(updates[0], replace(updates[1], before=other))
    with pytest.raises(RunError, match="client 0 sends more than one update"):
        record(replace(updates[0], message=2))
    with pytest.raises(RunError, match="the strategy sends clients different lr, which no recipe contains"):
        record(updates[0], config={"differs-by-client": "lr"})
    assert list((tmp_path / "recording").iterdir()) == []
    record(updates[0])
    assert Transcript(tmp_path / "recording").count_left_out(1) == 1
