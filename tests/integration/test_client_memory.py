"""A federation whose clients go on from what they kept: the same on every engine, and however it is interrupted."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from flwr.app import Message

from fedsim.base.errors import RunError
from fedsim.federation.config import Config
from fedsim.federation.integrity import compare_with_manifest
from fedsim.federation.open_run import OpenRun
from fedsim.recording.sealed_files import read_sealed_file, write_sealed_file
from fedsim.recording.transcript import Transcript
from strategies import reply_checks
from strategies.checkpoint import Checkpoint
from strategies.curious import Curious
from tests.support.experiments import make_tiny_config, run_serial
from tests.support.runs import assert_same_runs, hash_recording

PLUGINS = '''
from dataclasses import dataclass

import torch

from fedsim.interfaces.attack import Paper
from fedsim.interfaces.defense import Defense

PAPER = Paper(title="none", authors="nobody", venue="none", year=2000, url="")


@dataclass(frozen=True, kw_only=True)
class Feedback(Defense):
    """Send half of what is to be sent, keep the rest for the next round, and count the rounds.

    Every other attempt at the round numbered `fails_at` fails.
    """

    fails_at: int = 0
    paper = PAPER

    def on_update(self, update, context):
        count = context.memory.pop("count", torch.tensor(0)) + 1
        whole = {name: tensor + context.memory.get(f"left/{name}", torch.zeros(())) for name, tensor in update.items()}
        context.memory |= {f"left/{name}": tensor / 2 for name, tensor in whole.items()}
        context.memory["count"] = count
        if count == self.fails_at and torch.rand((), generator=context.rng) < 0.5:
            raise ValueError("it has had enough")
        return {name: tensor / 2 for name, tensor in whole.items()}
'''


@pytest.fixture(autouse=True)
def plugins(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "remembering_plugins.py").write_text(textwrap.dedent(PLUGINS))
    monkeypatch.syspath_prepend(str(folder))
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)  # of processes that are started
    monkeypatch.delitem(sys.modules, "remembering_plugins", raising=False)


def remembering(*, fails_at: int = 0, strategy: dict[str, Any] | None = None, **federation: Any) -> Config:
    """Six clients, of which each round samples four; some straggle, and two defenses keep a memory each."""
    defense = {"name": "remembering_plugins:Feedback", "fails_at": fails_at}
    return make_tiny_config(
        federation={"clients": 6, "rounds": 5, "straggler_probability": 0.2, **federation},
        strategy={"name": "fedavg", "fraction_train": 0.7, **(strategy or {})},
        defense=[
            defense,
            {"name": "update-noise", "clip": 1.0, "noise_multiplier": 0.01},
            {**defense, "fails_at": 0},
        ],
        attack=[],
    )


def defense_counts(folder: OpenRun) -> dict[int, list[int]]:
    """How many rounds each client's defenses have counted."""
    header, stored = read_sealed_file(folder.checkpoint)
    return {
        int(client): [int(stored[f"client/{client}/{place}/count"]) for place in range(len(kept))]
        for client, kept in header["clients"].items()
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, OpenRun]:
    return {}


@pytest.fixture
def serial(whole: dict[str, OpenRun], tmp_path_factory: pytest.TempPathFactory) -> OpenRun:
    """The run that others are compared with, made once."""
    if not whole:
        whole["serial"] = run_serial(remembering(), tmp_path_factory.mktemp("serial") / "run")
    return whole["serial"]


def test_each_client_keeps_what_it_had_when_it_last_answered(serial: OpenRun) -> None:
    """Sampled or not, straggling or not."""
    transcript = Transcript(serial.path)
    answered = Counter(client for number in transcript.rounds for client in transcript.clients(number))
    failures = [client for number in transcript.rounds for client in transcript.header(number).failures]
    assert failures, "nobody straggled"
    assert len(set(answered.values())) > 1, "everybody took part as often"
    assert defense_counts(serial) == {client: [count, count] for client, count in answered.items()}


