"""The declared types of functions and classes."""

from __future__ import annotations

from typing import Any, get_type_hints


def argument_types(function: Any) -> dict[str, Any]:
    """Return the declared types of the arguments, or none if a type checker alone imports them."""
    declaring = getattr(function, "__init__") if isinstance(function, type) else function  # noqa: B009
    try:
        return get_type_hints(declaring, include_extras=True)
    except (NameError, TypeError, AttributeError):
        return {}
