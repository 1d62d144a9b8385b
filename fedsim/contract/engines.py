"""Checks of engines: each carries two tiny experiments, one of which fails."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from safetensors import safe_open

from fedsim.base.content_hashes import hash_json
from fedsim.base.errors import InstallationError, RunError
from fedsim.base.papers import Paper
from fedsim.contract import common
from fedsim.contract.checks import CheckedPlugin, ContractViolation, NotChecked, expect
from fedsim.federation.config import Config
from fedsim.federation.open_run import OpenRun
from fedsim.federation.run_folder import read_metrics
from fedsim.federation.simulation import run_federation
from fedsim.federation.table_validation import validate_tables
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.local_context import LocalContext
from fedsim.plugins.allowed_code import allow_code

_TABLES: Mapping[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"name": "dirichlet", "alpha": 1.0, "test_fraction": 0.2, "samples_per_client": 24},
    "model": {"name": "mlp", "hidden": [8], "dropout": 0.2},
    "training": {"local_epochs": 1, "batch_size": 8, "learning_rate": 0.1},
    "strategy": {"name": "fedavg", "fraction_train": 0.5},
    "adversary": {"when": "never"},
}
"""Sampling, dropout and evaluation on clients: all that draws random numbers or sends messages."""
_FEDERATION: Mapping[str, Any] = {"seed": 1, "clients": 6, "rounds": 2, "supernodes": 2, "actors": 2}
_REASON = "the contract's client refuses"


@dataclass(frozen=True, kw_only=True)
class RefusingDefense(Defense):
    """Fail at the end of each client's round."""

    paper: ClassVar[Paper] = Paper(title="Refusing defense", authors="Nobody", venue="unpublished", year=2026)

    def on_update(self, update: Any, context: LocalContext) -> Any:
        """Raise the error that the user has to see."""
        raise ValueError(_REASON)


def is_an_engine(subject: CheckedPlugin) -> None:
    """It derives from fedsim.Engine, and is made from its settings."""
    try:
        from fedsim.federation.engines.engine import Engine
    except ImportError as error:
        raise NotChecked("Flower is not installed; pip install 'fedsim-curious[federation]'") from error
    common.build_instance(subject, Engine)


def records_same_bytes(subject: CheckedPlugin) -> None:
    """It gives the same recording, model and metrics as engine `serial`, to the byte."""
    expected, got = _hash_results(_run(subject, "serial", "expected")), _hash_results(_run_on_subject(subject))
    for name, content_hash in expected.items():
        expect(name in got, f"its run has no {name}")
        expect(got[name] == content_hash, f"its {name} is not that of engine 'serial'")


def cleans_up(subject: CheckedPlugin) -> None:
    """It ends the threads and processes that it started, and restores signal handlers."""
    _run_on_subject(subject)
    for noun, difference in subject.cache["left behind"].items():
        expect(not difference, f"after the run it leaves {noun}: {', '.join(difference)}")


def reports_failures(subject: CheckedPlugin) -> None:
    """It hands on the error of a client that fails, and ends."""
    defense = {"name": f"{RefusingDefense.__module__}:{RefusingDefense.__qualname__}"}
    allow_code(defense)
    try:
        _run(subject, _engine_of(subject), "failing", defense=[defense])
    except RunError as error:
        expect(_REASON in str(error), f"a client's error '{_REASON}' is reported as '{error}'")
        return
    raise ContractViolation("every client failed, and it went on as if none had")


CHECKS = (
    is_an_engine,
    common.is_a_frozen_dataclass,
    common.is_documented,
    records_same_bytes,
    cleans_up,
    reports_failures,
)


def _run_on_subject(subject: CheckedPlugin) -> OpenRun:
    """Return the run of this engine, which is made once, and note what the engine left behind."""
    if "run" not in subject.cache:
        with _differences(subject.cache):
            subject.cache["run"] = _run(subject, _engine_of(subject), "got")
    run: OpenRun = subject.cache["run"]
    return run


def _engine_of(subject: CheckedPlugin) -> dict[str, Any]:
    return {**subject.settings, "name": subject.name}


def _run(subject: CheckedPlugin, engine: Any, folder: str, **tables: Any) -> OpenRun:
    """Federate the tiny experiment on an engine."""
    federation = {**_FEDERATION, "engine": engine}
    config = validate_tables(Config, {**_TABLES, **tables, "federation": federation}, "contract")
    run = OpenRun(subject.folder / folder)
    try:
        run_federation(config, run, overwrite=True)
    except InstallationError as error:
        raise NotChecked(str(error)) from error
    return run


def _hash_results(run: OpenRun) -> dict[str, str]:
    """Return a hash of each round's recording, its metrics and each tensor of the last model, by name."""
    hashes = {}
    for path in sorted(run.transcript.iterdir()):
        hashes[f"recording {path.name}"] = hashlib.sha256(path.read_bytes()).hexdigest()
    with safe_open(run.checkpoint, framework="np") as file:
        for name in sorted(file.keys()):
            if name.startswith("model/"):
                hashes[f"final {name}"] = hashlib.sha256(file.get_tensor(name).tobytes()).hexdigest()
    # The replies of clients that only evaluate stand nowhere else.
    for row in read_metrics(run):
        del row["seconds"]
        hashes[f"metrics of round {row['round']}, {row['client']}"] = hash_json(row)
    return hashes


@contextlib.contextmanager
def _differences(cache: dict[str, Any]) -> Iterator[None]:
    """Store under `left behind` what there is after the block and was not before, by noun."""
    before = _process_state()
    yield
    after = _process_state()
    cache["left behind"] = {noun: sorted(after[noun] - before[noun]) for noun in after}


def _process_state() -> dict[str, set[str]]:
    """Return the threads, child processes and signal handlers of this process, by noun."""
    handlers = {f"{number.name} {signal.getsignal(number)}" for number in (signal.SIGINT, signal.SIGTERM)}
    return {
        "a thread that is never ended": {thread.name for thread in threading.enumerate() if not thread.daemon},
        "a process": set(map(str, _child_processes())),
        "a signal handler": handlers,
    }


def _child_processes() -> list[int]:
    """Return the processes that this one has started and that have not ended."""
    children = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state != "Z":
                children.append(int(path.parent.name))
    return children
