"""What every test needs: quiet libraries, one thread, an experiment that runs in a blink."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

# Flower and Ray read these when they are imported.
os.environ |= {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_LOG_LEVEL": "ERROR",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "OMP_NUM_THREADS": "1",
    "MPLBACKEND": "Agg",
}

import pytest
import torch

from fedsim.federation.config import Config, validate_tables
from fedsim.federation.open_run import OpenRun

with warnings.catch_warnings(), contextlib.suppress(ImportError):
    # Warnings of Flower's own dependencies at import are theirs; here, warnings are errors.
    warnings.simplefilter("ignore")
    import flwr.clientapp
    import flwr.serverapp.strategy
    import flwr.simulation  # noqa: F401

TINY: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"name": "iid", "samples_per_client": 24},
    "model": {"name": "mlp", "hidden": [16]},
    "training": {"local_epochs": 1, "batch_size": 8, "learning_rate": 0.1},
    "federation": {"engine": "serial", "seed": 3, "clients": 4, "rounds": 2},
    "strategy": {"name": "fedavg"},
    "adversary": {"when": "never"},
}


def make_tiny_config(**tables: Any) -> Config:
    """The tiny experiment with keys of its tables replaced.

    `federation={"rounds": 5}` changes one key; a table with another `name`, and a list, is replaced
    whole; a key set to None is removed.
    """
    merged = dict(TINY)
    for table, keys in tables.items():
        old = TINY.get(table, {})
        if not isinstance(keys, dict) or keys.get("name", old.get("name")) != old.get("name"):
            merged[table] = keys
        else:
            merged[table] = {key: value for key, value in {**old, **keys}.items() if value is not None}
    return validate_tables(Config, merged, "tiny")


def run_serial(config: Config, path: Path, **options: bool) -> OpenRun:
    """Federate `config` into the run folder `path`, attack and report nothing."""
    from fedsim.federation.simulation import run_federation

    folder = OpenRun(path)
    run_federation(config, folder, **options)
    return folder


@pytest.fixture(scope="session")
def load_script() -> Callable[[Path], ModuleType]:
    """Load a Python file that is no module of a package, such as a script of docs/ or benchmarks/."""

    def load_file(path: Path) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where dataclasses look for the module of an annotation
        spec.loader.exec_module(module)
        return module

    return load_file


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., Config]:
    """`tiny_config(federation={"rounds": 5}, ...)`: digits, an MLP, four clients, two rounds."""
    return make_tiny_config


@pytest.fixture(scope="session")
def serial_run() -> Callable[..., OpenRun]:
    """`serial_run(config, path, resume=False, overwrite=False)`: federate, then the run folder."""
    return run_serial


@pytest.fixture(scope="session")
def descendants() -> Callable[[int], list[int]]:
    """`descendants(pid)`: the processes that it started, those that they started, and so on; told by /proc."""

    def find_descendants(pid: int) -> list[int]:
        parents: dict[int, list[int]] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it has just ended
                parent = stat.read_text().rpartition(")")[2].split()[1]
                parents.setdefault(int(parent), []).append(int(stat.parent.name))
        children = parents.get(pid, [])
        return [*children, *(later for child in children for later in find_descendants(child))]

    return find_descendants


@pytest.fixture(scope="session")
def lives() -> Callable[[int], bool]:
    """`lives(pid)`: whether there is such a process, and it has not ended; told by /proc."""

    def is_alive(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    return is_alive


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Processes started here end on Ctrl-C, though a shell starts its background jobs with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Parsed data and trained states are not kept in the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDSIM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two cores are shared with others, and the number of threads changes float sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
