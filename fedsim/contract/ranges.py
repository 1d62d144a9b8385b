"""The check that settings keep to the ranges in their types, however a plug-in is made."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

from fedsim.base.constraints import Constraint, field_types, list_constraints, make_check
from fedsim.base.errors import ConfigError
from fedsim.contract.checks import CheckedPlugin, ContractViolation, DoesNotApply

_REMEDY = (
    "derive the class from fedsim.base.constraints.CheckedSettings, as attacks, defenses and measures "
    "do, and begin a '__post_init__' of its own with super().__post_init__()"
)


def keeps_to_its_ranges(subject: CheckedPlugin) -> None:
    """It refuses settings outside of the ranges in their types, also where Python makes it."""
    if not subject.is_class or not dataclasses.is_dataclass(subject.cls):
        raise DoesNotApply("it is no dataclass")
    cls: Any = subject.cls
    violations = {name: find_violations(kind) for name, kind in field_types(cls).items()}
    if not any(violations.values()):
        raise DoesNotApply("no type of a setting has a range")
    plugin = subject.build()
    for name, values in violations.items():
        for value in values:
            if _accepts(plugin, name, value):
                raise ContractViolation(f"setting '{name}' accepts {value!r}; {_REMEDY}")


def _accepts(plugin: Any, name: str, value: Any) -> bool:
    """Return whether a copy with this value is made, or refused for another setting."""
    try:
        dataclasses.replace(plugin, **{name: value})
    except ConfigError as error:
        return not str(error).startswith((f"{name}:", f"{name}."))
    return True


def find_violations(kind: Any) -> list[Any]:
    """Return values that violate a constraint in a type, beyond each of its ends; none where it has none.

    >>> from fedsim.base.constraints import PositiveInt, Share
    >>> find_violations(PositiveInt | None), find_violations(tuple[Literal["a"], ...])
    ([0], [('not one of the words',)])
    >>> find_violations(Share)
    [-1, 2, nan]
    """
    check = make_check(kind)
    violations: list[Any] = []
    if check is None:
        return violations
    for value in _list_suspects(kind):
        try:
            check("value", value)
        except ConfigError:
            violations.append(value)
    return violations


def _list_suspects(kind: Any) -> list[Any]:
    """Return values that may violate a constraint in a type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return ["not one of the words"]
    suspects: list[Any] = []
    if origin is Annotated:
        for constraint in list_constraints(kind):
            suspects += _list_beyond(constraint)
        if arguments[0] is float:
            suspects.append(math.nan)  # which is neither below nor above anything
        arguments = arguments[:1]
    item_suspects = [suspect for argument in arguments for suspect in _list_suspects(argument)]
    if inspect.isclass(origin) and issubclass(origin, Sequence):
        count = 1 if arguments[-1] is Ellipsis else len(arguments)
        item_suspects = [(suspect,) * count for suspect in item_suspects]
    return suspects + item_suspects


def _list_beyond(constraint: Constraint) -> list[Any]:
    """Return values at the limit of a constraint and on both sides of it."""
    limit = constraint.limit
    if constraint.rule.attribute in ("min_length", "max_length"):
        return [()]
    return [math.nan] if callable(limit) else [limit - 1, limit, limit + 1]
