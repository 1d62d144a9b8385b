"""Clients that measure how exposed they are: what they measure, that nobody is told, and what becomes of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from flwr.app import Message
from flwr.serverapp.strategy import FedAvg
from torch import Tensor

import fedsim
import strategies.app
from fedsim.base.errors import ConfigError, PluginError, RunError
from fedsim.exposure.gradient_norm import GradientNorm
from fedsim.exposure.measure import Meaning, Measure
from fedsim.federation.config import Config
from fedsim.federation.experiment import Experiment
from fedsim.federation.federation_tables import AlgorithmTable, StrategyTable
from fedsim.federation.resolve import resolve
from fedsim.federation.run_folder import RunFolder, read_exposures
from fedsim.recording.sealed_files import read_sealed_file
from fedsim.recording.transcript import Transcript
from fedsim.report import geometry
from fedsim.training.message_function import ClientMessage
from fedsim.training.sampling import round_batches
from tests.support.experiments import make_tiny_config, run_serial
from tests.support.runs import hash_recording

NORM: dict[str, Any] = {"name": "gradient-norm"}


@dataclass(frozen=True, kw_only=True)
class Odd(Measure):
    """Fails in clients that hold some number of a class, and calls its value something that no page should obey."""

    quantities: ClassVar[Mapping[str, Meaning]] = {"<b>value</b>": "less"}

    def _compute(self, sent: ClientMessage) -> Mapping[str, float | Tensor]:
        if sent.labels.sum() % 2:
            raise ValueError("<i>odd</i> labels")
        return {"<b>value</b>": sent.vector.abs().max()}


def measuring(*tables: dict[str, Any], **others: Any) -> Config:
    return make_tiny_config(measure=list(tables), **others)


def exposure_values(folder: RunFolder) -> dict[tuple[int, int, str], float]:
    """The value of each round, client and example."""
    rows = read_exposures(folder)
    return {(int(row["round"]), int(row["client"]), row["example"]): float(row["value"]) for row in rows}


@pytest.mark.parametrize("clients", [4, 10], ids=["one by one", "together"])
@pytest.mark.parametrize("batches", ["reshuffled", pytest.param("fixed", marks=pytest.mark.thorough)])
def test_what_is_measured_is_the_update_that_is_sent(tmp_path: Path, clients: int, batches: str) -> None:
    """The norm of the update over the learning rate, with the batches of this client in this round."""
    config = measuring(
        NORM,
        federation={"clients": clients},
        training={"batches": batches, "momentum": 0.5, "weight_decay": 0.01, "local_epochs": 2},
    )
    folder = run_serial(config, tmp_path / "run")
    transcript, found = Transcript(folder.path), exposure_values(folder)
    assert {key[:2] for key in found} == {(number, client) for number in (1, 2) for client in range(clients)}
    for (number, client, _), value in found.items():
        update = transcript.update(number, client)
        squares = [(update.after[name] - before).double().square().sum() for name, before in update.before.items()]
        assert value == pytest.approx(float(torch.stack(squares).sum().sqrt()) / 0.1, rel=1e-4)


def test_of_a_gradient_the_mini_batch_of_the_round_is_measured_and_each_of_its_examples(tmp_path: Path) -> None:
    training = {"local_epochs": None, "local_steps": 1, "batch_size": 8, "learning_rate": None}
    config = measuring({**NORM, "each": True}, training=training, strategy={"name": "fedsgd", "learning_rate": 0.1})
    folder = run_serial(config, tmp_path / "run")
    transcript, found, experiment = Transcript(folder.path), exposure_values(folder), Experiment(resolve(config))
    for number in (1, 2):
        for client in range(4):
            sent = transcript.update(number, client).payload.arrays()
            norm = torch.cat([tensor.flatten() for name, tensor in sent.items()]).double().norm()
            assert found[number, client, ""] == pytest.approx(float(norm), rel=1e-5)
            order = round_batches(24, experiment.training, seed=3, client=client, number=number)
            assert order is not None
            each = [example for n, c, example in found if (n, c) == (number, client) and example]
            assert each == [str(example) for example in order[0].tolist()]
    assert all(value > 0 for value in found.values())


@pytest.mark.parametrize("clients", [4, 10], ids=["one by one", "together"])
def test_no_message_tells_that_anything_was_measured(tmp_path: Path, clients: int) -> None:
    federation = {"clients": clients}
    plain = run_serial(make_tiny_config(federation=federation), tmp_path / "plain")
    folder = run_serial(measuring(NORM, federation=federation), tmp_path / "run")
    assert hash_recording(folder) == hash_recording(plain)
    assert folder.checkpoint.read_bytes() == plain.checkpoint.read_bytes()
    assert folder.exposure.is_file()
    assert not plain.exposure.exists()


class Nosy(FedAvg):
    """Notes all that it is sent."""

    seen: ClassVar[set[str]] = set()

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        kept = list(replies)
        for reply in kept:
            self.seen |= set(reply.content)
            self.seen |= {key for record in reply.content.metric_records.values() for key in record}
        return super().aggregate_train(server_round, kept)


def test_a_strategy_sees_nothing_of_it(tmp_path: Path) -> None:
    tables = {
        "partition": {"samples_per_client": 8},
        "model": {"name": "mlp", "hidden": [4]},
        "training": {"local_epochs": 1},
        "federation": {"clients": 2, "rounds": 2},
        "strategy": Nosy(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1),
        "adversary": {"when": "never"},
        "measure": [GradientNorm()],
    }
    run = fedsim.run(tables, out=tmp_path / "run")
    assert Nosy.seen == {"arrays", "metrics", "num-examples", "train_loss"}
    assert list(run.exposure["client"]) == [0, 1, 0, 1]
    assert list(run.exposure["state"]) == ["round-0", "round-0", "round-1", "round-1"]
    assert set(run.exposure["larger_means"]) == {"more"}


@pytest.mark.thorough
def test_a_resumed_run_has_the_same_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted after the clients of round 2 were measured, and before the round was done."""
    config = measuring(NORM, federation={"rounds": 3, "straggler_probability": 0.3})
    whole = run_serial(config, tmp_path / "whole")
    exposed = strategies.app._pop_exposures

    def interrupted(memory: Any, number: int) -> Any:
        if number == 2:
            raise RunError("interrupted")
        return exposed(memory, number)

    with monkeypatch.context() as patch:
        patch.setattr(strategies.app, "_pop_exposures", interrupted)
        with pytest.raises(RunError, match="interrupted"):
            run_serial(config, tmp_path / "run")
    folder = run_serial(config, tmp_path / "run", resume=True)
    assert folder.exposure.read_bytes() == whole.exposure.read_bytes()
    late = {(n, c) for n in (1, 2, 3) for c in range(4) if Experiment(config).is_straggler(c, n)}
    assert late
    assert {key[:2] for key in exposure_values(folder)} == {(n, c) for n in (1, 2, 3) for c in range(4)} - late


