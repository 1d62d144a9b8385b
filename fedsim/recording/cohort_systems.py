"""Which clients' values follow from sums over cohorts: rank and row space of a matrix, in exact arithmetic.

Each answer is a row: 1 for the clients whose sum it is, 0 for the others. The value of a client
follows from the sums if and only if its unit vector is a combination of rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Row = dict[int, Fraction]
"""Numbers that are not zero, by column."""
_ZERO = 1e-9
"""Largest rounding error of a number of order 1."""
_DIGITS = 6
"""Digits to which ratios are compared."""
_NODES_OF_SEARCH = 2000
"""Most nodes of the search for a smallest group; a number of seconds would depend on the machine."""


@dataclass(frozen=True)
class Cohort:
    """Clients whose sum one answer is.

    Attributes:
        round: in which it was given.
        members: the clients, ascending; one where it answered in clear.
    """

    round: int
    members: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Change:
    """Change of one client's value by 1; which of several clients it was, answers do not tell.

    Attributes:
        clients: whose value may have changed.
        answers: `answer`, by how much they change.
        largest: by how much it breaks the identity that it breaks most; 0 where it breaks none.
        ratio: tells apart in which ratio it breaks identities; empty where it breaks none.
    """

    clients: set[int]
    answers: Floats
    largest: float = 0.0
    ratio: bytes = b""


class CohortSystem:
    """Linear system of all sums over cohorts, where clients keep their values from round to round.

    >>> system = CohortSystem([Cohort(1, (1, 2, 3)), Cohort(2, (1, 2))])
    >>> system.combine([3]) == {0: 1, 1: -1}, system.combine([1])
    (True, None)
    """

    def __init__(self, cohorts: Sequence[Cohort]) -> None:
        self.cohorts = cohorts
        self.clients = sorted({client for cohort in cohorts for client in cohort.members})
        # By its first column, each reduced row with the answers that it is a combination of.
        self._reduced: dict[int, tuple[Row, Row]] = {}
        self._identities: list[Row] = []
        for index, cohort in enumerate(cohorts):
            self._add({client: Fraction(1) for client in cohort.members}, {index: Fraction(1)})

    def _add(self, row: Row, combination: Row) -> None:
        """Reduce a row by those before it; keep it as a new row, or as an identity where nothing is left."""
        for column in [column for column in row if column in self._reduced]:
            factor = row[column]
            pivot, pivot_combination = self._reduced[column]
            row, combination = _subtract(row, factor, pivot), _subtract(combination, factor, pivot_combination)
        if not row:
            self._identities.append(combination)
            return
        first = min(row)
        scale = row[first]
        row = {column: number / scale for column, number in row.items()}
        combination = {index: number / scale for index, number in combination.items()}
        for column, (other, other_combination) in self._reduced.items():
            if first in other:
                factor = other[first]
                self._reduced[column] = (
                    _subtract(other, factor, row),
                    _subtract(other_combination, factor, combination),
                )
        self._reduced[first] = row, combination

    @property
    def rank(self) -> int:
        """Return how many sums do not follow from the others."""
        return len(self._reduced)

    def combine(self, group: Sequence[int]) -> Row | None:
        """Return the factor of each answer in a combination that is the sum over a group; None where there is none."""
        rest, combination = {client: Fraction(1) for client in group}, Row()
        for column in [column for column in rest if column in self._reduced]:
            row, row_combination = self._reduced[column]
            factor = rest[column]
            rest = _subtract(rest, factor, row)
            combination = _subtract(combination, -factor, row_combination)
        return None if rest else combination

    @cached_property
    def matrix(self) -> Floats:
        """Return `answer client`, 1 for a member and else 0."""
        columns = {client: column for column, client in enumerate(self.clients)}
        matrix = np.zeros((len(self.cohorts), len(columns)))
        for index, cohort in enumerate(self.cohorts):
            matrix[index, [columns[client] for client in cohort.members]] = 1.0
        return matrix

    @cached_property
    def identities(self) -> Floats:
        """Return `identity answer`: combinations of answers that are 0 unless some client's value changes."""
        identities = np.zeros((len(self._identities), len(self.cohorts)))
        for number, identity in enumerate(self._identities):
            identities[number] = self.to_array(identity)
        return identities

    def to_array(self, combination: Mapping[int, Fraction]) -> Floats:
        """Return `answer`, the factor of each answer."""
        factors = np.zeros(len(self.cohorts))
        for index, number in combination.items():
            factors[index] = float(number)
        return factors

    def has_check(self, client: int) -> bool:
        """Return whether a change would be noticed that makes the combination for `client` wrong.

        The changes are that of one answer, and that of the values of one or two clients, or of one
        client twice, after any rounds and by any amounts. Three such changes may cancel.
        """
        combination = self.combine([client])
        if combination is None or not len(self.identities):
            return False
        factors, identities = self.to_array(combination), self.identities
        is_checked = (np.abs(identities) > _ZERO).any(0)
        if (np.abs(factors) > _ZERO)[~is_checked].any():
            return False
        # Two changes can cancel in all identities if they break them in the same ratio.
        effects_by_ratio: dict[bytes, list[float]] = {}
        for change in self._changes:
            is_own = client in change.clients
            if not change.ratio:  # it breaks none, so that it must have no effect
                if is_own or abs(factors @ change.answers) > _ZERO:
                    return False
                continue
            # After its own change, the client has no one value.
            effect = np.nan if is_own else float(factors @ change.answers) / change.largest
            effects_by_ratio.setdefault(change.ratio, []).append(effect)
        groups = [np.array(effects) for effects in effects_by_ratio.values() if len(effects) > 1]
        return all(bool((np.abs(effects - effects[0]) <= _ZERO).all()) for effects in groups)

    @cached_property
    def _changes(self) -> list[_Change]:
        """Return what it does that one client's value changes by 1 before a round.

        Changes that answers do not tell apart stand once.
        """
        rounds = np.array([cohort.round for cohort in self.cohorts])
        changes: dict[bytes, _Change] = {}
        for number in sorted(set(rounds.tolist()))[1:]:
            for known, column in zip(self.clients, self.matrix.T, strict=True):
                answers = column * (rounds >= number)
                key = answers.tobytes()
                if answers.any() and (answers != column).any():
                    if key not in changes:
                        changes[key] = self._find_residuals(answers)
                    changes[key].clients.add(known)
        return list(changes.values())

    def _find_residuals(self, answers: Floats) -> _Change:
        residuals = self.identities @ answers
        largest = float(residuals[np.abs(residuals).argmax()])
        if abs(largest) <= _ZERO:
            return _Change(clients=set(), answers=answers)
        ratio = (residuals / largest).round(_DIGITS) + 0.0  # no negative zeros
        digest = hashlib.sha256(ratio.tobytes()).digest()
        return _Change(clients=set(), answers=answers, largest=largest, ratio=digest)

    def find_smallest_group(self, client: int) -> tuple[int, ...] | None:
        """Return a smallest group with `client` whose sum follows; None where the search takes too long.

        An integer program finds it: a 0/1 vector in the row space with as few ones as possible. Where its search
        ends early, the group follows as well, and may not be the smallest.
        """
        if client not in self.clients:
            return None
        from scipy.optimize import Bounds, LinearConstraint, milp

        basis = np.zeros((self.rank, len(self.clients)))
        columns = {known: column for column, known in enumerate(self.clients)}
        for index, (row, _) in enumerate(self._reduced.values()):
            for known, number in row.items():
                basis[index, columns[known]] = float(number)
        num_clients, rank = len(self.clients), self.rank
        low = np.concatenate([np.zeros(num_clients), np.full(rank, -np.inf)])
        high = np.concatenate([np.ones(num_clients), np.full(rank, np.inf)])
        low[columns[client]] = 1.0
        result = milp(
            np.concatenate([np.ones(num_clients), np.zeros(rank)]),
            integrality=np.concatenate([np.ones(num_clients), np.zeros(rank)]),
            bounds=Bounds(low, high),
            constraints=LinearConstraint(np.hstack([np.eye(num_clients), -basis.T]), 0.0, 0.0),
            options={"node_limit": _NODES_OF_SEARCH},
        )
        if result.x is None:
            return None
        group = tuple(known for known, chosen in zip(self.clients, result.x[:num_clients], strict=True) if chosen > 0.5)
        return group if self.combine(group) is not None else None


@lru_cache(maxsize=256)
def make_system(cohorts: tuple[Cohort, ...]) -> CohortSystem:
    """Return the system of these cohorts, once for all clients that are attacked."""
    return CohortSystem(cohorts)


def _subtract(row: Row, factor: Fraction, other: Row) -> Row:
    """Return `row - factor * other` without zeros."""
    difference = dict(row)
    for column, number in other.items():
        rest = difference.get(column, 0) - factor * number
        if rest:
            difference[column] = Fraction(rest)
        else:
            difference.pop(column, None)
    return difference
