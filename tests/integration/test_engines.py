"""The same recording from every engine, and nothing in it that a server would not have seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from fedsim.federation.config import Config
from fedsim.federation.experiment import Experiment
from fedsim.federation.open_run import OpenRun
from fedsim.federation.run_folder import read_rows
from fedsim.recording.transcript import Transcript
from fedsim.training.loop import evaluate, local_update
from tests.support.experiments import make_tiny_config, run_serial
from tests.support.forks import fork_python
from tests.support.runs import hash_recording, read_checkpoint, read_metrics

ROOT = Path(__file__).resolve().parents[2]


def busy(recording: dict[str, Any] | None = None, **federation: Any) -> Config:
    """Everything at once: sampling, stragglers, dropout, noise, evaluation on the clients."""
    return make_tiny_config(
        federation={"clients": 6, "rounds": 3, "straggler_probability": 0.3, **federation},
        strategy={"name": "fedavg", "fraction_train": 0.5},
        model={"name": "mlp", "hidden": [16], "dropout": 0.2},
        partition={"name": "dirichlet", "alpha": 0.5, "test_fraction": 0.2},
        defense=[{"name": "update-noise", "clip": 1.0, "noise_multiplier": 0.01}],
        recording=recording or {},
    )


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> OpenRun:
    torch.set_num_threads(1)
    return run_serial(busy(), tmp_path_factory.mktemp("serial") / "run")


def test_the_busy_run_is_what_it_says(serial: OpenRun) -> None:
    """Else the comparisons below would compare little."""
    transcript = Transcript(serial.path)
    failures = {client for number in transcript.rounds for client in transcript.header(number).failures}
    asked = {n: {*transcript.clients(n), *transcript.header(n).failures} for n in transcript.rounds}
    assert transcript.rounds == [1, 2, 3]
    assert failures, "nobody straggled"
    assert all(len(clients) == 3 for clients in asked.values())
    assert len({frozenset(clients) for clients in asked.values()}) > 1, "the same clients every round"
    rows = read_rows(serial.metrics)
    assert {row["client"] for row in rows} == {"server", *map(str, range(6))}
    assert [row["failed"] for row in rows if row["client"] == "server"] == [
        str(len(transcript.header(number).failures)) for number in transcript.rounds
    ]


def test_the_same_seed_gives_the_same_bytes(serial: OpenRun, tmp_path: Path) -> None:
    torch.manual_seed(12345)  # what ran before in this process must not matter
    again = run_serial(busy(), tmp_path / "run")
    assert hash_recording(again) == hash_recording(serial)
    assert read_checkpoint(again, "model/") == read_checkpoint(serial, "model/")
    assert read_metrics(again) == read_metrics(serial)


def test_another_seed_gives_another_run(serial: OpenRun, tmp_path: Path) -> None:
    other = run_serial(busy(seed=4), tmp_path / "run")
    assert not set(hash_recording(other).values()) & set(hash_recording(serial).values())


def test_more_rounds_and_less_measuring_leave_the_earlier_rounds_as_they_were(serial: OpenRun, tmp_path: Path) -> None:
    longer = run_serial(busy(rounds=4, evaluate_every=0), tmp_path / "run")
    assert hash_recording(serial).items() <= hash_recording(longer).items()
    assert len(hash_recording(longer)) == 4


def test_recording_less_changes_nothing_but_the_recording(serial: OpenRun, tmp_path: Path) -> None:
    less = run_serial(busy(recording={"rounds": [2]}), tmp_path / "run")
    assert read_checkpoint(less, "model/") == read_checkpoint(serial, "model/")
    assert hash_recording(less).items() <= hash_recording(serial).items()
    assert len(hash_recording(less)) == 1


# What the recording says is what happened.


def test_a_recorded_update_is_what_the_client_computed(tmp_path: Path) -> None:
    config = make_tiny_config(federation={"vectorise": False})
    transcript = Transcript(run_serial(config, tmp_path / "run").path)
    experiment = Experiment(config)
    for update in transcript.updates():
        inputs, labels = experiment.data.train(update.client)
        after, loss = local_update(
            experiment.model,
            update.before,
            experiment.data.to_model(inputs),
            labels,
            experiment.training,
            key=(config.federation.seed, "train", update.round, update.client),
        )
        assert all(torch.equal(after[name], update.after[name]) for name in after)
        assert update.num_examples == len(labels) == 24
        assert dict(update.metrics) == {"train_loss": loss}
    first = transcript.update(1, 0)
    assert all(torch.equal(first.before[name], t) for name, t in experiment.initial_state().items())


def test_the_next_broadcast_is_the_weighted_mean_of_the_updates(tmp_path: Path) -> None:
    config = make_tiny_config(partition={"name": "dirichlet", "alpha": 1.0})
    transcript = Transcript(run_serial(config, tmp_path / "run").path)
    updates = list(transcript.restrict_to([1]).updates())
    counts = torch.tensor([float(u.num_examples) for u in updates])
    assert len(set(counts.tolist())) > 1
    for name, tensor in transcript.update(2, 0).before.items():
        mean = torch.stack([u.after[name] for u in updates]).double()
        weights = (counts / counts.sum()).double().reshape(-1, *[1] * tensor.ndim)
        torch.testing.assert_close(tensor.double(), (weights * mean).sum(0), rtol=1e-5, atol=1e-6)


def test_the_reported_accuracy_is_that_of_the_final_weights(tmp_path: Path) -> None:
    config = make_tiny_config()
    folder = run_serial(config, tmp_path / "run")
    experiment = Experiment(config)
    with safe_open(folder.checkpoint, framework="pt") as file:
        state = {k.removeprefix("model/"): file.get_tensor(k) for k in file.keys() if k.startswith("model/")}  # noqa: SIM118
    test = experiment.dataset.test
    measured = evaluate(experiment.model, state, experiment.data.to_model(test.inputs()), test.labels)
    last = read_rows(folder.metrics)[-1]
    assert (float(last["accuracy"]), float(last["loss"])) == pytest.approx((measured["accuracy"], measured["loss"]))
    assert int(last["num_examples"]) == len(test) == 359


def test_fedprox_reaches_the_clients_and_is_on_record(tmp_path: Path) -> None:
    training = {"local_epochs": 3, "batch_size": 8, "learning_rate": 0.1}
    config = make_tiny_config(strategy={"name": "fedprox", "proximal_mu": 20.0}, training=training)
    held = Transcript(run_serial(config, tmp_path / "held").path)
    free = Transcript(run_serial(make_tiny_config(training=training), tmp_path / "free").path)
    assert held.update(1, 0).config["proximal-mu"] == 20.0

    def squared_norm(transcript: Transcript) -> float:
        return sum(t.square().sum().item() for t in transcript.update(1, 0).pseudo_gradient.values())

    assert squared_norm(held) < squared_norm(free) / 2


# Nothing in it that a server did not receive.


def test_a_transcript_holds_what_crossed_the_wire_and_nothing_else(serial: OpenRun) -> None:
    transcript = Transcript(serial.path)
    for number in transcript.rounds:
        path = serial.transcript / f"round-{number:06d}.safetensors"
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        text = raw[8 : 8 + length].lower()
        for word in (b"experiment", b"seed", b"dirichlet", b"alpha", b"label", b"simulation", b"digits", b"cohort"):
            assert word not in text, word
        assert str(serial.path).encode() not in raw
        header = transcript.header(number)
        assert set(header.config) == {
            "local-epochs", "batch-size", "learning-rate", "optimizer", "momentum", "weight-decay", "batch-norm",
            "batch-norm-statistics", "dropout", "server-round",
        }  # fmt: skip
        assert all(set(reply.metrics) == {"train_loss"} for reply in header.replies)
        with safe_open(path, framework="pt") as file:
            names = {key.split("/")[0] for key in file.keys()}  # noqa: SIM118
            assert names <= {"broadcast", "client"}
            assert list(file.metadata()) == ["fedsim"]


# Who imports what.


BLOCK = """
import sys
asked = []
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            asked.append(name)
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Block())
"""


def test_a_serial_run_never_asks_for_ray(tmp_path: Path) -> None:
    lines = [
        "BLOCKED = ['ray']",
        BLOCK,
        "from pathlib import Path",
        "from fedsim.federation.config import Config",
        "from fedsim.federation.open_run import OpenRun",
        "from fedsim.federation.simulation import run_federation",
        f"config = Config.model_validate_json({make_tiny_config().model_dump_json()!r})",
        f"run_federation(config, OpenRun(Path({str(tmp_path / 'run')!r})))",
        "print(asked)",
    ]
    done = fork_python("\n".join(lines), forget=["flwr", "ray"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
    assert Transcript(tmp_path / "run").rounds == [1, 2]
