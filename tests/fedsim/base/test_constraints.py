"""A range in the type of a setting holds in Python as in an experiment file, in the same words."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
import pytest
from annotated_types import Ge, Gt, Interval, Le, Len, MaxLen, MinLen, MultipleOf, Predicate
from pydantic import TypeAdapter

from fedsim.base import constraints
from fedsim.base.constraints import (
    CheckedSettings,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    PositiveShareBelowOne,
    Share,
    ShareBelowOne,
    check_field_constraints,
    make_check,
)
from fedsim.base.errors import ConfigError
from fedsim.plugins import registry

if TYPE_CHECKING:
    from nowhere import Unknown

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("kind", "accepted", "refused"),
    [
        (FiniteFloat, [-1e300, 0.0], [INF, -INF, NAN]),
        (PositiveFloat, [1e-300, 1e300], [0.0, -1.0, INF, NAN]),
        (NonNegativeFloat, [0.0, 1e300], [-1e-300, INF, NAN]),
        (PositiveInt, [1, 1 << 70], [0, -1]),
        (NonNegativeInt, [0, 1], [-1]),
        (Share, [0.0, 1.0], [-1e-9, 1.1, NAN]),
        (PositiveShare, [1e-9, 1.0], [0.0, 1.1, NAN]),
        (ShareBelowOne, [0.0, 0.9], [-1e-9, 1.0, NAN]),
        (PositiveShareBelowOne, [1e-9, 0.9], [0.0, 1.0, NAN]),
        (PositiveInt | None, [None, 1], [0]),
        (PositiveInt | Literal["all"], [1, "all"], [0, "every"]),
        (dict[Literal["a"], Share], [{}, {"a": 1.0}], [{"a": 2.0}]),
        (frozenset[PositiveInt], [frozenset(), frozenset({1})], [frozenset({0})]),
        (Literal["sum", "mean"], ["sum"], ["max"]),
        (tuple[PositiveInt, ...], [(), (1, 2)], [(1, 0)]),
        (list[PositiveInt], [[1, 2]], [[1, 0]]),
        (tuple[PositiveInt, Share], [(5, 0.5)], [(5, 5.0), (0, 0.5)]),
        (tuple[PositiveInt, ...] | None, [None, (1,)], [(0,)]),
        (Annotated[tuple[int, ...], MinLen(1)], [(0,)], [()]),
        (Annotated[str, MaxLen(2)], ["ab"], ["abc"]),
        (Annotated[tuple[int, ...], Len(1, 2)], [(1, 2)], [(), (1, 2, 3)]),
        (Annotated[float, Interval(gt=-1, le=1)], [1.0, 0.0], [-1.0, 2.0]),
        (Annotated[int, MultipleOf(2)], [4], [5]),
        (Annotated[str, Predicate(str.islower)], ["a"], ["A"]),
    ],
)
def test_a_type_accepts_and_refuses_the_same_values_in_python_and_in_a_file(
    kind: Any, accepted: list[Any], refused: list[Any]
) -> None:
    check = make_check(kind)
    assert check is not None
    for value in accepted:
        check("x", value)
        TypeAdapter(kind).validate_python(value)
    for value in refused:
        with pytest.raises(ConfigError, match=r"^x(\.\w)?: expected .*, got "):
            check("x", value)
        with pytest.raises(ValueError, match="validation error"):
            TypeAdapter(kind).validate_python(value)


@pytest.mark.parametrize("kind", [int, float | None, tuple[str, ...], Mapping[str, Any], Any])
def test_a_type_without_a_range_needs_no_check(kind: Any) -> None:
    assert make_check(kind) is None


def test_each_alias_is_tested() -> None:
    names = {name for name in constraints.__all__ if isinstance(getattr(constraints, name), type(Share))}
    assert names <= set(globals())
    assert len(names) == 9


@dataclass(frozen=True, kw_only=True)
class Base(CheckedSettings):
    count: PositiveInt = 3
    share: PositiveShareBelowOne = 0.5
    rate: PositiveFloat | None = None
    sizes: Annotated[tuple[NonNegativeInt, ...], MinLen(1)] = (1,)
    mode: Literal["sum", "mean", "max"] = "sum"
    about: ClassVar[Unknown]


@dataclass(frozen=True, kw_only=True)
class Derived(Base):
    count: Annotated[int, Ge(10)] = 10
    low: float = 0.0
    high: Annotated[float, Le(5)] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low >= self.high:
            raise ConfigError(f"low: expected less than high = {self.high}, got {self.low}")


@pytest.mark.parametrize(
    ("settings", "key", "sentence"),
    [
        ({"count": 9}, "count", "expected at least 10, got 9"),
        ({"share": 0.0}, "share", "expected a value above 0, got 0.0"),
        ({"share": 1.0}, "share", "expected a value below 1, got 1.0"),
        ({"rate": INF}, "rate", "expected a finite value, got inf"),
        ({"rate": NAN}, "rate", "expected a finite value, got nan"),
        ({"rate": -2.0}, "rate", "expected a value above 0, got -2.0"),
        ({"sizes": (1, -1)}, "sizes.1", "expected at least 0, got -1"),
        ({"high": 6.0}, "high", "expected at most 5, got 6.0"),
    ],
)
def test_a_setting_is_refused_in_the_same_words_wherever_it_comes_from(
    settings: dict[str, Any], key: str, sentence: str
) -> None:
    routes = {
        f"{key}: {sentence}": (lambda: Derived(**settings), lambda: replace(Derived(), **settings)),
        f"here.{key}: {sentence}": (lambda: registry.construct(Derived, "it", settings, "here"),),
    }
    for expected, makers in routes.items():
        for make in makers:
            with pytest.raises(ConfigError) as caught:
                make()
            assert str(caught.value) == expected


def test_words_and_lengths_are_refused_too() -> None:
    with pytest.raises(ConfigError, match=r"^mode: expected 'sum', 'mean' or 'max', got 'min'$"):
        Base(mode="min")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^here\.mode: input should be 'sum', 'mean' or 'max', got 'min'$"):
        registry.construct(Base, "it", {"mode": "min"}, "here")
    with pytest.raises(ConfigError, match=r"^sizes: expected a length of at least 1, got \(\)$"):
        Base(sizes=())
    with pytest.raises(ConfigError, match=r"^here\.sizes: expected a length of at least 1, got \[\]$"):
        registry.construct(Base, "it", {"sizes": []}, "here")


def test_what_cannot_be_compared_is_refused_and_not_an_error_of_python() -> None:
    with pytest.raises(ConfigError, match=r"^count: expected at least 1, got 'many'$"):
        Base(count="many")  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", [np.int64(0), np.float32(-1), "0.1", Fraction(-1)])
def test_a_value_of_none_of_its_types_has_to_keep_to_their_ranges(rate: Any) -> None:
    with pytest.raises(ConfigError, match=r"^rate: expected a (finite value|value above 0), got "):
        Base(rate=rate)
    assert Base(rate=np.float32(1)).rate == 1  # type: ignore[arg-type]
    assert Base(rate=None).rate is None


def test_the_keys_of_a_table_are_checked_as_its_values_are() -> None:
    check = make_check(Mapping[Literal["a"], int])
    assert check is not None
    with pytest.raises(ConfigError, match=r"^x\.b: expected 'a', got 'b'$"):
        check("x", {"b": 1})


def test_a_whole_number_beyond_all_floats_is_refused_and_not_an_error_of_python() -> None:
    with pytest.raises(ConfigError, match=r"^rate: expected a finite value, got 1000"):
        Base(rate=10**400)


def test_checks_across_fields_come_after_those_of_each() -> None:
    with pytest.raises(ConfigError, match=r"^low: expected less than high = 1.0, got 2.0$"):
        Derived(low=2.0)
    with pytest.raises(ConfigError, match=r"^high: expected at most 5, got 6.0$"):
        Derived(low=7.0, high=6.0)


def test_a_subclass_may_widen_a_range() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Wide(Base):
        count: int = 0

    assert Wide().count == 0


def test_a_type_for_type_checkers_alone_leaves_the_other_fields_checked() -> None:
    @dataclass
    class Mixed:
        other: Unknown = None
        count: PositiveInt = 0
        computed: PositiveInt = field(init=False, default=0)

    with pytest.raises(ConfigError, match=r"^there\.count: expected at least 1, got 0$"):
        check_field_constraints(Mixed(), "there.")
    check_field_constraints(Mixed(count=1))


def test_a_function_of_a_stranger_is_checked_by_its_annotations() -> None:
    def make(*, width: Annotated[float, Gt(0)], depth: PositiveInt = 1) -> tuple[float, int]:
        return width, depth

    assert registry.construct(make, "it", {"width": 0.5}, "here") == (0.5, 1)
    with pytest.raises(ConfigError, match=r"^here\.width: expected a value above 0, got 0"):
        registry.construct(make, "it", {"width": 0}, "here")
    with pytest.raises(ConfigError, match=r"^here\.depth: expected at least 1, got -3$"):
        registry.construct(make, "it", {"width": 0.5, "depth": -3}, "here")


def test_constraints_import_neither_pydantic_nor_torch() -> None:
    code = "import sys, fedsim.base.constraints; sys.exit(bool({'pydantic', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
