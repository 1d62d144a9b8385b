"""Probe whether a transformer's gradients span its blocks' inputs, as attacks by spans assume."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from adversaries.text.attention_span import attention_weight_names, share_outside_span
from fedsim.training.models.transformer import TransformerBlock, TransformerModule

_TOLERANCE = 1e-6
"""Share of a gradient that may be outside of its span, by rounding in float64."""


def compute_block_inputs(model: TransformerModule, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the inputs of the first two blocks' attention.

    Returns:
        Those of the first and of the second block, `text position dim`, and whether a position holds a word,
        `text position`.
    """
    first, second = model.blocks[0], model.blocks[1]
    assert isinstance(first, TransformerBlock)
    assert isinstance(second, TransformerBlock)
    embedded = model.embedding(tokens)
    is_word = (embedded != 0).any(-1)
    states = model.add_positions(embedded)
    outputs = first(states, model.attention_mask(is_word))
    return first.norm1(states), second.norm1(outputs), is_word


def spans_hold(model: TransformerModule, loss: Callable[[Tensor, Tensor], Tensor]) -> bool:
    """Return whether the gradient of one text is what its words at their positions alone make of it.

    A block that is applied twice, or weights that stand at two places, also have gradients of other inputs. This
    shows in the gradient itself, whichever way the network was put together.

    Args:
        model: in float64; parameters that clients train require gradients.
    """
    padding = model.embedding.padding_idx
    words = [word for word in range(model.embedding.num_embeddings) if word != padding]
    text = torch.tensor([words[position % len(words)] for position in range(len(model.positions))])
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    with torch.enable_grad():
        objective = loss(model(text[None]), torch.tensor([0]))
        gradients = torch.autograd.grad(objective, list(trained.values()), materialize_grads=True)
    gradient = dict(zip(trained, gradients, strict=True))

    with torch.no_grad():
        first, second, _ = compute_block_inputs(model, text[None])
        for block, inputs in enumerate((first[0], second[0])):
            names = attention_weight_names(model, block)
            parts = [(name, inputs) for name in names]
            if model.lora_rank:
                value = f"blocks.{block}.attention.value"
                down = model.get_parameter(f"{value}.down.weight")
                parts.append((f"{value}.up.weight", inputs @ down.T))
            for name, spanning in parts:
                # A weight that stands at two places has one name only.
                if name not in gradient or share_outside_span(gradient[name], spanning) > _TOLERANCE:
                    return False

    # Rows of other words have no gradient, and the last layer one of one text's features.
    rows = gradient.get("embedding.weight")
    if rows is not None and rows[[word for word in words if word not in text.tolist()]].any():
        return False
    if "linear.weight" not in gradient or "linear.bias" not in gradient:
        return False
    return share_outside_span(gradient["linear.weight"].T, gradient["linear.bias"][None]) <= _TOLERANCE
