"""Membership by how much of a client's update the gradient of a candidate explains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adversaries.inference.membership import PASSIVE, Candidates, of_victim
from adversaries.local_updates import rounds_of
from adversaries.scene import STEPPING, known_steps, warn_unless_plain
from fedsim.attacks import CLIENT, Attack, Knowledge, Paper, Progress
from fedsim.findings import Finding
from fedsim.recording.transcript import Transcript
from fedsim.wire.messages import Update


@dataclass(frozen=True, kw_only=True)
class MembershipDifference(Attack):
    """Claim that a client trained on the candidates without whose share its updates would be shorter.

    With I = w_t - w_k and the share h that one example has in it, the score is |I|^2 - |I - h|^2, mean over rounds. h
    is the gradient of the candidate's loss at w_t, times learning rate x T / N for T local steps on N examples, or
    1 / N where the client sends a gradient. If the gradients of different examples are orthogonal, the score is |h|^2
    for what the client trained on and -|h|^2 for all else. This is the share in steps of plain SGD; where clients train
    otherwise, the attack warns.

    References:
        Li, Li, Ribeiro: Effective Passive Membership Inference Attacks in Federated Learning against Overparameterized
        Models, ICLR 2023, the attack by gradient difference. Differs: the gradient is scaled to the share of one
        example, without which |h|^2 drowns the rest wherever learning rate x T / N is far from 1; momentum is left
        out of it; the mean over rounds.
    """

    paper: ClassVar[Paper] = PASSIVE
    needs: ClassVar[frozenset[str]] = frozenset(
        {"model", "loss", "candidates", "learning_rate", "local_epochs", "batch_size"}
    )
    uses: ClassVar[frozenset[str]] = STEPPING
    reads: ClassVar[frozenset[str]] = frozenset({CLIENT})
    temporal: ClassVar[bool] = True

    def _run(
        self, transcript: Transcript, knowledge: Knowledge, victim: int, rng: torch.Generator, progress: Progress
    ) -> Finding:
        candidates = Candidates(knowledge)
        if any(transcript.update(number, victim).gradient is None for number in rounds_of(transcript, victim)):
            warn_unless_plain(self, knowledge, f"client {victim}")

        def explained(updates: Sequence[Update]) -> Tensor:
            found = candidates.products(updates)
            share = _share(knowledge, updates[0])
            return share * (2 * found.inner - share * found.slopes.square())

        return of_victim(transcript, victim, explained, progress)


def _share(knowledge: Knowledge, update: Update) -> float:
    """Of one example's gradient in what the client sent."""
    if update.gradient is not None:
        return 1 / update.num_examples
    steps = known_steps(knowledge, update.num_examples)
    assert knowledge.learning_rate is not None
    assert steps is not None
    return knowledge.learning_rate * steps / update.num_examples
