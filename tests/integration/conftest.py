"""What tests of whole runs share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fedsim.federation.config import Config
from fedsim.federation.run_folder import RunFolder


@pytest.fixture(scope="module")
def folder(
    request: pytest.FixtureRequest,
    tiny_config: Callable[..., Config],
    serial_run: Callable[..., RunFolder],
    tmp_path_factory: pytest.TempPathFactory,
) -> RunFolder:
    """The run of the tables that the module calls `RUN`, without attacks."""
    return serial_run(tiny_config(**request.module.RUN), tmp_path_factory.mktemp("own") / "run")
