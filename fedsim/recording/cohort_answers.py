"""Answers to queries, each of a client or of a cohort in one sum, and what follows from them for one client."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor, finfo, uint8

from fedsim.base.errors import TranscriptError
from fedsim.recording.cohort_systems import Cohort, CohortSystem, Floats
from fedsim.recording.transcript import Transcript

METRIC_PREFIX = "metric/"
"""Begins the name of a question that was answered by a number beside the arrays."""
_MAX_FRACTION = 0.05
"""Greatest rounding error of a count."""
_MAX_DISTANCE = 0.005
"""Greatest distance of a sum from a whole number, before it is no sum of counts, as prices of 4.99 are none."""
_FLOAT_ERROR = 1e-13
"""Rounding error of a combination of sums in float64, relative to the largest one."""
_FALSE_ALARM = 1e-6
"""How often noise alone may look like a change of the answers."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CohortAnswer:
    """Answers to one question by a client, or by a cohort as their mean.

    Attributes:
        cohort: round and clients.
        weight: N, the sum of the weights of the mean; the number of clients where none is reported.
        num_examples: N of a single client; 0 where it reports none.
        mean: the mean, or what the client answered, of any shape.
        resolution: distance between neighbours in the type in which it was sent, relative to a number.
    """

    cohort: Cohort
    weight: int
    num_examples: int
    mean: Floats
    resolution: float = 0.0


@dataclass(frozen=True, kw_only=True)
class AnswerErrors:
    """By how much answers may differ from the values of clients, as the server knows.

    Attributes:
        noise: standard deviation of the noise that each client adds to each number that it answers.
        rounded_to: step of the numbers that clients answer; 0 where they are not rounded.
        smallest_cell: clients answer 0 for numbers below it.
        tolerance: rounding error of a sum, relative to the largest one of its question.
    """

    noise: float = 0.0
    rounded_to: float = 0.0
    smallest_cell: float = 0.0
    tolerance: float = 1e-4


def read_answers(transcript: Transcript) -> dict[str, list[CohortAnswer]]:
    """Return the answers to each question, in the order of the rounds.

    Questions are arrays, and numbers beside them. One whose answers differ in shape is left out: it has no sums.
    """
    answers: dict[str, list[CohortAnswer]] = defaultdict(list)
    weighted: dict[bool, str] = {}
    for number in transcript.rounds:
        for reply in transcript.header(number).replies:
            update = transcript.recorded_update(number, reply.client, reply.message)
            cohort = Cohort(number, tuple(sorted(reply.senders)))
            weight = update.num_examples or len(cohort.members)
            if len(cohort.members) > 1:
                weighted.setdefault(bool(update.num_examples), f"round {number}, client {reply.client}")
            tensors: Mapping[str, Tensor] = update.gradient or update.after
            # Answers are arrays and the numbers beside them.
            numbers = {name: np.asarray(t.double().numpy()) for name, t in tensors.items() if _is_number_tensor(t)}
            numbers |= {f"{METRIC_PREFIX}{name}": np.asarray(float(value)) for name, value in update.metrics.items()}
            for name, mean in numbers.items():
                if not np.isfinite(mean).all():
                    raise TranscriptError(
                        f"round {number}, client {reply.client}: its answer '{name}' is NaN or infinite, so that no "
                        "sum with it says anything; attack other rounds"
                    )
                count = update.num_examples if len(cohort.members) == 1 else 0
                tensor = tensors.get(name)
                resolution = finfo(tensor.dtype).eps if tensor is not None and tensor.is_floating_point() else 0.0
                answer = CohortAnswer(
                    cohort=cohort, weight=weight, num_examples=count, mean=mean, resolution=resolution
                )
                answers[name].append(answer)
    if len(weighted) > 1:
        raise TranscriptError(
            f"{weighted[False]}: this sum reports no N, and that of {weighted[True]} does, so they are weighted in "
            "two ways; attack rounds that do the same (adversary.rounds)"
        )
    return {name: given for name, given in answers.items() if len({answer.mean.shape for answer in given}) == 1}


def list_reported_counts(answers: Iterable[Sequence[CohortAnswer]], client: int) -> dict[int, int]:
    """Return N that a client reported beside what it answered in clear, by round; 0 where it reported none."""
    clear = (answer for given in answers for answer in given if answer.cohort.members == (client,))
    return {answer.cohort.round: answer.num_examples for answer in clear}


def _is_number_tensor(tensor: Tensor) -> bool:
    """Return whether it holds real numbers, and not bytes."""
    return not tensor.is_complex() and not (tensor.dtype == uint8 and tensor.ndim == 1) and tensor.numel() > 0


