"""A federation with gates: what the server gets to know, what is trained on, and what clients keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from flwr.app import Message
from torch import Tensor

from clients.defenses.gate import Gate
from fedsim.base.errors import RunError
from fedsim.exposure.measure import Meaning, Measure
from fedsim.federation.config import Config
from fedsim.federation.experiment import Experiment
from fedsim.federation.resolve import resolve
from fedsim.federation.run_folder import RunFolder
from fedsim.recording.sealed_files import read_sealed_file
from fedsim.recording.transcript import Transcript
from fedsim.training.loop import local_gradient, local_update
from fedsim.training.message_function import ClientMessage
from strategies.curious import Curious
from tests.support.experiments import make_tiny_config, run_serial
from tests.support.runs import assert_same_runs, hash_recording

FEDSGD: dict[str, Any] = {
    "strategy": {"name": "fedsgd", "learning_rate": 0.1},
    "training": {"local_epochs": None, "local_steps": 1, "batch_size": 24, "learning_rate": None},
}


@dataclass(frozen=True, kw_only=True)
class Odd(Measure):
    """1 of clients whose labels have an odd sum, 0 of others; or `fails` there, in one of several ways."""

    fails: str = ""
    marked: ClassVar[set[bytes]] = set()
    quantities: ClassVar[Mapping[str, Meaning]] = {"odd": "more"}

    def _compute(self, sent: ClientMessage) -> Mapping[str, float | Tensor]:
        odd = int(sent.labels.sum() % 2)
        if self.fails == "never":  # whatever is measured, a client or one of its examples
            odd = int({example.numpy().tobytes() for example in sent.inputs} <= self.marked)
        if odd and self.fails == "a sentence":
            raise RunError(f"the private sum of labels is {int(sent.labels.sum())}")
        if odd and self.fails == "an error":
            raise ValueError(f"the private sum of labels is {int(sent.labels.sum())}")
        if odd and self.fails == "an exit":
            raise SystemExit(3)
        return {"odd": torch.inf if odd and self.fails == "a value" else float(odd)}


def gated(*, fails: str = "", gate: Mapping[str, Any] | None = None, **tables: Any) -> Config:
    settings = {"above": 0.5} if gate is None else gate
    defense = {"name": "gate", "measure": {"name": f"{__name__}:Odd", "fails": fails}, **settings}
    tables["federation"] = {"clients": 8, "rounds": 2, "vectorise": False, **tables.pop("federation", {})}
    tables["partition"] = {"samples_per_client": 6}
    return make_tiny_config(defense=[defense], **tables)


def odd_clients(config: Config) -> set[int]:
    data = Experiment(resolve(config)).data
    return {client for client in range(8) if int(data.train(client)[1].sum()) % 2}


Seen = list[tuple[int, Any, Any, Any]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Each reply as the strategy gets it: from whom, its error's code and reason, its metadata but for times."""
    found: Seen = []
    aggregate = Curious.aggregate_train

    def describe_reply(reply: Message) -> tuple[int, Any, Any, Any]:
        code, reason = (reply.error.code, reply.error.reason) if reply.has_error() else (None, None)
        about = {key: value for key, value in vars(reply.metadata).items() if key not in ("_created_at", "_ttl")}
        return reply.metadata.src_node_id, code, reason, about

    def aggregated(strategy: Curious, number: int, replies: Any) -> Any:
        def watched() -> Any:
            for reply in replies:
                found.append(describe_reply(reply))
                yield reply

        return aggregate(strategy, number, watched())

    monkeypatch.setattr(Curious, "aggregate_train", aggregated)
    return found


# What the server gets to know.


