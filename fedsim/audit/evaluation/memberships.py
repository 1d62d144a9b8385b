"""Score how well an attack infers which candidate records the victim trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.audit.evaluation.candidate_kinds import MOST_CANDIDATES, BlindRanking, doubt_candidates, rank_blindly
from fedsim.audit.evaluation.case import Case
from fedsim.audit.evaluation.display import Display, RocCurve
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
from fedsim.base.errors import DataError, format_percent
from fedsim.federation.candidates import CandidateRecords
from fedsim.interfaces.findings import Membership
from fedsim.interfaces.knowledge import NON_MEMBER_SOURCES
from fedsim.interfaces.metric import Evidence, Metric

RATES = {"tpr_at_1_in_100": 0.01, "tpr_at_1_in_1000": 0.001}
"""False-positive rates at which the true-positive rate is reported, by metric."""
CANDIDATES_DIGEST = "candidates_digest"
"""Key of a finding's metadata: the hash of the candidates that it scores, where truth files hold them."""
_CHANCE = "chance"


class MembershipAuc(Metric):
    """Area under the ROC curve of the membership scores."""

    title = "membership AUC"
    higher_is_better = True
    lowest = 0.0
    highest = 1.0
    evidence: ClassVar[Evidence] = "candidates"
    preference = 150
    explanations = (
        "For membership, the floor is what random scores get on average. The half of the candidates with the higher "
        "scores is claimed to be members; the true-positive rates (TPR) are those at the lowest threshold that keeps "
        "the false-positive rate (FPR).",
    )

    def chance_spread(self, count: int) -> tuple[float, float]:
        """Return that of Mann and Whitney's statistic for as many members as others."""
        return math.sqrt((count + 1) / 3) / count, 4 / count**2


class MembershipAccuracy(MembershipAuc):
    """Balanced accuracy of the claim that the half with the higher scores are members."""

    title = "membership balanced accuracy"
    preference = 151

    def chance_spread(self, count: int) -> tuple[float, float]:
        """Return that of the share of members among half of the candidates, which is hypergeometric."""
        return 0.5 / math.sqrt(count - 1), 2 / count


