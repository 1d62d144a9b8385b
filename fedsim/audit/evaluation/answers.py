"""Score what an attack on federated analytics says that one client answered."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from fedsim.audit.evaluation.case import Case
from fedsim.audit.evaluation.display import Display, DisplayTable
from fedsim.audit.evaluation.evaluator import EvaluationContext, Evaluator, FindingMetadata, FindingSpec, Judgement
from fedsim.audit.evaluation.score import Score
from fedsim.audit.evaluation.truth import ANSWERS, PEOPLE, Truth
from fedsim.base.errors import DataError, join_first
from fedsim.interfaces.answer_findings import AnsweredValues
from fedsim.interfaces.metric import Metric
from fedsim.recording.answer_claims import COUNT_NAME, EXACT, UNDETERMINED
from fedsim.recording.cohort_answers import CohortAnswer, list_reported_counts, read_answers

_STANDINGS = ("not determined", "if nobody's values changed", "exact")
_MAX_NUMBERS = 8
"""Most numbers of an answer in a cell of a table."""
_EXPLANATION = (
    "For answers, the guess of the floor is the mean answer of a client over all that the server received, and the "
    "ceiling what is left to an attack where the cohorts do not determine the client: that guess. Counts are compared "
    "as whole numbers."
)


class AnswersExact(Metric):
    """Share of the numbers that the victim answered which are claimed exactly."""

    title = "answers, exact"
    higher_is_better = True
    is_share = True
    preference = 170
    explanations = (_EXPLANATION,)


class AnswersError(Metric):
    """Mean absolute error of the claimed answers, relative to their mean absolute value."""

    title = "answers, relative error"
    higher_is_better = False
    lowest = 0.0
    preference = 171
    explanations = (_EXPLANATION,)


class PeopleExact(Metric):
    """Share of the claimed values of single people who joined or left that are exact."""

    title = "people who joined or left, exact"
    higher_is_better = True
    is_share = True
    preference = 172
    explanations = (
        "For people who joined or left, the guess of the floor is a person with the mean of what the client answered "
        "per person, and the fullest cell of a histogram; one whose answer is a number of people adds 1.",
    )


@dataclass(frozen=True)
class AnswerEvaluator(Evaluator[AnsweredValues]):
    """Judge of claims what a client answered; a file of `write_answers` says what it was."""

    finding = AnsweredValues

    def check_form(self, finding: AnsweredValues, spec: FindingSpec) -> None:
        """Accept every form: which questions there are is in the messages."""

    def truth(self, finding: AnsweredValues, about: FindingMetadata, case: Case) -> Truth | None:
        """Return the victim's true answers; None where no file has them."""
        del finding
        return case.answers_in_file(int(about["victim"]))

    def judge(self, finding: AnsweredValues, about: FindingMetadata, context: EvaluationContext) -> Judgement:
        """Score answers and people, each beside a guess by means."""
        truth = self.truth(finding, about, context.case)
        if truth is None:
            return Judgement()
        answers = _share_answers(context)
        means = _mean_by_question(answers)
        numbers = _pair_answers(finding, truth.answers, means)
        scores = [*score_numbers(numbers)]
        if finding.people:
            counts = list_reported_counts(answers.values(), int(about["victim"]))
            scores.append(score_people(finding, truth.answers, counts))
        return Judgement(scores=scores, examples=len(numbers.true))

    def show(self, finding: AnsweredValues, truth: Truth | None, tokens: Sequence[str], metric: str) -> Display:
        """Display what is claimed of each answer, how sure that is, and the true answer."""
        del tokens, metric
        true_answers = truth.answers if truth is not None else {}
        rows = list[tuple[str | float, ...]]()
        for name, values in finding.values.items():
            for index, number in enumerate(finding.rounds[name].tolist()):
                standing = _STANDINGS[int(finding.standings[name][index])]
                true = true_answers.get(f"{ANSWERS}/{number}/{name}")
                spread = finding.spreads[name][index]
                rows.append(
                    (
                        name,
                        str(number),
                        _list_numbers(values[index]),
                        standing,
                        float(spread.max()),
                        float(_chance_of_whole(spread).min()),
                        "" if true is None else _list_numbers(true),
                    )
                )
        columns = [
            "question",
            "round",
            "claimed",
            "follows",
            "standard deviation",
            "chance of each count",
            "true",
        ]
        tables = [DisplayTable(title="Answers", columns=columns, rows=rows)]
        if len(finding.group) > 1:
            group_rows = [(name, _list_numbers(values)) for name, values in finding.group_sums.items()]
            title = f"Sums over clients {join_first(finding.group.tolist(), _MAX_NUMBERS)}, which follow"
            tables.append(DisplayTable(title=title, columns=["question", "sum"], rows=group_rows))
        return Display(has_truth=bool(true_answers), tables=tables)


def _share_answers(context: EvaluationContext) -> Mapping[str, Sequence[CohortAnswer]]:
    """Return all answers, which are read once for the findings that are judged in `context`."""
    if "answers" not in context.cached_values:
        context.cached_values["answers"] = read_answers(context.transcript)
    answers: Mapping[str, Sequence[CohortAnswer]] = context.cached_values["answers"]
    return answers


def _list_numbers(values: Tensor) -> str:
    numbers = [f"{number:.6g}" for number in values.reshape(-1).tolist()]
    return " ".join(numbers[:_MAX_NUMBERS]) + (" ..." if len(numbers) > _MAX_NUMBERS else "")


def _chance_of_whole(spread: Tensor) -> Tensor:
    """Return the chance that a normal error of this standard deviation is below one half."""
    return torch.where(spread > 0, torch.erf(0.5 / (spread.clamp_min(1e-300) * math.sqrt(2))), 1.0)


