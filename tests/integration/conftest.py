"""What tests of whole runs share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fedsim.audit.evaluation import local_models, similarity
from fedsim.audit.evaluation.line_search import minimise_coarsely
from fedsim.audit.isolation import Isolation, attempt
from fedsim.federation.open_run import OpenRun
from tests.support.experiments import make_tiny_config, run_serial


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OpenRun:
    """The run of the tables that the module calls `RUN`, without attacks."""
    return run_serial(make_tiny_config(**request.module.RUN), tmp_path_factory.mktemp("own") / "run")


@pytest.fixture(scope="module", autouse=True)
def short_explanations() -> Iterator[None]:
    """Local models are explained on fewer examples, for that takes most of the time in which they are judged."""
    with pytest.MonkeyPatch.context() as patch:
        for name, count in {"REFERENCES": 16, "MASKS": 130, "DRAWS": 2}.items():
            assert count < getattr(local_models, name)
            patch.setattr(local_models, name, count)
        yield


@pytest.fixture(scope="module", autouse=True)
def coarse_line_searches() -> Iterator[None]:
    """Claims are searched on the line as guesses are, by a third of the gradients."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(similarity, "minimise_on_line", lambda line, at_end: minimise_coarsely(line, at_end).value)
        yield


@pytest.fixture(autouse=True)
def attacks_run_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attacks of strangers run in this process, unless a test is marked `isolated`."""
    if request.node.get_closest_marker("isolated") is None:
        monkeypatch.setattr(Isolation, "attempt", lambda self, *order: attempt(*order))