class TruePositiveRate(MembershipAuc):
    """Share of the members that are found where one non-member in 100 is taken for one."""

    title = "TPR at FPR 1 %"
    is_share = True
    preference = 152
    false_positive_rate: ClassVar[float] = RATES["tpr_at_1_in_100"]

    def chance_tail(self, value: float, count: int) -> float | None:
        """Return the chance that so many members score above the highest non-members but k (beta-binomial).

        Of several victims the mean counts: they may share their non-members and so the threshold, and one that is low
        by chance favours all of them.
        """
        from scipy.stats import betabinom  # takes a second

        hits = math.floor(value * (count // 2) + 1e-9)
        return float(betabinom.sf(hits - 1, *self._chance_law(count)))

    def chance_spread(self, count: int) -> tuple[float, float]:
        """Return that of the same law, half of whose variance is of the threshold."""
        from scipy.stats import betabinom  # likewise

        members = count // 2
        return float(betabinom.std(*self._chance_law(count))) / members, 1 / members

    def _chance_law(self, count: int) -> tuple[int, int, int]:
        """Return the parameters of the beta-binomial distribution of how many members are found by chance."""
        members = count // 2
        allowed = math.floor(members * self.false_positive_rate)
        return members, allowed + 1, members - allowed


class TruePositiveRateOfFew(TruePositiveRate):
    """Share of the members that are found where one non-member in 1000 is taken for one."""

    title = "TPR at FPR 0.1 %"
    preference = 153
    false_positive_rate = RATES["tpr_at_1_in_1000"]


@dataclass(frozen=True)
class MembershipEvaluator(Evaluator[Membership]):
    """Judge of membership scores of candidate records, half of which are the victim's."""

    finding = Membership

    def check_form(self, finding: Membership, spec: FindingSpec) -> None:
        """Check that there is one score for each candidate."""
        candidates = spec.knowledge.candidates
        if candidates is not None:
            spec.expect("scores of candidates numbering", len(finding.scores), len(candidates.inputs))

    def fact_about(self, finding: Membership) -> str:
        """Return the candidates that it scores."""
        del finding
        return "candidates"

    def truth(self, finding: Membership, about: FindingMetadata, case: Case) -> Truth:
        """Return which candidates are members, as `candidate 1` data and `candidate` labels.

        Raises:
            UnknownTruthError: no truth file is named for the client of a recording made elsewhere, or the candidates
                were not drawn from truth files.
        """
        drawn = self._draw_candidates(finding, about, case)
        return Truth(data=drawn.members[:, None].float(), labels=drawn.members.long())

    def _draw_candidates(self, finding: Membership, about: FindingMetadata, case: Case) -> CandidateRecords:
        """Draw the candidates that the finding scores once more."""
        clients = group_members(about) or (int(about["victim"]),)
        granted = about.get("knowledge") or {}
        if granted.get("candidates") not in NON_MEMBER_SOURCES:  # somebody passed records of their own
            case.require_experiment()
        non_members, count = str(granted.get("candidates")), len(finding.scores)
        drawn = case.draw_candidates(clients, non_members, count)
        if len(drawn.members) != count:
            raise DataError(
                f"truth: the attack scores {count} candidates, but there are {len(drawn.members)}; attack again"
            )
        if case.is_described_by_file and about.get(CANDIDATES_DIGEST) != drawn.digest:
            raise DataError(
                "truth: the attack scores other candidates than those that the truth files hold now; attack again"
            )
        return drawn

    def judge(self, finding: Membership, about: FindingMetadata, context: EvaluationContext) -> Judgement:
        """Score a membership inference, see `score_membership`."""
        drawn = self._draw_candidates(finding, about, context.case)
        scores = score_membership(finding.scores, drawn.members)
        other_rankings = [] if group_members(about) else self._rank_others(finding, about, context)
        doubt_candidates(rank_blindly(drawn), other_rankings, f"{about['attack']}, client {about['victim']}")
        return Judgement(scores=scores, examples=len(finding.scores))

    def _rank_others(
        self, finding: Membership, about: FindingMetadata, context: EvaluationContext
    ) -> list[BlindRanking]:
        """Rank candidates of other clients of a run of our own, as many in all as are compared."""
        if context.case.is_described_by_file:
            return []
        experiment = context.case.require_experiment()
        source, count = str((about.get("knowledge") or {}).get("candidates")), len(finding.scores)
        rankings = context.cached_values.setdefault(f"blind rankings, {source}, {count}", {})
        for client in range(min(experiment.data.clients, MOST_CANDIDATES // count)):
            if client not in rankings:
                rankings[client] = None
                with suppress(DataError):  # it holds no record that can be paired
                    rankings[client] = rank_blindly(context.case.draw_candidates((client,), source, count))
        return [ranking for client, ranking in rankings.items() if ranking and client != int(about["victim"])]

    def show(self, finding: Membership, truth: Truth | None, tokens: Sequence[str], metric: str) -> Display:
        """Display the ROC curve."""
        del tokens, metric
        if truth is None:
            return Display()
        return Display(has_truth=True, roc=compute_roc(finding.scores, truth.labels.bool()))


def score_membership(scores: Tensor, is_member: Tensor) -> list[Score]:
    """Score membership scores of candidates, which are higher for a member.

    `membership_auc` is the area under the ROC curve. `membership_accuracy` is balanced accuracy
    where the half with the higher scores is claimed to be members: that half of the candidates are
    members is part of what is granted, so this threshold, the median, takes no truth. Candidates
    that all score the median are each claimed with the same probability. `tpr_at_1_in_100` and
    `tpr_at_1_in_1000` are the true-positive rates at the lowest threshold with at most that
    false-positive rate, the figures that [Carlini2022] asks for. Where k of n non-members may reach
    the threshold, random scores get (k + 1) / (n + 1) on average, a little more than that rate,
    because the threshold is lowered until the next non-member would reach it.
    """
    if scores.shape != is_member.shape:
        raise DataError(f"truth: the attack scores {len(scores)} candidates, the truth is about {len(is_member)}")
    if is_member.all() or not is_member.any():
        kind = "a member" if is_member.all() else "no member"
        raise DataError(f"truth: each of the {len(is_member)} candidates is {kind}; grant members and others")
    from sklearn.metrics import roc_auc_score  # takes a second

    curve, non_members = compute_roc(scores, is_member), int((~is_member).sum())
    area = float(roc_auc_score(is_member, _ranks(scores)))
    accuracy = _balanced_accuracy(scores.double(), is_member)
    all_scores = [
        Score.against_guesses("membership_auc", area, {_CHANCE: 0.5}),
        Score.against_guesses("membership_accuracy", accuracy, {_CHANCE: 0.5}),
    ]
    for metric, rate in RATES.items():
        if non_members * rate < 1:
            reason = (
                f"{format_percent(rate)} of {non_members} non-members is less than one; grant more candidates, and "
                "attack a victim with enough examples"
            )
            all_scores.append(Score.from_reason(metric, reason))
            continue
        chance = (math.floor(non_members * rate) + 1) / (non_members + 1)
        all_scores.append(Score.against_guesses(metric, curve.true_positive_rate(rate), {_CHANCE: chance}))
    return all_scores


def _balanced_accuracy(scores: Tensor, is_member: Tensor) -> float:
    """Return the expected balanced accuracy of claiming the higher half, ties by chance."""
    threshold = scores.sort().values[len(scores) // 2]
    above, tied = scores > threshold, scores == threshold
    # Probability that each candidate is claimed.
    claimed = above.double() + tied * (len(scores) / 2 - above.sum()) / tied.sum()
    return float(claimed[is_member].mean() + 1 - claimed[~is_member].mean()) / 2


def compute_roc(scores: Tensor, is_member: Tensor) -> RocCurve:
    """Compute the ROC curve over all thresholds; infinite scores are allowed."""
    from sklearn.metrics import roc_curve  # takes a second

    false_rates, true_rates, _ = roc_curve(is_member, _ranks(scores), drop_intermediate=False)
    return RocCurve(
        false_positive_rates=torch.from_numpy(false_rates), true_positive_rates=torch.from_numpy(true_rates)
    )


def _ranks(scores: Tensor) -> Tensor:
    """Return ranks, which have the same ROC curve; scikit-learn takes no infinite scores."""
    return torch.unique(scores, return_inverse=True)[1]  # type: ignore[no-any-return]