def test_without_its_memory_a_client_would_send_something_else(
    serial: OpenRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the tests below would show little."""
    monkeypatch.setattr("fedsim.federation.engines.client_state.ClientStateStore.pack", lambda memory, clients: {})
    forgetful = run_serial(remembering(), tmp_path / "run")
    assert Transcript(forgetful.path).hash() != Transcript(serial.path).hash()
    assert hash_recording(forgetful)["round-000001.safetensors"] == hash_recording(serial)["round-000001.safetensors"]


@pytest.mark.thorough
def test_clients_that_train_at_once_keep_what_those_keep_that_train_alone(tmp_path: Path) -> None:
    together, alone = (
        run_serial(remembering(vectorise=vectorise), tmp_path / str(vectorise)) for vectorise in (True, False)
    )
    assert defense_counts(together) == defense_counts(alone)
    (header, one), (_, other) = read_sealed_file(together.checkpoint), read_sealed_file(alone.checkpoint)
    kept = [key for key in one if "/left/" in key]
    assert len(kept) == 2 * 4 * len(header["clients"])
    for key in kept:
        torch.testing.assert_close(torch.from_numpy(one[key]), torch.from_numpy(other[key]), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("vectorise", [True, False])
def test_a_client_that_fails_keeps_what_it_had_also_for_the_defenses_before(vectorise: bool, tmp_path: Path) -> None:
    config = remembering(fails_at=2, vectorise=vectorise, straggler_probability=0.0)
    folder = run_serial(config.model_copy(update={"defense": config.defense[::-1]}), tmp_path / "run")
    transcript = Transcript(folder.path)
    answered = Counter(client for number in transcript.rounds for client in transcript.clients(number))
    failures = [why for number in transcript.rounds for why in transcript.header(number).failures.values()]
    assert failures
    assert all("it has had enough" in why for why in failures)
    assert defense_counts(folder) == {client: [count, count] for client, count in answered.items()}


def test_a_reply_that_is_not_accepted_changes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, count = reply_checks._Request.find_fault, Counter[str]()

    def refused(*arguments: Any) -> Any:
        count["replies"] += 1
        return "it is not to our liking" if count["replies"] > 4 else real(*arguments)

    monkeypatch.setattr(reply_checks._Request, "find_fault", refused)
    everybody = {"fraction_train": 1.0}
    config = remembering(strategy=everybody, rounds=1, straggler_probability=0.0)
    assert defense_counts(run_serial(config, tmp_path / "run")) == {client: [1, 1] for client in range(4)}


def test_clients_that_send_gradients_have_a_memory_too(tmp_path: Path) -> None:
    config = make_tiny_config(
        strategy={"name": "fedsgd", "learning_rate": 0.1},
        training={"local_epochs": None, "local_steps": 1, "learning_rate": 0.01},
        federation={"rounds": 3},
        defense=[{"name": "remembering_plugins:Feedback"}],
        attack=[],
    )
    assert defense_counts(run_serial(config, tmp_path / "run")) == {client: [3] for client in range(4)}


# In nobody else's hands.


def test_memory_is_in_no_message_of_the_strategy_and_in_no_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Message] = []
    configure, aggregate = Curious.configure_train, Curious.aggregate_train

    def configured(strategy: Curious, *arguments: Any) -> Any:
        messages = list(configure(strategy, *arguments))
        seen.extend(messages)
        return messages

    def aggregated(strategy: Curious, number: int, replies: Any) -> Any:
        def watched() -> Any:
            for reply in replies:
                seen.append(reply)
                yield reply

        return aggregate(strategy, number, watched())

    monkeypatch.setattr(Curious, "configure_train", configured)
    monkeypatch.setattr(Curious, "aggregate_train", aggregated)
    folder = run_serial(remembering(), tmp_path / "run")
    contents = [message.content for message in seen if message.has_content()]
    assert {tuple(sorted(content)) for content in contents} == {("arrays", "config"), ("arrays", "metrics")}
    for content in contents:
        assert not [name for record in content.array_records.values() for name in record if "left" in name]
        assert not [key for record in content.metric_records.values() for key in record if "count" in key]
    _, stored = read_sealed_file(folder.checkpoint)
    kept = [array.tobytes() for key, array in stored.items() if "/left/" in key and array.size > 8]
    for path in folder.path.rglob("*"):
        if path.is_file() and path != folder.checkpoint:
            text = path.read_bytes()
            assert b"left/" not in text
            assert not [one for one in kept if one in text], path


# Interrupted.


def test_a_resumed_run_goes_on_from_what_its_clients_kept(serial: OpenRun, tmp_path: Path) -> None:
    run_serial(remembering(rounds=2), tmp_path / "run")
    assert_same_runs(run_serial(remembering(), tmp_path / "run", resume=True), serial)
    assert compare_with_manifest(OpenRun(tmp_path / "run")).differences == []


def test_a_round_that_did_not_end_changes_no_memory(
    serial: OpenRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*arguments: Any, **keywords: Any) -> None:
        raise KeyboardInterrupt

    save, calls = Checkpoint.save, Counter[str]()

    def saved(*arguments: Any, **keywords: Any) -> None:
        calls["save"] += 1
        (killed if calls["save"] == 3 else save)(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", saved)
        with pytest.raises(KeyboardInterrupt):
            run_serial(remembering(), tmp_path / "run")
    assert Transcript(tmp_path / "run").rounds == [1, 2, 3]
    assert_same_runs(run_serial(remembering(), tmp_path / "run", resume=True), serial)


def test_a_resume_without_what_clients_kept_is_refused(tmp_path: Path) -> None:
    folder = run_serial(remembering(rounds=2), tmp_path / "run")
    header, stored = read_sealed_file(folder.checkpoint)
    del header["clients"]
    digest = write_sealed_file(
        folder.checkpoint, header, {k: a for k, a in stored.items() if not k.startswith("client/")}
    )
    with folder.manifest.edit() as manifest:
        manifest.files[folder.checkpoint.name] = digest
    with pytest.raises(RunError, match="does not say its 'clients'; begin the run again with --overwrite") as error:
        run_serial(remembering(), folder.path, resume=True)
    assert "\n" not in str(error.value)


# On SuperNodes; for Ray, see test_shared_ray.py.


@pytest.mark.slow
def test_supernodes_give_the_same_bytes(tmp_path: Path) -> None:
    serial = run_serial(remembering(rounds=3), tmp_path / "serial")
    process = started(remembering(rounds=3, engine="flower", supernodes=2), tmp_path / "run")
    said = process.communicate(timeout=250)
    assert process.returncode == 0, said
    assert_same_runs(OpenRun(tmp_path / "run"), serial)


def write_experiment(config: Config, folder: Path) -> Path:
    file = folder / "federation.toml"
    tables = config.model_dump(mode="json", exclude_none=True)
    file.write_text(tomli_w.dumps({key: value for key, value in tables.items() if value != []}))
    return file


def started(config: Config, folder: Path) -> subprocess.Popen[str]:
    file = write_experiment(config, folder.parent)
    code = "from fedsim.cli.main import main; main()"
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, "run", str(file), "--out", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
