"""Messages that are read as those of another model, or without a term of the app's own, are told of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fedsim
from fedsim.audit.audit import open_audit
from fedsim.federation.config import AttackFile
from fedsim.federation.table_validation import validate_tables
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.wire_format import State, Update

COUNT, RATE = 4, 0.1


def make_model(seed: int = 1) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))


def held_by(client: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(client)
    return torch.rand((COUNT, 1, 8, 8), generator=draw), torch.randint(4, (COUNT,), generator=draw)


def train(start: State, client: int, term: State | None = None) -> dict[str, Tensor]:
    """Take two steps on all examples, each with `term` added to the gradient."""
    model, (inputs, labels) = make_model(), held_by(client)
    model.load_state_dict(start)
    for _ in range(2):
        model.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                parameter -= RATE * (parameter.grad + (term[name] if term else 0))
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def record(folder: Path, number: int, before: State, replies: list[State]) -> None:
    updates = []
    for client, reply in enumerate(replies):
        payload = Payload.from_dense(reply, "weights")
        updates.append(Update(round=number, client=client, before=before, payload=payload, num_examples=COUNT))
    Recorder(folder / "run" / "transcript", resume=number > 1).write(number, updates)


def score(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int = 1, app: dict[str, str] | None = None, **stated: Any
) -> dict[str, dict[int, float]]:
    """Attack round `number` of all clients; the scores by metric and client."""
    monkeypatch.setattr(torch, "make_checked_model", make_model, raising=False)
    known = {"model": "torch:make_checked_model", "input_shape": [1, 8, 8], "value_range": [0.0, 1.0], "num_classes": 4}
    tables: dict[str, Any] = {
        "adversary": {"workers": 1, "victims": "all", "rounds": [number], "knowledge": known | stated},
        "app": app or {},
        "attack": [{"name": "label-counts"}],
        "truth": fedsim.write_truth(folder / "truth", lambda client: held_by(int(client)), [0, 1, 2]),
    }
    audit = open_audit(folder / "run", validate_tables(AttackFile, tables, "attack.toml"), folder)
    audit.run()
    values: dict[str, dict[int, float]] = {}
    for row in audit.score():
        values.setdefault(row["metric"], {})[int(row["victim"])] = float(row["value"])
    return values


STATED = {"learning_rate": RATE, "optimizer": "sgd", "batch_size": COUNT}


def test_messages_of_another_model_than_is_read_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = make_model(1).state_dict(), make_model(2).state_dict()
    record(tmp_path, 1, first, [train(first, 0), train(second, 1), train(second, 2)])
    score(tmp_path, monkeypatch)
    assert "round 1, client 1: its reply hardly resembles what it was sent" in caplog.text
    assert "like 2 of 3 replies" in caplog.text
    assert "what truth.1 says that it held explains its message hardly" in caplog.text
    assert "what truth.0 says that it held explains" not in caplog.text


def test_a_term_that_follows_from_earlier_rounds_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = make_model().state_dict()
    returned = [train(start, client) for client in range(3)]
    record(tmp_path, 1, start, returned)
    middle = {name: torch.stack([reply[name] for reply in returned]).mean(0) for name in start}
    terms = [{name: 3 * (reply[name] - start[name]) for name in start} for reply in returned]
    record(tmp_path, 2, middle, [train(middle, client, terms[client]) for client in range(3)])
    score(tmp_path, monkeypatch, 2, **STATED, local_epochs=2)
    assert "trained as [adversary.knowledge] states, gives another message" in caplog.text
    assert "as FedDyn's, and attacks read wrong gradients here; " in caplog.text
    assert "attack round 1" in caplog.text
    assert "hardly resembles" not in caplog.text


def test_a_client_that_answers_with_an_older_model_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Client 0 sends what it sent before, and client 1 trains on the model before; client 2 keeps up."""
    start = make_model().state_dict()
    returned = [train(start, client) for client in range(3)]
    record(tmp_path, 1, start, returned)
    middle = {name: torch.stack([reply[name] for reply in returned]).mean(0) + 0.01 for name in start}
    late = {name: tensor.clone() for name, tensor in train(start, 1).items()}
    late["3.bias"] = late["3.bias"] + 1e-6
    record(tmp_path, 2, middle, [returned[0], late, train(middle, 2)])
    scores = score(tmp_path, monkeypatch, 2, **STATED, local_epochs=2)
    assert "round 2, client 0: its reply is byte for byte that of round 1" in caplog.text
    assert "(1 such in the first 2 rounds)" in caplog.text
    assert caplog.text.count("from the w_t of round 1 it gives this one") == 2
    assert all(set(values) == {2} for values in scores.values())


def test_clients_that_are_sent_models_of_other_shapes_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = make_model().state_dict()
    narrow = start | {"1.weight": start["1.weight"][:8].clone(), "1.bias": start["1.bias"][:8].clone()}
    updates = []
    for client, before in enumerate((start, narrow, start)):
        reply = Payload.from_dense({name: tensor + 1e-3 for name, tensor in before.items()}, "weights")
        updates.append(Update(round=1, client=client, before=before, payload=reply, num_examples=COUNT))
    Recorder(tmp_path / "run" / "transcript").write(1, updates)
    score(tmp_path, monkeypatch)
    assert "models of different shapes, client 1 another one than client 0" in caplog.text


def test_a_stated_one_is_no_true(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = make_model().state_dict()
    record(tmp_path, 1, start, [train(start, client) for client in range(3)])
    score(tmp_path, monkeypatch, **STATED, local_epochs=1)
    assert "times as long as training on truth.0" in caplog.text
    page = fedsim.open(tmp_path / "run").report().path.read_text()
    assert "local_epochs = 1" in page


def test_deltas_of_the_other_sign_are_told_of_though_another_clients_data_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = make_model().state_dict()
    trained = train(start, 0)
    moves = {name: start[name] - trained[name] for name in start}
    inputs, labels = held_by(0)
    monkeypatch.setattr("tests.cases.test_misread_messages.held_by", lambda client: (inputs, (labels + client) % 4))
    record(tmp_path, 1, start, [moves, moves, moves])
    score(tmp_path, monkeypatch, app={"replies": "delta"})
    assert "points the opposite way, as where a delta is w_t - w_T, which" in caplog.text
    assert 0 in score(tmp_path, monkeypatch, app={"replies": "gradient"})["label_distance"]
