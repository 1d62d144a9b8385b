"""What tests of whole runs share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fedsim.federation.config import Config
from fedsim.federation.open_run import OpenRun


@pytest.fixture(scope="module")
def folder(
    request: pytest.FixtureRequest,
    tiny_config: Callable[..., Config],
    serial_run: Callable[..., OpenRun],
    tmp_path_factory: pytest.TempPathFactory,
) -> OpenRun:
    """The run of the tables that the module calls `RUN`, without attacks."""
    return serial_run(tiny_config(**request.module.RUN), tmp_path_factory.mktemp("own") / "run")
