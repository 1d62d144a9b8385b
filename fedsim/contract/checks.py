"""Running the checks of a plug-in's group, and their results."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from fedsim.base.errors import FedsimError, error_reason, one_line
from fedsim.base.files import temporary_folder
from fedsim.plugins import registry
from fedsim.plugins.code_hashes import locate_error

Verdict = Literal["passed", "failed", "does not apply", "not checked"]


class ContractViolation(Exception):
    """The plug-in violates the contract; the message is one sentence that says how."""


class DoesNotApply(Exception):
    """The check requires nothing of such a plug-in; the message says why."""


class NotChecked(Exception):
    """The check could not run, so its result is unknown; the message says why."""


@dataclass(frozen=True)
class CheckResult:
    """Result of one check of a plug-in.

    Attributes:
        requirement: the first line of the check's docstring.
        verdict: `passed` and `does not apply` are good, the others are not.
        reason: a sentence; empty where the check passed.
    """

    requirement: str
    verdict: Verdict
    reason: str = ""

    @property
    def is_good(self) -> bool:
        """Return whether the plug-in keeps to the contract, as far as this check applies to it."""
        return self.verdict in ("passed", "does not apply")


@dataclass(frozen=True, eq=False, kw_only=True)
class CheckedPlugin:
    """The plug-in to check.

    Attributes:
        group: its group of entry points.
        name: its registered name.
        settings: values for settings that differ from the defaults.
        folder: an empty folder for files that a check writes.
        cache: results that checks share, so that they are computed once.
    """

    group: registry.Group
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    folder: Path
    cache: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def cls(self) -> Any:
        """Return the registered class, or the registered function of a model or data set."""
        return registry.load(self.group, self.name)

    @property
    def is_class(self) -> bool:
        """Return whether it is a plug-in class, not a function or network class that makes one."""
        return isinstance(self.cls, type) and hasattr(self.cls, registry.PLUGIN_METHODS[self.group])

    def build(self, **extra_settings: Any) -> Any:
        """Return a new instance with the settings and `extra_settings`."""
        return registry.build(self.group, self.name, {**self.settings, **extra_settings}, self.name)


Check = Callable[[CheckedPlugin], None]
"""A check raises `ContractViolation`, or whatever the plug-in raises, where the plug-in violates
it. The first line of its docstring states the requirement and is shown to the user."""


def expect(condition: object, complaint: str) -> None:
    """Raise ContractViolation with `complaint` unless `condition` is true."""
    if not condition:
        raise ContractViolation(complaint)


def load_checks(group: registry.Group) -> tuple[Check, ...]:
    """Return the checks of `group`; the first is that an instance can be made at all."""
    checks: tuple[Check, ...] = import_module(f"fedsim.contract.{group}").CHECKS
    return checks


def run_check(check: Check, subject: CheckedPlugin) -> CheckResult:
    """Run one check; an exception of the plug-in itself is a failure."""
    requirement = (inspect.getdoc(check) or "").split("\n")[0].rstrip(".")
    try:
        check(subject)
    except DoesNotApply as reason:
        return CheckResult(requirement, "does not apply", str(reason))
    except NotChecked as reason:
        return CheckResult(requirement, "not checked", one_line(str(reason)))
    except (ContractViolation, FedsimError) as error:
        return CheckResult(requirement, "failed", one_line(str(error)))
    except (Exception, SystemExit) as error:
        cls = subject.cls if isinstance(subject.cls, type) else type(subject.cls)
        return CheckResult(requirement, "failed", one_line(f"{error_reason(error)} ({locate_error(error, cls)})"))
    return CheckResult(requirement, "passed")


def run_checks(group: registry.Group, name: str, settings: Mapping[str, Any]) -> Iterator[CheckResult]:
    """Run the checks of the plug-in called `name`, only the first where no instance can be made.

    Raises:
        PluginError: the name is not registered, or two distributions did.
    """
    registry.find_distribution(group, name)
    first_check, *further_checks = load_checks(group)
    with temporary_folder() as folder:
        subject = CheckedPlugin(group=group, name=name, settings=settings, folder=folder)
        first_result = run_check(first_check, subject)
        yield first_result
        if not first_result.is_good:
            return
        for check in further_checks:
            yield run_check(check, subject)
