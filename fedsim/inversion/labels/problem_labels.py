"""Take the labels of a problem that are granted, or count them."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.base.errors import AttackError
from fedsim.interfaces.attack import Knowledge
from fedsim.inversion.labels.updates import count_labels
from fedsim.inversion.problem import InversionProblem
from fedsim.recording.wire_format import Update


def find_labels(problem: InversionProblem, update: Update, knowledge: Knowledge, rng: torch.Generator) -> Tensor:
    """Return the labels that are granted, or count them from the last layer."""
    if knowledge.labels is None:
        buffers = dict(problem.buffers)
        after_weights = problem.after or problem.before  # if a gradient was sent
        before = dict(zip(problem.parameter_names, problem.before, strict=True)) | buffers
        after = dict(zip(problem.parameter_names, after_weights, strict=True)) | buffers
        return count_labels(update, knowledge, problem.model, before, after, rng)
    if len(knowledge.labels) != update.num_examples:
        raise AttackError(
            f"{problem.where}: {len(knowledge.labels)} labels are granted, "
            f"but the client reported N = {update.num_examples}"
        )
    return knowledge.labels
