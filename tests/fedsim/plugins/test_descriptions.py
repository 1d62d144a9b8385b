"""What `fedsim show` and `fedsim list` say of a plug-in that somebody else wrote."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
from annotated_types import MinLen

from fedsim.base.constraints import PositiveFloat, PositiveInt, ShareBelowOne
from fedsim.base.papers import cite
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
    """No defense.

    References:
        As [Zhu2019], Sect. 4, does, and [Nobody1999] does not.
    """

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
    _register_for_test(cls, monkeypatch)
    assert descriptions.describe_plugin(group, "theirs").statement == expected


def test_the_papers_that_a_docstring_quotes_are_shown_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    _register_for_test(Guess, monkeypatch)
    assert descriptions.describe_plugin("attacks", "theirs").papers == [
        f"[Zhu2019] {cite('Zhu2019')} {cite('Zhu2019').url}",
        "Nobody: An example. nowhere, 2026.",
    ]


def test_a_plugin_s_own_paper_is_not_shown_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guess, "paper", cite("Zhu2019"))
    _register_for_test(Guess, monkeypatch)
    (shown,) = descriptions.describe_plugin("attacks", "theirs").papers
    assert shown.startswith("[Zhu2019] Zhu, Liu, Han: ")


@dataclass(frozen=True, kw_only=True)
class Ranged(Silent):
    """Have settings with ranges."""

    clip: PositiveFloat | None = None
    layers: Annotated[tuple[PositiveInt, ...], MinLen(1)] = (1,)
    share: ShareBelowOne = 0.5
    mode: Literal["sum", "mean"] = "sum"
    scales: tuple[float, ...] = ()


def test_the_range_of_a_setting_stands_beside_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    _register_for_test(Ranged, monkeypatch)
    assert descriptions.describe_plugin("defenses", "theirs").settings == [
        ["clip", "finite float > 0 | None", "None"],
        ["layers", "tuple[int >= 1, ...] of length >= 1", "(1,)"],
        ["share", "float >= 0, < 1", "0.5"],
        ["mode", "Literal['sum', 'mean']", "'sum'"],
        ["scales", "tuple[float, ...]", "()"],
    ]


def test_a_changed_bibliography_outdates_the_cached_descriptions(monkeypatch: pytest.MonkeyPatch) -> None:
    names, real = list[str](), Path.stat
    monkeypatch.setattr(Path, "stat", lambda path: names.append(path.name) or real(path))
    descriptions._cache_key.__wrapped__()
    assert "papers.bib" in names


def _register_for_test(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the registry find `cls` as a stranger's plug-in, whatever the name."""

    class Entry:
        dist = None

    monkeypatch.setattr(registry, "find_entry_point", lambda group, name: Entry)
    monkeypatch.setattr(registry, "load", lambda group, name: cls)
