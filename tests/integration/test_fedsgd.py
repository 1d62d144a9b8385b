"""FedSGD as a whole: what is recorded, that the server steps by it, and what the evaluator compares with."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.nn.functional import cross_entropy

from fedsim.audit.audit import open_audit
from fedsim.audit.evaluation.own_run import OwnRun
from fedsim.audit.finding_files import load_finding
from fedsim.audit.threat_model import grant_knowledge
from fedsim.base.errors import ConfigError, PluginError, RunError
from fedsim.base.randomness import generator, seed_globals
from fedsim.federation.config import Config
from fedsim.federation.engines.serial import InProcessGrid
from fedsim.federation.experiment import Experiment
from fedsim.federation.experiment_file import load_config
from fedsim.federation.open_run import OpenRun
from fedsim.federation.resolve import resolve
from fedsim.federation.run_folder import read_rows
from fedsim.federation.simulation import run_federation
from fedsim.interfaces.findings import Reconstruction
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update
from fedsim.report.geometry import geometries_of_updates as geometry_of
from fedsim.report.page import write_report
from fedsim.report.recording_summary import read_recording
from fedsim.report.run_facts import recorded_facts
from fedsim.training.cohort import TOLERANCE
from fedsim.training.loop import local_update
from fedsim.training.sampling import round_batches
from fedsim.training.stochastic_layers import find_stochastic_layers
from strategies.curious import Curious
from strategies.fedsgd import FedSgd
from tests.support.commands import Call
from tests.support.experiments import make_tiny_config, run_serial
from tests.support.runs import assert_same_runs

ROOT = Path(__file__).resolve().parents[2]
RATE = 0.1


def of_gradients(**tables: Any) -> Config:
    """Clients of 10 examples, three mini-batches of 4, 4 and 2."""
    training = {"local_epochs": None, "local_steps": 1, "batch_size": 4, "learning_rate": None}
    tables["training"] = training | tables.get("training", {})
    tables["partition"] = {"samples_per_client": 10} | tables.get("partition", {})
    return resolve(make_tiny_config(**{"strategy": {"name": "fedsgd", "learning_rate": RATE}, **tables}))


def busy(**federation: Any) -> Config:
    """Everything at once: sampling, stragglers, dropout, a random mask, evaluation on clients, more than an epoch."""
    return of_gradients(
        federation={"clients": 6, "rounds": 5, "straggler_probability": 0.2, **federation},
        strategy={"name": "fedsgd", "learning_rate": RATE, "fraction_train": 0.7},
        model={"name": "mlp", "hidden": [16], "dropout": 0.2, "batch_norm": True},
        partition={"samples_per_client": 12, "test_fraction": 0.2},
        defense=[{"name": "random-mask"}],
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Path]:
    torch.set_num_threads(1)
    config = of_gradients(federation={"rounds": 4}, partition={"name": "dirichlet", "alpha": 0.3})
    return config, run_serial(config, tmp_path_factory.mktemp("plain") / "run").path


def batch_of(experiment: Experiment, update: Update) -> torch.Tensor:
    """The rule, written out again: 'reshuffled' batches of 4 in the order of epochs of their own."""
    _, labels = experiment.data.train(update.client)
    in_epoch = -(-len(labels) // 4)
    epoch, place = (update.round - 1) // in_epoch, (update.round - 1) % in_epoch
    order = torch.randperm(len(labels), generator=generator(experiment.seed, "batches", update.client, epoch))
    return order[4 * place :][:4]


def test_a_recorded_gradient_is_that_of_the_mini_batch_of_its_round(plain: tuple[Config, Path]) -> None:
    config, path = plain
    experiment = Experiment(config)
    sizes = set()
    for update in Transcript(path).updates():
        inputs, labels = experiment.data.train(update.client)
        index = batch_of(experiment, update)
        model = experiment.new_model()
        model.load_state_dict(dict(update.before))
        loss = cross_entropy(model(experiment.data.to_model(inputs[index])), labels[index])
        slopes = torch.autograd.grad(loss, list(model.parameters()))
        assert update.gradient is not None
        for told, true in zip(update.gradient.values(), slopes, strict=True):
            assert torch.equal(told, true)
        assert update.after == {}
        assert update.num_examples == len(index)
        assert update.metrics["train_loss"] == loss.item()
        sizes.add(len(index))
    assert len(sizes) > 1  # the last batch of an epoch is smaller


def test_the_server_steps_against_the_mean_gradient_weighted_by_batch_sizes(plain: tuple[Config, Path]) -> None:
    _, path = plain
    transcript = Transcript(path)
    for number in (1, 2, 3):
        updates = [transcript.update(number, client) for client in transcript.clients(number)]
        total = sum(update.num_examples for update in updates)
        following = transcript.update(number + 1, 0).before
        for name, weight in updates[0].before.items():
            slopes = [update.num_examples / total * update.pseudo_gradient[name].double() for update in updates]
            expected = weight.double() - RATE * torch.stack(slopes).sum(0)
            torch.testing.assert_close(following[name].double(), expected, rtol=1e-6, atol=1e-7)
            assert following[name].dtype == torch.float32
            assert not torch.equal(following[name], weight)


def test_the_recording_says_what_the_protocol_was(plain: tuple[Config, Path]) -> None:
    facts = Transcript(plain[1]).header(1).config
    assert facts["sends"] == "gradient"
    assert facts["learning-rate"] == RATE
    assert facts["local-steps"] == 1
    assert facts["batch-size"] == 4


def test_a_federation_of_gradients_learns(tmp_path: Path) -> None:
    config = of_gradients(
        federation={"rounds": 8, "evaluate_every": 8},
        training={"batch_size": 10},
        strategy={"name": "fedsgd", "learning_rate": 0.5},
    )
    rows = [row for row in read_rows(run_serial(config, tmp_path / "run").metrics) if row["client"] == "server"]
    assert float(rows[-1]["accuracy"]) > 0.4


# The same from every engine, and after an interruption.


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> OpenRun:
    torch.set_num_threads(1)
    return run_serial(busy(), tmp_path_factory.mktemp("serial") / "run")


def test_statistics_travel_beside_gradients_and_are_averaged(serial: OpenRun) -> None:
    transcript = Transcript(serial.path)
    assert [len(transcript.clients(number)) + len(transcript.header(number).failures) for number in (1, 2)] == [4, 4]
    assert any(transcript.header(number).failures for number in transcript.rounds)
    updates = [transcript.update(1, client) for client in transcript.clients(1)]
    following = transcript.update(2, transcript.clients(2)[0]).before
    total = sum(update.num_examples for update in updates)
    names = set(updates[0].after)
    assert names
    assert all("running" in name for name in names)
    for name in names:
        mean = torch.stack([update.num_examples / total * update.after[name] for update in updates]).sum(0)
        torch.testing.assert_close(following[name], mean)


@pytest.mark.thorough
def test_a_resumed_run_is_the_same_to_the_byte(serial: OpenRun, tmp_path: Path) -> None:
    run_serial(busy(rounds=2), tmp_path / "run")
    assert_same_runs(run_serial(busy(), tmp_path / "run", resume=True), serial)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_supernodes_record_the_same_bytes(tmp_path: Path) -> None:
    config = busy(rounds=2)
    deployed = busy(rounds=2, engine="flower", supernodes=2, timeout=200.0)
    run_federation(deployed, OpenRun(tmp_path / "deployed"))
    assert_same_runs(OpenRun(tmp_path / "deployed"), run_serial(config, tmp_path / "serial"))


@pytest.mark.parametrize(
    ("fraction", "expected"),
    [
        (0.1, 2),
        *(pytest.param(*shares, marks=pytest.mark.thorough) for shares in [(1.0, 20), (0.8, 16), (0.5, 10), (0.2, 4)]),
    ],
)
def test_a_share_of_twenty_clients_is_sampled_anew_each_round(fraction: float, expected: int, tmp_path: Path) -> None:
    """TGIAs-RO, Table VI."""
    config = of_gradients(
        federation={"clients": 20, "rounds": 2, "evaluate_every": 0},
        strategy={"name": "fedsgd", "learning_rate": RATE, "fraction_train": fraction},
    )
    transcript = Transcript(run_serial(config, tmp_path / "run").path)
    sampled = [transcript.clients(number) for number in transcript.rounds]
    assert [len(clients) for clients in sampled] == [expected] * 2
    assert (sampled[0] != sampled[1]) == (expected < 20)


# The strategy by itself.


def a_client(send: Callable[[dict[str, Any], int], dict[str, Any]]) -> ClientApp:
    """Any Flower app: `send` makes the arrays of a reply from the broadcast ones and the client's id."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        assert message.content.config_records["config"]["sends"] == "gradient"
        before = {name: array.numpy() for name, array in message.content.array_records["arrays"].items()}
        arrays = ArrayRecord({name: Array(np.asarray(value)) for name, value in send(before, client).items()})
        metrics = MetricRecord({"num-examples": client + 1, "partition-id": client})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


