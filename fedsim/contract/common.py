"""Checks for plug-ins of several groups, and helpers of checks."""

from __future__ import annotations

import dataclasses
import inspect
import math
import pickle
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Annotated, Any, Literal, get_args, get_origin

import numpy as np
import torch
from torch import Tensor

from fedsim.base.constraints import Constraint, field_types, list_constraints, make_check
from fedsim.base.errors import ConfigError, error_reason
from fedsim.contract.checks import CheckedPlugin, ContractViolation, DoesNotApply, expect
from fedsim.interfaces.attack import Paper
from fedsim.plugins import registry


def build_instance(subject: CheckedPlugin, cls: type) -> Any:
    """Build the plug-in; raise ContractViolation where it does not derive from `cls`, a public name of fedsim."""
    plugin = subject.build()
    if not isinstance(plugin, cls):
        raise ContractViolation(f"{type(plugin).__name__} does not derive from fedsim.{cls.__name__}")
    return plugin


def is_made(subject: CheckedPlugin) -> None:
    """It loads, and is made from its settings."""
    subject.build()


def is_a_frozen_dataclass(subject: CheckedPlugin) -> None:
    """It is a frozen dataclass, and its settings are keyword arguments."""
    cls = _class_of(subject)
    parameters = vars(cls).get("__dataclass_params__")
    remedy = "decorate it with @dataclass(frozen=True, kw_only=True)"
    expect(parameters is not None, f"{cls.__name__} is no dataclass; {remedy}")
    expect(parameters.frozen, f"{cls.__name__} is not frozen; {remedy}")
    for field in dataclasses.fields(cls):
        expect(field.kw_only, f"setting '{field.name}' is not a keyword argument; say kw_only=True")


def survives_copying(subject: CheckedPlugin) -> None:
    """It is the same after repr, pickle, and being made again from its own settings."""
    cls, plugin = _class_of(subject), subject.build()
    namespace = {**vars(sys.modules[cls.__module__]), cls.__name__: cls, "inf": math.inf, "nan": math.nan}
    settings = {field.name: getattr(plugin, field.name) for field in dataclasses.fields(cls) if field.init}
    copiers: dict[str, Callable[[], Any]] = {
        "repr": lambda: eval(repr(plugin), namespace),
        "pickle": lambda: pickle.loads(pickle.dumps(plugin)),
        "its own settings": lambda: registry.build(subject.group, subject.name, settings, subject.name),
    }
    expect(plugin == subject.build(), "two that are made from the same settings are not equal")
    for method, make_copy in copiers.items():
        try:
            copy = make_copy()
        except (Exception, SystemExit) as error:
            raise ContractViolation(f"it cannot be reproduced by {method}: {error_reason(error)}") from error
        expect(copy == plugin, f"reproduced by {method} it is {copy!r}, expected {plugin!r}")
    expect(hash(plugin) == hash(subject.build()), "two equal ones have different hashes")


def is_documented(subject: CheckedPlugin) -> None:
    """Its docstring begins with a sentence, explains each setting, and cites a method's source."""
    cls = _class_of(subject)
    text = inspect.getdoc(cls) or ""
    is_sentence = text.split("\n")[0].endswith(".")
    expect(is_sentence, "the first line of its docstring is not a sentence that ends with a full stop")
    # Settings may be explained by the class that declares them.
    texts = "\n".join(inspect.getdoc(base) or "" for base in cls.__mro__)
    for field in dataclasses.fields(cls):
        line = re.search(rf"^\s+{field.name}: ", texts, re.MULTILINE)
        expect(line, f"its docstring does not explain the setting '{field.name}' in a line '{field.name}: ...'")
    if hasattr(cls, "paper") or subject.group in ("attacks", "defenses"):
        expect("References:" in text, "its docstring has no part 'References:'")
        expect(isinstance(getattr(cls, "paper", None), Paper), "its class has no 'paper', a fedsim.Paper")


_SEEDS = count(1_000_003)


def _class_of(subject: CheckedPlugin) -> Any:
    if not subject.is_class:
        raise DoesNotApply("it is a function or a network class, not a class of plug-ins")
    return subject.cls


@contextmanager
def expect_untouched_generators() -> Iterator[None]:
    """Raise ContractViolation where the block draws from a global generator, or seeds one.

    Each block starts from another state, so that seeding with the same number twice is noticed.
    """
    with seed_global_generators(next(_SEEDS)):
        numpy_state = np.random.get_state()  # noqa: NPY002
        python_state, torch_state = random.getstate(), torch.random.get_rng_state()
        yield
        is_unchanged = {
            "torch's": torch.equal(torch.random.get_rng_state(), torch_state),
            "NumPy's": repr(np.random.get_state()) == repr(numpy_state),  # noqa: NPY002
            "Python's": random.getstate() == python_state,
        }
    for owner, unchanged in is_unchanged.items():
        expect(unchanged, f"it draws from {owner} global generator, or seeds it; draw from what it is given alone")


@contextmanager
def seed_global_generators(seed: int) -> Iterator[None]:
    """Seed the global generators with `seed` for the block, and restore their states afterwards."""
    numpy_state = np.random.get_state()  # noqa: NPY002
    python_state, torch_state = random.getstate(), torch.random.get_rng_state()
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        torch.random.set_rng_state(torch_state)


def are_equal(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Return whether both hold exactly the same tensors; NaN equals NaN."""
    if first.keys() != second.keys():
        return False
    return all(_is_equal(tensor, second[name]) for name, tensor in first.items())


def _is_equal(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return bool(torch.isclose(first, second, rtol=0, atol=0, equal_nan=first.is_floating_point()).all())


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


CHECKS = (is_made, is_a_frozen_dataclass, keeps_to_its_ranges, survives_copying, is_documented)
