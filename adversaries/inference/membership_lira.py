"""Membership by a likelihood ratio whose shadow models are those of other clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from adversaries.inference.membership import Candidates, beside_others
from fedsim.attacks import CLIENT, Attack, Knowledge, Paper, Progress
from fedsim.findings import Finding
from fedsim.recording.transcript import Transcript


@dataclass(frozen=True, kw_only=True)
class MembershipLira(Attack):
    """Claim that a client trained on the candidates in which its models are more confident than those of others.

    The models that other clients of a round returned stand for LiRA's shadow models that have not seen a record. What
    is measured is log p / (1 - p) of the candidate's class, which is close to normal; the score is how many deviations
    the victim's lies above the mean of the others', mean over rounds. There are few clients, so one deviation is used
    for all candidates of a round.

    References:
        Carlini et al.: Membership Inference Attacks From First Principles, IEEE S&P 2022, the offline attack with a
        global variance. Differs: no shadow models are trained, other clients' models, which start from the same w_t,
        take their place; the mean over rounds, which are no independent trials.
    """

    paper: ClassVar[Paper] = Paper(
        title="Membership Inference Attacks From First Principles",
        authors="Carlini, Chien, Nasr, Song, Terzis, Tramèr",
        venue="IEEE S&P",
        year=2022,
        url="https://arxiv.org/abs/2112.03570",
    )
    needs: ClassVar[frozenset[str]] = frozenset({"model", "candidates"})
    reads: ClassVar[frozenset[str]] = frozenset({CLIENT})
    temporal: ClassVar[bool] = True

    def _run(
        self, transcript: Transcript, knowledge: Knowledge, victim: int, rng: torch.Generator, progress: Progress
    ) -> Finding:
        return beside_others(transcript, victim, Candidates(knowledge).margins, progress, pooled=True)
