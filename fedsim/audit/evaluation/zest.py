"""Zest: compare how two models answer by the explanations that LIME gives of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedsim.base.errors import AttackError, ConfigError, DataError
from fedsim.base.randomness import Key, generator, numpy_generator
from fedsim.base.task import infer_modality
from fedsim.data import Column, Examples
from fedsim.recording.wire_format import State
from fedsim.training.model_state import load_state
from fedsim.training.modes import forward, set_evaluation_modes

MASKS = 1000
"""Masked copies of each reference, as many as in the Zest paper [Jia2022]."""
_GRID_SIZE = 8
"""Cells on each side of the grid that images are cut into."""


def interpretable_pieces(shape: Sequence[int], columns: Sequence[Column] = (), modality: str = "") -> Tensor:
    """Return the interpretable piece, counted from 0, to which each number of an example belongs.

    In a table a piece is a column: the features of a categorical one are masked together. Where the
    columns are not known each feature is a piece. In images, `channel height width`, a piece is a
    cell of a regular grid, 8 by 8 or, where a side has fewer pixels, one a pixel; channels are
    masked together. In series, `channel time`, it is one of 8 spans of time.

    Differs: the Zest paper cuts images into quickshift segments. A grid is the same for all images,
    costs nothing and needs no further library.

    >>> interpretable_pieces((1, 2, 3)).tolist()
    [[[0, 1, 2], [3, 4, 5]]]
    """
    modality = modality or infer_modality(shape)
    if modality == "series":
        spans = torch.arange(shape[1]) * min(shape[1], _GRID_SIZE) // shape[1]
        return spans.expand(*shape).contiguous()
    if modality == "image":
        row_cells, column_cells = (torch.arange(side) * min(side, _GRID_SIZE) // side for side in shape[1:])
        cells = row_cells[:, None] * min(shape[2], _GRID_SIZE) + column_cells
        return cells.expand(*shape).contiguous()
    if modality != "table":
        raise DataError(f"zest: expected images, rows of a table or series, got examples of shape {tuple(shape)}")
    pieces = torch.arange(shape[0])
    for index, column in enumerate(columns):
        pieces[column.features] = index
    return pieces


def draw_references(examples: Examples, count: int, *key: Key) -> Tensor:
    """Draw the indices of `count` examples, or of all if there are fewer.

    They are spread evenly over natural groups and classes (of a regression, quartiles of the
    target): one of each, then a second of each, and so on. Files are often sorted, and their first
    rows all of one client.
    """
    labels = examples.labels.numpy()
    if labels.ndim > 1:  # rows of several labels or numbers, or masks; the first of a row says enough of it
        labels = labels.reshape(len(labels), -1)[:, 0]
    if examples.labels.is_floating_point() and len(labels):
        labels = np.digitize(labels, np.quantile(labels, (0.25, 0.5, 0.75)))
    groups = labels if examples.groups is None else examples.groups.numpy()
    _, strata = np.unique(np.stack([groups, labels]), axis=1, return_inverse=True)
    order = numpy_generator("references", *key).permutation(len(labels))
    # Count for each example, in that order, how many of its stratum come before it.
    shuffled = strata.reshape(-1)[order]
    grouped = np.argsort(shuffled, kind="stable")
    sizes = np.unique(shuffled, return_counts=True)[1]
    rank_in_stratum = np.empty(len(order), dtype=np.int64)
    rank_in_stratum[grouped] = np.concatenate([np.arange(0), *(np.arange(size) for size in sizes)])
    return torch.from_numpy(order[np.argsort(rank_in_stratum, kind="stable")[:count]])


def model_outputs(model: nn.Module, state: State, references: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the function from examples to the outputs of `model` with weights `state`.

    An explanation needs a function of one example. BatchNorm layers whose running statistics are
    not in `state` therefore normalise by the statistics of `references`, not by the batch of masked
    copies of one of them.

    Args:
        model: lends its architecture; it is copied.
        references: `example ...` in model units.
    """
    network = copy.deepcopy(model)
    load_state(network, state)
    set_evaluation_modes(network, state)
    for layer in network.modules():
        if isinstance(layer, _BatchNorm) and layer.training:
            layer.reset_running_stats()
            layer.momentum = 1.0  # so that only the next batch counts
    with torch.no_grad():
        forward(network, references)
    network.eval()
    return network


@torch.no_grad()
def signature(
    outputs: Callable[[Tensor], Tensor],
    references: Tensor,
    pieces: Tensor,
    *,
    masks: int = MASKS,
) -> Tensor:
    """Compute LIME's explanation of a model on each reference: what each piece contributes.

    For each reference, `masks` copies are made in which random halves of the pieces are masked (the
    first copy is whole). The explanation is the least-squares fit from the pieces that are kept, 0
    or 1 each, to the outputs, without a constant: the part of the outputs that is always the same
    is spread over all pieces. The explanations of two models can be compared by `zest` if
    references, pieces and masks were the same.

    Args:
        outputs: a model's answers, `example output`, logits or predictions; see `model_outputs`.
        references: `reference ...`, in model units.

    Returns:
        `reference piece output`.

    References:
        [Jia2022], Sect. 4. Differs: all references get the same masks, so that one factorisation
        serves all; masked numbers become the mean of the references (of each feature of a table, of
        each channel of images), which is their 0 wherever inputs are standardised, and for a
        category is its frequency.
    """
    from sklearn.linear_model import LinearRegression  # takes a second

    count = int(pieces.max()) + 1
    if masks <= count:
        raise ConfigError(f"masks: expected more than the {count} pieces of an example, got {masks}")
    if not len(references):
        raise DataError("zest: there are no reference examples; the data set needs public (test) examples")
    kept_pieces = torch.rand((masks, count), generator=generator("zest", 0)) < 0.5
    kept_pieces[0] = True
    is_kept = kept_pieces[:, pieces]
    axes = [0, *range(2, references.ndim)]
    mean = references.mean(axes, keepdim=True)
    answers_by_reference = []
    for reference in references:
        answers_by_reference.append(outputs(torch.where(is_kept, reference, mean)))
    answers = torch.stack(answers_by_reference, 1)
    if not answers.isfinite().all():
        raise AttackError("zest: a model answers with NaN or infinite values, which cannot be explained")
    fit = LinearRegression(fit_intercept=False).fit(kept_pieces.double().numpy(), answers.flatten(1).double().numpy())
    return torch.from_numpy(fit.coef_).reshape(*answers.shape[1:], count).transpose(1, 2)


def zest(first: Tensor, second: Tensor) -> float:
    """Return the cosine similarity of two models' signatures, in [-1, 1]; 1 for the same model.

    It is 0 where a signature is all zero, that is, where no input changes the model's answer. (The
    Zest paper uses the distance, 1 minus this; LMRA's Table 1 prints this.) The outputs of both
    models are in the same order, so they need not be matched, as those of models with different
    classes would.
    """
    if first.shape != second.shape:
        raise DataError(f"zest: expected signatures of one shape, got {tuple(first.shape)} and {tuple(second.shape)}")
    first, second = first.flatten(), second.flatten()
    norms = float(first.norm() * second.norm())
    return float(first @ second) / norms if norms else 0.0
