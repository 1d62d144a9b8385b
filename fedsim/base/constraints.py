"""Constraints of settings as types, and their check when an object is made.

A setting says in its type which values it accepts. An experiment file is checked against these
types by the registry, an object that Python makes by `CheckedSettings`, and `fedsim show` prints
them. Any constraint of the package `annotated_types` will do; those used most have names here.

>>> @dataclasses.dataclass(frozen=True, kw_only=True)
... class Blur(CheckedSettings):
...     width: PositiveInt = 3
...     strength: Annotated[float, Gt(0), Le(10)] = 1.0
>>> Blur(width=0)
Traceback (most recent call last):
    ...
fedsim.base.errors.ConfigError: width: expected at least 1, got 0
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import repeat
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import (
    Ge,
    GroupedMetadata,
    Gt,
    Le,
    Lt,
    MaxLen,
    MinLen,
    MultipleOf,
    Predicate,
)

from fedsim.base.errors import ConfigError

__all__ = [
    "CheckedSettings",
    "FiniteFloat",
    "NonNegativeFloat",
    "NonNegativeInt",
    "PositiveFloat",
    "PositiveInt",
    "PositiveShare",
    "PositiveShareBelowOne",
    "Share",
    "ShareBelowOne",
    "check_field_constraints",
]
"""The names that the author of a plug-in imports."""

FiniteFloat = Annotated[float, Predicate(math.isfinite)]
"""A number that is neither NaN nor infinite."""
PositiveFloat = Annotated[FiniteFloat, Gt(0)]
"""A finite number above 0."""
NonNegativeFloat = Annotated[FiniteFloat, Ge(0)]
"""A finite number from 0 on."""
PositiveInt = Annotated[int, Ge(1)]
"""A count of at least 1."""
NonNegativeInt = Annotated[int, Ge(0)]
"""A count that may be 0."""
Share = Annotated[float, Ge(0), Le(1)]
"""A share or probability from 0 to 1."""
PositiveShare = Annotated[float, Gt(0), Le(1)]
"""A share or probability above 0 that may be 1."""
ShareBelowOne = Annotated[float, Ge(0), Lt(1)]
"""A share or probability below 1 that may be 0."""
PositiveShareBelowOne = Annotated[float, Gt(0), Lt(1)]
"""A share or probability above 0 and below 1."""


class CheckedSettings:
    """Base of dataclasses whose fields are settings with constraints; it checks them at once.

    A subclass that checks several fields against each other does so in its own `__post_init__`,
    after `super().__post_init__()`.
    """

    def __post_init__(self) -> None:
        check_field_constraints(self)


def check_field_constraints(settings: Any, prefix: str = "") -> None:
    """Check the fields of a dataclass against the constraints and words in their types.

    Args:
        prefix: what stands before the name of a field in errors.

    Raises:
        ConfigError: names the first field that violates a constraint.
    """
    for name, check in _field_checks(settings.__class__).items():
        check(prefix + name, getattr(settings, name))


Check = Callable[[str, Any], None]
"""Raises ConfigError where a value, of the setting that is named first, violates a constraint."""


@cache
def _field_checks(cls: type) -> Mapping[str, Check]:
    checks = {name: make_check(kind) for name, kind in field_types(cls).items()}
    return {name: check for name, check in checks.items() if check is not None}


def field_types(cls: type) -> dict[str, Any]:
    """Return the types of a dataclass's settings with their constraints, by name.

    A type that is imported for type checkers alone is not known, and so it is Any.
    """
    types: dict[str, Any] = {}
    settable = {field.name for field in dataclasses.fields(cls) if field.init}
    for owner in reversed(cls.__mro__):
        namespace = vars(sys.modules[owner.__module__])
        for name, annotation in inspect.get_annotations(owner).items():
            if name in settable:
                # One at a time, because an unknown name concerns its own field alone.
                holder = SimpleNamespace(__annotations__={name: annotation})
                try:
                    types |= get_type_hints(holder, namespace, include_extras=True)
                except NameError:
                    types[name] = Any
    return types


def make_check(kind: Any) -> Check | None:
    """Return a check of the constraints in a type; None where it has none.

    That a value is of the type itself is not checked.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return partial(_check_choice, arguments)
    if origin is Annotated:
        checks = [make_check(arguments[0]), *(c.check for c in list_constraints(kind))]
        present = [check for check in checks if check is not None]
        return partial(_check_all, present) if present else None
    checks = [make_check(argument) for argument in arguments]
    if origin is tuple and Ellipsis not in arguments:
        return partial(_check_fixed_tuple, checks)
    if not any(checks):
        return None
    if origin in (Union, UnionType):
        classes = map(_find_class, arguments)
        return partial(_check_alternatives, list(zip(classes, checks, strict=True)))
    if inspect.isclass(origin) and issubclass(origin, Mapping):
        check_key, check_value = checks
        return partial(_check_entries, check_key, check_value)
    if inspect.isclass(origin) and issubclass(origin, Collection):
        return partial(_check_items, repeat(checks[0]))
    return None


def _check_all(checks: Sequence[Check], name: str, value: Any) -> None:
    for check in checks:
        check(name, value)


