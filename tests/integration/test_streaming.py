"""Replies that wait on disk and clients that train at once: the same federation, to the bit or nearly so."""

from __future__ import annotations

import errno
import os
import textwrap
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict

import clients.app
import fedsim.federation.engines.cohort
import fedsim.federation.experiment
import fedsim.training.cohort
from clients.app import app as client_app
from fedsim.base.errors import RunError
from fedsim.federation.engines.arrays import LazyArray
from fedsim.federation.engines.cohort import CohortGrid
from fedsim.federation.engines.serial import InProcessGrid
from fedsim.federation.experiment import Experiment
from fedsim.federation.open_run import OpenRun
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State
from fedsim.training.cohort import TOLERANCE
from strategies.app import app as server_app
from tests.support.experiments import make_tiny_config, run_serial
from tests.support.runs import read_checkpoint, read_metrics

thorough = partial(pytest.param, marks=pytest.mark.thorough)

PLUGINS = """
from dataclasses import dataclass, replace
from fedsim.data.digits import Digits

@dataclass(frozen=True, kw_only=True)
class OneBadLabel:
    def load(self, folder):
        data = Digits().load(folder)
        labels = data.train.labels.clone()
        labels[100] = 99
        return replace(data, train=replace(data.train, labels=labels))
"""


@pytest.fixture(autouse=True)
def plugins(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.getbasetemp() / "streaming-plugins"
    folder.mkdir(exist_ok=True)
    (folder / "one_bad_label.py").write_text(textwrap.dedent(PLUGINS))
    monkeypatch.syspath_prepend(str(folder))


def file_bytes(folder: OpenRun) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.transcript.iterdir())}


def failures(folder: OpenRun) -> dict[int, dict[int, str]]:
    transcript = Transcript(folder.path)
    return {number: dict(transcript.header(number).failures) for number in transcript.rounds}


def norm(state: State) -> float:
    return sum(tensor.double().square().sum().item() for tensor in state.values()) ** 0.5


def farthest(left: OpenRun, right: OpenRun) -> float:
    """Largest distance between two recordings' updates, relative to the update."""
    one, other = Transcript(left.path), Transcript(right.path)
    assert one.rounds == other.rounds
    assert [one.clients(n) for n in one.rounds] == [other.clients(n) for n in one.rounds]
    assert failures(left) == failures(right)
    worst = 0.0
    for update in one.updates():
        there = other.update(update.round, update.client)
        assert (update.num_examples, set(update.metrics)) == (there.num_examples, set(there.metrics))
        assert dict(update.metrics) == pytest.approx(dict(there.metrics), rel=1e-3)
        off = {name: there.after[name] - tensor for name, tensor in update.after.items()}
        worst = max(worst, norm(off) / norm(update.pseudo_gradient))
    return worst


# On disk instead of in memory.


