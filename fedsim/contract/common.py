"""What plug-ins of several groups keep to."""

from __future__ import annotations

import dataclasses
import inspect
import math
import pickle
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.attacks import Paper
from fedsim.contract.checks import Broken, DoesNotApply, Subject, expect
from fedsim.errors import FedsimError
from fedsim.plugins import registry


def is_made(subject: Subject) -> None:
    """It loads, and is made from its settings."""
    subject.build()


def is_a_frozen_dataclass(subject: Subject) -> None:
    """It is a frozen dataclass, and its settings are keyword arguments."""
    cls = _class_of(subject)
    about = vars(cls).get("__dataclass_params__")
    expect(about is not None, f"{cls.__name__} is no dataclass; decorate it with @dataclass(frozen=True, kw_only=True)")
    expect(about.frozen, f"{cls.__name__} is not frozen; decorate it with @dataclass(frozen=True, kw_only=True)")
    for field in dataclasses.fields(cls):
        expect(field.kw_only, f"setting '{field.name}' is no keyword argument; say kw_only=True")


def comes_back_the_same(subject: Subject) -> None:
    """It is the same after repr, pickle, and being made again from its own settings."""
    cls, plugin = _class_of(subject), subject.build()
    known = {**vars(sys.modules[cls.__module__]), cls.__name__: cls, "inf": math.inf, "nan": math.nan}
    settings = {field.name: getattr(plugin, field.name) for field in dataclasses.fields(cls) if field.init}
    ways: dict[str, Callable[[], Any]] = {
        "repr": lambda: eval(repr(plugin), known),
        "pickle": lambda: pickle.loads(pickle.dumps(plugin)),
        "its own settings": lambda: registry.build(subject.group, subject.name, settings, subject.name),
    }
    expect(plugin == subject.build(), "two that are made from the same settings are not equal")
    for way, again in ways.items():
        try:
            copy = again()
        except (Exception, SystemExit) as error:
            said = str(error) if isinstance(error, FedsimError) else f"{type(error).__name__}: {error}"
            raise Broken(f"it cannot be made again by {way}: {said}") from error
        expect(copy == plugin, f"made again by {way} it is {copy!r}, expected {plugin!r}")
    expect(hash(plugin) == hash(subject.build()), "two equal ones have different hashes")


def explains_itself(subject: Subject) -> None:
    """Its docstring begins with a sentence, explains each setting, and of a method cites its source."""
    cls = _class_of(subject)
    text = inspect.getdoc(cls) or ""
    expect(
        text.split("\n")[0].endswith("."), "the first line of its docstring is no sentence that ends with a full stop"
    )
    explained = "\n".join(inspect.getdoc(base) or "" for base in cls.__mro__)
    for field in dataclasses.fields(cls):
        said = re.search(rf"^\s+{field.name}: ", explained, re.MULTILINE)
        expect(said, f"its docstring does not explain the setting '{field.name}' in a line '{field.name}: ...'")
    if hasattr(cls, "paper") or subject.group in ("attacks", "defenses"):
        expect("References:" in text, "its docstring has no part 'References:'")
        expect(isinstance(getattr(cls, "paper", None), Paper), "its class has no 'paper', a fedsim.Paper")


_SEEDS = count(1_000_003)

CHECKS = (is_made, is_a_frozen_dataclass, comes_back_the_same, explains_itself)


def _class_of(subject: Subject) -> Any:
    if not subject.is_class:
        raise DoesNotApply("it is a function or a network class, not a class of plug-ins")
    return subject.cls


@contextmanager
def global_generators_untouched() -> Iterator[None]:
    """Raise Broken where what is done within draws from a global generator, or seeds it.

    Each begins in a state of its own, so that seeding it with the same number again does not go unnoticed.
    """
    with other_global_generators(next(_SEEDS)):
        numpy, python, torchs = np.random.get_state(), random.getstate(), torch.random.get_rng_state()  # noqa: NPY002
        yield
        same = {
            "torch's": torch.equal(torch.random.get_rng_state(), torchs),
            "NumPy's": repr(np.random.get_state()) == repr(numpy),  # noqa: NPY002
            "Python's": random.getstate() == python,
        }
    for whose, unchanged in same.items():
        expect(unchanged, f"it draws from {whose} global generator, or seeds it; draw from what it is given alone")


@contextmanager
def other_global_generators(seed: int) -> Iterator[None]:
    """Do what is within after seeding the global generators with `seed`; afterwards they are as before."""
    numpy, python, torchs = np.random.get_state(), random.getstate(), torch.random.get_rng_state()  # noqa: NPY002
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.random.set_rng_state(torchs)


def same(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    """Whether these are the same tensors, to the bit; NaN is like NaN."""

    def equal(one: Tensor, other: Tensor) -> bool:
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=one.is_floating_point()).all())

    return some.keys() == others.keys() and all(equal(tensor, others[name]) for name, tensor in some.items())
