"""Identification: which of the victim's examples the claims identify among examples of others.

A blurred or noisy image may be far from the true one and still be more similar to it than to any
other; an image with a high PSNR may be more similar to the example of another client.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.audit.evaluation.matches import CHANCE, Pool
from fedsim.audit.evaluation.measurements import CPU, NO_TEXT_SCORED, is_own
from fedsim.audit.evaluation.score import Score
from fedsim.audit.evaluation.truth import Truth
from fedsim.base.errors import PluginError
from fedsim.interfaces.metric import Metric
from fedsim.modalities import find_modality

IDENTIFIED = "identified"
_NO_OTHERS = (
    "no examples of the victim's classes are known that it does not hold; name truth files of other clients in "
    "[truth], or use data with a test set"
)


class IdentifiedShare(Metric):
    """Share of the victim's examples that a claim identifies among others of the same classes.

    An example is identified if it is the one in the pool that is most similar to some claim, by
    `Modality.similarity`.
    """

    title = "share identified"
    higher_is_better = True
    is_share = True
    of_examples = True
    preference = 20
    evidence = "matches"
    explanations = (
        "An example of the victim is identified if, of all its examples and up to 1000 others of the same classes, it "
        "is the most similar to some claim. The floor is the share that as many random matches would identify.",
    )


def score_identification(claimed: Tensor, truth: Truth, pool: Pool | None, device: torch.device = CPU) -> Score:
    """Score `identified`."""
    if pool is None:
        return Score.from_reason(IDENTIFIED, _NO_OTHERS if len(truth.labels) else NO_TEXT_SCORED)
    modality = find_modality(truth.modality)
    modality_device = device if is_own(type(modality)) else CPU
    similarity = modality.similarity(claimed.to(modality_device), pool.data.to(modality_device))
    if similarity.shape != (len(claimed), len(pool.data)):
        raise PluginError(
            f"modalities: '{truth.modality}' gives a similarity of shape {tuple(similarity.shape)}, expected "
            f"{(len(claimed), len(pool.data))}, claims by examples; fix its similarity"
        )
    is_matched = torch.zeros(len(pool.data), dtype=torch.bool)
    is_matched[similarity.argmax(1).cpu()] = True
    # Of equal examples of the victim the first one counts as most similar; to identify it is to identify all.
    kinds = torch.unique(truth.data.flatten(1), dim=0, return_inverse=True)[1]
    is_matched[pool.of_victim] = torch.isin(kinds, kinds[is_matched[pool.of_victim]])
    identified = is_matched[pool.of_victim].double()
    return Score.against_guesses(
        IDENTIFIED,
        identified.mean().item(),
        {CHANCE: pool.expected_share(is_matched)},
        per_image=tuple(identified.tolist()),
    )