@pytest.mark.parametrize(
    ("sends", "failing"),
    [
        pytest.param({}, ("an error",), id="fedavg"),
        pytest.param({}, ("a sentence", "an exit", "a value"), id="fedavg, other failures", marks=pytest.mark.thorough),
        pytest.param(FEDSGD, ("an error",), id="fedsgd", marks=pytest.mark.thorough),
    ],
)
def test_silence_is_that_of_a_straggler_for_every_reason(
    sends: dict[str, Any], failing: tuple[str, ...], tmp_path: Path, seen: Seen
) -> None:
    """Word for word in each message, and to the byte in the recording and in the model."""
    gates: dict[str, Any] = {
        "withheld": ("", {"above": 0.5}),
        "nothing left": ("never", {"above": 0.5, "action": "drop-examples"}),
    }
    gates |= {how: (how, {"above": 5.0}) for how in failing}
    silent = odd_clients(gated(**sends))
    assert 2 <= len(silent) <= 6
    held = Experiment(resolve(gated(**sends))).data.model_examples(sorted(silent))
    Odd.marked.update(example.numpy().tobytes() for inputs, _ in held for example in inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Experiment, "is_straggler", lambda _, client, number: client in silent)
        config = gated(**sends).model_copy(update={"defense": []})
        straggling = run_serial(config, tmp_path / "straggling")
    expected, told = hash_recording(straggling), list(seen)
    assert {reason for client, _, reason, _ in told if client in silent} == {
        f"straggler: did not return in round {number}" for number in (1, 2)
    }
    for name, (fails, gate) in gates.items():
        seen.clear()
        folder = run_serial(gated(fails=fails, gate=gate, **sends), tmp_path / name)
        assert seen == told, name
        assert hash_recording(folder) == expected, name
        assert folder.checkpoint.read_bytes() == straggling.checkpoint.read_bytes(), name


def test_why_a_measure_failed_is_told_to_the_log_of_the_client_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = run_serial(gated(fails="an error", federation={"rounds": 1}), tmp_path / "run")
    said = [record.message for record in caplog.records if "private" in record.message]
    assert len(said) == len(Transcript(folder.path).header(1).failures) > 0
    assert all("sends nothing, Gate failed: ValueError: the private sum of labels is" in line for line in said)
    assert not [path for path in folder.path.rglob("round-*") if b"private" in path.read_bytes()]


def test_values_are_in_no_message_and_in_no_recording(
    tmp_path: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gate, "check", lambda *_: None)  # it refuses a gate that stays open, as this one has to
    quiet = {"name": "gate", "measure": "gradient-norm", "quantile": 0.9}
    folder = run_serial(make_tiny_config(defense=[quiet]), tmp_path / "run")
    plain = run_serial(make_tiny_config(federation={"vectorise": False}), tmp_path / "plain")
    assert hash_recording(folder) == hash_recording(plain)
    assert folder.checkpoint.read_bytes() != plain.checkpoint.read_bytes(), "clients keep what they measured"


# What clients keep.


def past(folder: RunFolder, client: int) -> list[float]:
    _, stored = read_sealed_file(folder.checkpoint)
    values: list[float] = stored[f"client/{client}/0/values"].tolist()
    return values


def test_rounds_of_silence_count_among_the_past_and_those_of_straggling_do_not(tmp_path: Path) -> None:
    gate = {"name": "gate", "measure": "gradient-norm", "quantile": 0.4}
    config = make_tiny_config(defense=[gate], federation={"rounds": 6, "clients": 6, "straggler_probability": 0.2})
    folder, experiment = run_serial(config, tmp_path / "run"), Experiment(resolve(config))
    transcript, silent = Transcript(folder.path), 0
    for client in range(6):
        measured = [number for number in range(1, 7) if not experiment.is_straggler(client, number)]
        assert len(past(folder, client)) == len(measured) >= 2
        for place, number in enumerate(measured):
            values = past(folder, client)
            rank = -(-4 * (place + 1) // 10)
            closed = bool(place) and values[place] > sorted(values[:place])[rank - 1]
            assert closed == (client not in transcript.clients(number)), (client, number)
            silent += closed
    assert silent > 2


def test_a_round_in_which_all_are_silent_is_lost_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Experiment, "is_straggler", lambda _, client, number: number == 2)
        folder = run_serial(make_tiny_config(federation={"rounds": 3}), tmp_path / "run")
    assert "round 2: the strategy aggregated nothing, too few clients returned; the model stays" in caplog.messages
    transcript = Transcript(folder.path)
    assert [len(transcript.clients(number)) for number in (1, 2, 3)] == [4, 0, 4]
    undisturbed = Transcript(run_serial(make_tiny_config(federation={"rounds": 2}), tmp_path / "undisturbed").path)
    now, then = transcript.update(3, 0).before, undisturbed.update(2, 0).before
    assert all(torch.equal(tensor, now[name]) for name, tensor in then.items())


