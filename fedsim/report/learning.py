"""Whether the trained model has learnt anything: it has to beat the best answer that is the same for all examples.

A federation that learns nothing, such as one with too small a learning rate, says little about what
leaks from one that does, and its accuracy cannot fall under a defense.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fedsim.audit.evaluation.statistics import binomial_interval

_REMEDY = "try another training.learning_rate, more federation.rounds or more training.local_epochs"
_NORMAL_QUANTILE = 1.96


def explain_no_learning(rows: Sequence[Mapping[str, str]]) -> str:
    """Say in a sentence that the recorded model has not learnt; empty where it has, or where that is not known.

    Args:
        rows: rows of `metrics.csv`; of them the server's last evaluation counts.
    """
    evaluated = [row for row in rows if row["client"] == "server" and row.get("guess") and row.get("num_examples")]
    if not evaluated:
        return ""
    row = evaluated[-1]
    guess, count = float(row["guess"]), int(float(row["num_examples"]))
    if row.get("accuracy"):
        return explain_low_accuracy([float(row["accuracy"])], guess, count)
    return _explain_high_loss(float(row["loss"]), guess, count) if row.get("loss") else ""


def explain_low_accuracy(accuracies: Sequence[float], guess: float, count: int) -> str:
    """Say in a sentence that models have not learnt to classify; empty where one of them has.

    A model has not where its accuracy is no better than `guess` within its 95 % interval.

    Args:
        accuracies: of models that were trained in the same way, each on `count` examples.
        guess: share of the most frequent class among these examples, which is never below chance.
        count: number of examples.

    >>> explain_low_accuracy([0.5], 0.11, 472)
    ''
    """
    intervals = [binomial_interval(round(accuracy * count), count) for accuracy in accuracies]
    if not intervals or any(low > guess for low, _ in intervals):
        return ""
    mean = math.fsum(accuracies) / len(accuracies)
    low, high = min(low for low, _ in intervals), max(high for _, high in intervals)
    return (
        f"{_begin(is_worse=mean <= guess)}: its accuracy on {count} test examples, {mean:.1%} (95 % interval {low:.1%} "
        f"to {high:.1%}), is not beyond the {guess:.1%} that always answering the most frequent class gets; {_REMEDY}."
    )


def _begin(*, is_worse: bool) -> str:
    """Begin the sentence: a better value within its interval may be chance, or may not."""
    return "The model has not learnt" if is_worse else "It is not shown that the model has learnt"


def _explain_high_loss(loss: float, guess: float, count: int) -> str:
    """Say in a sentence that a regression has not learnt; empty where it has.

    Squared errors of normal residuals have a standard deviation of sqrt(2) times their mean.
    """
    margin = _NORMAL_QUANTILE * math.sqrt(2 / count) * loss
    if loss + margin < guess:
        return ""
    return (
        f"{_begin(is_worse=loss >= guess)}: its loss on {count} test examples, {loss:.4g} ± {margin:.2g} (95 %), is "
        f"not beyond the {guess:.4g} that always answering the mean target gets; {_REMEDY}."
    )
