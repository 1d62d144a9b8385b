"""Checks of settings that several attacks share."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args, get_origin, get_type_hints

from fedsim.base.errors import ConfigError
from fedsim.interfaces.attack import Attack


def check_choices(attack: Attack) -> None:
    """Raise ConfigError unless each setting whose type is a `Literal` has one of its values."""
    for name, kind in get_type_hints(type(attack)).items():
        if get_origin(kind) is Literal and getattr(attack, name) not in get_args(kind):
            choices = ", ".join(map(str, get_args(kind)))
            raise ConfigError(f"{name}: expected one of {choices}, got {getattr(attack, name)!r}")


def check_positive(attack: Any, *names: str) -> None:
    """Raise ConfigError unless each of these settings is finite and above 0."""
    for name in names:
        if not 0 < getattr(attack, name) < math.inf:
            raise ConfigError(f"{name}: expected a finite value above 0, got {getattr(attack, name)}")


def check_not_negative(attack: Any, *names: str) -> None:
    """Raise ConfigError unless each of these settings is finite and at least 0."""
    for name in names:
        if not 0 <= getattr(attack, name) < math.inf:
            raise ConfigError(f"{name}: expected a finite value of at least 0, got {getattr(attack, name)}")
