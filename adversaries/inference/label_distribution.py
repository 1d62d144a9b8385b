"""The label distribution of a client: what each of its messages says, round by round."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from adversaries.local_updates import rounds_of
from fedsim.attacks import Knowledge, Progress, single_update
from fedsim.errors import AttackError, KnowledgeError
from fedsim.findings import LabelDistribution
from fedsim.recording.transcript import Transcript
from fedsim.wire.messages import Update

Rule = Callable[[Update], Tensor]
"""From one message to `class`, how often each class occurs among what it was computed from, on any scale."""


def over_rounds(
    transcript: Transcript, victim: int, knowledge: Knowledge, rule: Rule, progress: Progress
) -> LabelDistribution:
    """What `rule` says of each message of the victim, as shares of classes.

    Where it is known that clients smooth their labels, the part of all classes alike is taken off again. The objective
    that is reported is the total variation distance of a round to the mean of the rounds so far.

    Raises:
        AttackError: the victim took part in no round, or a message says nothing of labels.
    """
    rounds, found = rounds_of(transcript, victim), list[Tensor]()
    for done, number in enumerate(rounds, start=1):
        update = single_update(transcript.only([number]), victim)
        where = f"round {number}, client {victim}"
        if update.num_examples < 1:
            raise AttackError(f"{where}: N is {update.num_examples}; attack a client that reports its num_examples")
        try:
            counts = rule(update).double().cpu()
        except KnowledgeError as error:  # what it says of granting labels is of no use here
            raise AttackError(
                f"{where}: {str(error).partition(';')[0]}; attack a model that ends in a linear layer with a bias, "
                "which is trained, and whose outputs are classes"
            ) from error
        found.append(_unsmoothed(counts, knowledge.label_smoothing or 0.0))
        apart = (found[-1] - torch.stack(found).mean(0)).abs().sum() / 2
        progress(done, len(rounds), {"objective": float(apart)})
    return LabelDistribution(rounds=torch.tensor(rounds), shares=torch.stack(found))


def _unsmoothed(counts: Tensor, smoothing: float) -> Tensor:
    """`class`, shares; where nothing is left of them, all alike."""
    shares = (counts / counts.sum() - smoothing / len(counts)).clamp_min(0)
    return shares / shares.sum() if shares.any() else torch.full_like(shares, 1 / len(shares))