START = {"w": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3), "scale": np.array(0.5, dtype=np.float32)}


def two_rounds(strategy: Any, send: Callable[[dict[str, Any], int], dict[str, Any]]) -> list[dict[str, bytes]]:
    arrays = ArrayRecord({name: Array(value) for name, value in START.items()})
    inner = InProcessGrid(a_client(send), nodes=3)
    seen = []
    for number in (1, 2):
        with seed_globals("two rounds", number):  # Flower samples in a random order, and floats are summed in it
            messages = list(strategy.configure_train(number, arrays, ConfigRecord(), inner))
        arrays, _ = strategy.aggregate_train(number, list(inner.send_and_receive(messages)))
        seen.append({name: array.numpy().tobytes() for name, array in arrays.items()})
    return seen


def a_gradient(before: dict[str, Any], client: int) -> dict[str, Any]:
    return {f"gradient/{name}": value * np.float32(0.1 * client) + np.float32(1) for name, value in before.items()}


def test_the_aggregate_is_bit_identical_under_curious(tmp_path: Path) -> None:
    bare = two_rounds(FedSgd(learning_rate=0.3), a_gradient)
    wrapped = two_rounds(Curious(FedSgd(learning_rate=0.3), Recorder(tmp_path)), a_gradient)
    assert bare == wrapped
    update = Transcript(tmp_path).update(1, 2)
    assert update.gradient is not None
    assert update.num_examples == 3
    assert torch.equal(update.gradient["w"], torch.from_numpy(a_gradient(START, 2)["gradient/w"]))


