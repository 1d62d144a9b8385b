"""However a run is interrupted, going on gives the same bytes as never having stopped."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import flwr.serverapp.strategy as shipped
import numpy as np
import pytest
import tomli_w
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Strategy

import fedsim.federation.open_run
import fedsim.recording.recorder
import fedsim.recording.sealed_files
import strategies.app
from clients.app import app as client_app
from fedsim.base.errors import ConfigError, RunError
from fedsim.federation.config import Config
from fedsim.federation.engines.serial import InProcessGrid
from fedsim.federation.integrity import compare_with_manifest
from fedsim.federation.open_run import OpenRun
from fedsim.plugins import registry
from fedsim.recording.transcript import Transcript
from strategies.checkpoint import Checkpoint
from tests.support.experiments import make_tiny_config, run_serial
from tests.support.forks import ForkedCommand
from tests.support.processes import wait_until
from tests.support.runs import assert_same_runs, hash_recording, read_metrics

WholeRuns = Callable[[Config], OpenRun]

SETTINGS: dict[str, dict[str, Any]] = {
    "fedavg": {"fraction_train": 0.7},
    "fedavgm": {"server_learning_rate": 0.8, "server_momentum": 0.9},
    "fedprox": {"proximal_mu": 0.5},
    "qfedavg": {"client_learning_rate": 0.1},
    "krum": {"num_malicious_nodes": 1},
    "multikrum": {"num_malicious_nodes": 1, "num_nodes_to_select": 3},
    "bulyan": {"num_malicious_nodes": 1},
}


def with_strategy(name: str, rounds: int = 3) -> Config:
    return make_tiny_config(
        strategy={"name": name, **SETTINGS.get(name, {})},
        partition={"samples_per_client": 12},
        federation={
            "rounds": rounds,
            "clients": 7 if name in ("krum", "multikrum", "bulyan") else 4,
            "straggler_probability": 0.0 if name == "bulyan" else 0.1,
        },
    )


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory: pytest.TempPathFactory) -> WholeRuns:
    """The run of a config that was never interrupted, made once."""
    runs: dict[str, OpenRun] = {}

    def find_whole_run(config: Config) -> OpenRun:
        text = config.model_dump_json()
        if text not in runs:
            runs[text] = run_serial(config, tmp_path_factory.mktemp("whole") / "run")
        return runs[text]

    return find_whole_run


@pytest.fixture
def finished_run(whole_runs: WholeRuns, tmp_path: Path) -> OpenRun:
    """The run of the tiny experiment, to do anything to."""
    return OpenRun(shutil.copytree(whole_runs(make_tiny_config()).path, tmp_path / "run"))


# Interrupted at any point of a round.


class Killed(BaseException):
    """Like a signal: nothing catches it."""


@contextmanager
def killed_in_a_round(point: str, *, after_rounds: int = 1) -> Iterator[None]:
    count, last_call = {"calls": 0}, after_rounds + 1

    def kill_at_last_call(real: Callable[..., Any], after: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            count["calls"] += 1
            if count["calls"] == last_call and not after:
                raise Killed
            result = real(*args, **kwargs)
            if count["calls"] == last_call:
                raise Killed
            return result

        return call

    owner, name, after = {
        "before recording": (fedsim.recording.recorder.Recorder, "write", False),
        "while recording": (fedsim.recording.recorder.RoundFile, "finish", True),
        "before metrics": (OpenRun, "write_table", False),
        "while metrics are written": (fedsim.federation.open_run, "write_text", False),
        "before the checkpoint": (Checkpoint, "save", False),
        "while the checkpoint is written": (fedsim.recording.sealed_files, "save_file", False),
        "after the checkpoint": (Checkpoint, "save", True),
    }[point]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, kill_at_last_call(getattr(owner, name), after))
        with pytest.raises(Killed):
            yield


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("before recording", marks=pytest.mark.thorough),
        pytest.param("while recording", marks=pytest.mark.thorough),
        pytest.param("before metrics", marks=pytest.mark.thorough),
        "before the checkpoint",
        "while the checkpoint is written",
        pytest.param("after the checkpoint", marks=pytest.mark.thorough),
    ],
)
def test_an_interruption_anywhere_in_a_round_is_made_good(point: str, tmp_path: Path, whole_runs: WholeRuns) -> None:
    config = with_strategy("fedavgm")
    with killed_in_a_round(point):
        run_serial(config, tmp_path / "run")
    assert Transcript(tmp_path / "run").rounds in ([1], [1, 2])
    assert_same_runs(run_serial(config, tmp_path / "run", resume=True), whole_runs(config))


@pytest.mark.thorough
@pytest.mark.parametrize("point", ["while the checkpoint is written", "while metrics are written"])
def test_a_run_that_is_interrupted_twice_at_the_same_point_goes_on(
    point: str, tmp_path: Path, whole_runs: WholeRuns
) -> None:
    config = with_strategy("fedavgm")
    for resume in (False, True):
        with killed_in_a_round(point, after_rounds=0 if resume else 1):
            run_serial(config, tmp_path / "run", resume=resume)
    assert_same_runs(run_serial(config, tmp_path / "run", resume=True), whole_runs(config))
    assert compare_with_manifest(OpenRun(tmp_path / "run")).differences == []


SHIPPED = sorted(
    name
    for name in registry.registered_names("strategies")
    if registry.find_entry_point("strategies", name).value.startswith("flwr")
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "fedadam" else pytest.mark.thorough) for name in SHIPPED]
)
def test_every_strategy_remembers_what_it_had_learnt(name: str, tmp_path: Path, whole_runs: WholeRuns) -> None:
    config = with_strategy(name)
    with killed_in_a_round("before the checkpoint"):
        run_serial(config, tmp_path / "run")
    assert_same_runs(run_serial(config, tmp_path / "run", resume=True), whole_runs(config))


@pytest.mark.parametrize("name", [pytest.param("fedadam", marks=pytest.mark.thorough), "fedavgm"])
def test_without_its_memory_a_strategy_would_go_elsewhere(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_runs: WholeRuns
) -> None:
    """Else the tests above would show little."""
    config = with_strategy(name)
    whole = whole_runs(config)
    with killed_in_a_round("after the checkpoint", after_rounds=0):
        run_serial(config, tmp_path / "run")
    monkeypatch.setattr("strategies.checkpoint._restore", lambda *args: None)
    assert hash_recording(run_serial(config, tmp_path / "run", resume=True)) != hash_recording(whole)


def test_a_run_interrupted_before_its_first_checkpoint_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_runs: WholeRuns
) -> None:
    def killed(*args: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", killed)
        with pytest.raises(Killed):
            run_serial(make_tiny_config(), tmp_path / "run")
    assert_same_runs(run_serial(make_tiny_config(), tmp_path / "run", resume=True), whole_runs(make_tiny_config()))


@pytest.mark.parametrize("last_write", [1, 2, 3, 4, 5])
def test_a_run_killed_before_its_first_round_is_begun_again_or_resumed(
    last_write: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_runs: WholeRuns
) -> None:
    """The same command, or `--resume` where there is an experiment, does all; nothing has to be overwritten."""
    writes: list[Path] = []
    real = Path.replace

    def replace_until_killed(path: Path, target: Path) -> Path:
        writes.append(target)
        if len(writes) == last_write:
            shutil.copyfile(path, path.with_name(path.name.replace("tmp", "left.tmp")))  # a kill removes no such file
            raise Killed
        return real(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace_until_killed)
        with pytest.raises(Killed):
            run_serial(make_tiny_config(), tmp_path / "run")
    has_begun = (tmp_path / "run" / "experiment.toml").is_file()
    assert has_begun == (last_write == 5)
    again = run_serial(make_tiny_config(), tmp_path / "run", resume=has_begun)
    assert_same_runs(again, whole_runs(make_tiny_config()))
    assert compare_with_manifest(again).differences == []
    assert not list(again.path.rglob("*.tmp"))


@pytest.mark.parametrize("name", ["manifest.json", "versions.json", ".manifest.json.mine"])
def test_somebody_elses_file_is_not_taken_for_a_run_that_was_never_begun(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match="is not empty; choose another --out or pass --overwrite"):
        run_serial(make_tiny_config(), tmp_path)
    assert (tmp_path / name).read_text() == "{}"


def test_resuming_a_finished_run_changes_nothing(finished_run: OpenRun, tmp_path: Path) -> None:
    folder = finished_run
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    run_serial(make_tiny_config(), tmp_path / "run", resume=True)
    assert {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()} == before


def test_rounds_that_are_made_again_for_want_of_a_checkpoint_are_said_to_be(
    finished_run: OpenRun, tmp_path: Path, whole_runs: WholeRuns, caplog: pytest.LogCaptureFixture
) -> None:
    finished_run.checkpoint.unlink()
    again = run_serial(make_tiny_config(), tmp_path / "run", resume=True)
    assert "there is no checkpoint to go on from, so all rounds are made again" in caplog.text
    assert_same_runs(again, whole_runs(make_tiny_config()))


def test_a_finished_run_can_go_on_for_more_rounds(tmp_path: Path, whole_runs: WholeRuns) -> None:
    longer = with_strategy("fedyogi")
    run_serial(with_strategy("fedyogi", rounds=2), tmp_path / "run")
    assert_same_runs(run_serial(longer, tmp_path / "run", resume=True), whole_runs(longer))


def test_states_of_rounds_that_were_over_before_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_serial(make_tiny_config(states={"rounds": [1]}), tmp_path / "run")
    run_serial(make_tiny_config(states={"rounds": [1]}), tmp_path / "run", resume=True)
    assert "states.rounds" not in caplog.text
    longer = make_tiny_config(states={"rounds": [0, 1, 2, 3]}, federation={"rounds": 3})
    folder = run_serial(longer, tmp_path / "run", resume=True)
    assert "states.rounds: of round 0, 2 no state is saved" in caplog.text
    assert sorted(path.stem for path in folder.states.glob("*.safetensors")) == ["round-1", "round-3"]


@pytest.mark.parametrize("engine", ["serial", pytest.param("ray", marks=pytest.mark.thorough), "flower"])
def test_no_engine_starts_for_a_finished_run(
    engine: str,
    finished_run: OpenRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def carry(*args: Any) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr(registry.load("engines", engine), "carry", carry)
    caplog.set_level("INFO")
    run_serial(make_tiny_config(federation={"engine": engine}), tmp_path / "run", resume=True)
    assert "the run is finished: all 2 rounds are done already" in caplog.text
    with pytest.raises(AssertionError, match="an engine was started"):
        run_serial(make_tiny_config(federation={"engine": engine, "rounds": 3}), tmp_path / "run", resume=True)


def test_the_last_round_is_evaluated_however_seldom_the_others_are(tmp_path: Path) -> None:
    """And evaluating changes nothing that is recorded."""

    def config(rounds: int, every: int) -> Config:
        return make_tiny_config(
            federation={"rounds": rounds, "evaluate_every": every}, partition={"test_fraction": 0.25, "name": "iid"}
        )

    def evaluated(folder: OpenRun) -> list[tuple[str, str]]:
        return [(row["round"], row["client"]) for row in read_metrics(folder) if row["accuracy"]]

    def everyone(*numbers: int) -> list[tuple[str, str]]:
        return [(str(n), client) for n in numbers for client in ("server", "0", "1", "2", "3")]

    never, always = (run_serial(config(4, every), tmp_path / str(every)) for every in (0, 1))
    assert evaluated(never) == []
    assert evaluated(always) == everyone(1, 2, 3, 4)
    folder = run_serial(config(2, 3), tmp_path / "run")
    assert evaluated(folder) == everyone(2)
    run_serial(config(4, 3), tmp_path / "run", resume=True)
    assert evaluated(folder) == everyone(2, 3, 4)
    assert hash_recording(folder) == hash_recording(never)
    last = [row for row in read_metrics(always) if row["round"] == "4"]
    assert [row for row in read_metrics(folder) if row["round"] == "4"] == last
    assert folder.checkpoint.read_bytes() == never.checkpoint.read_bytes()


@pytest.mark.parametrize("damage", ["truncated", "flipped", "emptied", "header"])
def test_a_damaged_checkpoint_is_one_sentence_and_leaves_the_recording(
    damage: str, finished_run: OpenRun, tmp_path: Path
) -> None:
    folder = finished_run
    whole = hash_recording(folder)
    raw = bytearray(folder.checkpoint.read_bytes())
    if damage == "flipped":
        raw[-2] ^= 1
    elif damage == "header":
        raw = bytearray(bytes(raw).replace(b'round\\\\\\": 2', b'round\\\\\\": 1'))
        assert raw != folder.checkpoint.read_bytes()
    folder.checkpoint.write_bytes({"truncated": raw[:100], "emptied": b""}.get(damage, raw))
    with pytest.raises(RunError, match=r"checkpoint\.safetensors: is damaged .*remove it to begin") as caught:
        run_serial(make_tiny_config(federation={"rounds": 3}), tmp_path / "run", resume=True)
    assert "\n" not in str(caught.value)
    assert hash_recording(folder) == whole
    folder.checkpoint.unlink()
    run_serial(make_tiny_config(), tmp_path / "run", resume=True)
    assert hash_recording(folder) == whole


# The checkpoint by itself.


def a_model() -> ArrayRecord:
    rng = np.random.default_rng(0)
    model = {"a.b/c": rng.normal(size=(2, 3)).astype(np.float32), "scale": np.array(0.25), "none": np.empty((0, 2))}
    return ArrayRecord({name: Array(value) for name, value in model.items()})


def rounds_of(strategy: Strategy, arrays: ArrayRecord, numbers: range) -> ArrayRecord:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        number = int(message.content.config_records["config"]["server-round"])  # type: ignore[arg-type]
        rng = np.random.default_rng((number, client))
        after = {k: a.numpy() for k, a in message.content.array_records["arrays"].items()}
        after = {k: np.asarray((v + rng.normal(size=v.shape)).astype(v.dtype)) for k, v in after.items()}
        metrics = {"num-examples": 1 + client, "norm_bit": client % 2, "train_loss": 1.0}
        content = {"arrays": ArrayRecord({k: Array(v) for k, v in after.items()}), "metrics": MetricRecord(metrics)}
        return Message(RecordDict(content), reply_to=message)

    grid = InProcessGrid(app, 4)
    for number in numbers:
        np.random.seed(number)  # noqa: NPY002 (Flower's noise)
        messages = strategy.configure_train(number, arrays, ConfigRecord(), grid)
        replies = sorted(grid.send_and_receive(messages), key=lambda reply: reply.metadata.src_node_id)
        aggregate, _ = strategy.aggregate_train(number, replies)
        assert aggregate is not None
        arrays = aggregate
    return arrays


def flat(arrays: Mapping[str, Array]) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    named = {name: array.numpy() for name, array in arrays.items()}
    return [(name, str(array.dtype), array.shape, array.tobytes()) for name, array in named.items()]


def private(**kwargs: Any) -> Strategy:
    wrapper = shipped.DifferentialPrivacyServerSideAdaptiveClipping
    return wrapper(shipped.FedAvgM(min_train_nodes=4, **kwargs), noise_multiplier=0.1, num_sampled_clients=4)


@pytest.mark.parametrize(
    "make",
    [
        FedAvg,
        lambda: shipped.FedAvgM(server_momentum=0.9, server_learning_rate=0.5),
        shipped.FedAdam,
        shipped.FedAdagrad,
        shipped.FedYogi,
        lambda: private(server_momentum=0.9),
    ],
    ids=["fedavg", "fedavgm", "fedadam", "fedadagrad", "fedyogi", "adaptive clipping round fedavgm"],
)
def test_a_checkpoint_holds_the_model_and_the_strategys_memory(make: Callable[[], Strategy], tmp_path: Path) -> None:
    """With scalars, empty arrays and names with dots and slashes in the model."""
    whole = rounds_of(make(), a_model(), range(1, 6))
    first, second = make(), make()
    middle = rounds_of(first, a_model(), range(1, 4))
    Checkpoint.capture(3, middle, first).save(tmp_path / "checkpoint.safetensors")
    loaded = Checkpoint.load(tmp_path / "checkpoint.safetensors", second)
    assert loaded is not None
    assert loaded.round == 3
    assert flat(loaded.arrays) == flat(middle)
    assert flat(rounds_of(second, loaded.arrays, range(4, 6))) == flat(whole)


def test_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    assert Checkpoint.load(tmp_path / "checkpoint.safetensors", FedAvg()) is None


# Real signals to a real process.


@pytest.fixture
def interrupt(tmp_path: Path) -> Callable[[Config, signal.Signals], tuple[int, str]]:
    """Send a signal to `fedsim run` when it has recorded two rounds; return its exit code and last words."""

    def wait_after_two_rounds() -> None:
        write = fedsim.recording.recorder.Recorder.write

        def write_and_wait(recorder: Any, number: int, *arguments: Any, **options: Any) -> Any:
            written = write(recorder, number, *arguments, **options)
            if number == 2:
                (tmp_path / "waits").touch()
                time.sleep(120)
            return written

        fedsim.recording.recorder.Recorder.write = write_and_wait  # type: ignore[method-assign]

    def run_until_signal(config: Config, number: signal.Signals) -> tuple[int, str]:
        file = tmp_path / "federation.toml"
        tables = config.model_dump(mode="json", exclude_none=True)
        file.write_text(tomli_w.dumps({key: value for key, value in tables.items() if value != []}))
        process = ForkedCommand("run", file, "--out", tmp_path / "run", folder=tmp_path, before=wait_after_two_rounds)
        wait_until(lambda: process.poll() is not None or (tmp_path / "waits").exists(), 120)
        process.send_signal(number)
        code, _, said = process.finish()
        return code, said

    return run_until_signal


@pytest.mark.thorough
def test_a_run_killed_without_warning_goes_on_to_the_same_end(
    interrupt: Callable[..., tuple[int, str]], tmp_path: Path, whole_runs: WholeRuns
) -> None:
    config = with_strategy("fedadam")
    code, said = interrupt(config, signal.SIGKILL)
    assert code == -signal.SIGKILL, said
    assert Transcript(tmp_path / "run").rounds == [1, 2]
    assert_same_runs(run_serial(config, tmp_path / "run", resume=True), whole_runs(config))


@pytest.mark.usefixtures("ctrl_c")
def test_control_c_is_one_sentence_and_a_usable_recording(
    interrupt: Callable[..., tuple[int, str]], tmp_path: Path, whole_runs: WholeRuns
) -> None:
    config = with_strategy("fedadam")
    code, said = interrupt(config, signal.SIGINT)
    assert code == 1
    assert said.strip() == "fedsim: interrupted; `fedsim run --resume RUN` continues the run"
    assert Transcript(tmp_path / "run").rounds == [1, 2]
    assert_same_runs(run_serial(config, tmp_path / "run", resume=True), whole_runs(config))


# As `flwr run` starts it: a path instead of a checked experiment.


def test_a_deployment_resumes_too(tmp_path: Path, whole_runs: WholeRuns) -> None:
    config = with_strategy("fedavgm")
    file = tmp_path / "federation.toml"

    def flwr_run(rounds: int, resume: bool) -> None:
        tables = config.model_dump(mode="json", exclude_none=True)
        tables["federation"]["rounds"] = rounds
        file.write_text(tomli_w.dumps({key: value for key, value in tables.items() if value != []}))
        settings: Any = {"experiment": str(file), "out": str(tmp_path / "run"), "resume": resume}
        strategies.app.main(InProcessGrid(client_app, nodes=2), Context(1, 1, {}, RecordDict(), settings))

    flwr_run(2, resume=False)
    with pytest.raises(ConfigError, match="is not empty"):
        flwr_run(3, resume=False)
    whole = whole_runs(config)
    shutil.copy(tmp_path / "run" / "checkpoint.safetensors", tmp_path / "kept")
    shutil.copy(whole.checkpoint, tmp_path / "run" / "checkpoint.safetensors")
    with pytest.raises(RunError, match="is not what this run wrote"):
        flwr_run(3, resume=True)
    shutil.copy(tmp_path / "kept", tmp_path / "run" / "checkpoint.safetensors")
    flwr_run(3, resume=True)
    assert_same_runs(OpenRun(tmp_path / "run"), whole)
    assert compare_with_manifest(OpenRun(tmp_path / "run")).differences == []


# What a strategy remembers in its own way.


class Nested(FedAvg):
    """Remembers, client by client, in dicts of dicts, and moves the aggregate by it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.kept: Any = {}
        self.seen: Any = (0, [np.float32(0)])

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        arrays, metrics = super().aggregate_train(server_round, replies)
        assert arrays is not None
        for place, (name, array) in enumerate(arrays.items()):
            before = self.kept.get(place, {}).get(name, [0.0])[0]
            self.kept[place] = {name: [0.5 * before + 0.1 * array.numpy()]}
            arrays[name] = Array((array.numpy() + self.kept[place][name][0]).astype(np.float32))
        self.seen = (server_round, [np.float32(server_round)])
        return arrays, metrics


