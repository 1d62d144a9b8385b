"""The part of a text model that follows its embedding: a model of vectors, which any attack on numbers can attack.

The gradient of the embedding itself is left out of what is matched, because the dummy data are its outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from adversaries.scene import Scene
from adversaries.text.embedding import (
    Embedding,
    Lexicon,
    Nearest,
    Words,
    claimable_words,
    embedding_of,
    named,
    reads_tokens,
)
from fedsim.attacks import Knowledge
from fedsim.findings import Reconstruction, Texts
from fedsim.wire.messages import Update
from fedsim.wire.payloads import Payload

_Item = TypeVar("_Item")


@dataclass(frozen=True, kw_only=True)
class BehindEmbedding:
    """What an attack on numbers reads in place of a text model, its messages and what is known of its inputs.

    Attributes:
        model: the whole text model.
        layer: name of its embedding.
        lexicon: the words that may be claimed.
        knowledge: of the vectors that go into the rest of the model.
    """

    model: nn.Module
    layer: str
    lexicon: Lexicon
    knowledge: Knowledge

    @classmethod
    def of(cls, update: Update, knowledge: Knowledge, *, words: Words, nearest: Nearest) -> BehindEmbedding:
        """With the vectors and the words that `update` shows.

        Args:
            knowledge: of the texts.
            words: `touched` claims no tokens but those whose row of the embedding's gradient is not zero.
            nearest: how the token nearest to a vector is found.

        Raises:
            AttackError: the model is not one of texts, or the embedding holds NaN or infinite values or did not move.
            TranscriptError: the update is not one of this model.
        """
        model, layer = reads_tokens(knowledge)
        embedding = embedding_of(update, model, layer)
        found = claimable_words(embedding, words, nearest, f"round {update.round}, client {update.client}")
        return cls(model=model, layer=layer, lexicon=found, knowledge=among_numbers(knowledge, model, embedding, found))

    def update(self, update: Update) -> Update:
        """The same message without the embedding, under the names of the model."""
        known = named(update, self.model)
        return replace(known, before=self._without(known.before), payload=Payload(self._without(known.payload.tensors)))

    def _without(self, state: Mapping[str, _Item]) -> dict[str, _Item]:
        return {name: item for name, item in state.items() if name != f"{self.layer}.weight"}

    def texts(self, found: Reconstruction) -> Texts:
        """The words nearest to the vectors that were found."""
        assert self.knowledge.value_range is not None
        low, high = (torch.tensor(end)[:, None] for end in self.knowledge.value_range)
        points = (low + (high - low) * found.data).transpose(1, 2)
        return Texts(tokens=self.lexicon.read(points), labels=found.labels, trace=found.trace)


class Behind(nn.Identity):
    """Takes the place of an embedding in a network that takes vectors; knows the words."""

    def __init__(self, lexicon: Lexicon) -> None:
        super().__init__()
        self.lexicon = lexicon


def behind(model: nn.Module, layer: str, lexicon: Lexicon) -> nn.Module:
    """A copy of `model` that takes `example dimension place` vectors where it took tokens."""
    own = deepcopy(model)
    own.set_submodule(layer, Behind(lexicon))
    own.register_forward_pre_hook(_places_first)
    return own


def _places_first(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
    return (inputs[0].transpose(1, 2),)


def lexicon_of(scene: Scene) -> Lexicon:
    """The words of a scene whose model is one of `behind`."""
    return next(module.lexicon for module in scene.model.modules() if isinstance(module, Behind))


def among_numbers(knowledge: Knowledge, model: nn.Module, embedding: Embedding, lexicon: Lexicon) -> Knowledge:
    """What is known of the vectors that go into the network behind the embedding.

    They are between the smallest and the largest value that the embedding has in each dimension. Mean and deviation
    are those over all tokens.
    """
    assert knowledge.input_shape is not None
    vectors = embedding.vectors.float()
    low, high = vectors.min(0).values, vectors.max(0).values
    return replace(
        knowledge,
        model=partial(behind, model, embedding.name, lexicon),
        input_shape=(vectors.shape[1], *knowledge.input_shape),
        value_range=(low.tolist(), torch.maximum(high, low + 1e-6).tolist()),
        input_mean=vectors.mean(0).tolist(),
        input_std=vectors.std(0).clamp_min(1e-6).tolist(),
    )
