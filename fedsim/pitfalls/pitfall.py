"""A pitfall of an evaluation, and the interface of the rules that find them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fedsim.pitfalls.design import EvaluationDesign


@dataclass(frozen=True, kw_only=True)
class Pitfall:
    """Pitfall that a file has.

    Attributes:
        name: short name, such as `one-seed`.
        title: the pitfall in a few words.
        detail: sentence on where it is in this file.
        reason: sentence on why it matters.
        counter_experiment: TOML that avoids it. Keys of the file that it does not name stay as they
            are; a table of another `name`, and a list, takes the place of the old one.
    """

    name: str
    title: str
    detail: str
    reason: str
    counter_experiment: str


@dataclass(frozen=True, kw_only=True)
class Symptom:
    """What a rule finds in a file.

    Attributes:
        detail: sentence on where the pitfall is.
        changes: tables of an experiment file, or `sweep`, with the keys that avoid it.
    """

    detail: str
    changes: Mapping[str, Any]


class PitfallRule(ABC):
    """Rule that finds one pitfall.

    Class attributes:
        name: see `Pitfall`, as for `title` and `reason`.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    reason: ClassVar[str]

    @abstractmethod
    def find(self, design: EvaluationDesign) -> Symptom | None:
        """Return where the design has the pitfall; None where it has not.

        A sweep has it where all cells that it concerns have it: otherwise it compares both.
        """