class Box:
    """No checkpoint has a form for it."""

    def __init__(self) -> None:
        self.count = 0


class Boxed(FedAvg):
    """Remembers in an object; `settings` is one that never changes, `fn` is a function."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.box, self.settings, self.fn = Box(), Box(), lambda: None

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        self.box.count += 1
        return super().aggregate_train(server_round, replies)


def test_dicts_of_dicts_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        registry, "load", lambda group, name, real=registry.load: Nested if group == "strategies" else real(group, name)
    )
    config = make_tiny_config(federation={"rounds": 3})
    whole = run_serial(config, tmp_path / "whole")
    with killed_in_a_round("after the checkpoint"):
        run_serial(config, tmp_path / "run")
    assert_same_runs(run_serial(config, tmp_path / "run", resume=True), whole)


def test_what_cannot_be_remembered_is_said_once_and_the_run_does_not_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        registry, "load", lambda group, name, real=registry.load: Boxed if group == "strategies" else real(group, name)
    )
    run_serial(make_tiny_config(), tmp_path / "run")
    said = [record.getMessage() for record in caplog.records if "no checkpoint can hold" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("no checkpoint can hold what Boxed remembers as box, so this run cannot be resumed")
    with pytest.raises(RunError, match="does not hold what Boxed remembers as box, so resuming would give another run"):
        run_serial(make_tiny_config(federation={"rounds": 3}), tmp_path / "run", resume=True)


def test_types_come_back_as_they_were(tmp_path: Path) -> None:
    first, second = FedAvg(), FedAvg()
    memory = {1: (np.float32(0.5), [np.arange(3), None]), "b": {True: b"bytes", 2.5: {}}, "inf": float("inf")}
    first.memory = memory  # type: ignore[attr-defined]
    Checkpoint.capture(1, ArrayRecord({"w": Array(np.zeros(2))}), first).save(tmp_path / "checkpoint.safetensors")
    Checkpoint.load(tmp_path / "checkpoint.safetensors", second)
    got = second.memory  # type: ignore[attr-defined]
    assert repr(got) == repr(memory)
    assert type(got[1][0]) is np.float32


def test_the_digest_of_a_checkpoint_tells_names_and_types_apart(tmp_path: Path) -> None:
    from fedsim.recording.sealed_files import write_sealed_file

    arrays = [
        {"a": np.zeros(2, "f4")},
        {"b": np.zeros(2, "f4")},
        {"a": np.zeros(1, "f8")},
        {"a": np.zeros((2, 1), "f4")},
    ]
    assert len({write_sealed_file(tmp_path / "x.safetensors", {}, each) for each in arrays}) == 4


@pytest.mark.parametrize("fsync", [False, True])
def test_rounds_and_checkpoints_wait_for_the_disk_where_that_is_asked(
    fsync: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[str] = []
    real = os.fsync

    def note_sync(descriptor: int) -> None:
        waited.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", note_sync)
    run_serial(make_tiny_config(recording={"fsync": fsync}), tmp_path / "run")
    files = [name for name in waited if name.endswith(".tmp")]
    assert sum("round-" in name for name in files) == (2 if fsync else 0)
    assert sum("checkpoint" in name for name in files) == (2 if fsync else 0)
    assert ("transcript" in waited) == fsync, "the names in the folder, too"
