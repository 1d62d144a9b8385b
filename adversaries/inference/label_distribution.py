"""The loop over rounds that attacks on a client's label distribution share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from adversaries.inference.usable_rounds import compute_by_round
from fedsim.base.errors import AttackError, KnowledgeError
from fedsim.interfaces.attack import Knowledge, Progress, Target
from fedsim.interfaces.findings import LabelDistribution
from fedsim.inversion.labels.last_layer import count_outputs
from fedsim.recording.wire_format import Update

ClassCounter = Callable[[Update], Tensor]
"""`message -> class`, how often each class occurs in the victim's data, on any scale."""


def infer_label_distribution(
    target: Target, rule: ClassCounter, progress: Progress, *, smoothing: float | None
) -> LabelDistribution:
    """Estimate the shares of classes from each message of the victim; those that cannot be attacked are left out.

    The reported objective is the total variation distance of a round to the mean of the rounds so
    far.

    Args:
        rule: counts the classes of one message.
        smoothing: the share of each label that clients are known to spread over all classes, which
            is subtracted from the counts.
    """
    rounds = target.participation_rounds()

    def infer_shares(number: int) -> Tensor:
        update = target.read_update(number)
        where = f"round {number}, client {target.victim}"
        if update.num_examples < 1:
            raise AttackError(f"{where}: N is {update.num_examples}; attack a client that reports its num_examples")
        try:
            counts = rule(update).double().cpu()
        except KnowledgeError as error:  # its remedy, to grant the labels, does not help here
            raise AttackError(f"{where}: {_explain_layer(error)}") from error
        return _subtract_smoothing(counts, smoothing or 0.0)

    shares_by_round: dict[int, Tensor] = {}
    for number, shares in compute_by_round(rounds, infer_shares):
        shares_by_round[number] = shares
        distance = (shares - torch.stack(list(shares_by_round.values())).mean(0)).abs().sum() / 2
        progress(rounds.index(number) + 1, len(rounds), {"objective": float(distance)})
    return LabelDistribution(
        rounds=torch.tensor(list(shares_by_round)), shares=torch.stack([*shares_by_round.values()])
    )


def check_output_layer(knowledge: Knowledge, *, reads_bias: bool = False) -> int | None:
    """Return the number of classes of the network's last layer; None where no input is known that it takes.

    Args:
        reads_bias: whether labels are counted by that layer's bias.

    Raises:
        AttackError: the network does not end in a linear layer by which labels are counted.
    """
    try:
        return count_outputs(knowledge, by_bias=reads_bias)
    except KnowledgeError as error:
        raise AttackError(_explain_layer(error)) from error


def _explain_layer(error: KnowledgeError) -> str:
    """Return why the last layer counts no labels, with another remedy than to grant the labels."""
    return (
        f"{str(error).partition(';')[0]}; attack a model that ends in a linear layer with a bias (for masks a "
        "convolution), which is trained, and whose outputs are classes"
    )


def _subtract_smoothing(counts: Tensor, smoothing: float) -> Tensor:
    """Return shares of classes without label smoothing; uniform where nothing remains."""
    shares = (counts / counts.sum() - smoothing / len(counts)).clamp_min(0)
    return shares / shares.sum() if shares.any() else torch.full_like(shares, 1 / len(shares))
