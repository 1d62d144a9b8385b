"""An audit that computes several victims at once is the audit that attacks one after the other."""

from __future__ import annotations

import itertools
import re
import shutil
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsim.audit import job_log
from fedsim.audit.audit import open_audit
from fedsim.audit.finding_files import load_claim
from fedsim.audit.job_log import JobClock, JobLog
from fedsim.federation.config import AttackFile
from fedsim.federation.run_folder import RunFolder, read_rows
from fedsim.federation.table_validation import validate_tables
from fedsim.interfaces.attack import Outcome, VictimTask
from fedsim.interfaces.findings import Finding
from fedsim.inversion import batched_call, batched_restarts, matching
from fedsim.inversion.matching import GradientInversion
from tests.support.experiments import make_tiny_config, run_serial
from tests.support.shared import make_once

TABLES = """
[adversary]
victims = [2, 3]
rounds = "all"
repeats = 2
workers = 1

[[attack]]
name = "sme"
iterations = 3

[[attack]]
name = "sapag"
iterations = 2
restarts = 2
"""
CLIENTS, VICTIMS, ROUNDS, REPEATS = 4, 2, 2, 2


@pytest.fixture(scope="module")
def recorded_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rounds of four clients."""
    training = {"local_epochs": 2, "label_smoothing": 0.1}
    config = make_tiny_config(federation={"seed": 1}, partition={"samples_per_client": 6}, training=training)
    return make_once(tmp_path_factory, "at-once", lambda folder: run_serial(config, folder / "run")) / "run"


@pytest.fixture
def run(recorded_run: Path, tmp_path: Path) -> Path:
    """A copy of it to do anything to."""
    return Path(shutil.copytree(recorded_run, tmp_path / "run"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The attack file."""
    (tmp_path / "attack.toml").write_text(TABLES)
    return tmp_path / "attack.toml"


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """From now on several at once save time; how many restarts each call is of."""

    def patched() -> list[int]:
        sizes: list[int] = []
        compute = batched_call.BatchedCall.compute

        def noted(self: Any, left: list[int], *given: Any) -> Any:
            sizes.append(len(left))
            return compute(self, left, *given)

        monkeypatch.setattr(batched_call.BatchedCall, "compute", noted)
        monkeypatch.setattr(matching, "batching_is_faster", lambda device: True)
        return sizes

    return patched


def claims(run: Path) -> dict[str, tuple[Finding, dict[str, Any]]]:
    found = sorted((run / "findings").glob("*/*.safetensors"))
    return {f"{path.parent.name}/{path.stem}": load_claim(path) for path in found}


def find_claims(run: Path, file: Path) -> None:
    """Attack, and score nothing."""
    tables = tomllib.loads(file.read_text())
    assert open_audit(run, validate_tables(AttackFile, tables, "attack.toml")).run() == []


def test_the_findings_and_scores_are_those_of_one_after_the_other(
    run: Path, file: Path, at_once: Callable[[], list[int]], tmp_path: Path
) -> None:
    other = Path(shutil.copytree(run, tmp_path / "other"))
    find_claims(run, file)
    sizes = at_once()
    began = time.monotonic()
    find_claims(other, file)
    passed = time.monotonic() - began
    assert max(sizes) == VICTIMS * ROUNDS * REPEATS * 2
    apart, whole = claims(run), claims(other)
    assert list(whole) == list(apart)
    assert len(whole) == 2 * VICTIMS * ROUNDS * REPEATS
    for name, (finding, about) in apart.items():
        again, said = whole[name]
        for tensor, value in finding.tensors.items():
            torch.testing.assert_close(again.tensors[tensor], value, rtol=1e-3, atol=1e-3)
        assert {**said, "seconds": 0} == {**about, "seconds": 0}
        clients = [client for sentence in said["warnings"] for client in re.findall(r"client (\d+)", sentence)]
        assert set(clients) == ({str(said["victim"])} if said["attack"] == "sapag" else set())
    # Shares of the time that they took together, each rounded to hundredths of a second.
    assert 0 < sum(said["seconds"] for _, said in whole.values()) < passed + 0.005 * len(whole)
    for folder in (run, other):  # scoring costs most, and is the same for each finding
        for path in (folder / "findings").glob("*/*.safetensors"):
            if "round-2-client-3" not in path.name:
                path.unlink()
        open_audit(folder, validate_tables(AttackFile, tomllib.loads(TABLES), "attack.toml")).score()
    rows, others = read_rows(RunFolder(run).scores), read_rows(RunFolder(other).scores)
    assert len({(row["attack"], row["round"], row["victim"]) for row in rows}) == 2
    assert [{**row, "value": ""} for row in rows] == [{**row, "value": ""} for row in others]
    for row, again in zip(rows, others, strict=True):
        assert row["missing"] or float(again["value"]) == pytest.approx(float(row["value"]), rel=1e-2, abs=1e-2)


