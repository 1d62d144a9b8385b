"""What `fedsim show` and `fedsim list` say of a defense that somebody else wrote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from fedsim.interfaces.attack import Paper
from fedsim.interfaces.defense import Defense, Guarantee, Participation
from fedsim.interfaces.local_context import LocalContext
from fedsim.plugins import descriptions, registry
from fedsim.recording.wire_format import State


@dataclass(frozen=True, kw_only=True)
class Silent(Defense):
    """Say nothing."""

    def on_update(self, update: State, context: LocalContext) -> State:
        del context
        return update


@dataclass(frozen=True, kw_only=True)
class Proves(Silent):
    """Prove something, and say against whom."""

    against: ClassVar[str] = "the server"

    def guarantee(self, participation: Participation, delta: float) -> Guarantee:
        del participation
        return Guarantee(epsilon=1.0, delta=delta, neighbours="none", accountant="none")


@dataclass(frozen=True, kw_only=True)
class Guess:
    """No defense."""

    paper: ClassVar[Paper] = Paper(title="An example", authors="Nobody", venue="nowhere", year=2026)
    promise: ClassVar[str] = "to guess well"


@pytest.mark.parametrize(
    ("group", "cls", "expected"),
    [
        ("defenses", Silent, ["promises: no formal guarantee"]),
        ("defenses", Proves, ["promises: a guarantee, which the report of a run states", "against: the server"]),
        ("attacks", Guess, []),
    ],
)
def test_a_defense_states_what_it_says_and_denies_no_guarantee_that_it_has(
    group: Any, cls: type, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Entry:
        dist = None

    monkeypatch.setattr(registry, "find_entry_point", lambda group, name: Entry)
    monkeypatch.setattr(registry, "load", lambda group, name: cls)
    assert descriptions.describe_plugin(group, "theirs").statement == expected
