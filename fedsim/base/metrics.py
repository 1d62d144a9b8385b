"""Distances between batches of images: pure functions of `example channel height width` in [0, 1].

PSNR and SSIM are written here and held against SciPy's filters by tests, because importing
torchmetrics takes four seconds: it draws in torchvision and torch's compiler. SciPy is imported
where it is used.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_SSIM_WINDOWS = {1.5: 11, 0.5: 5}
"""Standard deviations of SSIM's Gaussian window and its sides in pixels, the usual one first."""
_C1, _C2 = 0.01**2, 0.03**2
"""Constants of SSIM for values in [0, 1], which keep its quotients finite."""
_ROUNDING = 1e-6
"""Norm below which the deviations of an example from its mean are rounding errors."""
_DECIBELS = 10 / torch.log(torch.tensor(10.0))
"""Decibels of a factor of e."""
Misfits = Callable[[Tensor, Tensor], Tensor]
"""Function of claimed and true examples that gives `true claimed`, how badly each pair fits."""
_EQUAL_MSE = 1e-10
"""Mean squared error (100 dB) below which images count as equal when they are paired."""


def match_examples(candidates: Tensor, targets: Tensor) -> Tensor:
    """Return the index of the candidate assigned to each target by least total squared error."""
    from scipy.optimize import linear_sum_assignment

    cost = torch.cdist(candidates.flatten(1).double(), targets.flatten(1).double()).square()
    return torch.from_numpy(linear_sum_assignment(cost.T.numpy())[1])


def mean_squared_errors(claimed: Tensor, true: Tensor) -> Tensor:
    """Return `... true claimed`, the mean squared error of each pair of examples, in double precision.

    Claims may have leading axes, of several sets of claims that are compared with the same true examples.

    >>> mean_squared_errors(torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.tensor([[0.0, 1.0]]))
    tensor([[0.5000, 0.5000]], dtype=torch.float64)
    """
    rows = claimed.flatten(1 + claimed.ndim - true.ndim)
    squared_distance = torch.cdist(true.flatten(1).double(), rows.double()).square()
    return squared_distance / true[0].numel()


def image_misfits(claimed: Tensor, true: Tensor) -> Tensor:
    """Return `... true claimed`, the negative PSNR of each pair of images, up to a factor.

    PSNR above 100 dB counts as 100, because that of exact copies is infinite.
    """
    return mean_squared_errors(claimed, true).clamp_min(_EQUAL_MSE).log10()


def pair_examples(claimed: Tensor, true: Tensor, misfits: Misfits = image_misfits) -> Tensor:
    """Return the claimed example assigned to each true one; mid-grey for true ones left without.

    The assignment is one-to-one (Hungarian algorithm), since attacks do not know the order. By
    default it maximises the total PSNR of images, the metric that is reported. If more examples are
    claimed than there are, those that fit worst are left over.

    Args:
        claimed: `claimed ...`.
        true: `true ...`.
        misfits: gives `true claimed`, what the assignment of each pair costs.
    """
    return reorder_claims(claimed, true, assign_examples(claimed, true, misfits))


def reorder_claims(claimed: Tensor, true: Tensor, assignment: Tensor) -> Tensor:
    """Return the claimed example of each true one, by its index; mid-grey where that is -1."""
    is_assigned = assignment >= 0
    grey = torch.full_like(true, 0.5)
    return grey.index_put((is_assigned.nonzero()[:, 0],), claimed[assignment[is_assigned]])


def assign_examples(claimed: Tensor, true: Tensor, misfits: Misfits) -> Tensor:
    """Return `true`, the index of the claimed example that `pair_examples` assigns; -1 for none."""
    return assign_by_costs(misfits(claimed, true), lambda: misfits(torch.full_like(true[:1], 0.5), true))