@pytest.mark.parametrize(
    ("send", "expected"),
    [
        (lambda before, client: before, "round 1: clients sent no gradients; strategy fedsgd needs clients that send"),
        (lambda before, client: {"gradient/w": before["w"]}, "round 1: of 'scale', (), clients sent nothing; send the"),
        (
            lambda before, client: {"gradient/w": before["w"][0], "scale": before["scale"]},
            "round 1: of 'w', (2, 3), clients sent (3,); send the gradient of each parameter",
        ),
    ],
    ids=["weights", "missing", "shape"],
)
def test_replies_that_are_no_gradients_of_the_model_are_one_sentence(
    send: Callable[[dict[str, Any], int], dict[str, Any]], expected: str
) -> None:
    with pytest.raises(RunError) as error:
        two_rounds(FedSgd(learning_rate=0.3), send)
    assert str(error.value).startswith(expected)
    assert "\n" not in str(error.value)


# Settings.


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({"training": {"local_steps": None, "local_epochs": 2}}, "training.local_epochs: clients that send gradients"),
        ({"training": {"local_steps": 3}}, "training.local_steps: clients that send gradients take one mini-batch"),
        ({"training": {"momentum": 0.5}}, "training.momentum: clients that send gradients take no step themselves"),
        ({"training": {"learning_rate": 0.7}}, "training.learning_rate: with strategy 'fedsgd' the server takes the"),
        ({"strategy": {"name": "fedsgd"}}, "strategy: 'fedsgd' needs learning_rate, which is not set"),
        ({"strategy": {"name": "fedsgd", "learning_rate": -1.0}}, "strategy.learning_rate: the server takes the steps"),
        ({"strategy": {"name": "fedsgd", "learning_rate": "x"}}, "strategy.learning_rate: the server takes the steps"),
        (
            {"strategy": {"name": "fedsgd", "learning_rate": 0.1, "momentum": 0.9}},
            "strategy.momentum: unknown setting for 'fedsgd'",
        ),
    ],
)
def test_settings_that_contradict_fedsgd_are_refused_before_work(tables: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        Experiment(of_gradients(**tables)).check()
    assert str(error.value).startswith(expected)
    assert "\n" not in str(error.value)


def test_the_strategy_alone_refuses_a_step_size_that_is_none() -> None:
    with pytest.raises(ConfigError, match="learning_rate: expected a finite value above 0, got nan"):
        FedSgd(learning_rate=float("nan"))


def test_the_resolved_experiment_says_the_same(plain: tuple[Config, Path]) -> None:
    config = resolve(plain[0])
    assert Experiment(config).training == Experiment(plain[0]).training
    assert Experiment(config).training.learning_rate == RATE


# What clients send is declared by the strategy's class, whatever it is called.


STRANGERS = """
from typing import ClassVar

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import FedAvg

from strategies.fedsgd import FedSgd

class Plain(FedSgd):
    pass

class Halving(FedSgd):
    def __init__(self, *, learning_rate: float = 0.2) -> None:
        super().__init__(learning_rate=learning_rate)

    def configure_train(self, server_round, arrays, config, grid):
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self.learning_rate /= 2
        return messages

class Own(FedAvg):
    sends: ClassVar[str] = "gradient"

    def __init__(self, *, step: float = 0.1) -> None:
        super().__init__(min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1)
        self.step = step

    def configure_train(self, server_round, arrays, config, grid):
        config["sends"] = "gradient"
        self.before = arrays
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        mean, metrics = super().aggregate_train(server_round, replies)
        after = {n: Array(np.asarray(a.numpy() - self.step * mean["gradient/" + n].numpy()))
                 for n, a in self.before.items()}
        return ArrayRecord(after), metrics

class FedSgdLike(FedAvg):
    pass

class Odd(FedAvg):
    sends = "pigeons"
"""


@pytest.fixture
def strangers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "strategies_of_strangers.py").write_text(STRANGERS)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("strangers")
@pytest.mark.parametrize(
    ("name", "settings", "rates"),
    [
        pytest.param("Plain", {"learning_rate": RATE}, [RATE, RATE], marks=pytest.mark.thorough),
        pytest.param("Halving", {}, [0.2, 0.1], marks=pytest.mark.thorough),
        ("Own", {}, [None, None]),
    ],
)
def test_a_strangers_strategy_of_gradients_is_attacked_with_the_facts_of_gradients(
    name: str, settings: dict[str, Any], rates: list[float | None], tmp_path: Path
) -> None:
    written = {} if any(rates) else {"learning_rate": 0.1}  # 'Own' tells nobody
    config = of_gradients(
        strategy={"name": f"strategies_of_strangers:{name}", **settings},
        attack=[{"name": "inverting-gradients", "iterations": 2}],
        adversary={
            "when": "never",
            "knowledge": {"labels": True, **written},
            "rounds": [1],
            "victims": [1],
            "workers": 1,
        },
    )
    folder = run_serial(config, tmp_path / "run")
    told = folder.read_experiment(trust=True)
    assert told is not None
    assert told.training.sends == "gradient"
    transcript = Transcript(folder.path)
    assert all(update.gradient is not None for update in transcript.updates())
    assert [transcript.header(number).config.get("learning-rate") for number in (1, 2)] == rates
    audit = open_audit(folder.path, None, trust=True)
    assert audit.run() == []
    (path,) = (folder.findings / "inverting-gradients").glob("*.safetensors")
    finding, _ = load_finding(path)
    assert isinstance(finding, Reconstruction)
    experiment = Experiment(told)
    _, labels = experiment.data.train(1)
    batch = labels[batch_of(experiment, transcript.update(1, 1))]
    assert len(batch) < len(labels)
    assert finding.labels.tolist() == batch.sort().values.tolist()
    assert grant_knowledge(config.adversary, OwnRun({}, experiment), tmp_path).local_epochs == 1
    assert {row["examples"] for row in audit.score()} == {len(batch)}


