"""Texts that say exactly which rounds an attack read, as findings and tables of scores have them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fedsim.base.errors import one_line

_ROUNDS = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18})(?: by ([1-9][0-9]{0,17}))?)?")
_MAX_SHOWN = 30
"""Most characters shown of a text that is not one of rounds."""
_MAX_ROUNDS = 1 << 20
"""Most rounds in a row that a text may say, since a changed file may say any."""


def write_rounds(rounds: Iterable[int]) -> str:
    """Return attacked rounds as one text, as the column `round` has it: exactly these, and no others between.

    >>> write_rounds([2]), write_rounds([1, 2, 3, 7]), write_rounds([1, 3, 5])
    ('2', '1-3+7', '1-5 by 2')
    """
    numbers, parts = sorted(set(rounds)), []
    while numbers:
        step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
        count = 1
        while count < len(numbers) and numbers[count] - numbers[count - 1] == step:
            count += 1
        if step > 1 and count == 2:  # two rounds apart are no row of rounds
            count = 1
        span = str(numbers[0]) if count == 1 else f"{numbers[0]}-{numbers[count - 1]}"
        parts.append(f"{span} by {step}" if step > 1 and count > 1 else span)
        numbers = numbers[count:]
    return "+".join(parts)


def parse_rounds(text: str) -> list[int]:
    """Return the rounds that a text of `write_rounds` says; raise ValueError where it is none.

    >>> parse_rounds("2"), parse_rounds("1-3+7"), parse_rounds("1-5 by 2")
    ([2], [1, 2, 3, 7], [1, 3, 5])
    """
    rounds: list[int] = []
    for part in text.split("+"):
        match = _ROUNDS.fullmatch(part)
        first, last, step = match.groups() if match else (0, -1, 1)
        numbers = range(int(first), int(last or first) + 1, int(step or 1))
        if not 0 < len(numbers) <= _MAX_ROUNDS:
            raise ValueError(f"has {one_line(text)[:_MAX_SHOWN]!r} in place of rounds")
        rounds += numbers
    return rounds
