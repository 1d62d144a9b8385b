"""How close two batches of images are: pure functions over `example channel height width` in [0, 1].

torchmetrics and SciPy are imported where they are used: they take four seconds, which attacks and
their worker processes need not wait for.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from fedsim.errors import DataError, first_line
from fedsim.randomness import one_thread

_WINDOWS = {1.5: 11, 0.5: 5}
"""Deviations of SSIM's Gaussian window and its sides in pixels, the usual one first."""
_SAME = 1e-10
"""Mean squared error, 100 dB, from which on images count as equal when they are paired."""
_LPIPS_SMALLEST = 17
LPIPS_FILE, _LPIPS_TENSORS = "squeezenet1_1-imagenet1k.pth", 52
_AT_ONCE = 256


def match(some: Tensor, others: Tensor) -> Tensor:
    """For each of `others`, the index of the one of `some` assigned to it: one-to-one, least total squared error."""
    from scipy.optimize import linear_sum_assignment

    cost = torch.cdist(some.flatten(1).double(), others.flatten(1).double()).square()
    return torch.from_numpy(linear_sum_assignment(cost.T.numpy())[1])


def paired(claimed: Tensor, true: Tensor) -> Tensor:
    """For each true example, the claimed one assigned to it, or mid-grey where fewer are claimed than there are.

    One-to-one (Hungarian algorithm), since attacks do not know the order. Images are paired so that their total PSNR is
    largest, for that is what is reported of them; more than 100 dB counts as 100, so that exact copies, whose PSNR is
    infinite, are paired like all others. Rows of a table are paired by the least total squared error. Of more claims
    than there are examples those are left over that fit worst.
    """
    chosen = assigned(claimed, true)
    there = chosen >= 0
    return torch.full_like(true, 0.5).index_put((there.nonzero()[:, 0],), claimed[chosen[there]])


def assigned(claimed: Tensor, true: Tensor) -> Tensor:
    """`true`: the index of the claimed example that `paired` takes for each; -1 where there is none left."""
    from scipy.optimize import linear_sum_assignment

    cost = _cost(true, claimed)
    if len(claimed) < len(true):  # what a claim is worth at each place is what it gains on mid-grey there
        cost = cost - _cost(true, torch.full_like(true[:1], 0.5))
    places, chosen = (torch.from_numpy(index) for index in linear_sum_assignment(cost.numpy()))
    return torch.full((len(true),), -1).index_put((places,), chosen)


def _cost(true: Tensor, claimed: Tensor) -> Tensor:
    """`true claimed`, what it costs to pair them."""
    apart = torch.cdist(true.flatten(1).double(), claimed.flatten(1).double()).square() / true[0].numel()
    return apart.clamp_min(_SAME).log10() if true.ndim == 4 else apart


def mse(claimed: Tensor, true: Tensor) -> Tensor:
    """Mean squared error of each image, in [0, 1]; lower is closer."""
    return (claimed - true).square().flatten(1).mean(1)


def psnr(claimed: Tensor, true: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of each image in dB for a data range of 1; higher is closer."""
    from torchmetrics.functional.image import peak_signal_noise_ratio

    return peak_signal_noise_ratio(claimed, true, data_range=1.0, reduction="none", dim=(1, 2, 3))


def ssim(claimed: Tensor, true: Tensor) -> Tensor:
    """Structural similarity of each image, at most 1; higher is closer.

    Gaussian window with sigma 1.5, 11 pixels wide (Wang et al. 2004), averaged over the places where it is wholly
    inside the image, as scikit-image does with `gaussian_weights=True` and `use_sample_covariance=False`. Images with
    a side below 11, for which there is no such value, get sigma 0.5 and 5 pixels; NaN below 5, see `no_ssim`.
    """
    from torchmetrics.functional.image import structural_similarity_index_measure

    if no_ssim(true):
        return torch.full((len(true),), torch.nan)
    sigma = next(sigma for sigma, window in _WINDOWS.items() if window <= min(true.shape[-2:]))
    _, full = structural_similarity_index_measure(
        claimed, true, data_range=1.0, sigma=sigma, reduction="none", return_full_image=True
    )
    border = _WINDOWS[sigma] // 2
    return torch.as_tensor(full)[..., border:-border, border:-border].flatten(1).mean(1)


def no_ssim(true: Tensor) -> str:
    """Why such images have no SSIM; empty where they have one."""
    height, width = true.shape[-2:]
    narrow = min(_WINDOWS.values())
    return f"images of {height} x {width} are smaller than its window" if min(height, width) < narrow else ""


def lpips(claimed: Tensor, true: Tensor, weights: Path | None) -> Tensor | str:
    """Learned perceptual distance of each image (LPIPS v0.1, SqueezeNet), at least 0; lower is closer.

    Args:
        weights: folder with `squeezenet1_1-imagenet1k.pth`; the linear heads come with torchmetrics.

    Returns:
        One value an image, or the reason why none was computed.
    """
    if min(true.shape[-2:]) < _LPIPS_SMALLEST:
        return f"images of {true.shape[-2]} x {true.shape[-1]} are too small for its network"
    if true.shape[1] not in (1, 3):
        return f"its network sees grey or RGB images, these have {true.shape[1]} channels"
    path = None if weights is None else weights / LPIPS_FILE
    if path is None or not path.is_file():
        return f"no network weights at {path or '$FEDSIM_DATA/weights/squeezenet1_1-imagenet1k.pth'}"
    pairs = (x.expand(-1, 3, -1, -1) * 2 - 1 for x in (claimed, true))
    network = _lpips_network(path)
    # Some at a time, for their features take much room; on one thread, because threads that wait for one another on
    # busy cores take a hundred times as long for small images, and so that the number of cores changes no score.
    with torch.no_grad(), one_thread():
        parts = zip(*(torch.split(images, _AT_ONCE) for images in pairs), strict=True)
        distances = [network(*part) for part in parts]
    return torch.cat([distance.reshape(-1) for distance in distances])


def check_weights(weights: Path | None) -> None:
    """Raise where the weights for LPIPS are there and not readable: before attacks, not when they are scored.

    Args:
        weights: as in `lpips`.

    Raises:
        DataError: the file is damaged, or another network's.
    """
    if weights is not None and (weights / LPIPS_FILE).is_file():
        _lpips_weights(weights / LPIPS_FILE)


def _lpips_weights(path: Path) -> Mapping[str, Tensor]:
    try:
        tensors: Mapping[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        if tuple(tensors["features.0.weight"].shape) != (64, 3, 3, 3) or len(tensors) != _LPIPS_TENSORS:
            raise ValueError("it holds another network")
        if any(not tensor.isfinite().all() for tensor in tensors.values()):
            raise ValueError("it holds NaN or infinite values")
    except Exception as error:  # what unpickling a damaged file may raise is no short list
        raise DataError(
            f"{path}: is no readable file of weights ({type(error).__name__}: {first_line(error)}); get it again, or "
            "remove it to go without LPIPS"
        ) from error
    return tensors


@lru_cache(maxsize=1)
def _lpips_network(path: Path) -> torch.nn.Module:
    from torchmetrics.functional.image.lpips import _LPIPS
    from torchvision.models import squeezenet1_1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network = _LPIPS(net="squeeze", pnet_rand=True)
    features = squeezenet1_1(weights=None)
    features.load_state_dict(_lpips_weights(path))
    own = list(network.net.parameters())
    trained = list(features.features.parameters())
    for mine, theirs in zip(own, trained, strict=True):
        mine.data.copy_(theirs.data)
    return network.eval()