def test_a_gate_that_is_closed_for_all_from_the_first_round_on_ends_the_run(tmp_path: Path) -> None:
    config = make_tiny_config(defense=[{"name": "gate", "measure": "gradient-norm", "above": 0.0}])
    says = (
        r"round 1: all 4 clients failed \(client \d: straggler: did not return in round 1\); lower .* loosen the limits"
    )
    with pytest.raises(RunError, match=says):
        run_serial(config, tmp_path / "run")


def test_a_client_that_fails_after_its_gate_was_open_keeps_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedsim.training import algorithm_client

    real = algorithm_client.local_update

    def failing(*arguments: Any, key: tuple[Any, ...], **keywords: Any) -> Any:
        if key[2:] == (2, 1):
            raise MemoryError("out of memory")
        return real(*arguments, key=key, **keywords)

    monkeypatch.setattr(algorithm_client, "local_update", failing)
    monkeypatch.setattr(Gate, "check", lambda *_: None)
    gate = {"name": "gate", "measure": "gradient-norm", "quantile": 0.9}
    folder = run_serial(make_tiny_config(defense=[gate], federation={"rounds": 3}), tmp_path / "run")
    assert [len(past(folder, client)) for client in range(4)] == [3, 2, 3, 3]


# What is trained on.


def dropping(fraction: float = 0.25) -> dict[str, Any]:
    return {"name": "gate", "measure": "gradient-norm", "action": "drop-examples", "fraction": fraction}


@pytest.mark.parametrize("batches", [pytest.param("reshuffled", marks=pytest.mark.thorough), "fixed"])
def test_what_is_left_out_was_never_held(batches: str, tmp_path: Path) -> None:
    """N, batches and steps are those of a client that holds the others alone."""
    config = make_tiny_config(defense=[dropping()], training={"batches": batches}, partition={"samples_per_client": 8})
    folder, experiment = run_serial(config, tmp_path / "run"), Experiment(resolve(config))
    update = Transcript(folder.path).update(2, 1)
    assert update.num_examples == 6
    inputs, labels = experiment.data.model_examples([1])[0]
    norms = []
    model = experiment.model_with_state(update.before)
    for one, label in zip(inputs.split(1), labels.split(1), strict=True):
        loss = experiment.dataset.task.loss(model(one), label)
        parts = torch.autograd.grad(loss, list(model.parameters()))
        norms.append(float(torch.cat([part.flatten() for part in parts]).double().norm()))
    left = torch.tensor(norms).argsort()[:6].sort().values
    share = experiment.make_local_data(1, 2, experiment.training, inputs[left], labels[left])
    after, _ = local_update(
        experiment.model,
        update.before,
        share.inputs,
        share.labels,
        experiment.training,
        key=share.key,
        order=share.order,
        loss=experiment.dataset.task.loss,
    )
    assert all(torch.equal(after[name], update.after[name]) for name in after)


