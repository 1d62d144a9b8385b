"""The layer of a text model that turns tokens into vectors, and the words that may be claimed."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from adversaries.named_states import named_states
from fedsim.attacks import Knowledge
from fedsim.errors import AttackError, first_line
from fedsim.wire.messages import Update

Nearest = Literal["euclidean", "cosine"]
Words = Literal["vocabulary", "touched"]


@dataclass(frozen=True)
class Embedding:
    """The layer of a text model that turns tokens into vectors, at the weights that the server broadcast.

    Attributes:
        name: of the layer.
        vectors: `token dimension`.
        moved: `token dimension`, its part of the gradient or of the update.
        padding: the token that the layer never learns, or None.
    """

    name: str
    vectors: Tensor
    moved: Tensor
    padding: int | None

    @property
    def touched(self) -> Tensor:
        """`token`: whether the gradient in the token's row is not exactly zero, in ascending order.

        A text moves the rows of its own words and no others.
        """
        return (self.moved != 0).any(1)


@dataclass(frozen=True)
class Lexicon:
    """The words that may be claimed.

    Attributes:
        tokens: `candidate`, ascending.
        vectors: `candidate dimension`, their embeddings.
        by: how the nearest is found.
    """

    tokens: Tensor
    vectors: Tensor
    by: Nearest

    def read(self, points: Tensor) -> Tensor:
        """`...`, the token nearest to each of `... dimension` points."""
        flat, vectors = points.flatten(0, -2), self.vectors.to(points)
        if self.by == "cosine":
            flat, vectors = normalize(flat, dim=1), normalize(vectors, dim=1)
        nearest = torch.cdist(flat, vectors).argmin(1)
        return self.tokens.to(nearest.device)[nearest].reshape(points.shape[:-1])

    def written(self, tokens: Tensor) -> Tensor:
        """`... dimension`, the vectors of `...` tokens that are in the lexicon."""
        return self.vectors.to(tokens.device)[torch.searchsorted(self.tokens.to(tokens.device), tokens)]


def reads_tokens(knowledge: Knowledge) -> tuple[nn.Module, str]:
    """A text model, and the name of the embedding that its tokens go through.

    Raises:
        AttackError: the inputs are no texts, or the model does not begin with one `nn.Embedding`.
    """
    assert knowledge.model is not None
    assert knowledge.input_shape is not None
    if len(knowledge.input_shape) != 1:
        raise AttackError(
            f"input_shape: expected the length of a text, one number, got {tuple(knowledge.input_shape)}; attack data "
            "of numbers with another attack"
        )
    model = deepcopy(knowledge.model()).cpu().eval()
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    reading = _reading(model, layers, knowledge.input_shape[0]) if layers else []
    if len(reading) != 1:
        told = f"{len(reading)} layers nn.Embedding read the tokens" if layers else "the model has no nn.Embedding"
        raise AttackError(f"{told}, expected one, whose vectors can be found; attack a text model that begins with one")
    return model, reading[0]


@torch.no_grad()
def _reading(model: nn.Module, layers: dict[str, nn.Embedding], length: int) -> list[str]:
    """Which of these layers the tokens go into; others may be of places."""
    fewest = min(layer.num_embeddings for layer in layers.values())
    tokens = torch.arange(length).flip(0).remainder(fewest)[None]
    reading: list[str] = []

    def note(name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if torch.equal(inputs[0], tokens):
            reading.append(name)

    hooks = [layer.register_forward_pre_hook(partial(note, name)) for name, layer in layers.items()]
    try:
        model(tokens)
    except (RuntimeError, ValueError, IndexError) as error:
        raise AttackError(
            f"the model does not take texts of {length} tokens ({first_line(error)}); check input_shape, and that the "
            "model is that of the federation"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    return reading


def embedding_of(update: Update, model: nn.Module, layer: str) -> Embedding:
    """The embedding as the server broadcast it, with its part of the update.

    Raises:
        AttackError: it holds NaN or infinite values.
        TranscriptError: the update is not one of this model.
    """
    known = named(update, model)
    module, name = model.get_submodule(layer), f"{layer}.weight"
    assert isinstance(module, nn.Embedding)
    held = name not in known.before  # the same for everybody, neither trained nor sent
    vectors = module.weight.detach() if held else known.before[name]
    if not vectors.isfinite().all():
        raise AttackError(
            f"round {update.round}, client {update.client}: {layer}.weight holds NaN or infinite values; choose "
            "another round"
        )
    return Embedding(
        name=layer,
        vectors=vectors,
        moved=torch.zeros_like(vectors) if held else known.pseudo_gradient[name],
        padding=module.padding_idx,
    )


def named(update: Update, model: nn.Module) -> Update:
    """`update` under the names of `model`, whatever the federation calls its arrays.

    Raises:
        TranscriptError: the update is not one of this model.
    """
    states = named_states(update, model, f"round {update.round}, client {update.client}")
    return replace(update, before=states.before, payload=states.payload)


def claimable_words(embedding: Embedding, words: Words, nearest: Nearest, where: str) -> Lexicon:
    """The words that may be claimed."""
    tokens = torch.arange(len(embedding.vectors)) if words == "vocabulary" else touched_tokens(embedding, where)
    return Lexicon(tokens=tokens, vectors=embedding.vectors[tokens], by=nearest)


def touched_tokens(embedding: Embedding, where: str) -> Tensor:
    """The tokens whose rows moved, ascending."""
    touched = embedding.touched
    if not touched.any():
        raise AttackError(f"{where}: the embedding did not move, so it says nothing of words; try another attack")
    if embedding.padding is not None:
        touched[embedding.padding] = True
    return touched.nonzero()[:, 0]
