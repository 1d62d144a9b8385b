"""Checks of the evaluators of findings; findings are checked with the attacks that return them."""

from __future__ import annotations

import dataclasses
import inspect

from fedsim.audit.evaluation.evaluator import Evaluator
from fedsim.contract import common
from fedsim.contract.checks import CheckedPlugin, ContractViolation, expect
from fedsim.interfaces.findings import Finding

_PARAMETERS = {
    "check_form": ("finding", "spec"),
    "truth": ("finding", "about", "case"),
    "judge": ("finding", "about", "context"),
    "show": ("finding", "truth", "tokens", "metric"),
}


def is_an_evaluator(subject: CheckedPlugin) -> None:
    """It is an evaluator, and each of its methods can be called as fedsim calls it."""
    evaluator = subject.build()
    expect(isinstance(evaluator, Evaluator), f"{type(evaluator).__name__} does not derive from Evaluator")
    for method, parameters in _PARAMETERS.items():
        try:
            inspect.signature(getattr(evaluator, method)).bind(*parameters)
        except TypeError as error:
            call = f"{method}({', '.join(parameters)})"
            raise ContractViolation(f"'{method}' cannot be called as {call} ({error})") from error


def is_of_a_finding(subject: CheckedPlugin) -> None:
    """Its finding is a frozen dataclass that can be saved, and its kind is the registered name."""
    finding = getattr(subject.build(), "finding", None)
    is_finding = isinstance(finding, type) and issubclass(finding, Finding)
    expect(
        is_finding,
        f"its 'finding' is {finding!r}, expected a class that derives from fedsim.interfaces.findings.Finding",
    )
    assert isinstance(finding, type)
    is_frozen = dataclasses.is_dataclass(finding) and vars(finding)["__dataclass_params__"].frozen
    expect(is_frozen, f"{finding.__name__} is not a frozen dataclass")
    kind = getattr(finding, "kind", None)
    expect(
        kind == subject.name,
        f"the kind of {finding.__name__} is {kind!r}, expected {subject.name!r} as registered",
    )
    missing = ", ".join(sorted(getattr(finding, "__abstractmethods__", ())))
    expect(not missing, f"{finding.__name__} does not implement {missing}")


CHECKS = (*common.CHECKS, is_an_evaluator, is_of_a_finding)