@pytest.mark.usefixtures("strangers")
def test_a_strategy_is_not_taken_by_its_name_for_one_of_gradients(tmp_path: Path) -> None:
    config = resolve(
        make_tiny_config(strategy={"name": "strategies_of_strangers:FedSgdLike"}, federation={"rounds": 1})
    )
    assert config.training.sends == "weights"
    folder = run_serial(config, tmp_path / "run")
    assert all(update.gradient is None for update in Transcript(folder.path).updates())


@pytest.mark.usefixtures("strangers")
@pytest.mark.parametrize(
    ("strategy", "claimed", "expected"),
    [
        ({"name": "fedavg"}, "gradient", "training.sends: expected 'weights', as the class of strategy 'fedavg' decl"),
        ({"name": "fedsgd", "learning_rate": RATE}, "weights", "training.sends: expected 'gradient', as the class of"),
        (
            {"name": "strategies_of_strangers:Odd"},
            None,
            "strategies: 'strategies_of_strangers:Odd' declares sends = 'p",
        ),
    ],
)
def test_what_contradicts_the_class_of_the_strategy_is_refused(
    strategy: dict[str, Any], claimed: str | None, expected: str
) -> None:
    with pytest.raises((ConfigError, PluginError)) as error:
        resolve(make_tiny_config(strategy=strategy, training={"sends": claimed} if claimed else {}))
    assert str(error.value).startswith(expected)
    assert "\n" not in str(error.value)


