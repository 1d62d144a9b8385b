"""Independent component analysis of mixtures of inputs."""

from __future__ import annotations

import warnings
from typing import Literal

import torch
from torch import Tensor

ComponentSource = Literal["differences", "values"]
"""What has to be independent between inputs: values, or differences of neighbouring pixels."""


def separate_components(
    mixtures: Tensor, shape: tuple[int, ...], source: ComponentSource, seed: int, iterations: int = 400
) -> Tensor:
    """Find A in mixtures = A inputs such that the inputs are as independent as possible.

    Inputs that are images are hardly independent, because neighbouring pixels are similar and all
    images are brighter in the middle. The differences between neighbours nearly are, and sparse
    ([Kariyappa2023], for pixels; differences are ours).

    Args:
        mixtures: `mixture value`, linearly independent.
        source: what has to be independent: values, or differences between neighbours in the last
            two axes, if there are enough of them to tell the inputs apart.
        iterations: of FastICA, at most.

    Returns:
        A, `mixture input`, without the scales of its columns.
    """
    from sklearn.decomposition import FastICA

    if len(mixtures) == 1:
        return torch.ones((1, 1), dtype=mixtures.dtype)
    left, singular_values, right = torch.linalg.svd(mixtures, full_matrices=False)
    samples = right
    if source == "differences":
        samples = neighbour_differences(right.reshape(-1, *shape))
        if samples.shape[1] <= len(right):
            samples = right
    ica = FastICA(max_iter=iterations, random_state=seed, whiten="unit-variance", tol=1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without convergence the components are used as they are
        ica.fit(samples.T.numpy())
    mixing: Tensor = torch.linalg.inv(torch.from_numpy(ica.components_).to(mixtures))
    separated: Tensor = (left * singular_values) @ mixing
    return separated


def neighbour_differences(images: Tensor) -> Tensor:
    """Return `example difference`, between horizontal and between vertical neighbours.

    Args:
        images: `example channel height width`.

    >>> neighbour_differences(torch.tensor([[[[1.0, 3.0]]]]))
    tensor([[2.]])
    """
    across = images[..., 1:] - images[..., :-1]
    down = images[..., 1:, :] - images[..., :-1, :]
    return torch.cat([across.flatten(1), down.flatten(1)], 1)
