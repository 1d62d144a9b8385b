"""A text model without its embedding, as a model of vectors that any gradient inversion can attack.

The gradient of the embedding itself is not matched, because the dummy data are its outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from adversaries.text.embedding import (
    ClaimableWords,
    Lexicon,
    NearestMetric,
    TokenEmbedding,
    build_lexicon,
    find_token_embedding,
    read_embedding,
    with_model_names,
)
from fedsim.interfaces.attack import Knowledge
from fedsim.interfaces.findings import Reconstruction, Texts
from fedsim.inversion.problem import InversionProblem
from fedsim.recording.payloads import Payload
from fedsim.recording.wire_format import Update

_Item = TypeVar("_Item")


@dataclass(frozen=True, kw_only=True)
class EmbeddingSpace:
    """Conversion of messages and knowledge to embeddings, and of findings back to tokens.

    Attributes:
        model: the whole text model.
        layer: name of its embedding.
        lexicon: the words that may be claimed.
        knowledge: about the model without embedding, whose inputs are vectors.
    """

    model: nn.Module
    layer: str
    lexicon: Lexicon
    knowledge: Knowledge

    @classmethod
    def from_update(
        cls, update: Update, knowledge: Knowledge, *, words: ClaimableWords, nearest: NearestMetric
    ) -> EmbeddingSpace:
        """Build the conversion from the embedding in `update`.

        Args:
            words: `touched` restricts claims to tokens whose row of the embedding's gradient is not
                zero.
            nearest: metric of the token nearest to a vector.
        """
        model, layer = find_token_embedding(knowledge)
        embedding = read_embedding(update, model, layer)
        lexicon = build_lexicon(embedding, words, nearest, update.name)
        vector_knowledge = embedding_knowledge(knowledge, model, embedding, lexicon)
        return cls(model=model, layer=layer, lexicon=lexicon, knowledge=vector_knowledge)

    def convert_update(self, update: Update) -> Update:
        """Return the message without the embedding, under the names of the model."""
        named_update = with_model_names(update, self.model)
        payload = Payload(self._drop_embedding(named_update.payload.tensors))
        return replace(named_update, before=self._drop_embedding(named_update.before), payload=payload)

    def _drop_embedding(self, state: Mapping[str, _Item]) -> dict[str, _Item]:
        return {name: item for name, item in state.items() if name != f"{self.layer}.weight"}

    def claim_texts(self, reconstruction: Reconstruction) -> Texts:
        """Claim the words nearest to the reconstructed vectors."""
        assert self.knowledge.value_range is not None
        low, high = (torch.tensor(bound)[:, None] for bound in self.knowledge.value_range)
        points = (low + (high - low) * reconstruction.data).transpose(1, 2)
        tokens = self.lexicon.nearest_tokens(points)
        return Texts(tokens=tokens, labels=reconstruction.labels, trace=reconstruction.trace)


class LexiconIdentity(nn.Identity):
    """Identity in place of the embedding of a network that takes vectors; carries the lexicon."""

    def __init__(self, lexicon: Lexicon) -> None:
        super().__init__()
        self.lexicon = lexicon


def embedding_space_model(model: nn.Module, layer: str, lexicon: Lexicon) -> nn.Module:
    """Copy `model`, to take `example dimension position` vectors in place of tokens."""
    network = deepcopy(model)
    network.set_submodule(layer, LexiconIdentity(lexicon))
    network.register_forward_pre_hook(_transpose_positions)
    return network


def _transpose_positions(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
    return (inputs[0].transpose(1, 2),)


def problem_lexicon(problem: InversionProblem) -> Lexicon:
    """Return the lexicon of a problem whose model is one of `embedding_space_model`."""
    return next(module.lexicon for module in problem.model.modules() if isinstance(module, LexiconIdentity))


def embedding_knowledge(
    knowledge: Knowledge, model: nn.Module, embedding: TokenEmbedding, lexicon: Lexicon
) -> Knowledge:
    """Derive the knowledge about vectors, the inputs of the network without embedding.

    Their range in each dimension is that of the embedding's values; mean and deviation are those
    over all tokens.
    """
    assert knowledge.input_shape is not None
    vectors = embedding.vectors.float()
    low, high = vectors.min(0).values, vectors.max(0).values
    return replace(
        knowledge,
        model=partial(embedding_space_model, model, embedding.name, lexicon),
        input_shape=(vectors.shape[1], *knowledge.input_shape),
        value_range=(low.tolist(), torch.maximum(high, low + 1e-6).tolist()),
        input_mean=vectors.mean(0).tolist(),
        input_std=vectors.std(0).clamp_min(1e-6).tolist(),
        # By their two axes vectors would pass for series, along which values vary little.
        modality="text",
    )
