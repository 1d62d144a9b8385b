"""What every test needs: quiet libraries, one thread, a cache of its own, shared assertions."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import subprocess
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

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
from hypothesis import settings

from tests.support.commands import Call, call_fedsim
from tests.support.forks import ForkedInterpreter
from tests.support.garbage import freeze_existing_objects

# What takes seconds to import is imported where tests run: pytest-xdist's own process, which reads
# this file before any worker starts, runs none.
if TYPE_CHECKING:
    from fedsim.data import Dataset
    from fedsim.recording.transcript import Transcript
    from fedsim.recording.wire_format import Update
    from tests.support.recordings import Record

# How long an example takes says how busy the machine is, and nothing of fedsim.
settings.register_profile("fedsim", deadline=None)
settings.load_profile("fedsim")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Import libraries where tests run; warnings at their import are theirs, and in tests they would be errors."""
    if session.config.getoption("dist", "no") != "no":
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")

        with contextlib.suppress(ImportError):
            import flwr.clientapp
            import flwr.serverapp.strategy
            import flwr.simulation  # noqa: F401


@pytest.fixture(scope="module", autouse=True)
def quick_garbage_collection() -> None:
    """Leave out of garbage collection what exists before a module of tests."""
    freeze_existing_objects()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Processes started here end on Ctrl-C, though a shell starts its background jobs with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def workers_are_forks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers, and the processes of isolated attacks, are forks of this process: importing torch takes seconds."""
    from fedsim.base import workers

    if "fresh_interpreters" not in request.fixturenames:
        monkeypatch.setattr(workers, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": ForkedInterpreter}))


@pytest.fixture
def fresh_interpreters() -> None:
    """Workers, and the processes of isolated attacks, know nothing of this one, as they do for users."""


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Parsed data and trained states are not kept in the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDSIM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Call:
    """`call(*words)`: run `fedsim WORDS...` in this process; return its exit code and what it printed."""
    return functools.partial(call_fedsim, capfd=capfd)


@pytest.fixture(scope="session")
def digits() -> Dataset:
    """The data set of the tiny experiment, which comes with scikit-learn."""
    from fedsim.data.digits import Digits

    return Digits().load(None)


@pytest.fixture
def server_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages name the task that makes them, as in a ServerApp."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """Each call writes its updates into a new recording."""
    from fedsim.recording.wire_format import Update
    from tests.support.recordings import record_updates

    numbers = itertools.count()

    def write(updates: Update | Iterable[Update]) -> Transcript:
        listed = [updates] if isinstance(updates, Update) else updates
        return record_updates(tmp_path / f"recording-{next(numbers)}" / "transcript", listed)

    return write


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two cores are shared with others, and the number of threads changes float sums."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
