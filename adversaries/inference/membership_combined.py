"""Membership inference from all rounds together, under noise that is correlated over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adversaries.inference.membership import CandidateAttack, CandidateScorer
from fedsim.base.errors import AttackError
from fedsim.base.papers import cite
from fedsim.interfaces.attack import CLIENT, GROUP, Paper, Progress, Target
from fedsim.interfaces.findings import Finding, Membership


@dataclass(frozen=True, kw_only=True)
class MembershipCombined(CandidateAttack):
    """Claim that a client trained on the candidates that move the models along their gradients in its rounds.

    A trusted server may add noise that cancels over rounds, by a tree or by bands. What hides a client in
    one round is then told in part by the rounds before and after it, also by those in which it did not take part:
    their differences and other combinations have less noise. The matrix that says how much is public.

    1. In each round compute how far the sum of updates goes along each candidate's gradient at w_t
       (`CandidateScorer.gradient_products`), divided by the gradient's norm.
    2. Weight the rounds by Sigma^-1 s, where Sigma is the covariance of their noise and s is 1 in rounds of
       the victim, else 0: of all weighted sums in which the victim counts fully, this one has the least noise
       (`weigh_rounds`).
    3. The weighted sum is the score.

    Without `noise_covariance` rounds count alike, and those without the victim not at all.

    References:
        [Li2023a] for the inner product of update and gradient; [Denisov2022], Sec. 2, for noise C^-1 z, of which
        whoever multiplies by C is left with z. Differs: the best linear combination of rounds in its place, as in
        an audit by canaries; gradients of a candidate are taken to point alike in all rounds.
    """

    paper: ClassVar[Paper] = cite("Denisov2022")
    vector_targets: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"model", "loss", "candidates"})
    uses: ClassVar[frozenset[str]] = frozenset({"noise_covariance"})
    reads: ClassVar[frozenset[str]] = frozenset({CLIENT, GROUP})

    def _run(self, target: Target, progress: Progress) -> Finding:
        transcript, covariance = target.transcript, target.knowledge.noise_covariance
        candidates = CandidateScorer(target.knowledge)
        rounds, takes_part, messages = _choose_messages(target, all_rounds=covariance is not None)
        weights = weigh_rounds(rounds, takes_part, covariance)

        total = torch.zeros(0, dtype=torch.float64)
        for count, (number, client, weight) in enumerate(zip(rounds, messages, weights.tolist(), strict=True), 1):
            update = transcript.update(number, client)
            products = candidates.gradient_products([update])
            tiny = torch.finfo(torch.float64).tiny
            moves = (products.inner_products[0] / products.gradient_norms.clamp_min(tiny)).cpu()
            # Noise is that of a sum, and messages are means over the group.
            scores = weight * max(1, len(update.members)) * moves
            if not scores.isfinite().all():
                raise AttackError(f"round {number}: the score of a candidate is NaN or infinite; inspect other rounds")
            total = scores if count == 1 else total + scores
            progress(count, len(rounds), {"objective": float(-total.mean())})
        return Membership(scores=total)


def _choose_messages(target: Target, *, all_rounds: bool) -> tuple[list[int], Tensor, list[int]]:
    """Return the rounds to combine, whether the victim is in each, and whose message is read in it.

    Rounds without the victim tell something where one message is of all clients, whose noise is correlated with
    that of other rounds.
    """
    transcript, victim = target.transcript, target.victim
    own = set(target.participation_rounds())
    rounds, messages = [], []
    for number in transcript.rounds:
        clients = transcript.clients(number)
        if number in own:
            rounds.append(number)
            messages.append(victim)
        elif all_rounds and len(clients) == 1:
            rounds.append(number)
            messages.append(clients[0])
    return rounds, torch.tensor([float(number in own) for number in rounds], dtype=torch.float64), messages


def weigh_rounds(rounds: Sequence[int], takes_part: Tensor, covariance: Tensor | None) -> Tensor:
    """Return the weight of each round in the combination with the least noise, `round`, of which the victim has 1.

    Args:
        rounds: their numbers, from 1 on.
        takes_part: `round`, 1 where the victim takes part, else 0.
        covariance: `round round` of all rounds of the run; None where rounds are independent.

    >>> anticorrelated = torch.tensor([[1.0, -0.5], [-0.5, 1.0]])
    >>> weigh_rounds([1, 2], torch.tensor([1.0, 0.0]), anticorrelated).tolist()
    [1.0, 0.5]
    """
    if covariance is None:
        return takes_part / takes_part.sum()
    indices = torch.tensor([number - 1 for number in rounds])
    filtered: Tensor = torch.linalg.solve(covariance.to(takes_part)[indices][:, indices], takes_part)
    return filtered / (filtered @ takes_part)
