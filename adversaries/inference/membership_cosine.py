"""Membership inference by the cosine of a candidate's gradient and a client's update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from adversaries.inference.membership import PASSIVE_INFERENCE_PAPER, CandidateAttack, CandidateScorer, score_victim
from fedsim.interfaces.attack import CLIENT, GROUP, Paper, Progress, Target
from fedsim.interfaces.findings import Finding


@dataclass(frozen=True, kw_only=True)
class MembershipCosine(CandidateAttack):
    """Claim that a client trained on the candidates whose gradients point along its updates.

    In overparameterised networks the gradients of different examples are nearly orthogonal. An
    update is a sum of gradients, so it correlates with those of the examples that were trained on.

    1. Compute the gradient of each candidate's loss at w_t.
    2. Score the candidate by its cosine with w_t - w_k (`CandidateScorer.gradient_cosines`).
    3. Average over rounds (`score_victim`).

    References:
        [Li2023a], the cosine attack. Differs: scores are averaged over rounds, which is the cosine
        series that FedMIA [Zhu2025] compares with.
    """

    paper: ClassVar[Paper] = PASSIVE_INFERENCE_PAPER
    vector_targets: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"model", "loss", "candidates"})
    reads: ClassVar[frozenset[str]] = frozenset({CLIENT, GROUP})

    def _run(self, target: Target, progress: Progress) -> Finding:
        return score_victim(target, CandidateScorer(target.knowledge).gradient_cosines, progress)
