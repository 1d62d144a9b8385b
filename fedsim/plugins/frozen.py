"""Plug-in classes as frozen dataclasses, whose instances are fully described by their fields."""

from __future__ import annotations

import dataclasses
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.base.errors import PluginError


def check_frozen(cls: type) -> None:
    """Raise PluginError unless `cls` itself, not only a base, is a frozen dataclass.

    Only then is an instance that is made again from its fields the same, and stores no state
    between clients.
    """
    if not dataclasses.is_dataclass(cls) or not getattr(vars(cls).get("__dataclass_params__"), "frozen", False):
        raise PluginError(
            f"{cls.__module__}.{cls.__name__}: expected a frozen dataclass, which is made again from its fields alone; "
            "put @dataclass(frozen=True, kw_only=True) above the class, and its settings into fields"
        )


def to_plain_value(value: Any) -> Any:
    """Convert a NumPy number, path or enumeration member to a value of an experiment file.

    Other values are returned as they are.
    """
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    return value.item() if isinstance(value, np.generic) else value
