"""What follows from answers for one client: its values, how sure they are, and who joined it or left."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from fedsim.recording.cohort_answers import QuestionGroup, is_histogram
from fedsim.recording.cohort_systems import CohortSystem, Floats, make_system

UNDETERMINED, UNCHECKED, EXACT = 0, 1, 2
"""Standing of a claim. The answers do not determine the value; they do if clients kept their values; they do,
and changes would have been noticed (`CohortSystem.has_check`), or the client answered in clear."""
_NO_SUM = re.compile(
    r"(^|[-_ ./])(min|max|minimum|maximum|median|quantiles?|percentiles?|q\d+|p\d+|std|var|variance)$", re.IGNORECASE
)
"""Name of an answer that is no sum over people: an order statistic, or a deviation."""
COUNT_NAME = re.compile(r"(^|[-_ ./])(count|num)$", re.IGNORECASE)
"""Name of an answer that is a number of people."""
_MEAN = re.compile(r"(mean|average|avg)$", re.IGNORECASE)
"""Name of an answer that is a mean over people, and no sum."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AnswerClaim:
    """What one client answered to one question in one round, as follows from all answers.

    Attributes:
        value: the answer; where it is not determined, the mean of its cohort.
        standing: `UNDETERMINED`, `UNCHECKED` or `EXACT`.
        spread: standard deviation of the error that noise and rounding leave, one for each number.
        group: clients of a smallest group with it whose sum is determined; empty where none is known.
        group_sum: that sum, which holds if nobody's values changed.
    """

    round: int
    value: Floats
    standing: int
    spread: Floats
    group: tuple[int, ...]
    group_sum: Floats


def claim_answers(group: QuestionGroup, client: int) -> tuple[dict[str, list[AnswerClaim]], list[int]]:
    """Claim what a client answered to each question, in each round in which it took part.

    1. What it answered alone is in clear.
    2. Solve the system of all sums. Where it is inconsistent, clients' values changed: begin a new
       system with the first round from which on they do not fit, and claim of systems of several
       rounds only what is checked, and that not as exact. A round that contradicts itself
       determines nothing.
    3. Where the system does not determine the client, claim the mean of its cohort.

    Returns:
        The claims by question, and the rounds with which a new system begins, or which contradict themselves.
    """
    claims: dict[str, list[AnswerClaim]] = {name: [] for name in group.answers}
    windows = list(_split_into_consistent(group))
    starts = [group.cohorts[chosen[0]].round for _, chosen in windows[1:]]
    for system, chosen in windows:
        is_consistent = group.is_consistent(system, chosen)
        if not is_consistent:  # a system of one round, as longer ones are cut
            starts.append(group.cohorts[chosen[0]].round)
        if client not in system.clients:
            continue
        standing = _find_standing(system, client, has_changes=len(windows) > 1) if is_consistent else UNDETERMINED
        smallest = (client,) if standing else system.find_smallest_group(client) or ()
        view = _ClientView(
            group=group, system=system, chosen=chosen, client=client, standing=standing, smallest=smallest
        )
        for name, given in claims.items():
            given += [view.claim(name, number) for number in view.rounds]
    for given in claims.values():
        given.sort(key=lambda claim: claim.round)
    return claims, sorted(set(starts))


def _split_into_consistent(group: QuestionGroup) -> Iterator[tuple[CohortSystem, list[int]]]:
    """Yield systems of successive rounds, each as long as it is consistent, with the answers in it."""
    cohorts = group.cohorts
    rounds = sorted({cohort.round for cohort in cohorts})
    whole = list(range(len(cohorts)))
    system = make_system(tuple(cohorts))
    if group.is_consistent(system, whole):
        yield system, whole
        return
    chosen: list[int] = []
    for number in rounds:
        added = [index for index in whole if cohorts[index].round == number]
        longer = make_system(tuple(cohorts[index] for index in [*chosen, *added]))
        if chosen and not group.is_consistent(longer, [*chosen, *added]):
            yield make_system(tuple(cohorts[index] for index in chosen)), chosen
            chosen = []
        chosen = [*chosen, *added]
    yield make_system(tuple(cohorts[index] for index in chosen)), chosen


def _find_standing(system: CohortSystem, client: int, *, has_changes: bool) -> int:
    """Return the standing of what a system says of a client."""
    if system.combine([client]) is None:
        return UNDETERMINED
    # Values that changed once may have changed again within a system, in ways that cancel in its checks.
    may_change = has_changes and len({cohort.round for cohort in system.cohorts}) > 1
    if system.has_check(client):
        return UNCHECKED if may_change else EXACT
    return UNDETERMINED if may_change else UNCHECKED


