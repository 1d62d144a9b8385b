"""Clients that send deltas, sparse and quantised updates: through the round loop, the aggregate and the recording."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Strategy
from torch import Tensor

from clients.mods import as_mod, defend_payload
from fedsim.base.errors import RunError
from fedsim.base.randomness import generator
from fedsim.federation.config import Config
from fedsim.federation.engines.arrays import make_record, read_state
from fedsim.federation.engines.serial import InProcessGrid
from fedsim.interfaces.attack import Paper
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.local_context import LocalContext
from fedsim.recording.payloads import Dense, Form, Payload, Quantised, Sparse, State
from fedsim.recording.recorder import Recorder, RecordingPlan
from fedsim.recording.transcript import Transcript
from strategies.curious import Curious
from tests.support.experiments import make_tiny_config, run_serial

PAPER = Paper(title="none", authors="nobody", venue="none", year=2000, url="")


@dataclass(frozen=True, kw_only=True)
class AsDelta(Defense):
    """Sends the difference itself."""

    paper = PAPER

    def on_update(self, update: State, context: LocalContext) -> Payload:
        return Payload.from_dense(update)


@dataclass(frozen=True, kw_only=True)
class LargestTenth(Defense):
    """Sends the tenth of each tensor that is largest."""

    paper = PAPER

    def on_update(self, update: State, context: LocalContext) -> Payload:
        return Payload.from_sparse({name: kept(tensor) for name, tensor in update.items()})


@dataclass(frozen=True, kw_only=True)
class EightBits(Defense):
    """Sends signed bytes, rounded at random, and a scale for each tensor."""

    paper = PAPER

    def on_update(self, update: State, context: LocalContext) -> Payload:
        scales = {name: tensor.abs().max().clamp_min(1e-30) / 127 for name, tensor in update.items()}
        noisy = {n: t / scales[n] + torch.rand(t.shape, generator=context.rng) for n, t in update.items()}
        return Payload.from_integers({n: t.floor().clamp(-127, 127).to(torch.int8) for n, t in noisy.items()}, scales)


@dataclass(frozen=True, kw_only=True)
class BothForms(Defense):
    """Sends every other tensor sparse, and those between them quantised."""

    paper = PAPER

    def on_update(self, update: State, context: LocalContext) -> Payload:
        sparse, quantised = LargestTenth().on_update(update, context), EightBits().on_update(update, context)
        odd = list(update)[1::2]
        return sparse | Payload({name: quantised.tensors[name] for name in odd})


def kept(tensor: Tensor) -> Tensor:
    fewest = tensor.abs().flatten().kthvalue(max(1, int(0.9 * tensor.numel()))).values
    return torch.where(tensor.abs() > fewest, tensor, 0)


FORMS: dict[str, type[Form]] = {"AsDelta": Dense, "LargestTenth": Sparse, "EightBits": Quantised}


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param(name, strategy, marks=() if name == "EightBits" or strategy == "fedavg" else pytest.mark.thorough)
        for name in FORMS
        for strategy in ("fedavg", "fedsgd")
    ],
)
def test_a_federation_records_each_form_as_it_was_sent_and_aggregates_what_it_stands_for(
    name: str, strategy: str, tmp_path: Path
) -> None:
    sgd = strategy == "fedsgd"
    config = make_tiny_config(
        strategy={"name": strategy} | ({"learning_rate": 0.1} if sgd else {}),
        training={"local_epochs": None, "local_steps": 1, "learning_rate": 0.1},
        federation={"rounds": 2},
        defense=[{"name": f"{__name__}:{name}"}],
        attack=[],
    )
    transcript = Transcript(run_serial(config, tmp_path / "run").path)
    first, after = list(transcript.updates())[:4], transcript.update(2, 0).before
    assert {reply.kind for reply in transcript.header(1).replies} == {"gradient" if sgd else "delta"}
    assert {type(form) for update in first for _, form in update.payload.tensors.values()} == {FORMS[name]}
    total = sum(update.num_examples for update in first)
    for key, start in first[0].before.items():
        moved = sum(update.pseudo_gradient[key] * (update.num_examples / total) for update in first)
        torch.testing.assert_close(after[key], start - (0.1 if sgd else 1.0) * moved)
    dense = sum(tensor.numel() * 4 for tensor in first[0].before.values())
    share = {"AsDelta": 1.0, "LargestTenth": 0.25, "EightBits": 0.3}[name]
    assert all(update.payload.nbytes <= share * dense for update in first)


def sparse_and_quantised() -> Config:
    return make_tiny_config(defense=[{"name": f"{__name__}:BothForms"}])


def test_a_payload_may_have_both_forms(tmp_path: Path) -> None:
    transcript = Transcript(run_serial(sparse_and_quantised(), tmp_path / "run").path)
    sent = {type(form) for update in transcript.updates() for _, form in update.payload.tensors.values()}
    assert sent == {Sparse, Quantised}


def sender(sent: Callable[[int, State], State]) -> ClientApp:
    """Clients that send what `sent` makes of w_t."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        arrays = make_record(sent(client, read_state(message.content.array_records["arrays"])))
        metrics = MetricRecord({"num-examples": 3 + client, "partition-id": client})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