@dataclass(frozen=True, kw_only=True, eq=False)
class QuestionGroup:
    """Questions that the same cohorts answered in the same rounds."""

    answers: Mapping[str, Sequence[CohortAnswer]]
    errors: AnswerErrors

    @cached_property
    def cohorts(self) -> list[Cohort]:
        """Return who gave each answer."""
        return [answer.cohort for answer in next(iter(self.answers.values()))]

    @cached_property
    def weights(self) -> Floats:
        """Return `answer`, N of each."""
        return np.array([answer.weight for answer in next(iter(self.answers.values()))], float)

    @cached_property
    def sums(self) -> dict[str, Floats]:
        """Return by question `answer number`, the sums over cohorts; whole numbers where they are counts."""
        sums = {name: self._sum(given) for name, given in self.answers.items()}
        return {name: given.round() if name in self.counts else given for name, given in sums.items()}

    @cached_property
    def counts(self) -> frozenset[str]:
        """Return the questions whose sums are all whole numbers, up to rounding that is too small to hide another."""
        return frozenset(name for name, given in self.answers.items() if self._are_counts(given))

    def _sum(self, given: Sequence[CohortAnswer]) -> Floats:
        means = np.stack([answer.mean.reshape(-1) for answer in given])
        return np.asarray(means * self.weights[:, None])

    def _are_counts(self, given: Sequence[CohortAnswer]) -> bool:
        sums = self._sum(given)
        largest, distance = np.abs(sums).max(), np.abs(sums - sums.round()).max()
        # All large floats are whole numbers, which says nothing of what was added up.
        resolution = max(_FLOAT_ERROR, *(answer.resolution for answer in given))
        is_near = distance <= min(_MAX_DISTANCE, self.errors.tolerance * largest)
        return bool(not self.errors.noise and is_near and resolution * largest <= _MAX_FRACTION)

    def error_variances(self, name: str) -> Floats:
        """Return `answer`, the variance of the error of each sum of a question, of noise or of rounding."""
        sizes, sums = np.array([len(cohort.members) for cohort in self.cohorts]), self.sums[name]
        variances = np.asarray((self.weights * self.errors.noise) ** 2 / sizes)
        if not self.errors.noise and name not in self.counts:
            variances = np.full(len(sums), (self.errors.tolerance * np.abs(sums).max()) ** 2)
        return variances

    def is_consistent(self, system: CohortSystem, chosen: Sequence[int]) -> bool:
        """Return whether clients may have kept their values in the chosen answers, of which `system` is.

        All identities must hold (`CohortSystem.identities`), and no client that the system
        determines may have an N below 1 or, where all answers are counts, a count below 0.
        """
        indices = list(chosen)
        if not _holds(system.identities, self.weights[indices, None], 0.0):
            return False
        rows = [system.combine([client]) for client in system.clients]
        factors = [system.to_array(row) for row in rows if row is not None]
        if any(row @ self.weights[indices] < 1 - _MAX_FRACTION for row in factors):
            return False
        for name, all_sums in self.sums.items():
            sums, is_whole = all_sums[indices], name in self.counts
            if self.errors.noise:
                if not _holds_under_noise(system.identities, sums, self.error_variances(name)[indices]):
                    return False
                continue
            if not _holds(system.identities, sums, 0.0 if is_whole else self.errors.tolerance * np.abs(all_sums).max()):
                return False
            if is_whole and (all_sums >= 0).all() and any((row @ sums < -_MAX_FRACTION).any() for row in factors):
                return False
        return True


def _holds(identities: Floats, sums: Floats, error: float) -> bool:
    """Return whether combinations that should be 0 are, up to an error of each sum."""
    allowed = np.abs(identities).sum(1)[:, None] * (error + _FLOAT_ERROR * np.abs(sums).max(initial=0.0))
    return bool((np.abs(identities @ sums) <= allowed).all())


def _holds_under_noise(identities: Floats, sums: Floats, variances: Floats) -> bool:
    """Return whether noise of these variances explains how far combinations are from 0."""
    if not len(identities):
        return True
    from scipy.stats import chi2  # takes a second

    residuals = identities @ sums
    distances = (residuals * np.linalg.solve((identities * variances) @ identities.T, residuals)).sum(0)
    return bool((distances <= chi2.isf(_FALSE_ALARM / distances.size, len(identities))).all())


def group_questions(answers: Mapping[str, Sequence[CohortAnswer]], errors: AnswerErrors) -> list[QuestionGroup]:
    """Return the questions in groups that the same cohorts answered in the same rounds."""
    by_cohorts: dict[tuple[Cohort, ...], dict[str, Sequence[CohortAnswer]]] = defaultdict(dict)
    for name, given in answers.items():
        by_cohorts[tuple(answer.cohort for answer in given)][name] = given
    return [QuestionGroup(answers=given, errors=errors) for given in by_cohorts.values()]


def is_histogram(values: Floats, count: int) -> bool:
    """Return whether these are numbers of people in cells.

    Args:
        values: whole numbers of at least 0, in two cells or more.
        count: of all people; 0 where it is not known.

    >>> is_histogram(np.array([3.0, 0.0, 1.0]), 4), is_histogram(np.array([0.5, 1.0]), 0)
    (True, False)
    """
    if values.size < 2 or (values < 0).any() or (values != values.round()).any() or not values.any():
        return False
    return not count or float(values.sum()) == count
