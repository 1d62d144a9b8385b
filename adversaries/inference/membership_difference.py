"""Membership inference by how much of a client's update a candidate's gradient explains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from adversaries.inference.membership import PASSIVE_INFERENCE_PAPER, CandidateAttack, CandidateScorer, score_victim
from fedsim.interfaces.attack import CLIENT, Knowledge, Paper, Progress, Target
from fedsim.interfaces.findings import Finding
from fedsim.inversion.training_mismatch import OPTIMIZER_FACTS, warn_unless_plain_sgd
from fedsim.recording.wire_format import Update
from fedsim.training.settings import known_steps


@dataclass(frozen=True, kw_only=True)
class MembershipDifference(CandidateAttack):
    """Claim that a client trained on the candidates that explain part of its update's norm.

    If the gradients of different examples are orthogonal, removing an example's contribution h from
    the update I = w_t - w_k lowers |I|^2 by |h|^2 for a member and raises it by |h|^2 for others.

    1. Compute the gradient of each candidate's loss at w_t (`CandidateScorer.gradient_products`).
    2. Scale it to the contribution h of one example: times learning rate x T / N for T local steps
       on N examples, or 1 / N where the client sends a gradient (`_contribution_scale`).
    3. Score the candidate by |I|^2 - |I - h|^2 and average over rounds (`score_victim`).

    This is the contribution in steps of plain SGD; where clients train otherwise, the attack warns.

    References:
        [Li2023a], the gradient difference attack. Differs: the gradient is scaled to the
        contribution of one example, without which |h|^2 dominates wherever learning rate x T / N is
        far from 1; momentum is ignored; scores are averaged over rounds.
    """

    paper: ClassVar[Paper] = PASSIVE_INFERENCE_PAPER
    vector_targets: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset(
        {"model", "loss", "candidates", "learning_rate", "local_epochs", "batch_size"}
    )
    uses: ClassVar[frozenset[str]] = OPTIMIZER_FACTS
    reads: ClassVar[frozenset[str]] = frozenset({CLIENT})
    needs_num_examples: ClassVar[bool] = True

    def _run(self, target: Target, progress: Progress) -> Finding:
        knowledge = target.knowledge
        candidates = CandidateScorer(knowledge)
        updates = target.transcript.updates(target.victim)
        if any(update.gradient is None for update in updates):
            warn_unless_plain_sgd(self, knowledge, f"client {target.victim}")

        def norm_reduction(updates: Sequence[Update]) -> Tensor:
            products = candidates.gradient_products(updates)
            scale = _contribution_scale(knowledge, updates[0])
            # |I|^2 - |I - h|^2 with h = scale * g, multiplied out
            return scale * (2 * products.inner_products - scale * products.gradient_norms.square())

        return score_victim(target, norm_reduction, progress)


def _contribution_scale(knowledge: Knowledge, update: Update) -> float:
    """Return the factor of one example's gradient in the update."""
    if update.gradient is not None:
        return 1 / update.num_examples
    steps = known_steps(knowledge, update.num_examples)
    assert knowledge.learning_rate is not None
    assert steps is not None
    return knowledge.learning_rate * steps / update.num_examples
