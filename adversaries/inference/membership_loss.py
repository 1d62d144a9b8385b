"""Membership inference by the loss of candidates on the models that a client returned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from adversaries.inference.membership import CandidateAttack, CandidateScorer, score_victim
from fedsim.base.papers import cite
from fedsim.interfaces.attack import CLIENT, GROUP, MessageKind, Paper, Progress, Target
from fedsim.interfaces.findings import Finding


@dataclass(frozen=True, kw_only=True)
class MembershipLoss(CandidateAttack):
    """Claim that a client trained on the candidates whose loss is small on its models.

    A model fits the examples that it was trained on better than others. The score of a candidate is
    minus its loss on the returned model (`CandidateScorer.negative_losses`), averaged over rounds
    (`score_victim`). Where a sum over clients is seen, it is whether any of them trained on a
    candidate, by the model that is the mean of theirs.

    Args:
        by_decrease: score by how far the loss fell from the broadcast model to the returned one, so
            that records that any model finds easy do not look like members. Of two models around
            the removal of a client, it tells whose records left.

    References:
        [Yeom2018], Adversary 1; over rounds as the loss series of [Zhu2025] (FedMIA), Table 1.
        Differs: Yeom et al. threshold the loss at the mean training loss, which is one point of the
        ROC curve that all thresholds make; `by_decrease` is ours.
    """

    by_decrease: bool = False

    paper: ClassVar[Paper] = cite("Yeom2018")
    vector_targets: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"model", "loss", "candidates"})
    reads: ClassVar[frozenset[str]] = frozenset({CLIENT, GROUP})
    message_kind: ClassVar[MessageKind] = "weights"
    reads_gradients: ClassVar[bool] = False

    def _run(self, target: Target, progress: Progress) -> Finding:
        scorer = CandidateScorer(target.knowledge)
        return score_victim(target, scorer.loss_decreases if self.by_decrease else scorer.negative_losses, progress)
