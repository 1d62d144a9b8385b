"""A pitfall of an evaluation, and the interface of the rules that find them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
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
        was_tried: whether it could be looked for; otherwise `detail` says why not, and there is no
            counter-experiment.
    """

    name: str
    title: str
    detail: str
    reason: str
    counter_experiment: str
    was_tried: bool = True


@dataclass(frozen=True, kw_only=True)
class Symptom:
    """What a rule finds in a file.

    Attributes:
        detail: sentence on where the pitfall is.
        changes: tables of an experiment file, or `sweep`, with the keys that avoid it.
        further: the same of other cells of a sweep, where one cell does not avoid it alone.
    """

    detail: str
    changes: Mapping[str, Any]
    further: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, kw_only=True)
class Untried:
    """What a rule returns that cannot look.

    Attributes:
        why: sentence that names what is missing.
    """

    why: str


class PitfallRule(ABC):
    """Rule that finds one pitfall.

    Class attributes:
        name: see `Pitfall`, as for `title` and `reason`.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    reason: ClassVar[str]

    @abstractmethod
    def find(self, design: EvaluationDesign) -> Symptom | Untried | None:
        """Return where the design has the pitfall; None where it has not.

        Nobody is told that there is no pitfall where the rule could not look.
        A sweep has it where all cells that it concerns have it: otherwise it compares both.
        """
