"""What goes wrong stays where it went wrong, is said in one sentence, and leaves what was recorded usable."""

from __future__ import annotations

import errno
import os
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAvg

import fedsim.recording.round_file
import fedsim.recording.sealed_files
from fedsim.base.errors import ConfigError, FedsimError, RunError
from fedsim.base.files import write_text
from fedsim.federation.engines.arrays import make_record
from fedsim.federation.run_folder import RunFolder, read_rows
from fedsim.recording.transcript import Transcript
from tests.support.experiments import make_tiny_config, run_serial

PLUGINS = '''
from dataclasses import dataclass, replace
import torch
from torch import nn
from fedsim.interfaces.attack import Paper
from fedsim.data.digits import Digits
from fedsim.interfaces.defense import Defense

PAPER = Paper(title="none", authors="nobody", venue="none", year=2000, url="")

@dataclass(frozen=True, kw_only=True)
class OneRareLabel:
    """Digits with a class that has one example; one client holds it."""
    def load(self, folder):
        data = Digits().load(folder)
        labels = data.train.labels.clone()
        labels[100] = 10
        return replace(data, train=replace(data.train, labels=labels), num_classes=11)

@dataclass(frozen=True, kw_only=True)
class Allergic(Defense):
    """Falls over at the rare label."""
    paper = PAPER
    def on_batch(self, inputs, labels, context):
        if 10 in labels:
            raise IndexError("nobody told me of class 10")
        return inputs, labels

@dataclass(frozen=True, kw_only=True)
class Broken:
    """A network that falls over as soon as it is trained."""
    def build(self, task):
        class Net(nn.Linear):
            def forward(self, x):
                if self.training and len(x) > 2:
                    raise OSError("the device is gone")
                return super().forward(x.flatten(1))
        return Net(64, task.outputs)

@dataclass(frozen=True, kw_only=True)
class Untestable:
    """A network that falls over where a client tests it on the rare label's image."""
    def build(self, task):
        rare = Digits().load(None).train.inputs()[100].flatten()
        class Net(nn.Linear):
            def forward(self, x):
                if not self.training and (x.flatten(1) == rare).all(1).any():
                    raise IndexError("nobody told me of class 10")
                return super().forward(x.flatten(1))
        return Net(64, task.outputs)

@dataclass(frozen=True, kw_only=True)
class AlwaysDrops:
    """A network whose dropout is on in evaluation, too, as `functional.dropout` is by default."""
    def build(self, task):
        class Net(nn.Linear):
            def forward(self, x):
                return super().forward(nn.functional.dropout(x.flatten(1)))
        return Net(64, task.outputs)

@dataclass(frozen=True, kw_only=True)
class Nan(Defense):
    """Breaks the updates of about half of the clients."""
    paper = PAPER
    always: bool = False
    def on_update(self, update, context):
        if self.always or torch.rand((), generator=context.rng) < 0.5:
            return {name: tensor * float("nan") for name, tensor in update.items()}
        return update

@dataclass(frozen=True, kw_only=True)
class TooLate(Defense):
    """Works for a while: fails once the model has moved."""
    paper = PAPER
    def on_gradient(self, gradient, context):
        raise ValueError("no gradient for you")
'''


EXITS = '''
import sys
from dataclasses import dataclass
from torch import nn

@dataclass(frozen=True, kw_only=True)
class Net:
    """A network that ends the program at one place or another."""
    place: str = "module"
    def build(self, task):
        if self.place == "build":
            sys.exit(0)
        class Exits(nn.Linear):
            def forward(me, x):
                if len(x) > 4 and (me.training, self.place) in ((True, "client"), (False, "server")):
                    sys.exit(0)
                return super().forward(x.flatten(1))
        return Exits(64, task.outputs)
'''