def test_a_resume_from_a_table_that_was_changed_is_refused(tmp_path: Path) -> None:
    config = measuring(NORM)
    folder = run_serial(config, tmp_path / "run")
    folder.exposure.write_text(folder.exposure.read_text().replace("more", "less", 1))
    with pytest.raises(RunError, match=r"exposure.csv: is not what this run wrote"):
        run_serial(config, tmp_path / "run", resume=True)
    with pytest.raises(RunError, match=r"exposure.csv: is not what this run wrote"):
        _ = fedsim.open(tmp_path / "run").exposure


def test_clients_keep_what_their_defenses_keep_and_nothing_else(tmp_path: Path) -> None:
    config = measuring(NORM, defense=[{"name": "top-k", "fraction": 0.1, "error_feedback": True}])
    folder = run_serial(config, tmp_path / "run")
    header, _ = read_sealed_file(folder.checkpoint)
    assert set(header["clients"]) == {"0", "1", "2", "3"}
    assert not any("exposure" in str(kept) for kept in header["clients"].values())
    assert len(exposure_values(folder)) == 8


def test_under_secure_aggregation_single_clients_measure_themselves(tmp_path: Path) -> None:
    config = measuring(NORM, secure_aggregation={"groups": 2, "clip": 100.0})
    assert len(exposure_values(run_serial(config, tmp_path / "run"))) == 8


def test_a_measure_that_fails_stops_neither_the_client_nor_another_measure(tmp_path: Path) -> None:
    tables: dict[str, Any] = {
        "partition": {"samples_per_client": 9},
        "model": {"name": "mlp", "hidden": [4]},
        "training": {"local_epochs": 1},
        "federation": {"clients": 6, "rounds": 1},
        "measure": [Odd(), NORM],
        "adversary": {"victims": [0], "workers": 1},
        "attack": [{"name": "sme", "iterations": 1}],
    }
    with pytest.raises(RunError, match=r"was not measured \(round 1, client \d.*ValueError: <i>odd</i> labels"):
        fedsim.run(tables, out=tmp_path / "run")
    run = fedsim.open(tmp_path / "run")
    frame = run.exposure
    failed = frame[frame["failure"].notna()]
    assert 0 < len(failed) < 6
    assert failed["value"].isna().all()
    assert len(frame[frame["measure"] == "gradient-norm"]) == 6
    assert len(run.metrics[run.metrics["client"] == "server"]) == 1
    page = (tmp_path / "run" / "report.html").read_text()
    assert "How exposed the clients were before sending" in page
    assert "&lt;b&gt;value&lt;/b&gt;" in page
    assert "<b>value" not in page
    assert "<i>odd" not in page
    section = page.partition("How exposed the clients were")[2].partition("</section>")[0]
    assert "larger: less exposed" in section
    assert "higher: more leaked" in section


