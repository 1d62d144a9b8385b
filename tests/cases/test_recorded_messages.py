"""What a curious server writes down of messages that are not as Flower's tutorials have them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from torch import Tensor, nn

import fedsim
from fedsim.audit.reply_warnings import warn_of_replies
from fedsim.base.errors import AttackError, ConfigError, TranscriptError
from fedsim.recording.message_format import MessageFormat
from fedsim.recording.recorder import Recorder
from fedsim.recording.recording_folder import find_run
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update
from tests.support.recordings import PLAIN_SGD, build_update

Answer = Callable[[Message], RecordDict]


pytestmark = pytest.mark.usefixtures("server_task")


class OneByOne(Grid):
    """Gives each message an id as it is sent, as Flower's Grids do, and each reply that of its message."""

    def __init__(self, answer: Answer, nodes: int = 2) -> None:
        self.answer, self.nodes, self.sent = answer, nodes, dict[str, Message]()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        for message in (messages := list(messages)):
            message.metadata.__dict__["_message_id"] = str(len(self.sent))
            self.sent[message.metadata.message_id] = message
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        questions = [self.sent[number] for number in message_ids]
        # The last message is answered first, so that the order says nothing.
        return [Message(self.answer(question), reply_to=question) for question in reversed(questions)]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def get_node_ids(self) -> Iterable[int]:
        return range(self.nodes)

    create_message = get_nodes = set_run = None  # type: ignore[assignment]
    run = None  # type: ignore[assignment]


def record(**tensors: Tensor) -> ArrayRecord:
    return ArrayRecord({name: Array(tensor.numpy()) for name, tensor in tensors.items()})


def reply(arrays: ArrayRecord) -> RecordDict:
    return RecordDict({"a": arrays, "m": MetricRecord({"num-examples": 4})})


def test_batch_norm_under_flowers_fedavg_is_recorded_in_every_round(tmp_path: Path) -> None:
    """FedAvg averages BatchNorm's counter into a real number, and clients answer with an integer."""

    def train(message: Message) -> RecordDict:
        model = nn.BatchNorm1d(2)
        (arrays,) = message.content.array_records.values()
        model.load_state_dict(arrays.to_torch_state_dict())
        model(torch.randn(8, 2, generator=torch.Generator().manual_seed(message.metadata.dst_node_id)))
        return reply(ArrayRecord(model.state_dict()))

    strategy = fedsim.Curious(FedAvg(fraction_evaluate=0.0), tmp_path)
    strategy.start(OneByOne(train), ArrayRecord(nn.BatchNorm1d(2).state_dict()), num_rounds=3)
    transcript = Transcript(find_run(tmp_path))
    assert [transcript.clients(number) for number in (1, 2, 3)] == [[0, 1]] * 3
    assert not any(transcript.header(number).failures for number in (1, 2, 3))
    (remark,) = transcript.recorded_update(2, 0).remarks
    assert remark == "'num_batches_tracked' came as int64, and was sent as float64"
    assert transcript.recorded_update(1, 0).remarks == ()
    assert transcript.recorded_update(2, 0).after["num_batches_tracked"].dtype == torch.int64


def test_a_tensor_that_cannot_be_recorded_is_left_out_alone(tmp_path: Path) -> None:
    def train(message: Message) -> RecordDict:
        return reply(record(w=torch.ones(2), z=torch.ones(2, dtype=torch.complex128)))

    with fedsim.CuriousGrid(OneByOne(train), tmp_path) as grid:
        grid.send_and_receive([Message(RecordDict({"a": record(w=torch.zeros(2))}), 0, "train")])
    update = Transcript(tmp_path).recorded_update(1, 0)
    assert set(update.after) == {"w"}
    assert update.remarks == ("it sent 'z' as torch.complex128, which cannot be recorded",)


