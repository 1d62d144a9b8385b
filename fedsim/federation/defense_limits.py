"""What scores do not say of a client's defense, though a table of them may look as if they did."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fedsim.interfaces.defense import Defense, overrides
from fedsim.interfaces.defense_checks import name_of_defense


def list_undefended_rounds(defense: Defense, rounds: Iterable[int]) -> list[int]:
    """Return those of `rounds`, counted from 1, in which the defense does not act."""
    return [number for number in rounds if not defense.acts_in(number)]


def find_open_rounds(defenses: Sequence[Defense], rounds: Sequence[int]) -> list[int]:
    """Return those of `rounds` in which one of the defenses does not act."""
    return sorted({number for defense in defenses for number in list_undefended_rounds(defense, rounds)})


def describe_defense_limits(defenses: Sequence[Defense], rounds: Sequence[int]) -> list[str]:
    """Return a sentence for each defense that does not act in all of `rounds`, or trains on changed examples."""
    sentences = []
    for defense in defenses:
        name = name_of_defense(defense)
        if undefended := list_undefended_rounds(defense, rounds):
            sentences.append(
                f"{name} does not act in {len(undefended)} of {len(rounds)} rounds, the first of which is round "
                f"{undefended[0]}: messages of these rounds are unprotected, and scores of other rounds say nothing "
                "about them."
            )
        if overrides(defense, "on_batch"):
            sentences.append(
                f"{name} changes the examples that clients train on, and claims are compared with them as they were: "
                "a low score may be of a claim that shows a changed example and so gives the true one away."
            )
    return sentences