def test_what_is_undefined_is_not_zero(tmp_path: Path) -> None:
    """Of a model whose logits are always zero, the gradient is."""
    tables: dict[str, Any] = {
        "partition": {"samples_per_client": 4},
        "model": torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10), Dead()),
        "training": {"local_epochs": 1},
        "federation": {"clients": 2, "rounds": 1},
        "adversary": {"when": "never"},
        "measure": [NORM],
    }
    run = fedsim.run(tables, out=tmp_path / "run")
    assert run.exposure["value"].isna().all()
    assert run.exposure["failure"].isna().all()
    assert "undefined" in (tmp_path / "run" / "report.html").read_text()


class Dead(torch.nn.Module):
    """Gives zeros."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * 0.0


@pytest.mark.parametrize(
    ("tables", "error", "says"),
    [
        ([{"name": "gradient-nrom"}], PluginError, "measures: nothing is called 'gradient-nrom', did you mean"),
        ([{**NORM, "eech": True}], ConfigError, "measure.gradient-norm.eech: unknown setting for 'gradient-norm'"),
        ([{**NORM, "each": True}], ConfigError, "measure.gradient-norm: in an update of several steps"),
    ],
)
def test_what_cannot_be_measured_is_said_before_work(
    tmp_path: Path, tables: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        run_serial(measuring(*tables), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_other_optimizers_are_refused_before_work(tmp_path: Path) -> None:
    config = measuring(NORM, training={"optimizer": "adam"})
    with pytest.raises(ConfigError, match=r"measure\.gradient-norm: .*optimizer 'adam'"):
        run_serial(config, tmp_path / "run")


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ([NORM, NORM], "two measures are called 'gradient-norm'; give one of them a label"),
        ([{**NORM, "every": 0}], "measure.gradient-norm.every: expected at least 1, got 0"),
        ([{**NORM, "label": "a/b"}], "measure.0.label: it names a folder"),
        ([{}], "measure.0.name: field required"),
    ],
)
def test_wrong_tables_are_named(tables: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        measuring(*tables)


def test_a_strangers_measure_is_not_tried_in_the_process_of_the_server(tmp_path: Path) -> None:
    """Fedsim's own are; of others, what they refuse shows when the first client measures."""
    (tmp_path / "strangers_measure.py").write_text(
        "from dataclasses import dataclass\n"
        "from fedsim.exposure.measure import Measure\n\n\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Theirs(Measure):\n"
        "    quantities = {'value': 'more'}\n\n"
        "    def _compute(self, sent):\n"
        "        raise AssertionError\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        Experiment(resolve(measuring({"name": "strangers_measure:Theirs"}))).check()


def test_training_states_takes_no_time_for_measures(tmp_path: Path) -> None:
    from fedsim.federation.training_states import make_states

    states = make_states(measuring(NORM, states={"rounds": [1]}), "tiny", tmp_path / "states")
    assert not (states.folder.parent / "exposure.csv").exists()


def test_a_client_that_chooses_silence_has_measured_itself_too(tmp_path: Path) -> None:
    """It is the most exposed clients that send nothing, so a table without them would say that all is well."""
    gate = {"name": "gate", "measure": "gradient-norm", "above": 2.2, "action": "withhold"}
    folder = run_serial(measuring(NORM, defense=[gate]), tmp_path / "run")
    found, transcript = exposure_values(folder), Transcript(folder.path)
    assert len(found) == 8
    silent = {(number, client) for number in (1, 2) for client in transcript.header(number).failures}
    assert silent == {key[:2] for key, value in found.items() if value > 2.2}
    assert 0 < len(silent) < 8


def test_geometry_is_of_the_training_that_the_server_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_tiny_config(strategy={"name": "fedprox", "proximal_mu": 0.5})
    folder = run_serial(config, tmp_path / "run")
    asked = []
    monkeypatch.setattr(geometry, "compute_geometry", lambda *settings, **_: asked.append(settings[4].proximal_mu))
    list(geometry.geometries_of_updates(Experiment(config), Transcript(folder.path), [1]))
    assert set(asked) == {0.5}
    other = config.model_copy(update={"algorithm": AlgorithmTable(name="ditto"), "strategy": StrategyTable()})
    with pytest.raises(ConfigError, match="geometry: it measures messages of plain local training, and 'ditto'"):
        list(geometry.geometries_of_updates(Experiment(other), Transcript(folder.path), [1]))
