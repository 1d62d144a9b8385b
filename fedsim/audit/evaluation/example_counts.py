"""Score how close the claimed number of examples of a client is to its N."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedsim.audit.evaluation.display import Display
from fedsim.audit.evaluation.evaluator import (
    EvaluationContext,
    Evaluator,
    FindingMetadata,
    FindingSpec,
    Judgement,
    first_round,
)
from fedsim.audit.evaluation.score import Score
from fedsim.audit.evaluation.truth import Truth
from fedsim.base.errors import DataError
from fedsim.interfaces.count_findings import ExampleCount
from fedsim.interfaces.metric import Metric

_EXPLANATION = (
    "For N, the floor is the better one of two guesses from the N of all other clients: their median, and the number "
    "with the least relative error. An adversary that is granted N reads it in the messages; then this is the floor, "
    "and nothing is inferred."
)


class CountError(Metric):
    """Difference of the claimed and the true number of examples, as a share of the true one."""

    title = "N, relative error"
    higher_is_better = False
    lowest = 0.0
    preference = 180
    explanations = (_EXPLANATION,)


class CountExact(Metric):
    """Whether the claimed number of examples is the true one."""

    title = "N found exactly"
    higher_is_better = True
    is_share = True
    evidence = "few messages"
    preference = 181
    explanations = (_EXPLANATION,)


@dataclass(frozen=True)
class ExampleCountEvaluator(Evaluator[ExampleCount]):
    """Judge of the claimed N of a client; the recording says the true one, whether it was granted or not."""

    finding = ExampleCount

    def check_form(self, finding: ExampleCount, spec: FindingSpec) -> None:
        """Accept any: the constructor checks the numbers."""
        del finding, spec

    def judge(self, finding: ExampleCount, about: FindingMetadata, context: EvaluationContext) -> Judgement:
        """Score the claim, see `score_count`."""
        victim, number, counts = int(about["victim"]), first_round(about), _share_counts(context)
        true = counts.get(number, {}).get(victim, 0)
        if true < 1:
            raise DataError(
                f"round {number}, client {victim}: it reported no number of examples, so it is unknown whether the "
                "claimed N is right; state the number with [app] num_examples"
            )
        others = dict[int, int]()
        for of_round in counts.values():
            others |= {client: count for client, count in of_round.items() if count}
        others.pop(victim, None)
        is_granted = (about.get("knowledge") or {}).get("num_examples") is not False
        scores = score_count(finding.count, true, list(others.values()), is_granted=is_granted)
        return Judgement(scores=scores, examples=true)

    def show(self, finding: ExampleCount, truth: Truth | None, tokens: Sequence[str], metric: str) -> Display:
        """Display the claim and the range in which the attack expects N."""
        del truth, tokens, metric
        claimed = {"claimed N": finding.count, "expected from": finding.lowest, "expected up to": finding.highest}
        return Display(numbers={name: float(number) for name, number in claimed.items()})


def _share_counts(context: EvaluationContext) -> Mapping[int, Mapping[int, int]]:
    """Return N of each client by recorded round, 0 where it reported none; read once for all findings in `context`."""
    if "example counts" not in context.cached_values:
        transcript = context.transcript
        count_of = transcript.message_format.num_examples_of
        context.cached_values["example counts"] = {
            number: {
                reply.client: count_of(reply.client, reply.num_examples) for reply in transcript.header(number).replies
            }
            for number in transcript.rounds
        }
    counts: Mapping[int, Mapping[int, int]] = context.cached_values["example counts"]
    return counts


def score_count(claimed: int, true: int, others: Sequence[int], *, is_granted: bool) -> list[Score]:
    """Score a claimed N beside what a guess without the victim's message reaches.

    Relative errors forgive small guesses, so that the median of others is not the best constant: that is their
    median where each has the weight 1 / N.
    """
    guesses = dict[str, float]()
    if is_granted:
        guesses["N in the message"] = true
    if others:
        ascending = np.sort(np.asarray(others))
        weights = np.cumsum(1 / ascending)
        guesses["median N of other clients"] = round(float(np.median(ascending)))
        guesses["N with the least relative error"] = int(ascending[np.searchsorted(weights, weights[-1] / 2)])
    if not guesses:
        reason = "no other client is recorded, so the score of a guess is unknown"
        return [Score.from_reason("count_error", reason), Score.from_reason("count_exact", reason)]
    errors = {name: abs(guess - true) / true for name, guess in guesses.items()}
    hits = {name: float(guess == true) for name, guess in guesses.items()}
    return [
        Score.against_guesses("count_error", abs(claimed - true) / true, errors),
        Score.against_guesses("count_exact", float(claimed == true), hits),
    ]
