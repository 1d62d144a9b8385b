"""What the evaluator of a kind of finding keeps to; its findings are checked with the attacks that make them."""

from __future__ import annotations

import dataclasses
import inspect

from fedsim.contract import common
from fedsim.contract.checks import Broken, Subject, expect
from fedsim.evaluation.kind import Evaluator
from fedsim.findings import Finding

_CALLED = {
    "form": ("finding", "owed"),
    "truth": ("finding", "about", "case"),
    "judge": ("finding", "about", "bench"),
    "show": ("finding", "truth", "tokens", "metric"),
}


def is_an_evaluator(subject: Subject) -> None:
    """It is an evaluator, and each of its methods can be called as fedsim calls it."""
    evaluator = subject.build()
    expect(isinstance(evaluator, Evaluator), f"{type(evaluator).__name__} does not derive from Evaluator")
    for method, given in _CALLED.items():
        try:
            inspect.signature(getattr(evaluator, method)).bind(*given)
        except TypeError as error:
            raise Broken(f"'{method}' cannot be called as {method}({', '.join(given)}) ({error})") from error


def is_of_a_finding(subject: Subject) -> None:
    """Its finding is a frozen dataclass that can be saved, and its kind is the registered name."""
    finding = getattr(subject.build(), "finding", None)
    fits = isinstance(finding, type) and issubclass(finding, Finding)
    expect(fits, f"its 'finding' is {finding!r}, expected a class that derives from fedsim.findings.Finding")
    assert isinstance(finding, type)
    frozen = dataclasses.is_dataclass(finding) and vars(finding)["__dataclass_params__"].frozen
    expect(frozen, f"{finding.__name__} is no frozen dataclass")
    got = getattr(finding, "kind", None)
    expect(got == subject.name, f"the kind of {finding.__name__} is {got!r}, expected {subject.name!r} as registered")
    missing = ", ".join(sorted(getattr(finding, "__abstractmethods__", ())))
    expect(not missing, f"{finding.__name__} does not implement {missing}")


CHECKS = (*common.CHECKS, is_an_evaluator, is_of_a_finding)
