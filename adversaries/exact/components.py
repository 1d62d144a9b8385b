"""Estimates of inputs from mixtures of them, by independent components."""

from __future__ import annotations

import warnings
from typing import Literal

import torch
from torch import Tensor

Looked = Literal["differences", "values"]


def unmixing(mixtures: Tensor, shape: tuple[int, ...], of: Looked, seed: int, iterations: int = 400) -> Tensor:
    """A, `mixture input`, of mixtures = A inputs, such that the inputs are as independent of one another as can be.

    Inputs that are images are hardly independent, because neighbouring pixels are alike and all images are brighter in
    the middle; the differences between neighbours are nearly so, and sparse (Kariyappa et al.: Cocktail Party Attack,
    ICML 2023, for pixels; differences are ours).

    Args:
        mixtures: `mixture value`, linearly independent.
        shape: of one example.
        of: what is held to be independent: the values, or the differences between neighbours in the last two axes,
            where there are enough of them to tell the inputs apart.
        iterations: of FastICA, at most.

    Returns:
        A without the scales of its columns.
    """
    from sklearn.decomposition import FastICA

    if len(mixtures) == 1:
        return torch.ones((1, 1), dtype=mixtures.dtype)
    left, sizes, right = torch.linalg.svd(mixtures, full_matrices=False)
    seen = right if of == "values" else differences(right.reshape(-1, *shape))
    seen = right if seen.shape[1] <= len(right) else seen
    ica = FastICA(max_iter=iterations, random_state=seed, whiten="unit-variance", tol=1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it has not converged: the components are used as they are
        ica.fit(seen.T.numpy())
    mixing: Tensor = torch.linalg.inv(torch.from_numpy(ica.components_).to(mixtures))
    separated: Tensor = (left * sizes) @ mixing
    return separated


def differences(images: Tensor) -> Tensor:
    """`example difference`, between horizontal and vertical neighbours, of `example channel height width`."""
    across, down = images[..., 1:] - images[..., :-1], images[..., 1:, :] - images[..., :-1, :]
    return torch.cat([across.flatten(1), down.flatten(1)], 1)