def assign_by_costs(cost: Tensor, cost_of_grey: Callable[[], Tensor]) -> Tensor:
    """Return `true`, the index of the claim that each true example is assigned; -1 for none.

    Args:
        cost: `true claimed`, what each pair costs, on the CPU.
        cost_of_grey: gives `true 1`, what mid-grey costs, which stands where there is no claim.
    """
    from scipy.optimize import linear_sum_assignment

    if cost.shape[1] < len(cost):
        # Some true examples stay mid-grey, so a claim is worth its gain over mid-grey.
        cost = cost - cost_of_grey()
    if cost.shape[1] <= len(cost):
        # Each claim is assigned once, so this changes no optimum; many claims that fit alike, as noise does, no
        # longer compete for the same examples, which takes most of the time.
        cost = cost - cost.mean(0)
    rows, columns = (torch.from_numpy(index) for index in linear_sum_assignment(cost.numpy()))
    return torch.full((len(cost),), -1).index_put((rows,), columns)


def correlations(claimed: Tensor, examples: Tensor) -> Tensor:
    """Return `claim example`, the correlation of each pair over all values; 0 where one is constant.

    >>> correlations(torch.tensor([[0.0, 0.1, 0.2]]), torch.tensor([[0.3, 0.6, 0.9], [0.5, 0.5, 0.5]])).round()
    tensor([[1., 0.]], dtype=torch.float64)
    """
    directions = []
    for values in (claimed, examples):
        centred = values.flatten(1).double()
        centred = centred - centred.mean(1, keepdim=True)
        norms = centred.norm(dim=1, keepdim=True)
        # What rounding leaves of a constant example is no direction.
        directions.append(torch.where(norms > _ROUNDING, centred / norms.clamp_min(_ROUNDING), 0))
    return directions[0] @ directions[1].T


def mse(claimed: Tensor, true: Tensor) -> Tensor:
    """Return the mean squared error of each image, in [0, 1]; lower is closer."""
    return (claimed - true).square().flatten(1).mean(1)


def psnr(claimed: Tensor, true: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio of each image in dB (range 1); higher is closer.

    >>> psnr(torch.full((1, 1, 8, 8), 0.1), torch.zeros(1, 1, 8, 8)).round().tolist()
    [20.0]
    """
    return (0 - mse(claimed, true).log()) * _DECIBELS  # 0 - 0 is 0, and -0 would be shown as such


def ssim(claimed: Tensor, true: Tensor) -> Tensor:
    """Return the structural similarity of each image, at most 1; higher is closer.

    The Gaussian window has sigma 1.5 and 11 pixels [Wang2004]. Values are averaged over the
    positions where it is wholly inside the image, as scikit-image does with `gaussian_weights=True`
    and `use_sample_covariance=False`. Images with a side below 11, for which there is no such
    position, get sigma 0.5 and 5 pixels. Below 5 the result is NaN, see `explain_missing_ssim`.
    """
    if explain_missing_ssim(true):
        return torch.full((len(true),), torch.nan)
    window = _gaussian_window(true)
    channels = true.shape[1]

    def local_mean(values: Tensor) -> Tensor:
        return torch.nn.functional.conv2d(values, window.expand(channels, 1, -1, -1), groups=channels)

    # Means, variances and the covariance within each window.
    mean_claimed, mean_true = local_mean(claimed), local_mean(true)
    variance_claimed = (local_mean(claimed.square()) - mean_claimed.square()).clamp_min(0)
    variance_true = (local_mean(true.square()) - mean_true.square()).clamp_min(0)
    covariance = local_mean(claimed * true) - mean_claimed * mean_true
    # The similarity of brightness times that of structure.
    similar = (2 * (mean_claimed * mean_true) + _C1) * (2 * covariance + _C2)
    total = (mean_claimed.square() + mean_true.square() + _C1) * (variance_claimed + variance_true + _C2)
    return (similar / total).flatten(1).mean(1)


def _gaussian_window(images: Tensor) -> Tensor:
    """Return `height width`, the weights of the largest window that fits into the images."""
    smaller_side = min(images.shape[-2:])
    sigma, side = next((sigma, side) for sigma, side in _SSIM_WINDOWS.items() if side <= smaller_side)
    distances = torch.arange(side).to(images) - side // 2
    weights = (-(distances / sigma).square() / 2).exp()
    weights = weights / weights.sum()
    return torch.outer(weights, weights)


def explain_missing_ssim(true: Tensor) -> str:
    """Return the reason why such images have no SSIM; empty where they have one."""
    height, width = true.shape[-2:]
    smallest_side = min(_SSIM_WINDOWS.values())
    return f"images of {height} x {width} are smaller than its window" if min(height, width) < smallest_side else ""