@pytest.mark.parametrize("pushed", [True, False])
def test_each_answer_of_a_client_is_paired_with_the_model_that_it_was_sent(pushed: bool, tmp_path: Path) -> None:
    """As IFCA, FedEM and ensembles do, the server sends each client two models at once."""

    def train(message: Message) -> RecordDict:
        (arrays,) = message.content.array_records.values()
        return reply(record(w=arrays.to_torch_state_dict()["w"] + 0.01))

    models = [torch.zeros(3), torch.full((3,), 5.0)]
    messages = [Message(RecordDict({"a": record(w=model)}), node, "train") for node in (0, 1) for model in models]
    with fedsim.CuriousGrid(OneByOne(train), tmp_path) as grid:
        if pushed:
            grid.pull_messages(grid.push_messages(messages))
        else:
            grid.send_and_receive(messages)
    transcript = Transcript(tmp_path)
    assert transcript.clients(1) == [0, 1]
    for client in (0, 1):
        assert transcript.messages(1, client) == [1, 2]
        for message, model in zip((1, 2), models, strict=True):
            update = transcript.recorded_update(1, client, message)
            assert torch.equal(update.before["w"], model)
            assert update.pseudo_gradient["w"].tolist() == pytest.approx([-0.01] * 3, rel=1e-4)
    transcript.hash()  # reads all four
    with pytest.raises(TranscriptError, match=r"client 0: it answered 1, 2 of 2 messages .* \[app\] message"):
        transcript.update(1, 0)
    chosen = Transcript(tmp_path, message_format=MessageFormat(message=2))
    assert torch.equal(chosen.update(1, 0).before["w"], models[1])
    with pytest.raises(TranscriptError, match="answered 1, 2 but not message 3"):
        Transcript(tmp_path, message_format=MessageFormat(message=3)).update(1, 0)


def test_a_reply_that_nobody_asks_for_is_no_failure(tmp_path: Path) -> None:
    with fedsim.CuriousGrid(OneByOne(lambda message: reply(record(w=torch.ones(2)))), tmp_path) as grid:
        messages = [Message(RecordDict({"a": record(w=torch.zeros(2))}), node, "train") for node in range(3)]
        numbers = list(grid.push_messages(messages))
        grid.pull_messages(numbers[:2])
    header = Transcript(tmp_path).header(1)
    assert [answer.client for answer in header.replies] == [0, 1]
    assert header.failures == {}


def test_a_second_phase_of_training_in_a_round_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with fedsim.CuriousGrid(OneByOne(lambda message: reply(record(w=torch.ones(2)))), tmp_path) as grid:
        for _ in range(2):
            message = Message(RecordDict({"a": record(w=torch.zeros(2))}), 0, "train", group_id="1")
            grid.send_and_receive([message])
    assert Transcript(tmp_path).rounds == [1, 2]
    assert "round 1 is trained once more; this time it is recorded as round 2" in caplog.text


def test_curious_inside_another_strategy_is_refused(tmp_path: Path) -> None:
    inside = DifferentialPrivacyServerSideFixedClipping(
        fedsim.Curious(FedAvg(fraction_evaluate=0.0), tmp_path), 1.0, 1.0, 2
    )
    grid = OneByOne(lambda message: reply(record(w=torch.ones(2))))
    with pytest.raises(ConfigError, match=r"^Curious has to be outermost: within Differential.*; write Curious\(Diff"):
        inside.start(grid, record(w=torch.zeros(2)), num_rounds=1)


def test_a_folder_is_named_by_a_text_or_a_path(tmp_path: Path) -> None:
    Recorder(tmp_path).write(1, [make_update(torch.zeros(2), torch.ones(2))])
    assert Transcript(str(tmp_path)).rounds == Transcript(tmp_path).rounds == [1]


def make_update(before: Tensor, after: Tensor) -> Update:
    return build_update({"w": before}, {"w": after})


def test_attacks_read_one_type_and_lose_no_digits_of_float64(tmp_path: Path) -> None:
    before = torch.tensor([1.0, -2.0], dtype=torch.float64)
    Recorder(tmp_path).write(1, [make_update(before, before - 1e-9)])
    update = Transcript(tmp_path).update(1, 0)
    assert {tensor.dtype for tensor in (*update.before.values(), *update.after.values())} == {torch.float32}
    assert update.pseudo_gradient["w"].tolist() == pytest.approx([1e-9, 1e-9], rel=1e-6)
    assert Transcript(tmp_path).recorded_update(1, 0).after["w"].dtype == torch.float64


