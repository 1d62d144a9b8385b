"""Rounds in which a client's defense does not act, so that what it sends is as it would be without."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fedsim.interfaces.defense import Defense
from fedsim.interfaces.defense_checks import name_of_defense


def list_undefended_rounds(defense: Defense, rounds: Iterable[int]) -> list[int]:
    """Return those of `rounds`, counted from 1, in which the defense does not act."""
    return [number for number in rounds if not defense.acts_in(number)]


def describe_undefended_rounds(defenses: Sequence[Defense], rounds: Sequence[int]) -> list[str]:
    """Return a sentence for each defense that does not act in all of `rounds`."""
    sentences = []
    for defense in defenses:
        if undefended := list_undefended_rounds(defense, rounds):
            sentences.append(
                f"{name_of_defense(defense)} does not act in {len(undefended)} of {len(rounds)} rounds, the first of "
                f"which is round {undefended[0]}: what clients send in these, it does not hide, and scores of other "
                "rounds say nothing of it."
            )
    return sentences
