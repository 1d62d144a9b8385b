"""Attack files for the apps of Flower's repository, which are run by hand (docs/studies/flower-apps.md)."""

from __future__ import annotations

import importlib
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedsim.federation.config import AttackFile
from fedsim.federation.table_validation import validate_tables

FOLDER = Path(__file__).parents[2] / "examples" / "audit"


@pytest.fixture(scope="module")
def apps() -> dict[str, Any]:
    """Return all apps; the script's modules import each other by their names alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(FOLDER), *sys.path])
        return importlib.import_module("flower_example_apps").APPS  # type: ignore[no-any-return]


def test_what_is_said_of_each_app_is_an_attack_file(apps: dict[str, Any]) -> None:
    """No app runs here, so nobody would find a key that was renamed."""
    assert len(apps) >= 32
    for name, app in apps.items():
        validate_tables(AttackFile, tomllib.loads(app.describe_attack()), name)
