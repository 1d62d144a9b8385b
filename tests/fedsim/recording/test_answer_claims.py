"""What follows from sums over cohorts is found by exact rank, and nothing is sure that a change would spoil."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsim.base.errors import TranscriptError
from fedsim.recording.answer_claims import EXACT, UNCHECKED, UNDETERMINED, AnswerClaim, claim_answers, find_people
from fedsim.recording.cohort_answers import AnswerErrors, CohortAnswer, group_questions, read_answers
from fedsim.recording.cohort_systems import Cohort, CohortSystem, Floats
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update


def claim(
    cohorts: Sequence[tuple[int, ...]],
    values: Floats,
    client: int,
    errors: AnswerErrors | None = None,
    rounds: Sequence[int] = (),
    resolution: float = 0.0,
) -> tuple[list[AnswerClaim], list[int]]:
    """Claim what `client` answered; `values` are `round client cell`, one cohort a round unless rounds are given."""
    answers = []
    for index, members in enumerate(cohorts):
        cohort = Cohort(rounds[index] if rounds else index + 1, members)
        mean = values[index, list(members)].mean(0)
        answers.append(
            CohortAnswer(cohort=cohort, weight=len(members), num_examples=0, mean=mean, resolution=resolution)
        )
    (group,) = group_questions({"ages": answers}, errors or AnswerErrors())
    claims, changes = claim_answers(group, client)
    return claims["ages"], changes


def repeat(values: Sequence[Sequence[float]], rounds: int) -> Floats:
    """Return values `client cell` that clients keep for all rounds."""
    return np.repeat(np.array([values], float), rounds, 0)


def test_a_combination_is_exact_where_floats_would_round() -> None:
    # Every pair of three clients: each value is half of a sum of three answers.
    system = CohortSystem([Cohort(1, (0, 1)), Cohort(2, (1, 2)), Cohort(3, (0, 2))])
    assert system.combine([0]) == {0: Fraction(1, 2), 1: Fraction(-1, 2), 2: Fraction(1, 2)}
    assert system.combine([0, 1, 2]) == dict.fromkeys(range(3), Fraction(1, 2))


def test_the_smallest_group_that_follows_is_found() -> None:
    system = CohortSystem([Cohort(1, (0, 1, 2, 3, 4)), Cohort(2, (0, 1, 2))])
    assert system.combine([3]) is None
    assert system.find_smallest_group(3) == (3, 4)
    assert system.find_smallest_group(0) == (0, 1, 2)


def test_a_difference_is_sure_only_if_other_answers_check_it() -> None:
    values = [[3, 1], [0, 2], [5, 5]]
    pairs = [(0, 1), (1, 2), (0, 2), (0, 1, 2)]
    once, _ = claim([(0, 1, 2), (0, 1)], repeat(values, 2), 2)
    often, _ = claim(pairs * 3, repeat(values, 12), 2)
    # Here client 0 could grow before round 2 by as much as client 2 shrinks before round 3.
    in_turn, _ = claim([(0, 1, 2), (0, 1)] * 3, repeat(values, 6), 2)
    assert {given.standing for given in [*once, *in_turn]} == {UNCHECKED}
    assert {given.standing for given in often} == {EXACT}
    for given in [*once, *often, *in_turn]:
        assert given.value.tolist() == [5, 5]
        assert not given.spread.any()


def test_what_is_not_determined_is_a_guess_with_its_group() -> None:
    (given, _), _ = claim([(0, 1, 2), (0, 1)], repeat([[3, 1], [0, 2], [5, 5]], 2), 0)
    assert given.standing == UNDETERMINED
    assert (given.group, given.group_sum.tolist()) == ((0, 1), [3, 3])


@pytest.mark.parametrize("kind", ["one change", "all grow", "some grow"])
def test_nothing_that_is_sure_is_wrong_when_values_change(kind: str) -> None:
    rng, sure = np.random.default_rng(0), 0
    for _ in range(50):
        clients, rounds = int(rng.integers(2, 5)), int(rng.integers(3, 8))
        values = repeat(rng.integers(0, 6, (clients, 2)).tolist(), rounds)
        if kind == "one change":
            values[rng.integers(1, rounds) :, rng.integers(clients)] += [1, 0]
        else:
            share = 1.0 if kind == "all grow" else 0.2
            values += np.cumsum(rng.integers(0, 2, values.shape) * (rng.random((rounds, clients, 1)) < share), 0)
        sizes = [int(rng.integers(1, clients + 1)) for _ in range(rounds)]
        cohorts = [tuple(sorted(rng.choice(clients, size, replace=False).tolist())) for size in sizes]
        for client in range(clients):
            if not any(client in members for members in cohorts):
                continue
            for given in claim(cohorts, values, client)[0]:
                if given.standing == EXACT:
                    sure += 1
                    assert given.value.tolist() == values[given.round - 1, client].tolist(), (cohorts, client, given)
    assert sure > 15


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_nothing_sure_depends_on_what_clients_are_called(order: tuple[int, ...]) -> None:
    """Answers that changes of two clients alter alike are changes of either, so either's value may be another."""
    cohorts = [(0, 2, 3), (1,), (0, 1, 2, 3), (0, 1)]
    values = repeat([[3], [5], [7], [9]], 4)
    values[3, 1] = 8  # before the last round
    named = [tuple(sorted(order[client] for client in members)) for members in cohorts]
    claims, _ = claim(named, values[:, np.argsort(order)], order[1], rounds=[1, 2, 2, 3])
    wrong = [given for given in claims if given.round == 3 and given.value.tolist() != [8]]
    assert EXACT not in [given.standing for given in wrong]


