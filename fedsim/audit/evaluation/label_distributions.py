"""Score how close the claimed label distribution of a client is to its true one."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from fedsim.audit.evaluation.case import Case
from fedsim.audit.evaluation.evaluator import (
    EvaluationContext,
    Evaluator,
    FindingMetadata,
    FindingSpec,
    Judgement,
    group_members,
)
from fedsim.audit.evaluation.score import Score
from fedsim.audit.evaluation.truth import Truth
from fedsim.base.errors import DataError
from fedsim.interfaces.findings import LabelDistribution
from fedsim.interfaces.metric import Metric

log = logging.getLogger(__name__)


class LabelDistance(Metric):
    """Total variation distance of the claimed and the true shares of classes."""

    title = "label distribution, total variation"
    higher_is_better = False
    lowest = 0.0
    highest = 1.0
    preference = 110
    explanations = (
        "For the label distribution, the floor is the better of two guesses: all classes alike, and the shares of the "
        "classes in the public data. The total variation distance is the share of examples, or of pixels, that "
        "would have to get another label.",
    )


class LabelCosine(Metric):
    """Cosine of the claimed and the true shares of classes."""

    title = "label distribution, cosine"
    higher_is_better = True
    lowest = 0.0
    highest = 1.0
    preference = 111


@dataclass(frozen=True)
class LabelDistributionEvaluator(Evaluator[LabelDistribution]):
    """Judge of the claimed shares of classes among a client's training examples, or the pixels of their masks."""

    finding = LabelDistribution

    def check_form(self, finding: LabelDistribution, spec: FindingSpec) -> None:
        """Check that there is one share for each class of the federation."""
        classes = spec.knowledge.num_classes  # of shares of more classes, each guess would be bad
        if spec.task is not None:
            classes = spec.task.num_classes or spec.task.mask_classes
        if classes:
            spec.expect("shares of classes numbering", finding.shares.shape[1], classes)

    def truth(self, finding: LabelDistribution, about: FindingMetadata, case: Case) -> Truth | None:
        """Return all training data of the victim."""
        return case.truth(int(about["victim"]), None, group_members(about))

    def judge(self, finding: LabelDistribution, about: FindingMetadata, context: EvaluationContext) -> Judgement:
        """Score a label distribution, see `score_distribution`."""
        truth = self.truth(finding, about, context.case)
        if truth is None:
            log.warning(
                "%s, client %d: not scored: the data of this client are not known",
                about["attack"],
                int(about["victim"]),
            )
            return Judgement()
        public = None if context.public is None else context.public.labels
        return Judgement(
            scores=score_distribution(finding.mean_shares, truth.labels, public),
            examples=len(truth.labels),
        )


def score_distribution(claimed: Tensor, labels: Tensor, public: Tensor | None) -> list[Score]:
    """Score claimed shares of classes against two guesses: equal shares, and those of public data.

    `label_distance` is the total variation distance, half the sum of absolute differences: the
    share of examples that would have to get another label. `label_cosine` is the cosine of the two
    vectors of shares, which frequent classes dominate.

    Args:
        labels: `example`, of the victim's training data, or masks `example height width`, whose pixels are counted.
        public: likewise, labels of public data; None where there are none.
    """
    # Shares that sum to a little less than 1 would be nearer to those of absent classes than any guess is.
    claimed, count = claimed.double() / claimed.double().sum(), len(claimed)
    if labels.is_floating_point():
        raise DataError("truth: the victim's labels are targets of a regression, and the attack claims classes")
    if int(labels.max()) >= count:
        raise DataError(f"truth: the victim holds a label {int(labels.max())}, the attack claims {count} classes")
    true = _class_shares(labels, count)
    guesses = {"every class as often": torch.full((count,), 1 / count, dtype=torch.float64)}
    if public is not None:
        guesses["public class frequencies"] = _class_shares(public[public < count], count)
    return [
        Score.against_guesses(
            "label_distance",
            _total_variation(claimed, true),
            {name: _total_variation(guess, true) for name, guess in guesses.items()},
        ),
        Score.against_guesses(
            "label_cosine",
            _cosine(claimed, true),
            {name: _cosine(guess, true) for name, guess in guesses.items()},
        ),
    ]


def _class_shares(labels: Tensor, count: int) -> Tensor:
    return labels.flatten().bincount(minlength=count).double() / labels.numel()


def _total_variation(claimed: Tensor, true: Tensor) -> float:
    return float((claimed - true).abs().sum() / 2)


def _cosine(claimed: Tensor, true: Tensor) -> float:
    return float(cosine_similarity(claimed, true, dim=0))
