"""Attacks and defenses are frozen dataclasses: their fields are all that there is to know of them."""

from __future__ import annotations

import dataclasses

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
