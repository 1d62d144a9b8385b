"""Whether the trained model has learnt anything: it has to beat the best answer that is the same for all examples.

A federation that learns nothing, such as one with too small a learning rate, says little about what
leaks from one that does, and its accuracy cannot fall under a defense.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fedsim.audit.evaluation.statistics import NORMAL_QUANTILE, binomial_interval
from fedsim.base.errors import format_percent

Remedy = Literal["", "train longer", "smaller steps", "larger steps"]
_REMEDY = "try another training.learning_rate, more federation.rounds or more training.local_epochs"
_SMALLER_STEPS = "its loss has diverged ({:.3g}), so try a smaller training.learning_rate"
_DIVERGED_LOSS = 20.0
"""Cross-entropy that only a diverged model has: as if the true class had a probability of 2e-9 on average."""
_DIVERGED_RATIO = 10.0
"""How many times the loss of the best constant answer a regression's is where it has diverged."""


@dataclass(frozen=True, kw_only=True)
class NoLearning:
    """What shows that a model has not learnt, if anything does.

    Attributes:
        sentence: that it has not; empty where it has, or where that is not known.
        remedy: what is to be tried; empty where it has learnt, or where that is not fedsim's to say.
    """

    sentence: str = ""
    remedy: Remedy = ""


def examine_evaluations(rows: Sequence[Mapping[str, str]]) -> NoLearning:
    """Return whether the evaluations of the recorded model show that it has not learnt.

    Args:
        rows: rows of `metrics.csv`; of them the server's last evaluation counts.
    """
    evaluated = [row for row in rows if row["client"] == "server" and row.get("guess") and row.get("num_examples")]
    evaluated = [row for row in evaluated if _is_finite(row["num_examples"]) and _is_finite(row.get("accuracy"))]
    if not evaluated:
        return NoLearning()
    row = evaluated[-1]
    guess, count = float(row["guess"]), int(float(row["num_examples"]))
    loss = float(row["loss"]) if row.get("loss") else math.nan
    is_classifier = bool(row.get("accuracy"))
    has_diverged = bool(row.get("loss")) and not loss <= (_DIVERGED_LOSS if is_classifier else _DIVERGED_RATIO * guess)
    advice = _SMALLER_STEPS.format(loss) if has_diverged else _REMEDY
    sentence = ""
    if is_classifier:
        sentence = explain_low_accuracy([float(row["accuracy"])], guess, count, advice=advice)
    elif row.get("loss"):
        sentence = _explain_high_loss(loss, guess, count, advice)
    if not sentence:
        return NoLearning()
    return NoLearning(sentence=sentence, remedy="smaller steps" if has_diverged else "train longer")


def _is_finite(text: str | None) -> bool:
    """Return whether a cell of a table is empty or a finite number."""
    return math.isfinite(float(text or 0))


def explain_low_accuracy(accuracies: Sequence[float], guess: float, count: int, *, advice: str = _REMEDY) -> str:
    """Say in a sentence that models have not learnt to classify; empty where one of them has.

    A model has not where its accuracy is no better than `guess` within its 95 % interval.

    Args:
        accuracies: of models that were trained in the same way, each on `count` examples.
        guess: share of the most frequent class among these examples, which is never below chance; of several labels
            that of the more frequent answer to each.

    >>> explain_low_accuracy([0.5], 0.11, 472)
    ''
    """
    intervals = [binomial_interval(round(accuracy * count), count) for accuracy in accuracies]
    if not intervals or any(low > guess for low, _ in intervals):
        return ""
    mean = math.fsum(accuracies) / len(accuracies)
    low, high = min(low for low, _ in intervals), max(high for _, high in intervals)
    return (
        f"{begin_sentence(is_worse=mean <= guess)}: its accuracy on {count} test examples, {format_percent(mean)} "
        f"(95 % interval {100 * low:.1f} to {format_percent(high)}), is not beyond the {format_percent(guess)} that "
        f"always giving the most frequent answer gets; {advice}."
    )


def begin_sentence(*, is_worse: bool) -> str:
    """Begin the sentence: a better value within its interval may be chance, or may not."""
    return "The model has not learnt" if is_worse else "It is not shown that the model has learnt"


def _explain_high_loss(loss: float, guess: float, count: int, advice: str) -> str:
    """Say in a sentence that a regression has not learnt; empty where it has.

    Squared errors of normal residuals have a standard deviation of sqrt(2) times their mean.
    """
    margin = NORMAL_QUANTILE * math.sqrt(2 / count) * loss
    if loss + margin < guess:
        return ""
    return (
        f"{begin_sentence(is_worse=loss >= guess)}: its loss on {count} test examples, {loss:.4g} ± {margin:.2g} "
        f"(95 %), is not beyond the {guess:.4g} that always answering the mean target gets; {advice}."
    )