def test_an_experiment_that_calls_recorded_gradients_weights_is_not_attacked(
    plain: tuple[Config, Path], tmp_path: Path
) -> None:
    """Else all examples of a client would be taken for those of one mini-batch."""
    config, path = plain
    run = OpenRun(Path(shutil.copytree(path, tmp_path / "run")))
    run.manifest.path.unlink()
    run.experiment.write_text(run.experiment.read_text().replace('sends = "gradient"\n', ""))
    spec = Config.model_validate(config.model_dump() | {"attack": [{"name": "dlg", "iterations": 1}]})
    (failure,) = open_audit(run.path, spec).run()
    assert "the experiment says 'weights', but in round 1 client 0 sent 'gradient'" in failure


# What the evaluator compares with, and the adversary knows.


def test_the_truth_is_the_mini_batch_of_the_attacked_round(tmp_path: Path) -> None:
    """A linear model gives one example away whole, so no other batch would score like this."""
    config = of_gradients(
        federation={"rounds": 3, "clients": 2},
        training={"batch_size": 1},
        model={"name": "linear"},
        attack=[{"name": "idlg", "iterations": 20}],
        adversary={"when": "never", "rounds": [1, 3], "victims": [1]},
    )
    audit = open_audit(run_serial(config, tmp_path / "run").path, None)
    assert audit.run() == []
    scores = {row["round"]: row["value"] for row in audit.score() if row["metric"] == "psnr"}
    assert set(scores) == {"1", "3"}
    assert min(scores.values()) > 40
    one, three = audit.case.truth(1, 1), audit.case.truth(1, 3)
    assert one is not None
    assert three is not None
    assert one.data.shape == (1, 1, 8, 8)
    assert not torch.equal(one.data, three.data)


def test_granted_labels_are_those_of_the_mini_batch(plain: tuple[Config, Path], tmp_path: Path) -> None:
    config, path = plain
    table = {"knowledge": {"labels": True}, "rounds": [2], "victims": [0], "when": "never"}
    attack = {"name": "inverting-gradients", "iterations": 2}
    spec = Config.model_validate(config.model_dump() | {"adversary": table, "attack": [attack]})
    audit = open_audit(path, spec)
    assert audit.run() == []
    finding, _ = load_finding(path / "findings" / "inverting-gradients" / "round-2-client-0-repeat-0.safetensors")
    experiment = Experiment(config)
    _, labels = experiment.data.train(0)
    index = batch_of(experiment, Transcript(path).update(2, 0))
    assert finding.labels.tolist() == labels[index].sort().values.tolist()


PROBE = """
from dataclasses import dataclass
from fedsim.interfaces.attack import Attack, Paper
from fedsim.interfaces.findings import Reconstruction
import torch

@dataclass(frozen=True, kw_only=True)
class Probe(Attack):
    paper = Paper(title="none", authors="nobody", venue="none", year=2000)
    rounds_needed = "all"
    needs = frozenset({"labels"})

    def _run(self, target, progress):
        labels = target.knowledge.labels
        return Reconstruction(data=torch.zeros(len(labels), 1, 8, 8), labels=labels)
"""


def test_an_attack_on_several_rounds_is_judged_by_the_mini_batch_of_the_first_that_the_victim_took_part_in(
    serial: OpenRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "probe_of_rounds.py").write_text(PROBE)
    monkeypatch.syspath_prepend(tmp_path)
    transcript, experiment = Transcript(serial.path), Experiment(busy())
    late = next(client for client in range(6) if client not in transcript.clients(1))
    first = next(number for number in transcript.rounds if late in transcript.clients(number))
    table = {"knowledge": {"labels": True}, "rounds": "all", "victims": [late], "when": "never"}
    attack = {"name": "probe_of_rounds:Probe", "label": "probe"}
    spec = Config.model_validate(experiment.config.model_dump() | {"adversary": table, "attack": [attack]})
    audit = open_audit(serial.path, spec)
    assert audit.run() == []
    finding, about = load_finding(serial.findings / "probe" / f"round-1-5-client-{late}-repeat-0.safetensors")
    _, labels = experiment.data.train(late)
    expected = labels[batch_of(experiment, transcript.update(first, late))]
    assert about["first_round"] == first > 1
    assert finding.labels.tolist() == expected.sort().values.tolist()
    assert {row["examples"] for row in audit.score()} == {len(expected)}


