"""What a check is, what it says, and which checks there are for a plug-in."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from fedsim.errors import FedsimError, one_line, what_it_said
from fedsim.files import fresh_folder
from fedsim.plugins import registry
from fedsim.plugins.code import place_of

Verdict = Literal["passed", "failed", "does not apply", "not checked"]


class Broken(Exception):
    """The plug-in does not keep to the contract; says how, in one sentence."""


class DoesNotApply(Exception):
    """The check asks for nothing of such a plug-in; says why."""


class NotChecked(Exception):
    """The check could not be made, so that nothing is known; says why."""


@dataclass(frozen=True)
class Outcome:
    """What one check says of a plug-in.

    Attributes:
        check: what it asks for.
        verdict: only `passed` and `does not apply` are well.
        why: a sentence; empty where the check passed.
    """

    check: str
    verdict: Verdict
    why: str = ""

    @property
    def well(self) -> bool:
        """Whether nothing is wrong and nothing remains unknown."""
        return self.verdict in ("passed", "does not apply")


@dataclass(frozen=True, eq=False, kw_only=True)
class Subject:
    """The plug-in to check.

    Attributes:
        group: its group of entry points.
        name: its registered name.
        settings: what differs from its defaults.
        folder: an empty one, for what a check has to write.
        kept: what one check leaves for the next ones, so that it is computed once.
    """

    group: registry.Group
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    folder: Path
    kept: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def cls(self) -> Any:
        """The class, or of a model or a data set the function, that is registered."""
        return registry.load(self.group, self.name)

    @property
    def is_class(self) -> bool:
        """Whether it is a class of plug-ins; otherwise calling it makes the network or the data set."""
        return isinstance(self.cls, type) and hasattr(self.cls, registry.OFFERS[self.group])

    def build(self, **further: Any) -> Any:
        """A new one, made from the settings and `further` ones."""
        return registry.build(self.group, self.name, {**self.settings, **further}, self.name)


Check = Callable[[Subject], None]
"""Raises `Broken`, or whatever the plug-in raises, where the plug-in does not keep to it. The first line of its
docstring says what it asks for."""


def expect(holds: object, complaint: str) -> None:
    """Raise Broken with `complaint` unless something holds."""
    if not holds:
        raise Broken(complaint)


def checks_of(group: registry.Group) -> tuple[Check, ...]:
    """The checks of the plug-ins of `group`; the first one is whether a plug-in can be made at all."""
    found: tuple[Check, ...] = import_module(f"fedsim.contract.{group}").CHECKS
    return found


def outcome(check: Check, subject: Subject) -> Outcome:
    """What `check` says of `subject`; what the plug-in itself raises is a failure."""
    asked = (inspect.getdoc(check) or "").split("\n")[0].rstrip(".")
    try:
        check(subject)
    except DoesNotApply as reason:
        return Outcome(asked, "does not apply", str(reason))
    except NotChecked as reason:
        return Outcome(asked, "not checked", one_line(str(reason)))
    except (Broken, FedsimError) as error:
        return Outcome(asked, "failed", one_line(str(error)))
    except (Exception, SystemExit) as error:
        kind = subject.cls if isinstance(subject.cls, type) else type(subject.cls)
        return Outcome(asked, "failed", one_line(f"{what_it_said(error)} ({place_of(error, kind)})"))
    return Outcome(asked, "passed")


def examine(group: registry.Group, name: str, settings: Mapping[str, Any]) -> Iterator[Outcome]:
    """What each check says of the plug-in called `name`; nothing after the first where it cannot be made.

    Raises:
        PluginError: nobody registered the name, or two distributions did.
    """
    registry.owner(group, name)
    first, *others = checks_of(group)
    with fresh_folder() as folder:
        subject = Subject(group=group, name=name, settings=settings, folder=folder)
        made = outcome(first, subject)
        yield made
        for check in others if made.well else ():
            yield outcome(check, subject)
