"""Recordings, findings and scores are what they were; see golden.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.scripts import load_script
from tests.support.shared import make_once

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def golden() -> ModuleType:
    return load_script(HERE / "golden.py")


@pytest.fixture(scope="module")
def compare(golden: ModuleType) -> Callable[[str, dict[str, Any]], None]:
    told = json.loads(golden.EXPECTED.read_text())
    exact = told["machine"] == golden.machine()

    def compared(name: str, found: dict[str, Any]) -> None:
        differ = golden.differences(found, told["runs"][name], exact=exact)
        assert not differ, "\n".join([f"{name}, {'exactly' if exact else 'with a tolerance'}:", *differ])

    return compared


@pytest.fixture(scope="module")
def fedavg(golden: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = make_once(tmp_path_factory, "golden", lambda made: golden.run("fedavg", made / "fedavg")) / "fedavg"
    return folder, golden.figures(folder)


@pytest.mark.thorough
def test_fedavg_and_a_foreign_recording_of_it_have_not_moved(
    golden: ModuleType,
    fedavg: tuple[Path, dict[str, Any]],
    compare: Callable[[str, dict[str, Any]], None],
    tmp_path: Path,
) -> None:
    folder, found = fedavg
    compare("fedavg", found)
    compare("foreign", golden.foreign(folder, tmp_path / "foreign"))


@pytest.mark.parametrize(
    "name",
    [
        *("one-example", "defended", "linear", "texts"),
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("fedsgd", "batch-norm", "tables")),
    ],
)
def test_runs_have_not_moved(
    name: str, golden: ModuleType, compare: Callable[[str, dict[str, Any]], None], tmp_path: Path
) -> None:
    compare(name, golden.run(name, tmp_path / name))


@pytest.mark.slow
@pytest.mark.ray
def test_ray_gives_the_same_recording_findings_and_scores(
    golden: ModuleType, fedavg: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """One attack will do: all read the same bytes of the same recording."""
    tables = {"federation.engine": "ray", "federation.actors": "1", "attack": '[{ name = "sme", iterations = 5 }]'}
    words = [word for key, value in tables.items() for word in ("--set", f"{key}={value}")]
    found, expected = golden.run("fedavg", tmp_path / "ray", *words), fedavg[1]
    assert found["messages"] == expected["messages"]
    for kind in ("findings", "scores"):
        assert found[kind] == {name: value for name, value in expected[kind].items() if name.startswith("sme/")}
        assert found[kind]


def test_what_moves_is_named(golden: ModuleType) -> None:
    expected = {"messages": "a", "findings": {"sme/1": "b"}, "scores": {"sme/1/0/psnr": ["10.0", "9.0", ""]}}
    found = {"messages": "c", "findings": {"sme/2": "b"}, "scores": {"sme/1/0/psnr": ["10.1", "9.0", ""]}}
    assert golden.differences(found, expected, exact=True) == [
        "the messages have moved",
        "findings: sme/1 is missing",
        "findings: sme/2 is new",
        "score sme/1/0/psnr: ['10.1', '9.0', ''], expected ['10.0', '9.0', '']",
    ]
    assert golden.differences(found, expected, exact=False)[1:] == ["findings: sme/2 is new"]
