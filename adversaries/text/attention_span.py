"""Spans of a transformer's attention gradients, which contain its blocks' inputs (DAGER), and a probe of that."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedsim.inversion.named_states import NamedStates
from fedsim.training.models.transformer import TransformerBlock, TransformerModule

MIN_COMPLEMENT = 8
"""Least dimension of the complement; with fewer, wrong words are near the span by chance."""
_DRIFT_SHARES = 1e-6, 1e-5, 1e-4, 1e-3, 3e-3, 1e-2
"""Shares of the largest singular value below which directions may come from local drift."""
_ROUNDING_MARGIN = 8
"""In the basis of a gradient's span, directions down to the rounding divided by it are kept."""
_NEGLIGIBLE = 1e-9
"""Singular values of inputs below this share of the largest count as zero."""
_TOLERANCE = 1e-6
"""Share of a gradient that may be outside of its span, by rounding in float64."""


@dataclass(frozen=True)
class AttentionSpan:
    """The span of one block's query, key and value gradients, which contains the block's inputs.

    Attributes:
        gradient: `row dim`, of the three weights, one below the other.
        basis: `direction dim`, orthonormal; at least `rank` directions.
        rank: of the gradient, number of singular values above the rounding.
        rounding: singular values up to it are rounding errors.
        projection: `feature dim`, of inputs to what the span contains; None if that is the inputs.
            The rows of `gradient` and `basis` are then features.
    """

    gradient: Tensor
    basis: Tensor
    rank: int
    rounding: float
    projection: Tensor | None = None

    @classmethod
    def from_message(
        cls, names: Sequence[str], states: NamedStates, max_rank: int, min_rounding: float = 0.0
    ) -> AttentionSpan:
        """Compute the span of those directions that exceed the rounding of the message.

        A gradient is computed in the precision of the message, with an error below that precision
        times its largest singular value. Returned weights are rounded as well: each number by a
        uniform error, whose matrix has a largest singular value of about its deviation times the
        sum of the roots of both sides. In several local steps the inputs themselves drift, which
        adds directions with small singular values: they do not count for the rank, if one of
        `_DRIFT_SHARES` separates them. The basis contains them, up to half of the dimensions beyond
        `max_rank`, since words that drifted have components in both.

        The basis of a gradient also contains directions just below the rounding, up to `max_rank`:
        those of texts that the model is confident of are there, and rounding errors do no harm.

        Args:
            names: of the weights, see `attention_weight_names`.
            max_rank: largest rank for the client's number of words.
            min_rounding: rounding of the message that `states` are a part of.
        """
        gradient = torch.cat([states.direction(name, torch.float64) for name in names])
        _, singular_values, basis = torch.linalg.svd(gradient, full_matrices=False)

        # Estimate the rounding of the message.
        precision = torch.finfo(states.before[names[0]].dtype).eps
        rounding = max(min_rounding, precision * float(singular_values[0]))
        if states.gradient is None and states.delta is None:
            weights = torch.cat([states.before[name].double() for name in names])
            sides = sum(math.sqrt(side) for side in weights.shape)
            rounding = max(rounding, precision * float(weights.square().mean().sqrt()) * sides / math.sqrt(12))

        # Count the directions of the rank and of the basis.
        num_above = int((singular_values > rounding).sum())
        if states.gradient is None:
            if num_above > max_rank:
                for share in _DRIFT_SHARES:
                    drift = share * float(singular_values[0])
                    if int((singular_values > drift).sum()) <= max_rank:
                        rounding = drift
                        break
            basis_size = min(num_above, (max_rank + basis.shape[1]) // 2)
        else:
            num_near_rounding = int((singular_values > rounding / _ROUNDING_MARGIN).sum())
            basis_size = min(num_near_rounding, max_rank, basis.shape[1] - MIN_COMPLEMENT)
        rank = int((singular_values > rounding).sum())
        basis_size = max(rank, basis_size)
        return cls(gradient=gradient, basis=basis[:basis_size], rank=rank, rounding=rounding)

    def distances(self, inputs: Tensor) -> Tensor:
        """Return the sine of the angle between each of `... dim` inputs and the span, in [0, 1]."""
        unit = normalize(self._features(inputs), dim=-1)
        sine: Tensor = (unit - (unit @ self.basis.T) @ self.basis).norm(dim=-1)
        return sine

    def unexplained_share(self, inputs: Tensor) -> float:
        """Return the share of the gradient's norm outside of the span of `input dim` inputs.

        It is below 1e-4 if the inputs are complete.
        """
        return share_outside_span(self.gradient, self._features(inputs))

    def to_float32(self) -> AttentionSpan:
        """Convert what distances are computed with to float32."""
        projection = None if self.projection is None else self.projection.float()
        return replace(self, basis=self.basis.float(), projection=projection)

    def _features(self, inputs: Tensor) -> Tensor:
        """Return what the span contains of `... dim` inputs."""
        return inputs if self.projection is None else inputs @ self.projection.T


def share_outside_span(gradient: Tensor, inputs: Tensor) -> float:
    """Return the share of the gradient's norm, `row dim`, outside of the span of `input dim` inputs; 0 of none."""
    if not len(inputs):
        return 1.0
    _, singular_values, directions = torch.linalg.svd(inputs, full_matrices=False)
    basis = directions[singular_values > _NEGLIGIBLE * singular_values[0]]
    outside = (gradient - (gradient @ basis.T) @ basis).norm()
    return float(outside / gradient.norm().clamp_min(torch.finfo(gradient.dtype).tiny))


def attention_weight_names(model: TransformerModule, block: int) -> list[str]:
    """Return the names of the query, key and value weights that take the block's inputs."""
    suffix = "down.weight" if model.lora_rank else "weight"
    return [f"blocks.{block}.attention.{projection}.{suffix}" for projection in ("query", "key", "value")]


def find_span_weights(
    model: TransformerModule, block: int, states: NamedStates, max_rank: int
) -> tuple[list[str], Tensor | None]:
    """Return the names of the weights whose gradients span a block's inputs, and a projection of these.

    With adapters, B A beside a frozen matrix, the gradient of A spans the inputs x, and is 0 while B
    is 0. The gradient of the value's B spans A x, `lora_rank` numbers, from the first round on. It
    is read if B is 0, or if the words leave enough of these dimensions.
    """
    value = f"blocks.{block}.attention.value"
    if model.lora_rank:
        is_zero = not bool(states.before[f"{value}.up.weight"].any())
        if is_zero or max_rank <= model.lora_rank - MIN_COMPLEMENT:
            return [f"{value}.up.weight"], states.before[f"{value}.down.weight"].double()
    return attention_weight_names(model, block), None


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
