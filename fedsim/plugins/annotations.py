"""Types that functions and classes declare."""

from __future__ import annotations

from typing import Any, get_type_hints


def hints(function: Any) -> dict[str, Any]:
    """The types of a function's or class's arguments; none where they are imported for type checkers alone."""
    try:
        return get_type_hints(getattr(function, "__init__") if isinstance(function, type) else function)  # noqa: B009
    except (NameError, TypeError, AttributeError):
        return {}