def test_a_server_of_gradients_knows_one_step_of_b_examples_and_its_own_step_size(
    plain: tuple[Config, Path], tmp_path: Path
) -> None:
    config, _ = plain
    knowledge = grant_knowledge(config.adversary, OwnRun({}, Experiment(config)), tmp_path)
    assert (knowledge.local_epochs, knowledge.batch_size, knowledge.learning_rate) == (1, 4, RATE)


@pytest.mark.parametrize("dropout", [True, False])
def test_the_adversary_is_told_whether_dropout_layers_drop(dropout: bool, tmp_path: Path) -> None:
    model = {"name": "mlp", "hidden": [16], "dropout": 0.2}
    config = of_gradients(model=model, training={"dropout": dropout})
    build = grant_knowledge(config.adversary, OwnRun({}, Experiment(config)), tmp_path).model
    assert build is not None
    network = pickle.loads(pickle.dumps(build))()
    assert network.draws_in_training == dropout
    assert len(find_stochastic_layers(network.train(), torch.rand(2, 1, 8, 8))) == 1


def test_the_geometry_of_gradients_is_refused_in_one_sentence(plain: tuple[Config, Path]) -> None:
    with pytest.raises(ConfigError, match="geometry: the clients of this run send gradients, so there is no path of"):
        list(geometry_of(Experiment(plain[0]), Transcript(plain[1]), [1]))


def test_inspect_and_report_speak_of_gradients(plain: tuple[Config, Path], call: Call) -> None:
    _, path = plain
    inspected = call("inspect", "--rows", path)
    assert inspected.returncode == 0
    gradient = Transcript(path).update(1, 0).pseudo_gradient
    norm = torch.cat([t.flatten() for t in gradient.values()]).double().norm().item()
    assert f"{norm:.4g} (gradient)" in inspected.stdout
    assert "clients send the gradient of one mini-batch a round, B = 4" in write_report(OpenRun(path)).read_text()
    assert recorded_facts(read_recording(OpenRun(path), []))["Clients sent"] == "gradients"


# Fixed batches without gradients.


def test_fixed_batches_of_fedavg_are_recorded_as_the_loop_over_them_computes(tmp_path: Path) -> None:
    """In both ways of training; the batches are the same in both rounds."""
    training = {"local_epochs": 2, "batch_size": 8, "batches": "fixed"}
    config = make_tiny_config(training=training, federation={"vectorise": False})
    looped = Transcript(run_serial(config, tmp_path / "looped").path)
    together = Transcript(run_serial(make_tiny_config(training=training), tmp_path / "together").path)
    experiment = Experiment(config)
    for update in looped.updates():
        inputs, labels = experiment.data.train(update.client)
        cut = torch.randperm(24, generator=generator(3, "batches", update.client, 0)).split(8)
        after, _ = local_update(
            experiment.model,
            update.before,
            experiment.data.to_model(inputs),
            labels,
            experiment.training,
            key=(3, "train", update.round, update.client),
            order=[*cut, *cut],
        )
        assert all(torch.equal(after[name], update.after[name]) for name in after)
    for alone, grouped in zip(looped.restrict_to([1]).updates(), together.restrict_to([1]).updates(), strict=True):
        off, size = (
            torch.cat([(one - other[name]).flatten() for name, one in alone.after.items()]).norm()
            for other in (grouped.after, alone.before)
        )
        assert off <= TOLERANCE * size
    assert looped.header(1).config["batches"] == "fixed"


def test_fixed_batches_are_not_those_that_a_round_draws() -> None:
    fixed = Experiment(make_tiny_config(training={"batches": "fixed"})).training
    assert round_batches(24, fixed, seed=3, client=0, number=1) is not None
    assert resolve(make_tiny_config()).training.batches == "reshuffled"


# The example.


@pytest.mark.slow
def test_the_example_leaks_what_it_says(tmp_path: Path) -> None:
    config = load_config(ROOT / "examples" / "fedsgd.toml")
    run_federation(resolve(config), OpenRun(tmp_path / "run"))
    audit = open_audit(tmp_path / "run", None)
    assert audit.run() == []
    scores = {row["attack"]: row for row in audit.score() if row["metric"] == "psnr"}
    assert scores["dlg"]["value"] > 60
    assert scores["inverting-gradients"]["value"] > scores["inverting-gradients"]["floor"]