START = {"w": torch.linspace(-1, 1, 40).reshape(4, 10), "b": torch.linspace(0, 1, 4)}


def encoded(client: int, before: State) -> Payload:
    """Of each client another form."""
    rng = generator("payload", client)
    delta = {name: torch.randn(tensor.shape, generator=rng) for name, tensor in before.items()}
    if client % 3 == 0:
        return Payload.from_dense(delta)
    if client % 3 == 1:
        return Payload.from_sparse({name: kept(tensor) for name, tensor in delta.items()})
    return EightBits().on_update(delta, LocalContext(rng=rng))


def aggregate(strategy: Strategy, app: ClientApp) -> dict[str, bytes]:
    grid = InProcessGrid(app, 6)
    start = ArrayRecord({name: Array(tensor.numpy()) for name, tensor in START.items()})
    replies = grid.send_and_receive(strategy.configure_train(1, start, ConfigRecord(), grid))
    arrays, _ = strategy.aggregate_train(1, sorted(replies, key=lambda reply: reply.metadata.src_node_id))
    assert arrays is not None
    return {name: array.numpy().tobytes() for name, array in arrays.items()}


@pytest.mark.parametrize("plan", [RecordingPlan(), RecordingPlan(rounds=[])], ids=["recorded", "not recorded"])
def test_the_aggregate_is_that_of_dense_weights_to_the_bit(plan: RecordingPlan, tmp_path: Path) -> None:
    decoded = sender(lambda client, before: encoded(client, before).decode(before))
    curious = Curious(FedAvg(), Recorder(tmp_path / "transcript", plan))
    assert aggregate(curious, sender(lambda client, before: encoded(client, before).arrays())) == aggregate(
        FedAvg(), decoded
    )
    if plan.keeps_round(1):
        for update in Transcript(tmp_path).updates():
            sent = encoded(update.client, update.before).arrays()
            assert {name: t.numpy().tobytes() for name, t in update.payload.arrays().items()} == {
                name: t.numpy().tobytes() for name, t in sent.items()
            }


