"""Texts: `position`, the indices of tokens in a vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.base import text_metrics
from fedsim.interfaces.modality import GuessMaterial, Modality


@dataclass(frozen=True)
class TextModality(Modality):
    """Texts of tokens, the short ones filled up at the end."""

    axes = ("token",)
    noun = "text"
    plural = "texts"
    has_tokens = True
    shown_as = "texts"

    def guess_examples(self, material: GuessMaterial) -> Mapping[str, Tensor]:
        """Return guesses from public texts; none where no public texts are known.

        They are random public texts; for each claimed label the most frequent token at each
        position but padding, and the likeliest tokens whatever their positions; and the most
        frequent words.
        """
        public, count, length = material.public, material.count, material.shape[0]
        if public is None:
            return {}
        # For each claim the public texts of its label; all public texts where no label is claimed.
        similar_texts: list[Tensor] = []
        for label in material.labels.tolist():
            texts_of_label = public.data[public.labels == label]
            similar_texts.append(texts_of_label if len(texts_of_label) else public.data)
        similar_texts += [public.data] * (count - len(similar_texts))
        random_indices = torch.randint(len(public.data), (count,), generator=material.rng)
        by_position: list[Tensor] = []
        likeliest: list[Tensor] = []
        for texts in similar_texts:
            by_position.append(text_metrics.tokens_by_position(texts, material.padding))
            likeliest.append(text_metrics.likeliest_tokens(texts, length, material.padding))
        frequent_words = text_metrics.frequent_words(public.data, count * length, material.padding)
        return {
            "random public examples": public.data[random_indices],
            "most frequent token per position": torch.stack(by_position),
            "likeliest tokens": torch.stack(likeliest),
            "most frequent words": frequent_words.reshape(count, -1),
        }

    def similarity(self, claimed: Tensor, examples: Tensor) -> Tensor:
        """Return the sum of position accuracy and token recall of each pair."""
        return text_metrics.text_similarities(claimed, examples, padding=None).T

    def misfits(self, claimed: Tensor, true: Tensor) -> Tensor:
        """Return `true claimed`, minus the sum of position accuracy and token recall."""
        return -text_metrics.text_similarities(claimed, true, padding=None).double()
