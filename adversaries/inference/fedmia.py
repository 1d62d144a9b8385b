"""FedMIA: membership inference that compares a client with all other clients of its round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from adversaries.inference.membership import (
    MIN_CLIENTS_PER_ROUND,
    CandidateAttack,
    CandidateScorer,
    score_against_other_clients,
)
from fedsim.base.papers import cite
from fedsim.interfaces.attack import CLIENT, MessageKind, Paper, Progress, Target
from fedsim.interfaces.findings import Finding


@dataclass(frozen=True, kw_only=True)
class FedMia(CandidateAttack):
    """Claim that a client trained on the candidates for which it stands out in its round.

    The other clients of a round do not have the victim's data, so their statistics of a candidate
    show how that statistic is distributed for a non-member.

    1. Compute a statistic of each candidate and client that is larger for members (`measure`).
    2. Fit a normal distribution to the other clients' values and score the candidate by the
       one-tailed probability Phi((victim - mean) / deviation) (`score_against_other_clients`).
    3. Average over rounds.

    Args:
        measure: `cosine` of the gradient of a candidate's loss at w_t with w_t - w_k (FedMIA-II),
            or minus the `loss` on w_k (FedMIA-I).
        probability: whether Phi is applied. Near 1 it hardly differs between candidates; without it
            the score is the mean number of deviations.

    References:
        [Zhu2025]. Differs: outliers among the other clients are not filtered, since among up to ten
        values none is three of their own deviations from their mean; mean and deviation are those
        of the same candidate, which the released evaluation confuses for non-members by shuffling
        them client by client.
    """

    measure: Literal["cosine", "loss"] = "cosine"
    probability: bool = True

    paper: ClassVar[Paper] = cite("Zhu2025")
    vector_targets: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"model", "loss", "candidates"})
    reads: ClassVar[frozenset[str]] = frozenset({CLIENT})
    clients_needed: ClassVar[int] = MIN_CLIENTS_PER_ROUND

    @property
    def message_kind(self) -> MessageKind:
        """Return weights for losses on them."""
        return "weights" if self.measure == "loss" else "any"

    @property
    def reads_gradients(self) -> bool:
        """Return whether candidates are scored by the cosine of their gradients."""
        return self.measure == "cosine"

    def _run(self, target: Target, progress: Progress) -> Finding:
        candidates = CandidateScorer(target.knowledge)
        statistic = candidates.gradient_cosines if self.measure == "cosine" else candidates.negative_losses
        return score_against_other_clients(target, statistic, progress, probability=self.probability)
