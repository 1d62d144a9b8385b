"""Membership inference by LiRA, with the models of other clients as shadow models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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
class MembershipLira(CandidateAttack):
    """Claim that a client trained on the candidates that its models are unusually confident in.

    The models that the round's other clients returned serve as LiRA's shadow models, which were not
    trained on the candidate.

    1. Compute log p / (1 - p) of the candidate's class on each model, which is close to normally
       distributed (`CandidateScorer.confidence_log_odds`).
    2. Score the candidate by how many standard deviations the victim's value lies above the mean of
       the other clients (`score_against_other_clients`). Clients are few, so all candidates of a
       round share one deviation.
    3. Average over rounds.

    References:
        [Carlini2022], the offline attack with a global variance. Differs: no shadow models are
        trained, other clients' models, which start from the same w_t, take their place; scores are
        averaged over rounds, which are no independent trials.
    """

    paper: ClassVar[Paper] = cite("Carlini2022")
    needs: ClassVar[frozenset[str]] = frozenset({"model", "candidates"})
    reads: ClassVar[frozenset[str]] = frozenset({CLIENT})
    clients_needed: ClassVar[int] = MIN_CLIENTS_PER_ROUND
    message_kind: ClassVar[MessageKind] = "weights"
    reads_gradients: ClassVar[bool] = False

    def _run(self, target: Target, progress: Progress) -> Finding:
        statistic = CandidateScorer(target.knowledge).confidence_log_odds
        return score_against_other_clients(target, statistic, progress, pooled=True)