def test_only_what_is_not_there_is_computed(
    run: Path, file: Path, at_once: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once()
    find_claims(run, file)
    made, begin = [], GradientInversion._prepare_task

    def noted(self: Any, update: Any, *given: Any) -> Any:
        made.append((self.title, update.round, update.client))
        return begin(self, update, *given)

    monkeypatch.setattr(GradientInversion, "_prepare_task", noted)
    find_claims(run, file)
    assert made == []
    before = claims(run)
    gone = run / "findings" / "sme" / "round-2-client-3-repeat-1.safetensors"
    gone.unlink()
    find_claims(run, file)
    assert made == [("sme", 2, 3)]
    assert list(claims(run)) == list(before)


@pytest.mark.thorough
def test_what_was_found_before_an_interrupt_is_kept(
    run: Path, file: Path, at_once: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once()
    monkeypatch.setattr(batched_restarts, "MEMORY_BUDGET", 1)  # one victim after the other
    begun, begin = [], GradientInversion._prepare_task

    def interrupted(self: Any, update: Any, *given: Any) -> Any:
        begun.append(update.client)
        if len(begun) == 4:
            raise KeyboardInterrupt
        return begin(self, update, *given)

    monkeypatch.setattr(GradientInversion, "_prepare_task", interrupted)
    with pytest.raises(KeyboardInterrupt):
        find_claims(run, file)
    kept = claims(run)
    assert len(kept) == 2  # the third one was waiting for others beside it
    begun += [0] * 10
    find_claims(run, file)
    assert kept.keys() < claims(run).keys()
    assert len(begun) == 14 + 2 * VICTIMS * ROUNDS * REPEATS - len(kept)


def test_a_victim_that_fails_is_one_sentence_and_the_others_are_found(
    run: Path, at_once: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = GradientInversion._prepare_task

    def failing(self: Any, update: Any, *given: Any) -> Any:
        if update.client == 2:
            raise ZeroDivisionError("of a stranger")
        return begin(self, update, *given)

    monkeypatch.setattr(GradientInversion, "_prepare_task", failing)
    at_once()
    adversary = {"victims": [0, 2, 3], "workers": 1}
    tables = {"adversary": adversary, "attack": [{"name": "sme", "iterations": 3}]}
    failures = open_audit(run, validate_tables(AttackFile, tables, "attack.toml")).run()
    assert len(failures) == 1
    assert "client 2: ZeroDivisionError: of a stranger" in failures[0]
    assert sorted(claims(run)) == ["sme/round-1-client-0-repeat-0", "sme/round-1-client-3-repeat-0"]


def test_victims_that_fail_at_once_leave_those_of_the_next_call_alone(
    run: Path, at_once: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, begin = [], matching.batched_steps

    def failing(entries: Any) -> Any:
        begun.append(len(entries))
        if len(begun) == 1:
            raise ZeroDivisionError("of the first call")
        return begin(entries)

    at_once()
    monkeypatch.setattr(matching, "batched_steps", failing)
    monkeypatch.setattr(matching, "fit_in_memory", lambda entries: len(entries) <= 2)
    tables = {"adversary": {"victims": "all", "workers": 1}, "attack": [{"name": "sme", "iterations": 3}]}
    failures = open_audit(run, validate_tables(AttackFile, tables, "attack.toml")).run()
    told = [re.search(r"client (\d): ZeroDivisionError: of the first call", failure) for failure in failures]
    failed = {int(found[1]) for found in told if found}
    made = {int(about["victim"]) for _, about in claims(run).values()}
    assert len(failed) == len(failures) > 0
    assert failed.isdisjoint(made)
    assert made
    assert failed | made == set(range(CLIENTS))


@pytest.mark.parametrize("takes", [0, 1, 2])
def test_a_victim_of_whom_an_attack_says_nothing_has_failed(
    run: Path, monkeypatch: pytest.MonkeyPatch, takes: int
) -> None:
    several = GradientInversion._run_several

    def forgetful(self: Any, orders: Iterable[VictimTask]) -> Iterator[tuple[VictimTask, Outcome]]:
        """It takes some of the victims, and says nothing of one more."""
        yield from several(self, itertools.islice(orders, takes))
        for _ in itertools.islice(orders, min(takes, 1)):
            pass

    monkeypatch.setattr(GradientInversion, "_run_several", forgetful)
    tables = {"adversary": {"victims": "all", "workers": 1}, "attack": [{"name": "sme", "iterations": 2}]}
    failures = open_audit(run, validate_tables(AttackFile, tables, "attack.toml")).run()
    made = {int(about["victim"]) for _, about in claims(run).values()}
    assert len(made) == {0: 0, 1: 2, 2: 3}[takes]
    assert len(failures) == CLIENTS - len(made)
    assert all(failure.endswith("sme gave neither a finding nor a reason") for failure in failures)


class Panic(BaseException):
    """As an extension in Rust raises it, which is no Exception."""


def test_what_is_no_exception_ends_one_victim_too(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = GradientInversion._prepare_task

    def panicking(self: Any, update: Any, *given: Any) -> Any:
        if update.client == 2:
            raise Panic("of an extension")
        return begin(self, update, *given)

    monkeypatch.setattr(GradientInversion, "_prepare_task", panicking)
    tables = {"adversary": {"victims": [0, 2, 3], "workers": 1}, "attack": [{"name": "sme", "iterations": 3}]}
    [failure] = open_audit(run, validate_tables(AttackFile, tables, "attack.toml")).run()
    assert "client 2: Panic: of an extension" in failure
    assert {int(about["victim"]) for _, about in claims(run).values()} == {0, 3}


def test_time_is_divided_among_the_jobs_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 14.0, 20.0, 21.0])
    monkeypatch.setattr(job_log.time, "monotonic", lambda: next(clock))
    turns = JobClock()
    first, second = JobLog(turns), JobLog(turns)
    with first.record():  # at 10
        pass
    with second.record():  # at 14
        pass
    with first.record():
        pass
    first.end()  # at 20
    first.end()
    second.end()  # at 21
    assert first.seconds == pytest.approx(4 + 6 / 2)
    assert second.seconds == pytest.approx(6 / 2 + 1)