def test_of_a_mini_batch_the_gradient_of_what_is_left_is_sent(tmp_path: Path) -> None:
    sgd = {**FEDSGD, "training": {**FEDSGD["training"], "batch_size": 8}}
    config = make_tiny_config(defense=[dropping()], federation={"rounds": 1}, **sgd)
    folder, experiment = run_serial(config, tmp_path / "run"), Experiment(resolve(config))
    update = Transcript(folder.path).update(1, 2)
    assert update.num_examples == 6
    (share,) = experiment.local_data([2], 1, experiment.training)
    assert share.order is not None
    (batch,) = share.order
    found = 0
    for first in range(8):  # two of eight were left out
        for second in range(first):
            index = batch[[place for place in range(8) if place not in (first, second)]]
            gradient, _, _ = local_gradient(
                experiment.model,
                update.before,
                share.inputs[index],
                share.labels[index],
                experiment.training,
                key=share.key,
                loss=experiment.dataset.task.loss,
            )
            sent = update.payload.arrays()
            found += all(torch.equal(torch.as_tensor(sent[f"gradient/{name}"]), gradient[name]) for name in gradient)
    assert found == 1


def test_noise_is_on_the_updates_of_closed_rounds_alone(tmp_path: Path) -> None:
    config = gated(gate={"above": 0.5, "action": "noise", "noise": 0.5}, federation={"rounds": 1})
    loud = odd_clients(config)
    noisy = Transcript(run_serial(config, tmp_path / "run").path)
    plain = Transcript(run_serial(config.model_copy(update={"defense": []}), tmp_path / "plain").path)
    for client in range(8):
        one, other = noisy.update(1, client).after, plain.update(1, client).after
        apart = torch.cat([(one[name] - other[name]).flatten() for name in one])
        assert bool(apart.any()) == (client in loud)
        if client in loud:
            assert apart.std().item() == pytest.approx(0.5, rel=0.1)


# The same on every engine, and however it is interrupted.

NOISE = {"action": "noise", "noise": 0.01}
MANY: list[dict[str, Any]] = [
    {"name": "gate", "measure": {"name": "angular-lipschitz", "noises": 2}, "quantile": 0.5, **NOISE},
    {"name": "gate", "measure": {"name": "sensitivity", "noises": 2}, "quantile": 0.4, "action": "withhold"},
    {"name": "gate", "measure": "gradient-norm", "quantile": 0.8, "action": "drop-examples"},
]


def many(**federation: Any) -> Config:
    return make_tiny_config(
        defense=MANY,
        federation={"rounds": 4, "straggler_probability": 0.1, **federation},
        partition={"samples_per_client": 6},
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = run_serial(many(), tmp_path_factory.mktemp("whole") / "run")
    transcript = Transcript(folder.path)
    sizes = {transcript.update(n, c).num_examples for n in transcript.rounds for c in transcript.clients(n)}
    assert len(sizes) > 1, "nothing was left out"
    experiment = Experiment(many())
    failures = {(n, c) for n in transcript.rounds for c in transcript.header(n).failures}
    assert failures - {(n, c) for n, c in failures if experiment.is_straggler(c, n)}, "nothing was withheld"
    return folder


@pytest.mark.thorough
def test_a_resumed_run_goes_on_from_what_gates_keep(whole: RunFolder, tmp_path: Path) -> None:
    run_serial(many(rounds=2), tmp_path / "run")
    assert_same_runs(run_serial(many(), tmp_path / "run", resume=True), whole)


@pytest.mark.thorough
def test_clients_train_one_by_one_behind_a_gate(whole: RunFolder, tmp_path: Path) -> None:
    assert_same_runs(run_serial(many(vectorise=False), tmp_path / "run"), whole)


def test_under_secure_aggregation_who_is_silent_drops_out(tmp_path: Path) -> None:
    table = {"groups": "all", "clip": 100.0, "threshold": 2}
    config = gated(secure_aggregation=table, federation={"rounds": 1})
    silent = odd_clients(config)
    transcript = Transcript(run_serial(config, tmp_path / "run").path)
    assert set(transcript.header(1).failures) == silent
