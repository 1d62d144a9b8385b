"""Membership by the direction of the gradient of a candidate beside that of a client's update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from adversaries.inference.membership import PASSIVE, Candidates, of_victim
from fedsim.attacks import CLIENT, Attack, Knowledge, Paper, Progress
from fedsim.findings import Finding
from fedsim.recording.transcript import Transcript


@dataclass(frozen=True, kw_only=True)
class MembershipCosine(Attack):
    """Claim that a client trained on the candidates whose gradients point along its updates.

    The score of a candidate is the cosine of the gradient of its loss at w_t with w_t - w_k, mean over rounds. In large
    networks the gradients of different examples are nearly orthogonal, so that an update, a sum of gradients, is
    correlated with those of the examples that it was made of.

    References:
        Li, Li, Ribeiro: Effective Passive Membership Inference Attacks in Federated Learning against Overparameterized
        Models, ICLR 2023, the attack by cosine. Differs: the mean over rounds is what FedMIA (Zhu et al., CVPR 2025)
        compares with as the cosine series.
    """

    paper: ClassVar[Paper] = PASSIVE
    needs: ClassVar[frozenset[str]] = frozenset({"model", "loss", "candidates"})
    reads: ClassVar[frozenset[str]] = frozenset({CLIENT})
    temporal: ClassVar[bool] = True

    def _run(
        self, transcript: Transcript, knowledge: Knowledge, victim: int, rng: torch.Generator, progress: Progress
    ) -> Finding:
        return of_victim(transcript, victim, Candidates(knowledge).cosines, progress)
