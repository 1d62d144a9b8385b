"""Membership learnt from records whose membership is known: the passive global attack of Nasr et al."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from adversaries.inference.membership import Candidates
from adversaries.local_updates import rounds_of
from fedsim.attacks import CLIENT, Attack, Knowledge, KnownCandidates, Paper, Progress
from fedsim.errors import AttackError, ConfigError
from fedsim.findings import Finding, Membership
from fedsim.recording.transcript import Transcript


@dataclass(frozen=True, kw_only=True)
class MembershipWhiteBox(Attack):
    """Claim that a client trained on the candidates that look like records which it is known to have trained on.

    The adversary knows some records of the victim, and others that it does not hold. On the models that the victim
    returned it computes features of each record: the loss, the outputs, and the lengths of the gradient of the loss in
    the last layers. A logistic regression on the features of all rounds together learns on the known records to tell
    members from others; the score of a candidate is its log-odds. The known records are no candidates.

    Args:
        layers: of how many of the last layers that have weights the gradient is measured; None takes three, or all
            where there are fewer.
        strength: inverse weight of the regression's L2 penalty, for standardised features; few known records want
            little.

    References:
        Nasr, Shokri, Houmansadr: Comprehensive Privacy Analysis of Deep Learning, IEEE S&P 2019, the passive global
        attack in the supervised setting. Differs: of gradients only lengths are features, of outputs the confidence in
        the candidate's class and the entropy, and the attack model is linear; the paper feeds whole gradients and
        activations to a network of convolutions and encoders, for which it knows thousands of records.
    """

    layers: int | None = None
    strength: float = 0.1

    paper: ClassVar[Paper] = Paper(
        title="Comprehensive Privacy Analysis of Deep Learning: Passive and Active White-box Inference Attacks against "
        "Centralized and Federated Learning",
        authors="Nasr, Shokri, Houmansadr",
        venue="IEEE S&P",
        year=2019,
        url="https://arxiv.org/abs/1812.00910",
    )
    needs: ClassVar[frozenset[str]] = frozenset({"model", "loss", "candidates", "known_candidates"})
    reads: ClassVar[frozenset[str]] = frozenset({CLIENT})
    temporal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.layers is not None and self.layers < 1:
            raise ConfigError(f"layers: expected at least 1, got {self.layers}")
        if not 0 < self.strength < math.inf:
            raise ConfigError(f"strength: expected a finite value above 0, got {self.strength}")

    def _run(
        self, transcript: Transcript, knowledge: Knowledge, victim: int, rng: torch.Generator, progress: Progress
    ) -> Finding:
        known = knowledge.known_candidates
        assert known is not None
        held = _held(known)
        records = Candidates(replace(knowledge, candidates=known)), Candidates(knowledge)
        rounds, learnt, asked = rounds_of(transcript, victim), list[Tensor](), list[Tensor]()
        for done, number in enumerate(rounds, start=1):
            update = transcript.update(number, victim)
            for features, of in zip((learnt, asked), records, strict=True):
                features.append(of.features(update, self.layers).double().cpu())
            progress(done, len(rounds), {"objective": float(asked[-1][:, 0].mean())})
        return Membership(scores=self._log_odds(torch.cat(learnt, 1), held, torch.cat(asked, 1)))

    def _log_odds(self, learnt: Tensor, held: Tensor, asked: Tensor) -> Tensor:
        """`candidate`, of features `known feature` and `candidate feature`."""
        from sklearn.linear_model import LogisticRegression  # takes a second
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
        from threadpoolctl import threadpool_limits

        model = make_pipeline(StandardScaler(), LogisticRegression(C=self.strength, max_iter=10_000))
        with threadpool_limits(1):  # the number of threads changes float sums
            model.fit(learnt.numpy(), held.numpy())
            return torch.from_numpy(model.decision_function(asked.numpy()))


def _held(known: KnownCandidates) -> Tensor:
    """`record`, whether it is known to be a member.

    Raises:
        AttackError: that is not said of each, or there is nothing to tell apart.
    """
    held = known.members.bool().cpu()
    if held.shape != known.inputs.shape[:1]:
        raise AttackError(
            f"of {len(known.inputs)} known records {held.numel()} are said to be members or not; say so of each"
        )
    if not 0 < int(held.sum()) < len(held):
        raise AttackError(
            f"of {len(held)} known records {int(held.sum())} are members; this attack learns from members and from "
            "others, grant both"
        )
    return held