@pytest.fixture(autouse=True)
def plugins(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.getbasetemp() / "plugins"
    folder.mkdir(exist_ok=True)
    (folder / "faulty_plugins.py").write_text(textwrap.dedent(PLUGINS))
    (folder / "exits_when_made.py").write_text(EXITS)
    (folder / "sgd_by_another_name.py").write_text(
        "from strategies.fedsgd import FedSgd\n\nclass Mine(FedSgd):\n    sends = 'weights'\n"
    )
    (folder / "exits_when_imported.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(str(folder))


def assert_one_sentence(error: FedsimError, code: int = 1) -> None:
    assert "\n" not in str(error)
    assert "Traceback" not in str(error)
    assert error.exit_code == code


# Some clients fail.


def test_a_client_with_broken_data_fails_alone_in_every_round(tmp_path: Path) -> None:
    config = make_tiny_config(
        data={"name": "faulty_plugins:OneRareLabel"},
        partition={"samples_per_client": None},
        training={"batch_size": 32},
        defense=[{"name": "faulty_plugins:Allergic"}],
    )
    transcript = Transcript((folder := run_serial(config, tmp_path / "run")).path)
    failing = {frozenset(transcript.header(number).failures) for number in transcript.rounds}
    assert len(failing) == 1
    (client,) = failing.pop()
    assert all(transcript.clients(n) == [c for c in range(4) if c != client] for n in (1, 2))
    assert "IndexError" in transcript.header(1).failures[client]
    assert [row["failed"] for row in read_rows(folder.metrics)] == ["1", "1"]


def test_stragglers_fail_now_and_then_and_are_told_apart(tmp_path: Path) -> None:
    config = make_tiny_config(federation={"rounds": 6, "straggler_probability": 0.4})
    transcript = Transcript(run_serial(config, tmp_path / "run").path)
    failures = [(n, c, why) for n in transcript.rounds for c, why in transcript.header(n).failures.items()]
    assert 3 <= len(failures) <= 17
    assert all(why == f"straggler: did not return in round {number}" for number, _, why in failures)
    assert len({client for _, client, _ in failures}) > 1


def test_an_update_that_is_no_number_never_reaches_the_aggregate(tmp_path: Path) -> None:
    config = make_tiny_config(defense=[{"name": "faulty_plugins:Nan"}], federation={"rounds": 4, "clients": 6})
    transcript = Transcript(run_serial(config, tmp_path / "run").path)
    assert sum(len(transcript.header(number).failures) for number in transcript.rounds) >= 3
    for update in transcript.updates():
        for tensor in (*update.before.values(), *update.after.values()):
            assert torch.isfinite(tensor).all()


def test_a_client_that_cannot_test_the_model_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = make_tiny_config(
        data={"name": "digits", "standardise": False},
        model={"name": "faulty_plugins:Untestable"},
        partition={"samples_per_client": None, "test_fraction": 0.95},
        federation={"rounds": 1},
    )
    rows = read_rows(run_serial(config, tmp_path / "run").metrics)
    tested = {row["client"] for row in rows} - {"server"}
    (missing,) = {"0", "1", "2", "3"} - tested
    assert f"round 1, client {missing}: evaluation failed" in caplog.text
    assert "IndexError: nobody told me of class 10" in caplog.text


def test_what_a_client_draws_in_evaluation_does_not_depend_on_who_else_evaluates(tmp_path: Path) -> None:
    metrics = []
    for fraction in (1.0, 0.5):
        config = make_tiny_config(
            model={"name": "faulty_plugins:AlwaysDrops"},
            partition={"test_fraction": 0.5},
            strategy={"fraction_evaluate": fraction},
            federation={"rounds": 1},
        )
        rows = read_rows(run_serial(config, tmp_path / str(fraction)).metrics)
        metrics.append({row["client"]: row["loss"] for row in rows if row["client"] != "server"})
    every, half = metrics
    assert len(half) == 2
    assert half.items() <= every.items()


# All clients fail.


@pytest.mark.parametrize(
    ("tables", "reason"),
    [
        ({"federation": {"straggler_probability": 0.999999}}, "straggler: did not return in round 1"),
        ({"model": {"name": "faulty_plugins:Broken"}}, "OSError: the device is gone"),
        ({"defense": [{"name": "faulty_plugins:Nan", "always": True}]}, "NaN or infinite"),
        ({"defense": [{"name": "faulty_plugins:TooLate"}]}, "ValueError: no gradient for you"),
        ({"training": {"learning_rate": 1e30, "local_epochs": 5}}, "local training diverged"),
    ],
    ids=["stragglers", "model", "nan", "hook", "diverged"],
)
def test_a_round_without_updates_ends_the_run(tables: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="round 1: all 4 clients failed") as caught:
        run_serial(make_tiny_config(**tables), tmp_path / "run")
    assert reason in str(caught.value)
    assert_one_sentence(caught.value)
    assert list((tmp_path / "run" / "transcript").iterdir()) == []


def test_the_rounds_before_the_one_that_failed_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = Transcript(
        run_serial(make_tiny_config(federation={"rounds": 2, "vectorise": False}), tmp_path / "good").path
    )
    from fedsim.training import algorithm_client

    real = algorithm_client.local_update

    def failing(*args: Any, key: tuple[Any, ...], **kwargs: Any) -> Any:
        if key[2] == 3:
            raise MemoryError("out of memory")
        return real(*args, key=key, **kwargs)

    monkeypatch.setattr(algorithm_client, "local_update", failing)
    with pytest.raises(RunError, match=r"round 3: all 4 clients failed .*MemoryError: out of memory") as caught:
        run_serial(make_tiny_config(federation={"rounds": 5, "vectorise": False}), tmp_path / "run")
    assert_one_sentence(caught.value)
    kept = Transcript(tmp_path / "run")
    assert kept.rounds == [1, 2]
    assert kept.hash() == good.hash()
    assert [row["round"] for row in read_rows(RunFolder(tmp_path / "run").metrics)] == ["1", "2"]


def test_diverging_is_said_before_the_aggregate_is_spoilt(tmp_path: Path) -> None:
    """A step so large that it first shows in the next round: the rounds before stay readable."""
    config = make_tiny_config(
        training={"learning_rate": 1e30, "local_epochs": None, "local_steps": 1}, federation={"rounds": 4}
    )
    with pytest.raises(RunError, match=r"round 2: all 4 clients failed .*local training diverged") as caught:
        run_serial(config, tmp_path / "run")
    assert_one_sentence(caught.value)
    transcript = Transcript(tmp_path / "run")
    assert transcript.rounds == [1]
    assert all(torch.isfinite(t).all() for u in transcript.updates() for t in u.after.values())


# Somebody's code ends the program.


@pytest.mark.parametrize("engine", ["serial", "ray", "flower"])
@pytest.mark.parametrize("model", ["exits_when_imported:Net", "exits_when_made:Net"])
def test_a_model_that_exits_before_anything_ran_is_one_sentence(model: str, engine: str, tmp_path: Path) -> None:
    table = {"name": model} | ({"place": "build"} if "made" in model else {})
    with pytest.raises(FedsimError, match=r"it called sys\.exit\(0\)") as caught:
        run_serial(make_tiny_config(model=table, federation={"engine": engine}), tmp_path / "run")
    assert_one_sentence(caught.value, code=2)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("place", ["client", "server"])
def test_a_model_that_exits_while_it_runs_is_one_sentence(place: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"it called sys\.exit\(0\)") as caught:
        run_serial(make_tiny_config(model={"name": "exits_when_made:Net", "place": place}), tmp_path / "run")
    assert_one_sentence(caught.value)


def test_the_command_line_does_not_say_that_it_is_done_where_somebodys_code_ended_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import fedsim.cli.main

    def ends(**options: Any) -> int:
        raise SystemExit(0)

    monkeypatch.setattr(fedsim.cli.main, "cli", ends)
    with pytest.raises(SystemExit) as caught:
        fedsim.cli.main.main()
    assert caught.value.code == 1
    assert "third-party code called sys.exit(0)" in capsys.readouterr().err


# Nobody is asked, or too many are.


def test_a_fraction_that_asks_nobody_ends_the_run(tmp_path: Path) -> None:
    strategy = {"name": "fedavg", "fraction_train": 0.1, "min_train_nodes": 0}
    with pytest.raises(RunError, match="none was sampled") as caught:
        run_serial(make_tiny_config(strategy=strategy), tmp_path / "run")
    assert_one_sentence(caught.value)


def test_a_small_fraction_asks_at_least_one(tmp_path: Path) -> None:
    config = make_tiny_config(strategy={"name": "fedavg", "fraction_train": 0.01})
    transcript = Transcript(run_serial(config, tmp_path / "run").path)
    assert [len(transcript.clients(number)) for number in transcript.rounds] == [1, 1]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("key", ["fraction_train", "fraction_evaluate"])
def test_a_fraction_above_one_is_refused_and_does_not_wait_for_ever(key: str, tmp_path: Path) -> None:
    config = make_tiny_config(strategy={"name": "fedavg", key: 1.5}, partition={"name": "iid", "test_fraction": 0.2})
    with pytest.raises(ConfigError, match=rf"strategy\.{key}") as caught:
        run_serial(config, tmp_path / "run")
    assert_one_sentence(caught.value, code=2)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("key", ["min_train_nodes", "min_available_nodes", "min_evaluate_nodes"])
def test_waiting_for_more_clients_than_there_are_is_refused(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"strategy\.{key}: expected at most federation\.clients = 4, got 5"):
        run_serial(make_tiny_config(strategy={"name": "fedavg", key: 5}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_a_client_holds_out_for_testing_may_be_all_but_one(tmp_path: Path) -> None:
    too_much = make_tiny_config(partition={"name": "iid", "test_fraction": 0.999}, federation={"clients": 300})
    with pytest.raises(ConfigError, match="has no example to train on") as caught:
        run_serial(too_much, tmp_path / "run")
    assert "test_fraction" in str(caught.value)
    assert_one_sentence(caught.value, code=2)


# The run folder.


def test_a_used_folder_is_refused_replaced_or_continued_but_never_mixed(tmp_path: Path) -> None:
    first = run_serial(make_tiny_config(), tmp_path / "run")
    before = Transcript(first.path).hash()
    with pytest.raises(ConfigError, match="is not empty; choose another --out, continue with --resume") as caught:
        run_serial(make_tiny_config(federation={"seed": 9}), tmp_path / "run")
    assert_one_sentence(caught.value, code=2)
    assert Transcript(first.path).hash() == before
    run_serial(make_tiny_config(federation={"seed": 9}), tmp_path / "run", overwrite=True)
    assert Transcript(first.path).hash() != before


def test_overwriting_spares_what_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="is not a run folder, so --overwrite does not touch it"):
        run_serial(make_tiny_config(), tmp_path, overwrite=True)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_where_the_folder_should_be_is_one_sentence(overwrite: bool, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(FedsimError, match="run") as caught:
        run_serial(make_tiny_config(), tmp_path / "run", overwrite=overwrite)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "run").read_text() == "a file"


def test_a_folder_below_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written") as caught:
        run_serial(make_tiny_config(), tmp_path / "file" / "run")
    assert_one_sentence(caught.value)


def test_resuming_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run to resume") as caught:
        run_serial(make_tiny_config(), tmp_path / "run", resume=True)
    assert_one_sentence(caught.value, code=2)


def test_a_link_to_a_run_is_not_followed_to_remove_it(tmp_path: Path) -> None:
    run = run_serial(make_tiny_config(), tmp_path / "run")
    (tmp_path / "link").symlink_to(run.path)
    with pytest.raises(RunError, match="is a symbolic link") as caught:
        run_serial(make_tiny_config(), tmp_path / "link", overwrite=True)
    assert_one_sentence(caught.value)
    assert Transcript(run.path).rounds == [1, 2]


THREE_ROUNDS = make_tiny_config(federation={"rounds": 3}, strategy={"name": "fedavgm", "server_momentum": 0.9})


@pytest.fixture(scope="module")
def whole_hash(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the recording of three rounds that nothing went wrong with."""
    return Transcript(run_serial(THREE_ROUNDS, tmp_path_factory.mktemp("whole") / "run").path).hash()


@pytest.mark.parametrize("where", ["transcript", "checkpoint", "metrics"])
def test_a_disk_that_fills_up_ends_the_run_which_then_goes_on_where_it_stopped(
    where: str, whole_hash: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = {"n": 0}

    def full(real: Callable[..., Any], place: int = 3) -> Callable[..., Any]:
        def write(*args: Any, **kwargs: Any) -> Any:
            writes["n"] += 1
            if writes["n"] == place:
                for target in args:
                    if isinstance(target, Path) and target.suffix == ".tmp":
                        target.write_bytes(b"as far as there was room")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args, **kwargs)

        return write

    with monkeypatch.context() as patch:
        if where == "transcript":
            real = fedsim.recording.round_file.write_parts  # called once for each round
            patch.setattr(fedsim.recording.round_file, "write_parts", full(real, place=3))
        elif where == "checkpoint":
            patch.setattr(fedsim.recording.sealed_files, "save_file", full(fedsim.recording.sealed_files.save_file))
        else:
            patch.setattr(Path, "write_text", full(Path.write_text, place=4))  # after experiment and versions
        with pytest.raises(RunError, match="No space left on device") as caught:
            run_serial(THREE_ROUNDS, tmp_path / "run")
    assert_one_sentence(caught.value)
    assert Transcript(tmp_path / "run").rounds[:2] == [1, 2]
    assert not list((tmp_path / "run").rglob("*.tmp")), "half a file is left on a full disk"
    run_serial(THREE_ROUNDS, tmp_path / "run", resume=True)
    assert Transcript(tmp_path / "run").hash() == whole_hash


def test_a_file_written_on_a_full_disk_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "a.txt", "old")
    real = Path.write_text

    def full(self: Path, text: str, **kwargs: Any) -> None:
        real(self, text[:2], **kwargs)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(RunError, match=r"a\.txt: cannot be written \(No space left on device\)"):
        write_text(tmp_path / "a.txt", "new and longer")
    assert (tmp_path / "a.txt").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_clients_who_fail_alike_share_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = make_tiny_config(federation={"clients": 30, "rounds": 1, "straggler_probability": 0.8})
    folder = run_serial(config, tmp_path / "run")
    (line,) = [
        record.message
        for record in caplog.records
        if record.name == "fedsim.strategies.app" and "straggler" in record.message
    ]
    failures = Transcript(folder.path).header(1).failures
    named = re.fullmatch(r"round 1, clients (\d+(?:, \d+){4}) and (\d+) more: straggler: .*", line)
    assert named
    assert [int(client) for client in named[1].split(", ")] == sorted(failures)[:5]
    assert int(named[2]) == len(failures) - 5


# A reply is checked against what was sent, before the strategy and the recording see it.


def encoded(parts: dict[str, list[Any]]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Sends `1.bias` in these parts."""
    own = {f"{head}/1.bias": torch.tensor(values) for head, values in parts.items()}
    return lambda state: {name: tensor for name, tensor in state.items() if name != "1.bias"} | own


WRONG: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "one element": (lambda s: s | {"1.bias": torch.ones(1)}, r"it sent '1.bias' with shape \(1,\)"),
    "transposed": (lambda s: s | {"1.weight": s["1.weight"].T.contiguous()}, "with shape"),
    "missing": (lambda s: {k: v for k, v in s.items() if k != "1.bias"}, "it sent no '1.bias'"),
    "more": (lambda s: s | {"own": torch.ones(2)}, "it sent 'own', which was not asked for"),
    "integers": (lambda s: s | {"1.bias": s["1.bias"].long()}, "as int64, expected floating-point"),
    "half of a sparse tensor": (
        encoded({"delta-indices": [0]}),
        "it sent '1.bias' as indices, expected dense",
    ),
    "an index too large": (
        encoded({"delta-indices": [0, 10**6], "delta-values": [1.0, 1.0]}),
        "it sent '1.bias' with indices from 0 to 1000000, expected 0 to",
    ),
    "an index twice": (
        encoded({"delta-indices": [3, 0, 3], "delta-values": [1.0, 1.0, 1.0]}),
        "it sent '1.bias' with index 3 more than once, expected each once",
    ),
    "a gradient that nobody asked for": (
        encoded({"gradient-indices": [0], "gradient-values": [1.0]}),
        "it sent no '1.bias'",
    ),
}


@pytest.mark.parametrize("vectorise", [True, False])
def test_replies_that_do_not_fit_are_failures_of_their_clients_and_the_run_goes_on(
    vectorise: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import clients.app

    senders = dict(enumerate(WRONG.values(), start=1))
    real = clients.app._defended_reply

    def reply(experiment: Any, client: int, num_examples: int, payload: Any, loss: float, client_round: Any) -> Any:
        records = real(experiment, client, num_examples, payload, loss, client_round)
        if client in senders:
            change, _ = senders[client]
            records["arrays"] = make_record({k: v.contiguous() for k, v in change(dict(payload.arrays())).items()})
        return records

    monkeypatch.setattr(clients.app, "_defended_reply", reply)
    last = len(senders) + 1
    config = make_tiny_config(
        federation={"clients": last + 1, "vectorise": vectorise}, partition={"samples_per_client": 8}
    )
    transcript = Transcript(run_serial(config, tmp_path / "run").path)
    for number in (1, 2):
        assert transcript.clients(number) == [0, last]
        failures = transcript.header(number).failures
        for client, (_, reason) in senders.items():
            assert re.search(reason, failures[client]), (client, failures[client])


def test_a_strategy_that_asks_for_something_else_than_its_class_declares_is_stopped(tmp_path: Path) -> None:
    """Else attacks would be handed all labels of a client for a gradient of one mini-batch."""
    config = make_tiny_config(strategy={"name": "sgd_by_another_name:Mine", "learning_rate": 0.1})
    with pytest.raises(
        RunError, match=r"strategy 'sgd_by_another_name:Mine' asks clients for 'gradient', but its class declares 'wei"
    ) as caught:
        run_serial(config, tmp_path / "run")
    assert_one_sentence(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda arrays: make_record(dict(list(arrays.to_torch_state_dict().items())[1:])),
            "returns no 1.weight; return all",
        ),
        (
            lambda arrays: make_record({k: t for k, t in arrays.to_torch_state_dict().items() if "running" not in k}),
            "returns no 2.running_mean, 2.running_var; return all tensors",
        ),
        (
            lambda arrays: make_record({name: t[None] for name, t in arrays.to_torch_state_dict().items()}),
            r"1.weight of shape \(1, ",
        ),
        (
            lambda arrays: make_record({name: t.int() for name, t in arrays.to_torch_state_dict().items()}),
            "1.weight as int32, and the model has real numbers; return floats",
        ),
        (
            lambda arrays: make_record({name: t / 0 for name, t in arrays.to_torch_state_dict().items()}),
            "returns NaN or infinite values in 1.weight, 1.bias, .*; lower the step size",
        ),
        (
            lambda arrays: make_record({n: t.double() * 1e300 for n, t in arrays.to_torch_state_dict().items()}),
            "returns NaN or infinite values in 1.weight, 1.bias, .*; lower the step size",
        ),
        (None, "returns a NoneType, expected a pair of an ArrayRecord or None, and metrics"),
        (dict, "returns a dict in its pair, expected an ArrayRecord or None"),
    ],
)
def test_a_strategy_that_returns_another_model_is_stopped(
    change: Callable[[ArrayRecord], Any] | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what it leaves out is that of a fresh model, and accuracy is of a model that nobody trained."""
    real = FedAvg.aggregate_train

    def aggregate(self: FedAvg, server_round: int, replies: Any) -> Any:
        arrays, metrics = real(self, server_round, replies)
        return None if change is None else (change(arrays), metrics)

    monkeypatch.setattr(FedAvg, "aggregate_train", aggregate)
    config = make_tiny_config(federation={"rounds": 1}, model={"name": "mlp", "hidden": [16], "batch_norm": True})
    with pytest.raises(RunError, match=words) as caught:
        run_serial(config, tmp_path / "run")
    assert_one_sentence(caught.value)
