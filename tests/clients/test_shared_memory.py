"""A plug-in may write into what the server sent, or reuse its own memory: no other client nor the recording changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from clients.mods import as_mod
from fedsim.base.randomness import generator
from fedsim.federation.engines.arrays import make_record, read_state
from fedsim.federation.engines.serial import InProcessGrid
from fedsim.interfaces.algorithm import ClientAlgorithm, ClientResult, LocalClient
from fedsim.interfaces.attack import Paper
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.local_context import LocalContext, Memory
from fedsim.recording.payloads import Payload
from fedsim.recording.transcript import Transcript
from fedsim.training.local_round import LocalRound
from tests.support.experiments import make_tiny_config, run_serial
from tests.support.runs import hash_recording

PAPER = Paper(title="none", authors="nobody", venue="none", year=2000, url="")
WAYS = ["", "tensor", "data", "numpy"]


def write_into(state: Mapping[str, Tensor], way: str) -> None:
    """Write zeros into tensors by a way that PyTorch counts, one that it does not, and one past it."""
    for tensor in state.values():
        if way == "tensor":
            tensor.zero_()
        elif way == "data":
            tensor.data.zero_()
        elif way == "numpy":
            tensor.numpy()[...] = 0


@dataclass(frozen=True, kw_only=True)
class WritesIntoBroadcast(Defense):
    """Does so in the hook that is named."""

    way: str = ""
    hook: str = ""
    paper = PAPER

    def _write(self, hook: str, context: LocalContext) -> None:
        if hook == self.hook:
            write_into(context.broadcast, self.way)

    def on_data(self, local: LocalRound, context: LocalContext) -> Tensor:
        self._write("on_data", context)
        if self.hook == "on_data":
            write_into(dict(local.model.named_parameters()), "data" if self.way else "")
        return torch.arange(len(local.labels))

    def on_batch(self, inputs: Tensor, labels: Tensor, context: LocalContext) -> tuple[Tensor, Tensor]:
        self._write("on_batch", context)
        return inputs, labels

    def on_gradient(self, gradient: Any, context: LocalContext) -> Any:
        self._write("on_gradient", context)
        return gradient

    def on_update(self, update: Any, context: LocalContext) -> Any:
        self._write("on_update", context)
        return update


@dataclass(frozen=True, kw_only=True)
class WritesAtTheEnd(Defense):
    """Lets clients train in cohorts, and may be a mod."""

    way: str = ""
    paper = PAPER

    def on_update(self, update: Any, context: LocalContext) -> Any:
        write_into(context.broadcast, self.way)
        return update


@dataclass(frozen=True, kw_only=True)
class WritesIntoModel(ClientAlgorithm):
    """Writes into the model that it was given, when it has trained and when it is evaluated."""

    way: str = ""
    paper = PAPER

    def personalise_model(self, model: Mapping[str, Tensor], memory: Memory) -> Mapping[str, Tensor]:
        sent = {name: tensor.clone() for name, tensor in model.items()}
        write_into(model, self.way)
        return sent

    def train_client(self, client: LocalClient) -> ClientResult:
        result = ClientResult(model=client.train(client.model))
        write_into(client.model, self.way)
        return result


REUSED: dict[str, Tensor] = {}


def reuse_memory(state: Mapping[str, Tensor], way: str) -> dict[str, Tensor]:
    """Return a state, but for the first way in memory that all clients of this process share."""
    if not way:
        return dict(state)
    for name, tensor in state.items():
        REUSED.setdefault(name, torch.empty_like(tensor)).copy_(tensor)
    return dict(REUSED)


@dataclass(frozen=True, kw_only=True)
class SendsOneMemory(Defense):
    """Sends and keeps tensors that it writes again for the next client."""

    way: str = ""
    as_payload: bool = False
    paper = PAPER

    def on_update(self, update: Any, context: LocalContext) -> Any:
        # What was kept in the round before is a part of what is sent.
        sent = {name: tensor + context.memory.get(name, 0) for name, tensor in update.items()}
        sent = reuse_memory(sent, self.way)
        context.memory.update(sent)
        return Payload.from_dense(sent, "delta") if self.as_payload else sent


@dataclass(frozen=True, kw_only=True)
class ReturnsOneMemory(ClientAlgorithm):
    way: str = ""
    paper = PAPER

    def train_client(self, client: LocalClient) -> ClientResult:
        return ClientResult(model=reuse_memory(client.train(client.model), self.way))


def run_each_way(tmp_path: Path, **tables: Any) -> list[dict[str, str]]:
    """Return the hashes of what was recorded without writing and by each way of it; all of it can be read."""
    hashes = []
    for way in WAYS:
        described = {
            key: [{**table, "way": way} for table in value] if isinstance(value, list) else {**value, "way": way}
            for key, value in tables.items()
            if key in {"defense", "algorithm"}
        }
        run = run_serial(make_tiny_config(**{**tables, **described}), tmp_path / f"way-{way}")
        assert len(list(Transcript(run.path).updates())) == 8
        hashes.append(hash_recording(run))
    return hashes


@pytest.mark.parametrize("strategy", [{"name": "fedavg"}, {"name": "fedsgd", "learning_rate": 0.1}])
@pytest.mark.parametrize("hook", ["on_data", "on_batch", "on_gradient", "on_update"])
def test_a_defense_that_writes_into_what_was_sent(hook: str, strategy: dict[str, Any], tmp_path: Path) -> None:
    defense = {"name": f"{__name__}:WritesIntoBroadcast", "hook": hook}
    training = {"local_epochs": None, "local_steps": 1}
    plain, *written = run_each_way(tmp_path, strategy=strategy, training=training, defense=[defense])
    assert written == [plain] * 3


def test_an_algorithm_that_writes_into_what_was_sent(tmp_path: Path) -> None:
    plain, *written = run_each_way(tmp_path, algorithm={"name": f"{__name__}:WritesIntoModel"})
    assert written == [plain] * 3


def test_a_defense_of_a_cohort_that_writes_into_what_was_sent(tmp_path: Path) -> None:
    plain, *written = run_each_way(tmp_path, defense=[{"name": f"{__name__}:WritesAtTheEnd"}])
    assert written == [plain] * 3


def start() -> Tensor:
    return torch.randn(5, generator=generator("start"))


@pytest.mark.parametrize("sends", ["weights", "gradient", "payload"])
def test_a_defense_that_reuses_what_it_sent_and_kept(sends: str, tmp_path: Path) -> None:
    tables: dict[str, Any] = {}
    if sends == "gradient":
        tables = {
            "strategy": {"name": "fedsgd", "learning_rate": 0.1},
            "training": {"local_epochs": None, "local_steps": 1},
        }
    REUSED.clear()
    defense = {"name": f"{__name__}:SendsOneMemory", "as_payload": sends == "payload"}
    plain, *reused = run_each_way(tmp_path, defense=[defense], **tables)
    assert reused == [plain] * 3


def test_an_algorithm_that_reuses_what_it_sent(tmp_path: Path) -> None:
    REUSED.clear()
    plain, *reused = run_each_way(tmp_path, algorithm={"name": f"{__name__}:ReturnsOneMemory"})
    assert reused == [plain] * 3


@pytest.mark.usefixtures("server_task")
@pytest.mark.parametrize("way", WAYS[1:])
def test_an_app_and_its_mods_that_write_into_what_was_sent(way: str) -> None:
    """Flower's own readers copy; a mod of fedsim, which does not, gives its defense a copy."""
    app = ClientApp(mods=[as_mod(WritesAtTheEnd(way=way))])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        record = message.content["arrays"]
        assert isinstance(record, ArrayRecord)
        seen.append(record.to_torch_state_dict()["w"].clone())
        write_into(record.to_torch_state_dict(), way)
        for values in record.to_numpy_ndarrays():
            values[...] = 0
        return Message(RecordDict({"arrays": ArrayRecord({"w": seen[-1] + 1})}), reply_to=message)

    seen: list[Tensor] = []
    sent = make_record({"w": start()})
    grid = InProcessGrid(app, 3)
    replies = list(grid.send_and_receive([Message(RecordDict({"arrays": sent}), node, "train") for node in (2, 3, 4)]))
    assert not any(reply.has_error() for reply in replies)
    for tensor in (*seen, read_state(sent)["w"]):
        assert tensor.equal(start())
