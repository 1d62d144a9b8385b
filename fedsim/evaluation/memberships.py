"""How well an attack tells which candidate records the victim trained on."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.errors import DataError
from fedsim.evaluation.case import Case
from fedsim.evaluation.kind import About, Bench, Evaluator, Judgement, Owed, Roc, Shown, members
from fedsim.evaluation.score import Score
from fedsim.evaluation.truth import Truth
from fedsim.experiments.candidates import drawn
from fedsim.findings import Membership

log = logging.getLogger(__name__)

RATES = {"tpr_at_1_in_100": 0.01, "tpr_at_1_in_1000": 0.001}
"""False-positive rates at which the true-positive rate is told, by metric."""
_CHANCE = "chance"


@dataclass(frozen=True)
class Memberships(Evaluator[Membership]):
    """Candidate records of which half are the victim's."""

    finding = Membership

    def form(self, finding: Membership, owed: Owed) -> None:
        """One score for each candidate."""
        if (candidates := owed.knowledge.candidates) is not None:
            owed.expect("scores of candidates numbering", len(finding.scores), len(candidates.inputs))

    def truth(self, finding: Membership, about: About, case: Case) -> Truth | None:
        """Which candidates the victim trained on: `candidate 1` data and `candidate` labels, both 1 for a member.

        Raises:
            DataError: other candidates were granted than this experiment has.
        """
        if case.experiment is None:
            return None
        clients = members(about) or (int(about["victim"]),)
        others, count = str(about["knowledge"]["candidates"]), len(finding.scores)
        held = drawn(case.experiment.data, clients, others, count).members
        if len(held) != count:
            raise DataError(
                f"truth: the attack scores {count} candidates, but this experiment has {len(held)}; attack again"
            )
        return Truth(data=held[:, None].float(), labels=held.long())

    def judge(self, finding: Membership, about: About, bench: Bench) -> Judgement:
        """See `score_membership`."""
        truth = self.truth(finding, about, bench.case)
        if truth is None:
            log.warning(
                "%s, client %d: not scored: only an experiment says what the victim held",
                about["attack"],
                int(about["victim"]),
            )
            return Judgement()
        return Judgement(scores=score_membership(finding.scores, truth.labels.bool()), examples=len(finding.scores))

    def show(self, finding: Membership, truth: Truth | None, tokens: Sequence[str], metric: str) -> Shown:
        """Its ROC curve."""
        del tokens, metric
        return Shown() if truth is None else Shown(known=True, roc=roc(finding.scores, truth.labels.bool()))


def score_membership(scores: Tensor, held: Tensor) -> list[Score]:
    """Judge scores of candidates, higher for a member.

    `membership_auc` is the area under the ROC curve. `membership_accuracy` is balanced accuracy where the half with
    the higher scores is claimed to be members: that half of the candidates are is part of what is granted, so this
    threshold, the median, takes no truth. Of candidates that all score the median, each is claimed with the same
    probability. `tpr_at_1_in_100` and `tpr_at_1_in_1000` are the shares of members at the lowest threshold that at
    most that share of the others reach, the figures that Carlini et al. (Membership Inference Attacks From First
    Principles, IEEE S&P 2022) ask for. Where k of n others may reach it, random scores get (k + 1) / (n + 1) on
    average, a little more than that share, since the threshold is lowered until the next of the others would.

    Args:
        scores: `candidate`.
        held: `candidate`, whether the victim trained on it.

    Raises:
        DataError: all candidates are members, or none is, or their number is another than that of the scores.
    """
    if scores.shape != held.shape:
        raise DataError(f"truth: the attack scores {len(scores)} candidates, the truth is about {len(held)}")
    if held.all() or not held.any():
        what = "a member" if held.all() else "no member"
        raise DataError(f"truth: each of the {len(held)} candidates is {what}; grant members and others")
    from sklearn.metrics import roc_auc_score  # takes a second

    curve, others = roc(scores, held), int((~held).sum())
    found = [
        Score.beside("membership_auc", float(roc_auc_score(held, _ranks(scores))), {_CHANCE: 0.5}, ceiling=1.0),
        Score.beside("membership_accuracy", _accuracy(scores.double(), held), {_CHANCE: 0.5}, ceiling=1.0),
    ]
    for metric, rate in RATES.items():
        if others * rate < 1:
            why = (
                f"{rate:.1%} of {others} candidates that are no members is less than one; grant more candidates, of a "
                "victim that holds enough"
            )
            found.append(Score.not_computed(metric, why))
            continue
        chance = (math.floor(others * rate) + 1) / (others + 1)
        found.append(Score.beside(metric, curve.at(rate), {_CHANCE: chance}, ceiling=1.0))
    return found


def _accuracy(scores: Tensor, held: Tensor) -> float:
    """Balanced accuracy of claiming the higher half, ties by chance."""
    threshold = scores.sort().values[len(scores) // 2]
    above, level = scores > threshold, scores == threshold
    claimed = above.double() + level * (len(scores) / 2 - above.sum()) / level.sum()
    return float(claimed[held].mean() + 1 - claimed[~held].mean()) / 2


def roc(scores: Tensor, held: Tensor) -> Roc:
    """The ROC curve, of all thresholds that scores make; infinite scores are the highest or lowest of all."""
    from sklearn.metrics import roc_curve  # takes a second

    false, true, _ = roc_curve(held, _ranks(scores), drop_intermediate=False)
    return Roc(false=torch.from_numpy(false), true=torch.from_numpy(true))


def _ranks(scores: Tensor) -> Tensor:
    """They have the same curve, and scikit-learn takes no infinite scores."""
    return torch.unique(scores, return_inverse=True)[1]  # type: ignore[no-any-return]