def _check_choice(choices: Sequence[Any], name: str, value: Any) -> None:
    if value not in choices:
        *words, last = map(repr, choices)
        expected = f"{', '.join(words)} or {last}" if words else last
        raise ConfigError(f"{name}: expected {expected}, got {value!r}")


def _check_alternatives(alternatives: Sequence[tuple[Any, Check | None]], name: str, value: Any) -> None:
    """Raise ConfigError where the value violates the constraints of each type that it can be of.

    A value of none of these types, such as a number of NumPy, has to keep to the constraints of any.
    """
    checks = [check for expected_class, check in alternatives if isinstance(value, expected_class)]
    first_error = None
    for check in checks or [check for _, check in alternatives if check is not None]:
        if check is None:
            return
        try:
            check(name, value)
        except ConfigError as error:
            first_error = first_error or error
        else:
            return
    if first_error is not None:
        raise first_error


def _find_class(kind: Any) -> Any:
    """Return the class or classes of the values of a type; `object` where that is unclear."""
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    found = get_origin(kind) or kind
    if found is float:
        return (float, int)
    return found if inspect.isclass(found) and found is not Any else object


def _check_fixed_tuple(checks: Sequence[Check | None], name: str, values: Sequence[Any]) -> None:
    if len(values) != len(checks):
        raise ConfigError(f"{name}: expected {len(checks)} values, got {list(values)}")
    _check_items(checks, name, values)


def _check_items(checks: Iterable[Check | None], name: str, values: Any) -> None:
    for index, (check, value) in enumerate(zip(checks, values, strict=False)):
        if check is not None:
            check(f"{name}.{index}", value)


def _check_entries(check_key: Check | None, check_value: Check | None, name: str, entries: Mapping[Any, Any]) -> None:
    for key, value in entries.items():
        if check_key is not None:
            check_key(f"{name}.{key}", key)
        if check_value is not None:
            check_value(f"{name}.{key}", value)


@dataclasses.dataclass(frozen=True)
class Constraint:
    """One constraint of a type: a rule and its limit."""

    rule: _Rule
    limit: Any

    @classmethod
    def finite(cls) -> Constraint:
        """Return the constraint of a finite number."""
        return cls(_RULES[Predicate], math.isfinite)

    @property
    def expectation(self) -> str:
        """Return what an error says of it, such as 'expected at least 1'."""
        return f"expected {self.rule.words}".format(_format_limit(self.limit))

    @property
    def notation(self) -> str:
        """Return how it is written after a type, such as '>= 1'."""
        return f"{self.rule.notation} {_format_limit(self.limit)}".strip()

    def check(self, name: str, value: Any) -> None:
        """Raise ConfigError where the value violates it, or cannot be compared."""
        try:
            holds = self.rule.holds(value, self.limit)
        except (TypeError, OverflowError):  # the latter of a whole number that no float can hold
            holds = False
        if not holds:
            raise ConfigError(f"{name}: {self.expectation}, got {value!r}")


@dataclasses.dataclass(frozen=True)
class _Rule:
    """A kind of constraint.

    Attributes:
        attribute: where `annotated_types`, and pydantic's errors, have its limit.
        words: what an error expects, with a place for the limit.
        notation: how a type is written, before the limit.
        holds: whether a value and the limit keep to it.
    """

    attribute: str
    words: str
    notation: str
    holds: Callable[[Any, Any], bool]


_RULES: Mapping[type, _Rule] = {
    Gt: _Rule("gt", "a value above {}", ">", operator.gt),
    Ge: _Rule("ge", "at least {}", ">=", operator.ge),
    Lt: _Rule("lt", "a value below {}", "<", operator.lt),
    Le: _Rule("le", "at most {}", "<=", operator.le),
    MultipleOf: _Rule("multiple_of", "a multiple of {}", "a multiple of", lambda value, limit: value % limit == 0),
    MinLen: _Rule("min_length", "a length of at least {}", "of length >=", lambda value, limit: len(value) >= limit),
    MaxLen: _Rule("max_length", "a length of at most {}", "of length <=", lambda value, limit: len(value) <= limit),
    Predicate: _Rule("func", "a {} value", "", lambda value, predicate: predicate(value)),
}
"""The kinds of constraints that are checked, by their class in `annotated_types`."""


def list_constraints(kind: Any) -> Iterator[Constraint]:
    """Yield the constraints that an `Annotated` type itself has, but not those of its items."""
    if get_origin(kind) is not Annotated:
        return
    for metadata in kind.__metadata__:
        for part in metadata if isinstance(metadata, GroupedMetadata) else [metadata]:
            if rule := _RULES.get(type(part)):
                yield Constraint(rule, getattr(part, rule.attribute))


def find_constraint(limits: Mapping[str, Any]) -> Constraint | None:
    """Return the constraint whose limit is among these, by its attribute, if there is one."""
    for rule in _RULES.values():
        if rule.attribute in limits:
            return Constraint(rule, limits[rule.attribute])
    return None


def _format_limit(limit: Any) -> str:
    """Return a limit as text: a number, or the adjective of a predicate such as `isfinite`."""
    if callable(limit):
        return str(getattr(limit, "__name__", "as its type says")).removeprefix("is")
    return f"{limit:.12g}" if isinstance(limit, float) else str(limit)