@pytest.mark.parametrize(
    ("strategy", "vectorise"),
    [
        ("fedavg", True),
        ("bulyan", False),
        *(thorough(strategy, False) for strategy in ("fedavg", "krum", "fedadam", "qfedavg", "fedmedian")),
    ],
)
def test_replies_that_waited_on_disk_give_the_same_bytes(
    strategy: str, vectorise: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    special = {
        "bulyan": {"num_malicious_nodes": 1},
        "krum": {"num_malicious_nodes": 1},
        "qfedavg": {"client_learning_rate": 0.1},
    }
    config = make_tiny_config(
        federation={"clients": 7, "rounds": 2, "vectorise": vectorise},
        strategy={"name": strategy, **special.get(strategy, {})},
    )
    usual = run_serial(config, tmp_path / "usual")
    moved: list[LazyArray] = []
    park = LazyArray.move_to_file

    def watched(self: LazyArray, file: Any) -> None:
        moved.append(self)
        park(self, file)

    monkeypatch.setattr(LazyArray, "move_to_file", watched)
    monkeypatch.setattr(fedsim.federation.engines.cohort, "default_reply_memory", lambda num_bytes: 0)
    monkeypatch.setattr(fedsim.federation.engines.cohort, "_MESSAGE_BYTES", 9000)
    streamed = run_serial(config, tmp_path / "streamed")
    assert len(moved) == 2 * 7 * 4
    assert file_bytes(streamed) == file_bytes(usual)
    assert read_checkpoint(streamed) == read_checkpoint(usual)
    assert read_metrics(streamed) == read_metrics(usual)
    names = {path.relative_to(usual.path) for path in usual.path.rglob("*")}
    assert {path.relative_to(streamed.path) for path in streamed.path.rglob("*")} == names


# At once instead of one by one.


SKEWED: dict[str, Any] = {
    "partition": {"name": "dirichlet", "alpha": 0.5, "samples_per_client": 40},
    "federation": {"clients": 12, "rounds": 2, "straggler_probability": 0.25},
    "training": {"momentum": 0.5, "weight_decay": 0.001},
}


def both(path: Path, **tables: Any) -> tuple[OpenRun, OpenRun]:
    """The run vectorised, and as a loop."""
    tables = {**SKEWED, **tables}
    runs = []
    for vectorise in (True, False):
        federation = {**tables["federation"], "vectorise": vectorise}
        runs.append(run_serial(make_tiny_config(**{**tables, "federation": federation}), path / str(vectorise)))
    return runs[0], runs[1]


TOGETHER = 8


@pytest.fixture(autouse=True)
def several_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that there is more than one of them without hundreds of clients."""
    monkeypatch.setattr(fedsim.training.cohort, "_MAX_CLIENTS", TOGETHER)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many each group of clients gave that trained at once."""
    counts: list[int] = []
    inner = clients.app.local_updates

    def count_updates(*args: Any) -> Any:
        updates = inner(*args)
        counts.append(sum(update is not None for update in updates))
        return updates

    monkeypatch.setattr(clients.app, "local_updates", count_updates)
    return counts


def test_a_vectorised_run_is_the_loops_run_within_tolerance_and_the_same_clients_straggle(
    tmp_path: Path, at_once: list[int]
) -> None:
    vectorised, loop = both(tmp_path)
    assert len(at_once) == 2 * -(-12 // TOGETHER)
    assert 0 < farthest(vectorised, loop) < TOLERANCE
    assert sum(map(len, failures(loop).values())) == 24 - sum(at_once) > 2


def test_convolutions_train_at_once_where_products_pay_and_end_where_the_loop_ends(
    tmp_path: Path, at_once: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fedsim.training.cohort, "products_are_faster", lambda device: True)
    model = {"name": "sme-cnn", "channels": [2, 3], "hidden": 4}
    vectorised, loop = both(tmp_path, model=model, federation={**SKEWED["federation"], "rounds": 1})
    assert len(at_once) == 1
    assert sum(at_once) > 5
    assert 0 < farthest(vectorised, loop) < TOLERANCE


@pytest.mark.parametrize(
    "strategy",
    [
        {"name": "fedprox", "proximal_mu": 1.0},
        {"name": "fedadam", "eta": 0.01},
        thorough({"name": "fedadagrad", "eta": 0.01}),
        thorough({"name": "fedyogi", "eta": 0.01}),
        thorough({"name": "fedavgm"}),
        thorough({"name": "fedmedian"}),
        thorough({"name": "qfedavg", "client_learning_rate": 0.1}),
    ],
    ids=lambda strategy: strategy["name"],
)
def test_whatever_a_strategy_broadcasts_its_clients_train_at_once(
    strategy: dict[str, Any], tmp_path: Path, at_once: list[int]
) -> None:
    federation = {"clients": 5, "rounds": 2}
    vectorised, loop = both(tmp_path, federation=federation, strategy=strategy)
    assert at_once == [5, 5]
    assert 0 < farthest(vectorised, loop) < 10 * TOLERANCE


def test_noise_on_the_update_is_the_loops_noise(tmp_path: Path, at_once: list[int]) -> None:
    defense = [{"name": "update-noise", "clip": 0.5, "noise_multiplier": 0.1}]
    vectorised, loop = both(tmp_path, defense=defense)
    assert sum(at_once) > 12
    assert 0 < farthest(vectorised, loop) < TOLERANCE


@pytest.mark.parametrize("nodes", [2, thorough(5)])
def test_a_vectorised_run_has_the_same_bytes_on_any_number_of_nodes(
    nodes: int, tmp_path: Path, at_once: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_tiny_config(
        federation={"clients": 24, "rounds": 2, "straggler_probability": 0.1},
        partition={"name": "dirichlet", "alpha": 1.0, "samples_per_client": 30},
        strategy={"name": "fedavg", "fraction_train": 0.9},
    )
    usual = run_serial(config, tmp_path / "one")
    groups = list(at_once)
    at_once.clear()
    monkeypatch.setattr(fedsim.federation.engines.cohort, "_MESSAGE_BYTES", 10_000 * nodes)
    folder = OpenRun(tmp_path / "more")
    folder.prepare(resume=False, overwrite=False)
    settings = {"experiment": config.model_dump_json(), "out": str(folder.path), "resume": False}
    server_app(
        InProcessGrid(client_app, nodes),
        Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=settings),  # type: ignore[arg-type]
    )
    assert max(groups) > 4
    assert sorted(at_once) == sorted(groups)
    assert file_bytes(folder) == file_bytes(usual)
    assert read_checkpoint(folder) == read_checkpoint(usual)
    assert read_metrics(folder) == read_metrics(usual)


def test_who_has_a_broken_label_fails_alone_and_with_the_loops_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        fedsim.federation.experiment, "check_dataset", lambda dataset, name: dataset
    )  # it would not have come so far
    tables = {
        "data": {"name": "one_bad_label:OneBadLabel"},
        "partition": {"samples_per_client": None},
        "federation": {"clients": TOGETHER + 4, "rounds": 1},
    }
    vectorised, loop = both(tmp_path, **tables)
    assert farthest(vectorised, loop) < TOLERANCE
    for failed in failures(vectorised).values():
        ((client, why),) = failed.items()
        assert "Target 99 is out of bounds" in why
        assert 0 <= client < TOGETHER + 4


def test_who_diverges_in_a_group_fails_alone_and_with_the_loops_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = Experiment.local_data

    def huge(experiment: Any, several: Any, *more: Any) -> Any:
        made = dict(zip(several, shares(experiment, several, *more), strict=True))
        if 2 in made:
            made[2] = replace(made[2], inputs=made[2].inputs * torch.inf)
        return list(made.values())

    monkeypatch.setattr(Experiment, "local_data", huge)
    vectorised, loop = both(tmp_path, federation={"clients": 6, "rounds": 2})
    assert farthest(vectorised, loop) < TOLERANCE
    assert {frozenset(failed) for failed in failures(vectorised).values()} == {frozenset({2})}
    assert "local training diverged" in failures(vectorised)[1][2]


def test_vectorise_false_trains_one_by_one(tmp_path: Path, at_once: list[int]) -> None:
    run_serial(make_tiny_config(federation={"vectorise": False}), tmp_path / "run")
    assert at_once == []


def test_a_disk_that_is_full_of_waiting_replies_ends_the_run_and_keeps_the_earlier_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fedsim.federation.engines.cohort, "default_reply_memory", lambda num_bytes: 0)
    park, count = LazyArray.move_to_file, 0

    def full(self: LazyArray, file: Any) -> None:
        nonlocal count
        count += 1
        if count > 20:  # in the second round
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        park(self, file)

    monkeypatch.setattr(LazyArray, "move_to_file", full)
    config = make_tiny_config(federation={"rounds": 3})
    with pytest.raises(RunError, match="the updates of this round cannot be written") as caught:
        run_serial(config, tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert Transcript(tmp_path / "run").rounds == [1]
    monkeypatch.undo()
    resumed = run_serial(config, tmp_path / "run", resume=True)
    assert file_bytes(resumed) == file_bytes(run_serial(config, tmp_path / "usual"))


def test_the_replies_of_a_round_do_not_outlive_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    born: list[weakref.ref[LazyArray]] = []
    alive: list[int] = []
    make, exchange = LazyArray.__init__, CohortGrid._exchange

    def track_array(self: LazyArray, values: Any) -> None:
        make(self, values)
        born.append(weakref.ref(self))

    def watched(self: Any, messages: Any, *others: Any) -> Any:
        broadcast = {id(array) for m in messages for r in m.content.array_records.values() for array in r.values()}
        alive.append(sum(made() is not None and id(made()) not in broadcast for made in born))
        return exchange(self, messages, *others)

    monkeypatch.setattr(LazyArray, "__init__", track_array)
    monkeypatch.setattr(CohortGrid, "_exchange", watched)
    monkeypatch.setattr(fedsim.federation.engines.cohort, "_COLLECT_FROM_BYTES", 0)
    run_serial(make_tiny_config(federation={"rounds": 3, "clients": 5}), tmp_path / "run")
    assert len(born) >= 3 * 5 * 4
    assert alive == [0] * 3


def test_clients_with_very_unequal_amounts_of_data_train_in_the_loop(
    tmp_path: Path, at_once: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else all would wait for the one who has most."""
    monkeypatch.setattr(fedsim.training.cohort, "_MAX_CLIENTS", 12)
    partition = {"name": "dirichlet", "alpha": 0.1, "samples_per_client": None}
    run_serial(make_tiny_config(partition=partition, federation={"clients": 12, "rounds": 1}), tmp_path / "run")
    assert at_once == []
