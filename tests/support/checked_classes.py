"""Checks of the contract of plug-ins, made of a class of a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedsim.contract.checks import Check, CheckedPlugin, CheckResult, run_check
from fedsim.plugins import registry


def check_class(check: Check, group: registry.Group, cls: type, folder: Path, **settings: Any) -> CheckResult:
    """Return what a check says of a class, which is found by the name of its module."""
    name = f"{cls.__module__}:{cls.__qualname__}"
    return run_check(check, CheckedPlugin(group=group, name=name, settings=settings, folder=folder))
