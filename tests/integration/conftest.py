"""What tests of whole runs share."""

from __future__ import annotations

import pytest

from fedsim.audit.isolation import Isolation, attempt
from fedsim.federation.open_run import OpenRun
from tests.support.experiments import make_tiny_config, run_serial


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OpenRun:
    """The run of the tables that the module calls `RUN`, without attacks."""
    return run_serial(make_tiny_config(**request.module.RUN), tmp_path_factory.mktemp("own") / "run")


@pytest.fixture(autouse=True)
def attacks_run_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attacks of strangers run in this process, unless a test is marked `isolated`: importing torch takes seconds."""
    if request.node.get_closest_marker("isolated") is None:
        monkeypatch.setattr(Isolation, "attempt", lambda self, *order: attempt(*order))