def test_a_negative_count_shows_that_values_changed() -> None:
    values = repeat([[1.0], [4.0], [2.0]], 2)
    values[1, 0] += 9  # so that the cohort without client 2 has the larger sum
    (given,), changes = claim([(0, 1, 2), (0, 1)], values, 2)
    assert (given.standing, changes) == (UNDETERMINED, [2])


@pytest.mark.parametrize("prices", [[499.99, 699.99, 899.99], [1e9 + 3, 2e9 + 7, 3e9 + 11]])
def test_numbers_that_are_nearly_whole_or_too_large_for_their_type_are_no_sure_counts(prices: list[float]) -> None:
    pairs = [(0, 1), (1, 2), (0, 2), (0, 1, 2)] * 3
    values = repeat([[price] for price in prices], len(pairs))
    for given in claim(pairs, values, 2, resolution=float(np.finfo(np.float32).eps))[0]:
        assert abs(given.value[0] - prices[2]) < given.spread[0]


def test_a_count_that_grows_by_one_in_billions_is_noticed() -> None:
    pairs = [(0, 1), (1, 2), (0, 2), (0, 1, 2)] * 3
    values = repeat([[1e9], [2e9], [3e9]], len(pairs))
    values[5:, 2] += 1
    claims, changes = claim(pairs, values, 2)
    assert changes
    assert EXACT not in [given.standing for given in claims]


def test_a_round_that_contradicts_itself_determines_nothing() -> None:
    values = repeat([[1.0], [2.0], [4.0]], 4)
    values[3, 0] += 6
    claims, changes = claim([(0, 1, 2), (0, 1), (1, 2), (0, 2)], values, 0, rounds=[1, 1, 1, 1])
    assert ([given.standing for given in claims], changes) == ([UNDETERMINED], [1])


def test_the_spread_is_the_error_that_told_noise_leaves() -> None:
    rng, ratios = np.random.default_rng(3), list[float]()
    cohorts = [(0, 1, 2), (0, 1), (1, 2), (0, 2)] * 3
    for _ in range(60):
        values = repeat(rng.integers(0, 50, (3, 4)).tolist(), len(cohorts))
        noisy = values + rng.normal(0, 2.0, values.shape)
        claims, changes = claim(cohorts, noisy, 1, AnswerErrors(noise=2.0))
        assert not changes
        assert claims[0].standing
        assert claims[0].spread.max() < 2.0
        ratios += ((claims[0].value - values[0, 1]) / claims[0].spread).tolist()
    assert np.std(ratios) == pytest.approx(1.0, abs=0.15)


def test_noise_that_is_not_told_is_taken_for_changes() -> None:
    values = repeat([[30, 7], [12, 9], [8, 40]], 8) + np.random.default_rng(0).laplace(0, 1, (8, 3, 2))
    claims, changes = claim([(0, 1, 2), (0, 1), (1, 2), (0, 2)] * 2, values, 1)
    assert changes
    assert EXACT not in [given.standing for given in claims]


def test_who_joined_is_told_where_the_number_of_people_changes_by_one() -> None:
    def answers(*values: Sequence[float]) -> list[AnswerClaim]:
        return claim([(0,)] * len(values), np.array([[value] for value in values], float), 0)[0]

    claims = {"ages": answers([3, 1], [3, 2], [5, 1]), "income": answers([100], [140], [150])}
    (person,) = find_people(claims, {1: 4, 2: 5, 3: 6})  # before round 3, two joined and one left
    assert (person.round, person.joined) == (2, True)
    assert {name: value.tolist() for name, value in person.values.items()} == {"ages": [0, 1], "income": [40]}
    # Without N, an answer says how many people there are; the largest value is no sum.
    claims = {
        "income_mean_sum": answers([100], [75]),
        "income_mean": answers([25], [25]),
        "income_count": answers([4], [3]),
    }
    claims |= {"income_max": answers([60], [50])}
    (person,) = find_people(claims, {})
    assert (person.joined, person.values["income_mean_sum"].tolist()) == (False, [25])
    assert not {"income_max", "income_mean"} & set(person.values)


def test_sums_that_are_weighted_in_some_rounds_alone_are_no_system(tmp_path: Path) -> None:
    payload, before = Payload.from_dense({"total": torch.ones(1)}, "weights"), {"total": torch.zeros(1)}
    for number, count in ((1, 10), (2, 0)):
        update = Update(
            round=number, client=0, before=before, payload=payload, num_examples=count, members=(0, 1, 2)[: 4 - number]
        )
        Recorder(tmp_path / "transcript", resume=True).write(number, [update])
    with pytest.raises(TranscriptError, match="round 2, client 0: this sum reports no N, and that of round 1"):
        read_answers(Transcript(tmp_path / "transcript"))
