"""White-box membership inference by a classifier trained on known records [Nasr2019]."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from adversaries.inference.membership import CandidateAttack, CandidateScorer
from fedsim.base.constraints import PositiveFloat, PositiveInt
from fedsim.base.errors import AttackError
from fedsim.base.papers import cite
from fedsim.interfaces.attack import (
    CLIENT,
    KnownCandidates,
    MessageKind,
    Paper,
    Progress,
    Target,
)
from fedsim.interfaces.findings import Finding, Membership


@dataclass(frozen=True, kw_only=True)
class MembershipWhiteBox(CandidateAttack):
    """Claim that a client trained on the candidates whose features resemble those of known members.

    The adversary knows some records that the victim trained on and some that it did not; none of
    them is a candidate.

    1. Compute features of each record on every model that the victim returned: the loss, the
       confidence, and the norm of the loss gradient in the last layers
       (`CandidateScorer.white_box_features`).
    2. Fit a logistic regression of membership on the known records' features of all rounds.
    3. Score each candidate by its log-odds (`_membership_log_odds`).

    Args:
        layers: number of last layers with weights whose gradient norms are features; None takes
            three, or all where there are fewer.
        strength: inverse weight of the regression's L2 penalty, for standardised features; keep it
            small where few records are known.

    References:
        [Nasr2019], the passive global attack in the supervised setting. Differs: of gradients only
        norms are features, of outputs the confidence in the candidate's class and the entropy, and
        the attack model is linear; the paper feeds whole gradients and activations to a network of
        convolutions and encoders, for which it knows thousands of records.
    """

    layers: PositiveInt | None = None
    strength: PositiveFloat = 0.1

    paper: ClassVar[Paper] = cite("Nasr2019")
    vector_targets: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"model", "loss", "candidates", "known_candidates"})
    reads: ClassVar[frozenset[str]] = frozenset({CLIENT})
    message_kind: ClassVar[MessageKind] = "weights"

    def _run(self, target: Target, progress: Progress) -> Finding:
        knowledge = target.knowledge
        known_candidates = knowledge.known_candidates
        assert known_candidates is not None
        members = _membership_labels(known_candidates)
        known_records = CandidateScorer(replace(knowledge, candidates=known_candidates))
        candidates = CandidateScorer(knowledge)

        # Compute the features of all records in each round.
        rounds = target.participation_rounds()
        known_features: list[Tensor] = []
        candidate_features: list[Tensor] = []
        for rounds_so_far, number in enumerate(rounds, start=1):
            update = target.transcript.update(number, target.victim)
            known_features.append(known_records.white_box_features(update, self.layers).double().cpu())
            candidate_features.append(candidates.white_box_features(update, self.layers).double().cpu())
            mean_loss = candidate_features[-1][:, 0].mean()
            progress(rounds_so_far, len(rounds), {"objective": float(mean_loss)})

        scores = self._membership_log_odds(torch.cat(known_features, 1), members, torch.cat(candidate_features, 1))
        return Membership(scores=scores)

    def _membership_log_odds(self, known_features: Tensor, members: Tensor, candidate_features: Tensor) -> Tensor:
        """Fit a logistic regression on known records; return each candidate's log-odds.

        Args:
            known_features: `known feature`.
            members: `known`.
            candidate_features: `candidate feature`.
        """
        from sklearn.linear_model import LogisticRegression  # takes a second
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
        from threadpoolctl import threadpool_limits

        model = make_pipeline(StandardScaler(), LogisticRegression(C=self.strength, max_iter=10_000))
        with threadpool_limits(1):  # the number of threads changes float sums
            model.fit(known_features.numpy(), members.numpy())
            return torch.from_numpy(model.decision_function(candidate_features.numpy()))


def _membership_labels(known: KnownCandidates) -> Tensor:
    """Return whether each known record is a member, `record`."""
    members = known.members.bool().cpu()
    if members.shape != known.inputs.shape[:1]:
        raise AttackError(
            f"of {len(known.inputs)} known records {members.numel()} are said to be members or not; say so of each"
        )
    if not 0 < int(members.sum()) < len(members):
        raise AttackError(
            f"of {len(members)} known records {int(members.sum())} are members; this attack learns from members and "
            "from others, grant both"
        )
    return members