def _mean_by_question(answers: Mapping[str, Sequence[CohortAnswer]]) -> dict[str, Tensor]:
    """Return the mean answer of a client to each question; a cohort's mean counts as often as it has clients."""
    means = {}
    for name, given in answers.items():
        sizes = [len(answer.cohort.members) for answer in given]
        total = sum(size * answer.mean for size, answer in zip(sizes, given, strict=True))
        means[name] = torch.as_tensor(total / sum(sizes))
    return means


@dataclass(frozen=True, kw_only=True, eq=False)
class AnsweredNumbers:
    """Single numbers of answers, `number` each.

    Attributes:
        true: what the client would have answered without a defense.
        guessed: the mean answer of a client.
        determined: whether the cohorts determine it.
        certified: whether the attack is sure that it is exact.
    """

    claimed: Tensor
    true: Tensor
    guessed: Tensor
    determined: Tensor
    certified: Tensor


def _pair_answers(
    finding: AnsweredValues, true_answers: Mapping[str, Tensor], means: Mapping[str, Tensor]
) -> AnsweredNumbers:
    """Return the numbers of all answers that the truth knows."""
    parts: dict[str, list[Tensor]] = {name.name: [] for name in fields(AnsweredNumbers)}
    for name, values in finding.values.items():
        for index, number in enumerate(finding.rounds[name].tolist()):
            true = true_answers.get(f"{ANSWERS}/{number}/{name}")
            if true is None:
                continue
            claimed = values[index].reshape(-1)
            if true.numel() != claimed.numel():
                raise DataError(
                    f"truth: round {number}, '{name}': it has {true.numel()} numbers, and {claimed.numel()} were "
                    "answered; fix the file (fedsim.write_answers)"
                )
            standing = int(finding.standings[name][index])
            parts["claimed"].append(claimed)
            parts["true"].append(true.reshape(-1).double())
            parts["guessed"].append(means[name].reshape(-1))
            parts["determined"].append(torch.full(claimed.shape, standing > UNDETERMINED))
            parts["certified"].append((finding.spreads[name][index].reshape(-1) == 0) & (standing == EXACT))
    if not parts["true"]:
        asked = ", ".join(list(finding.values)[:_MAX_NUMBERS])
        raise DataError(f"truth: it has no answer to any question of the recording ({asked}); write these")
    return AnsweredNumbers(**{name: torch.cat(tensors) for name, tensors in parts.items()})


def score_numbers(numbers: AnsweredNumbers) -> list[Score]:
    """Score which numbers are claimed exactly, how far the others are off, and whether certificates hold."""
    hits, guess_hits = _are_exact(numbers.claimed, numbers.true), _are_exact(numbers.guessed, numbers.true)
    errors, guess_errors = (numbers.claimed - numbers.true).abs(), (numbers.guessed - numbers.true).abs()
    scale = float(numbers.true.abs().mean()) or 1.0
    # What the cohorts leave open can be guessed, no more.
    open_errors = torch.where(numbers.determined, 0.0, torch.minimum(errors, guess_errors))
    name = "the mean answer of a client"
    scores = [
        Score.against_guesses(
            "answers_exact",
            float(hits.double().mean()),
            {name: float(guess_hits.double().mean())},
            ceiling=float((numbers.determined | hits | guess_hits).double().mean()),
        ),
        Score.against_guesses(
            "answers_error",
            float(errors.mean()) / scale,
            {name: float(guess_errors.mean()) / scale},
            ceiling=float(open_errors.mean()) / scale,
        ),
    ]
    if numbers.certified.any():
        false_share = float((~hits[numbers.certified]).double().mean())
        scores.append(Score(metric="false_certificates", value=false_share, ceiling=0.0))
    return scores


def _are_exact(claimed: Tensor, true: Tensor) -> Tensor:
    """Return whether each number is right: as a whole number where the truth is one, else to six digits."""
    is_whole = true == true.round()
    return torch.where(is_whole, claimed.round() == true, (claimed - true).abs() <= 1e-6 * true.abs())


def score_people(finding: AnsweredValues, true_answers: Mapping[str, Tensor], counts: Mapping[int, int]) -> Score:
    """Score what single people added, beside a guess by what the client answered before."""
    hits, guess_hits = list[float](), list[float]()
    for key, claimed in finding.people.items():
        number, name = key.partition("/")[::2]
        true = true_answers.get(f"{PEOPLE}/{number}/{name}")
        if true is None:
            continue
        true = true.reshape(-1).double()
        rounds = finding.rounds[name].tolist()
        before = rounds.index(int(number)) - 1
        guess = _guess_person(name, finding.values[name][before].reshape(-1), counts.get(rounds[before], 0))
        hits.append(float(_are_exact(claimed.reshape(-1), true).all()))
        guess_hits.append(float(_are_exact(guess, true).all()))
    if not hits:
        return Score.from_reason("people_exact", "the truth does not say who joined or left (fedsim.write_answers)")
    guesses = {"the likeliest person": sum(guess_hits) / len(guess_hits)}
    return Score.against_guesses("people_exact", sum(hits) / len(hits), guesses)


def _guess_person(name: str, answer: Tensor, count: int) -> Tensor:
    """Return a person in the fullest cell of a histogram; of one number, its share of the sum over `count` people.

    To a number of people, each person adds 1.
    """
    if answer.numel() == 1 and COUNT_NAME.search(name):
        return torch.ones(1, dtype=torch.float64)
    if answer.numel() == 1:
        return answer / max(count, 1)
    return torch.nn.functional.one_hot(answer.argmax(), answer.numel()).double()