@pytest.mark.parametrize("plan", [RecordingPlan(), RecordingPlan(rounds=[])], ids=["recorded", "not recorded"])
def test_a_malformed_payload_fails_its_client_alone(plan: RecordingPlan, tmp_path: Path) -> None:
    def repeat_index(client: int, before: State) -> State:
        twice = {"delta-indices/b": torch.tensor([1, 1]), "delta-values/b": torch.ones(2), "w": before["w"]}
        return twice if client == 2 else encoded(client, before).arrays()

    class WithoutThird(FedAvg):
        """Is handed an error in the place of what the third client sent."""

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            replies = list(replies)
            assert [reply.has_error() for reply in replies] == [False, False, True, False, False, False]
            assert replies[2].error.reason == "it sent 'b' with index 1 more than once, expected each once"
            return super().aggregate_train(server_round, replies)

    class Without(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            return super().aggregate_train(server_round, [*list(replies)[:2], *list(replies)[3:]])

    curious = Curious(WithoutThird(), Recorder(tmp_path / "transcript", plan))
    everyone = sender(lambda client, before: encoded(client, before).decode(before))
    assert aggregate(curious, sender(repeat_index)) == aggregate(Without(), everyone)
    if plan.keeps_round(1):
        (failure,) = Transcript(tmp_path).header(1).failures.values()
        assert failure == "it sent 'b' with index 1 more than once, expected each once"


def test_a_payload_of_unreadable_bytes_fails_its_client_alone(tmp_path: Path) -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = make_record({"delta/w": torch.ones(4, 10), "b": START["b"]})
        if context.node_config["partition-id"] == 2:
            arrays["delta/w"] = Array("float32", (4, 10), "numpy.ndarray", b"nonsense")
        return Message(RecordDict({"a": arrays, "m": MetricRecord({"num-examples": 3})}), reply_to=message)

    assert aggregate(Curious(FedAvg(), tmp_path), app)["w"] == (START["w"] + 1).numpy().tobytes()
    (odd,) = [update for update in Transcript(tmp_path).updates() if update.remarks]
    assert odd.remarks[0].startswith("it sent 'delta/w', which cannot be read: ")
    assert set(odd.after) == {"b"}


def test_a_mod_sends_a_payload_from_any_flower_app(tmp_path: Path) -> None:
    def trained(client: int, before: State) -> State:
        return {name: tensor + 0.1 * (client + 1) * tensor.sin() for name, tensor in before.items()}

    plain = sender(trained)
    app = ClientApp(mods=[as_mod(LargestTenth())])
    app.train()(lambda message, context: plain(message, context))
    aggregate(Curious(FedAvg(), tmp_path), app)
    for update in Transcript(tmp_path).updates():
        expected = Payload.from_sparse({n: kept(t - START[n]) for n, t in trained(update.client, START).items()})
        for name, tensor in expected.arrays().items():
            assert torch.equal(update.payload.arrays()[name], tensor)


# What a hook may hand back, and what the next defense is handed.


class Returns(Defense):
    paper = PAPER

    def __init__(self, made: Callable[[State], Any]) -> None:
        self.__dict__["made"] = made

    def on_update(self, update: State, context: LocalContext) -> State | Payload:
        return self.__dict__["made"](update)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (lambda u: Payload.from_dense({"w": u["w"]}), "Returns.on_update: 'b' was left out; return the same names"),
        (lambda u: Payload.from_dense({**u, "x": u["w"]}), "Returns.on_update: 'x' was added; return the same names"),
        (
            lambda u: Payload.from_dense({**u, "b": u["w"]}),
            "the payload does not fit the update (it sent 'b' with shape (4, 10), expected (4,))",
        ),
        (lambda u: Payload.from_dense(u, "weights"), "'w' is sent as weights, expected a payload of deltas"),
        (
            lambda u: Payload.from_dense({n: t / 0 for n, t in u.items()}),
            "Returns: the update of 'w' is NaN or infinite",
        ),
    ],
)
def test_a_payload_that_is_not_one_of_the_update_is_not_sent(made: Callable[[State], Any], expected: str) -> None:
    after = Payload.from_dense({name: tensor + 1 for name, tensor in START.items()}, "weights")
    with pytest.raises(RunError) as caught:
        defend_payload(Returns(made), START, after, LocalContext(rng=generator(0)))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_next_defense_is_handed_what_the_payload_stands_for() -> None:
    after = Payload.from_dense({name: tensor + 1 for name, tensor in START.items()}, "weights")
    sparse = defend_payload(LargestTenth(), START, after, LocalContext(rng=generator(0)))
    seen: list[State] = []

    def look(update: State) -> State:
        seen.append(update)
        return {**update, "b": update["b"] * 2}

    sent = defend_payload(Returns(look), START, sparse, LocalContext(rng=generator(0)))
    for name, tensor in sparse.values("delta", START).items():
        assert torch.equal(seen[0][name], tensor)
    assert sent.tensors["w"] is sparse.tensors["w"]  # what it left as it was is sent as it was
    assert torch.equal(sent.values("delta", START)["b"], 2 * seen[0]["b"])
