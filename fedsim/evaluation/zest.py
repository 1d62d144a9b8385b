"""How alike two models answer: the Zest distance, which compares what LIME says of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedsim.datasets import Column, Examples
from fedsim.errors import AttackError, ConfigError, DataError
from fedsim.randomness import Key, generator, numpy_generator
from fedsim.training.model_state import load_state
from fedsim.training.modes import forward, set_evaluation_modes
from fedsim.wire.messages import State

MASKS = 1000
"""As many as in the Zest paper (Jia et al. 2022)."""
_CELLS = 8  # a side of the grid that images are cut into


def pieces_of(shape: Sequence[int], columns: Sequence[Column] = ()) -> Tensor:
    """Which interpretable piece each number of an example belongs to, counted from 0.

    Of a table a piece is a column: the features of a categorical one are masked together. Where columns are not known
    each feature is one. Of images, `channel height width`, it is a cell of a regular grid, 8 by 8 or, where a side
    has fewer pixels, one a pixel; channels are masked together.

    Differs: the Zest paper cuts images into quickshift segments. A grid is the same for all images, costs nothing and
    needs no further library.
    """
    if len(shape) == 3:
        rows, columns_ = (torch.arange(side) * min(side, _CELLS) // side for side in shape[1:])
        return (rows[:, None] * min(shape[2], _CELLS) + columns_).expand(*shape).contiguous()
    if len(shape) != 1:
        raise DataError(f"zest: expected images or rows of a table, got examples of shape {tuple(shape)}")
    pieces = torch.arange(shape[0])
    for place, column in enumerate(columns):
        pieces[column.features] = place
    return pieces


def draw_references(examples: Examples, count: int, *key: Key) -> Tensor:
    """Indices of `count` of the examples, or of all if there are fewer, drawn under `key`.

    As evenly as they go over natural groups and classes (of a regression, quarters of the target): of each that is
    there one, then of each a second, and so on. Files are often sorted, and their first rows all of one client.
    """
    labels = examples.labels.numpy()
    if examples.labels.is_floating_point() and len(labels):
        labels = np.digitize(labels, np.quantile(labels, (0.25, 0.5, 0.75)))
    groups = labels if examples.groups is None else examples.groups.numpy()
    _, strata = np.unique(np.stack([groups, labels]), axis=1, return_inverse=True)
    order = numpy_generator("references", *key).permutation(len(labels))
    # Beside each of them in that order, how many of its stratum come before it.
    shuffled = strata.reshape(-1)[order]
    grouped = np.argsort(shuffled, kind="stable")
    sizes = np.unique(shuffled, return_counts=True)[1]
    before = np.empty(len(order), dtype=np.int64)
    before[grouped] = np.concatenate([np.arange(0), *(np.arange(size) for size in sizes)])
    return torch.from_numpy(order[np.argsort(before, kind="stable")[:count]])


def model_outputs(model: nn.Module, state: State, references: Tensor) -> Callable[[Tensor], Tensor]:
    """What `model` with the weights of `state` answers: `example output` of examples in model units.

    An explanation asks for a function of one example. BatchNorm layers whose running statistics are not in `state`
    therefore normalise by the statistics of `references`, not by the batch of masked copies of one of them.

    Args:
        model: lends its architecture; it is copied.
        references: `example ...` in model units.
    """
    own = copy.deepcopy(model)
    load_state(own, state)
    set_evaluation_modes(own, state)
    lacking = [layer for layer in own.modules() if isinstance(layer, _BatchNorm) and layer.training]
    for layer in lacking:
        layer.reset_running_stats()
        layer.momentum = 1.0  # the next batch alone
    with torch.no_grad():
        forward(own, references)
    own.eval()
    return own


@torch.no_grad()
def signature(
    outputs: Callable[[Tensor], Tensor],
    references: Tensor,
    pieces: Tensor,
    *,
    masks: int = MASKS,
    intercept: bool = False,
    seed: int = 0,
) -> Tensor:
    """LIME's explanation of a model on each reference: `reference piece output`, how much each piece adds.

    Of each reference, `masks` copies are made of which random halves of the pieces are masked (the first copy is
    whole); the weights are the least-squares fit from what is kept, 0 or 1 a piece, to the outputs. The explanations
    of two models compare by `zest`, if references, pieces, masks and seed were the same.

    Args:
        outputs: a model's answers, `example output`, logits or predictions; see `model_outputs`.
        references: `reference ...`, in model units.
        pieces: of the shape of an example, see `pieces_of`.
        masks: number of copies.
        intercept: fit a constant, too, and leave it out of the explanation. The Zest paper fits none, so that what
            a model answers anyway is spread over all pieces.
        seed: draws the masks.

    Raises:
        ConfigError: no more masks than pieces.
        DataError: there are no references.
        AttackError: the model answers NaN or infinite values.

    References:
        Jia et al., A Zest of LIME: Towards Architecture-Independent Model Distances, ICLR 2022, Section 4. Differs:
        all references get the same masks, so that one factorisation serves all; what is masked becomes the mean of
        the references (of each feature of a table, of each channel of images), which is their 0 wherever inputs are
        standardised, and of a category its frequency.
    """
    from sklearn.linear_model import LinearRegression  # takes a second, which those who do not compare need not wait

    count = int(pieces.max()) + 1
    if masks <= count:
        raise ConfigError(f"masks: expected more than the {count} pieces of an example, got {masks}")
    if not len(references):
        raise DataError("zest: there are no reference examples; the data set needs public (test) examples")
    kept = torch.rand((masks, count), generator=generator("zest", seed)) < 0.5
    kept[0] = True
    where = kept[:, pieces]
    axes = [0, *range(2, references.ndim)]
    masked = references.mean(axes, keepdim=True)
    answers = torch.stack([outputs(torch.where(where, one, masked)) for one in references], 1)
    if not answers.isfinite().all():
        raise AttackError("zest: a model answers with NaN or infinite values, which cannot be explained")
    fit = LinearRegression(fit_intercept=intercept).fit(kept.double().numpy(), answers.flatten(1).double().numpy())
    return torch.from_numpy(fit.coef_).reshape(*answers.shape[1:], count).transpose(1, 2)


def zest(one: Tensor, other: Tensor) -> float:
    """Cosine similarity of two models' signatures, in [-1, 1]; the higher, the more alike, and 1 for the same model.

    0 where a signature is all zero, that is, where nothing that the model sees changes its answer. (The Zest paper
    speaks of the distance, 1 minus this; LMRA's Table 1 prints this.) The outputs of both stand in the same order,
    so none have to be matched, as models of different tasks' classes would need.

    Raises:
        DataError: they are of different shapes, and so of different references, pieces or outputs.
    """
    if one.shape != other.shape:
        raise DataError(f"zest: expected signatures of one shape, got {tuple(one.shape)} and {tuple(other.shape)}")
    one, other = one.flatten(), other.flatten()
    size = float(one.norm() * other.norm())
    return float(one @ other) / size if size else 0.0
