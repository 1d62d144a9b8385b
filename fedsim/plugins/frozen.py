"""Attacks and defenses are frozen dataclasses: their fields, which can be written down, are all there is to know."""

from __future__ import annotations

import dataclasses
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.errors import PluginError


def check_frozen(cls: type) -> None:
    """Make sure that `cls` is a frozen dataclass by a decorator of its own, not by that of a class it derives from.

    Only then is an instance made again from its fields the same, and nothing is left on it from client to client.

    Raises:
        PluginError: it is not.
    """
    if not dataclasses.is_dataclass(cls) or not getattr(vars(cls).get("__dataclass_params__"), "frozen", False):
        raise PluginError(
            f"{cls.__module__}.{cls.__name__}: expected a frozen dataclass, which is made again from its fields alone; "
            "put @dataclass(frozen=True, kw_only=True) above the class, and its settings into fields"
        )


def plain(value: Any) -> Any:
    """A number of NumPy, a path or a member of an enumeration as an experiment file holds it; all else as it is."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    return value.item() if isinstance(value, np.generic) else value