@dataclass(frozen=True, kw_only=True, eq=False)
class _ClientView:
    """What a system of answers says of one client.

    Attributes:
        group: all answers.
        system: of those that are `chosen`.
        chosen: their indices.
        client: the client, which is in the system.
        standing: of what the system says of it.
        smallest: a smallest group with it whose sum is determined.
    """

    group: QuestionGroup
    system: CohortSystem
    chosen: Sequence[int]
    client: int
    standing: int
    smallest: tuple[int, ...]

    @property
    def rounds(self) -> list[int]:
        """Return the rounds in which the client took part, ascending."""
        return sorted({self.group.cohorts[index].round for index in self._find_answers(None)})

    @cached_property
    def _group_factors(self) -> Floats:
        """Return `answer`, the factors of the sum over the smallest group."""
        return self._combine(self.smallest)

    def _combine(self, group: Sequence[int]) -> Floats:
        return self.system.to_array(self.system.combine(group) or {})

    @cached_property
    def _solutions(self) -> dict[str, tuple[Floats, Floats]]:
        """Return by question the solutions so far, which are those of all rounds."""
        return {}

    def _find_answers(self, number: int | None) -> list[int]:
        """Return the answers with the client in them, of one round or of all."""
        cohorts = self.group.cohorts
        own = [index for index in self.chosen if self.client in cohorts[index].members]
        return [index for index in own if number in (None, cohorts[index].round)]

    def claim(self, name: str, number: int) -> AnswerClaim:
        """Claim the answer to one question in one round."""
        errors, all_sums, own = self.group.errors, self.group.sums[name], self._find_answers(number)
        alone = [index for index in own if self.group.cohorts[index].members == (self.client,)]
        answer = self.group.answers[name][(alone or own)[0]]
        is_whole = name in self.group.counts
        standing, smallest = self.standing, self.smallest
        if alone and not (errors.noise and standing == EXACT):
            value, standing, smallest = answer.mean.reshape(-1), EXACT, (self.client,)
            spread = np.full(value.shape, errors.noise)
        elif standing == UNDETERMINED:
            value = answer.mean.reshape(-1).round() if is_whole else answer.mean.reshape(-1)
            spread = np.zeros(value.shape)
        else:
            if name not in self._solutions:
                self._solutions[name] = self._solve(name)
            value, spread = self._solutions[name]
        if standing != UNDETERMINED:
            spread = np.sqrt(spread**2 + errors.rounded_to**2 / 12)
            is_cut = (value == 0) & (errors.smallest_cell > 0)
            spread = np.where(is_cut, np.maximum(spread, errors.smallest_cell / 2), spread)
        factors = self._group_factors if smallest == self.smallest else self._combine(smallest)
        return AnswerClaim(
            round=number,
            value=value.reshape(answer.mean.shape),
            standing=standing,
            spread=spread.reshape(answer.mean.shape),
            group=smallest,
            group_sum=(factors @ all_sums[list(self.chosen)]).reshape(answer.mean.shape),
        )

    def _solve(self, name: str) -> tuple[Floats, Floats]:
        """Return the client's answer and the standard deviation of its error."""
        indices = list(self.chosen)
        variances, all_sums = self.group.error_variances(name)[indices], self.group.sums[name]
        factors = _combine_best(self.system, self.client, variances)
        weight = max(1.0, float((factors @ self.group.weights[indices]).round()))
        total = factors @ all_sums[indices]
        if name in self.group.counts:
            total = total.round()  # an exact combination of whole numbers, up to the rounding of floats
        return total / weight, np.full(total.shape, np.sqrt((factors**2) @ variances) / weight)


def _combine_best(system: CohortSystem, client: int, variances: Floats) -> Floats:
    """Return `answer`, factors whose combination is the client's value, with least noise where there is some."""
    combination = system.combine([client])
    assert combination is not None
    factors, identities = system.to_array(combination), system.identities
    if not variances.all() or not len(identities):
        return factors
    # Among all combinations that are the client's value, which differ by identities.
    weighted = identities * variances
    return np.asarray(factors - np.linalg.solve(weighted @ identities.T, weighted @ factors) @ identities)


@dataclass(frozen=True, kw_only=True, eq=False)
class PersonClaim:
    """The one person by whom a client's answers differ between two rounds.

    Attributes:
        round: the later one.
        joined: whether it joined, or else left.
        values: by question, what it added to the answer.
    """

    round: int
    joined: bool
    values: Mapping[str, Floats]


def find_people(claims: Mapping[str, Sequence[AnswerClaim]], counts: Mapping[int, int]) -> list[PersonClaim]:
    """Return who joined or left, where between two answers the number of people changes by one.

    That number is N or, where N does not change, an answer called a count, or the total of a
    histogram. Where these disagree, or a histogram changes in several cells, nobody is claimed. Two
    who join while one leaves are taken for one, unless a histogram shows them.

    Args:
        claims: exact ones of one client, by question.
        counts: by round, N as the client reports it.
    """
    by_round: dict[int, dict[str, Floats]] = defaultdict(dict)
    for name, given in claims.items():
        for claim in given:
            if claim.standing == EXACT and not claim.spread.any():
                by_round[claim.round][name] = claim.value
    people = []
    for earlier, later in pairwise(sorted(by_round)):
        names = sorted(by_round[earlier].keys() & by_round[later].keys())
        names = [name for name in names if not _NO_SUM.search(name)]
        totals = counts.get(earlier, 0), counts.get(later, 0)
        changes = {}
        for name in names:
            is_mean = bool(_MEAN.search(name))
            if is_mean and not all(totals):
                continue
            before, after = totals if is_mean else (1, 1)
            changes[name] = after * by_round[later][name] - before * by_round[earlier][name]
        histograms = [cells for name, cells in changes.items() if is_histogram(by_round[earlier][name], totals[0])]
        counted = [float(cells.sum()) for name, cells in changes.items() if COUNT_NAME.search(name) and cells.size == 1]
        change = totals[1] - totals[0]
        if not change:
            change = round([*counted, *(float(cells.sum()) for cells in histograms), 0.0][0])
        is_one = set(counted) <= {change} and all(
            np.abs(cells).sum() == 1 and cells.sum() == change for cells in histograms
        )
        if abs(change) == 1 and is_one:
            values = {name: change * difference for name, difference in changes.items()}
            people.append(PersonClaim(round=later, joined=change > 0, values=values))
    return people
