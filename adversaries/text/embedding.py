"""The embedding of a text model, and the words that an attack may claim."""

from __future__ import annotations

from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fedsim.base.errors import AttackError, first_line
from fedsim.base.module_hooks import hook_inputs
from fedsim.interfaces.attack import Knowledge
from fedsim.inversion.named_states import named_states
from fedsim.recording.wire_format import Update

NearestMetric = Literal["euclidean", "cosine"]
ClaimableWords = Literal["vocabulary", "touched"]


@dataclass(frozen=True)
class TokenEmbedding:
    """The embedding of a text model, as broadcast, and its part of the update.

    Attributes:
        name: of the layer.
        vectors: `token dimension`.
        update: `token dimension`, its part of the gradient or of the update.
        padding: the padding token, which is never trained, or None.
    """

    name: str
    vectors: Tensor
    update: Tensor
    padding: int | None

    @property
    def has_gradient(self) -> Tensor:
        """Return which tokens have a gradient that is not exactly zero, `token`.

        A text gives a gradient to the rows of its own words only.
        """
        return (self.update != 0).any(1)


@dataclass(frozen=True)
class Lexicon:
    """The words that may be claimed.

    Attributes:
        tokens: `candidate`, ascending.
        vectors: `candidate dimension`, their embeddings.
        metric: of the distance in `nearest_tokens`.
    """

    tokens: Tensor
    vectors: Tensor
    metric: NearestMetric

    def nearest_tokens(self, points: Tensor) -> Tensor:
        """Return the token nearest to each of `... dimension` points.

        >>> lexicon = Lexicon(torch.tensor([3, 7]), torch.eye(2), "euclidean")
        >>> lexicon.nearest_tokens(torch.tensor([[0.1, 0.9], [0.8, 0.3]]))
        tensor([7, 3])
        """
        rows, vectors = points.flatten(0, -2), self.vectors.to(points)
        if self.metric == "cosine":
            rows, vectors = normalize(rows, dim=1), normalize(vectors, dim=1)
        nearest = torch.cdist(rows, vectors).argmin(1)
        return self.tokens.to(nearest.device)[nearest].reshape(points.shape[:-1])

    def token_vectors(self, tokens: Tensor) -> Tensor:
        """Return the vectors of tokens that are in the lexicon, `... dimension`."""
        indices = torch.searchsorted(self.tokens.to(tokens.device), tokens)
        return self.vectors.to(tokens.device)[indices]


def find_token_embedding(knowledge: Knowledge) -> tuple[nn.Module, str]:
    """Build a text model and find the name of its token embedding."""
    assert knowledge.model is not None
    assert knowledge.input_shape is not None
    if len(knowledge.input_shape) != 1:
        raise AttackError(
            f"input_shape: expected the length of a text, one number, got {tuple(knowledge.input_shape)}; attack data "
            "of numbers with another attack"
        )
    model = deepcopy(knowledge.model()).cpu().eval()
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    token_layers = _find_token_layers(model, layers, knowledge.input_shape[0]) if layers else []
    if len(token_layers) != 1:
        problem = "the model has no nn.Embedding"
        if layers:
            problem = f"{len(token_layers)} layers nn.Embedding read the tokens"
        raise AttackError(
            f"{problem}, expected one, whose vectors can be found; attack a text model that begins with one"
        )
    return model, token_layers[0]


@torch.no_grad()
def _find_token_layers(model: nn.Module, layers: dict[str, nn.Embedding], length: int) -> list[str]:
    """Return the names of the layers that take tokens; others may take positions."""
    smallest_vocabulary = min(layer.num_embeddings for layer in layers.values())
    tokens = torch.arange(length).flip(0).remainder(smallest_vocabulary)[None]
    token_layers: list[str] = []

    def record_token_layer(name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if torch.equal(inputs[0], tokens):
            token_layers.append(name)

    with ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.enter_context(hook_inputs(layer, partial(record_token_layer, name)))
        try:
            model(tokens)
        except (RuntimeError, ValueError, IndexError) as error:
            raise AttackError(
                f"the model does not take texts of {length} tokens ({first_line(error)}); check input_shape, and that "
                "the model is that of the federation"
            ) from error
    return token_layers


def read_embedding(update: Update, model: nn.Module, layer: str) -> TokenEmbedding:
    """Read the embedding called `layer` as broadcast, and its part of the update."""
    named_update = with_model_names(update, model)
    module, name = model.get_submodule(layer), f"{layer}.weight"
    assert isinstance(module, nn.Embedding)
    is_frozen = name not in named_update.before  # the same for all clients, neither trained nor sent
    vectors = module.weight.detach() if is_frozen else named_update.before[name]
    if not vectors.isfinite().all():
        raise AttackError(f"{update.name}: {layer}.weight holds NaN or infinite values; choose another round")
    return TokenEmbedding(
        name=layer,
        vectors=vectors,
        update=torch.zeros_like(vectors) if is_frozen else named_update.pseudo_gradient[name],
        padding=module.padding_idx,
    )


def with_model_names(update: Update, model: nn.Module) -> Update:
    """Return `update` under the names of `model`, whatever the federation calls its arrays."""
    states = named_states(update, model, update.name)
    return replace(update, before=states.before, payload=states.payload)


def build_lexicon(embedding: TokenEmbedding, words: ClaimableWords, nearest: NearestMetric, where: str) -> Lexicon:
    """Return the words of the whole vocabulary, or those with a gradient."""
    tokens = torch.arange(len(embedding.vectors)) if words == "vocabulary" else tokens_with_gradient(embedding, where)
    return Lexicon(tokens=tokens, vectors=embedding.vectors[tokens], metric=nearest)


def tokens_with_gradient(embedding: TokenEmbedding, where: str) -> Tensor:
    """Return the tokens with a gradient, and the padding token, ascending."""
    is_touched = embedding.has_gradient
    if not is_touched.any():
        raise AttackError(f"{where}: the embedding did not move, so it says nothing of words; try another attack")
    if embedding.padding is not None:
        is_touched[embedding.padding] = True
    return is_touched.nonzero()[:, 0]