def test_a_server_that_sends_float64_is_read_as_its_clients_read_it(tmp_path: Path) -> None:
    """FedAdam and its kin make the model float64; clients load it into float32."""
    sent = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
    Recorder(tmp_path).write(1, [make_update(sent, sent.float())])
    assert Transcript(tmp_path).update(1, 0).pseudo_gradient["w"].tolist() == [0.0, 0.0]


def test_gradients_that_differ_are_not_said_to_be_identical(caplog: pytest.LogCaptureFixture) -> None:
    updates = [
        build_update({"w": torch.zeros(2)}, {"w": torch.full((2,), value)}, "gradient", client=client)
        for client, value in enumerate((1.0, 2.0))
    ]
    warn_of_replies(updates)
    assert caplog.text == ""
    warn_of_replies([updates[0], updates[0]])
    assert "all 2 replies are identical" in caplog.text


def test_one_model_before_the_removals_of_two_clients_is_no_copied_aggregate(caplog: pytest.LogCaptureFixture) -> None:
    """As docs/how-to/audit-an-unlearning.md imports them: each model after a removal is a broadcast."""
    before_removal = {"w": torch.ones(2)}
    updates = [
        build_update({"w": torch.full((2,), value)}, before_removal, "weights", client=client)
        for client, value in enumerate((0.8, 0.9))
    ]
    warn_of_replies(updates)
    assert caplog.text == ""


ATTACKS = ("inverting-gradients", "dlg", "spear-ica", "label-counts", "llg")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, torch.float64) for name in ATTACKS),
        *((name, torch.bfloat16) for name in ATTACKS if name != "spear-ica"),  # which needs more digits, and says so
    ],
)
def test_attacks_work_on_any_type_of_numbers(name: str, kind: torch.dtype) -> None:
    network = seeded_network()
    before, after = network.state_dict(), one_step(network)
    cast = {key: tensor.to(kind) for key, tensor in after.items()}
    fedsim.attack(before, cast, model=network, attack=name, **KNOWN, settings=FEW if name in ATTACKS[:2] else {})


@pytest.mark.parametrize("name", ATTACKS)
def test_what_cannot_be_computed_with_is_one_sentence(name: str) -> None:
    network = seeded_network()
    before = network.state_dict()
    large = {key: torch.full_like(tensor, 3e38) for key, tensor in before.items()}
    with pytest.raises(AttackError, match="so large that its square is infinite"):
        fedsim.attack(before, large, model=network, attack=name, **KNOWN)
    with pytest.raises(AttackError, match=r"N is 1000000000000000000, and so many examples take .* say N with"):
        fedsim.attack(before, one_step(network), model=network, attack=name, **{**KNOWN, "num_examples": 10**18})


FEW = {"iterations": 2}
KNOWN: dict[str, Any] = {
    "num_examples": 1,
    "input_shape": (1, 4, 4),
    "value_range": (0, 1),
    "num_classes": 3,
    "learning_rate": 0.1,
    "local_epochs": 1,
    "batch_size": 1,
    **PLAIN_SGD,
}


def seeded_network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


def one_step(network: nn.Module) -> dict[str, Tensor]:
    inputs = torch.rand(1, 1, 4, 4, generator=torch.Generator().manual_seed(2))
    nn.functional.cross_entropy(network(inputs), torch.tensor([1])).backward()
    return {name: weights.detach() - 0.1 * weights.grad for name, weights in network.named_parameters()}


@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.int32])
def test_integers_and_booleans_have_a_difference(kind: torch.dtype) -> None:
    before, after = torch.tensor([1, 0, 1]).to(kind), torch.tensor([0, 1, 1]).to(kind)
    update = build_update({"b": before}, {"b": after})
    assert update.pseudo_gradient["b"].tolist() == [1, -1, 0]
