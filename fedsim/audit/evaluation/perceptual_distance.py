"""LPIPS: how different two images look to a trained network, by the heads of the authors' package `lpips`.

The package brings the linear heads (v0.1). The network below them, trained on ImageNet, is read
from the data folder and never downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from fedsim.audit.evaluation.perceptual_networks import PerceptualNetwork
from fedsim.base.errors import DataError, first_line
from fedsim.base.randomness import use_one_thread
from fedsim.federation.data_folder import WEIGHTS_FOLDER

IMAGES_AT_ONCE = 256
"""Pairs of images whose features are in memory together."""


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """A network whose features LPIPS compares.

    Attributes:
        files: pattern of the file with its weights, as torchvision names it.
        smallest: images with a shorter side leave nothing for its last layer, in pixels.
    """

    name: str
    files: str
    smallest: int


BACKBONES = (
    Backbone(name="alex", files="alexnet*.pth", smallest=31),
    Backbone(name="vgg", files="vgg16-*.pth", smallest=16),
    Backbone(name="squeeze", files="squeezenet1_1*.pth", smallest=17),
)
"""In the order in which they are looked for; papers report LPIPS by AlexNet, if they say by which."""


def find_backbone(weights: Path | None) -> tuple[Backbone, Path] | None:
    """Return the first backbone whose weights lie in the folder `weights`, with their file."""
    if weights is None:
        return None
    for backbone in BACKBONES:
        for path in sorted(weights.glob(backbone.files)):
            return backbone, path
    return None


def lpips_distances(claimed: Tensor, true: Tensor, weights: Path | None) -> Tensor | str:
    """Compute the perceptual distance of each pair of images, at least 0; lower is closer.

    Args:
        claimed: `image channel height width` in [0, 1], grey or RGB.
        weights: folder with a file of weights of AlexNet, VGG16 or SqueezeNet 1.1, as torchvision names it.

    Returns:
        One value an image, or the reason why none was computed.

    References:
        [Zhang2018b].
    """
    if true.shape[1] not in (1, 3):
        return f"its network sees grey or RGB images, these have {true.shape[1]} channels"
    found = find_backbone(weights)
    smallest = min(backbone.smallest for backbone in BACKBONES) if found is None else found[0].smallest
    if min(true.shape[-2:]) < smallest:
        return f"images of {true.shape[-2]} x {true.shape[-1]} are too small for its network"
    if found is None:
        return f"no network weights at {(weights or WEIGHTS_FOLDER) / BACKBONES[-1].files}"
    network = _load_network(*found, claimed.device)
    distances = []
    # Threads that wait for one another on busy cores take a hundred times as long for small images, and on one thread
    # the number of cores changes no score.
    with torch.no_grad(), use_one_thread():
        for claimed_part, true_part in zip(
            torch.split(claimed, IMAGES_AT_ONCE), torch.split(true, IMAGES_AT_ONCE), strict=True
        ):
            # Guesses have many equal images, and the true ones stand beside each guess.
            distinct, numbers = torch.unique(torch.cat([claimed_part, true_part]), dim=0, return_inverse=True)
            images = distinct.expand(-1, 3, -1, -1) * 2 - 1
            distances.append(network(images, *numbers.split(len(true_part))).reshape(-1))
    return torch.cat(distances)


def check_backbone(weights: Path | None, shape: Sequence[int] | None = None) -> None:
    """Read the weights for LPIPS, where there are any: before attacks, not when they are scored.

    Args:
        shape: of an example; None where it is not known. Nothing is read where no LPIPS is computed of it.
    """
    found = find_backbone(weights)
    if found is None:
        return
    is_too_small = shape is not None and (len(shape) != 3 or min(shape[1:]) < found[0].smallest)
    if not is_too_small:
        _load_network(*found, torch.device("cpu"))


@lru_cache(maxsize=2)
def _load_network(backbone: Backbone, path: Path, device: torch.device) -> nn.Module:
    network, trained = PerceptualNetwork(backbone.name), _read_weights(path)
    try:
        network.load_state_dict({name: trained[name] for name in network.state_dict()})
    except (KeyError, RuntimeError) as error:
        raise _unreadable(path, f"it holds another network than {backbone.name}") from error
    return network.eval().to(device)


def _read_weights(path: Path) -> Mapping[str, Tensor]:
    try:
        tensors: Mapping[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        finite = all(tensor.isfinite().all() for tensor in tensors.values())
    except Exception as error:  # what unpickling a damaged file may raise is no short list
        raise _unreadable(path, f"{type(error).__name__}: {first_line(error)}") from error
    if not finite:
        raise _unreadable(path, "it holds NaN or infinite values")
    return tensors


def _unreadable(path: Path, reason: str) -> DataError:
    return DataError(
        f"{path}: is not a readable file of weights ({reason}); get it again, or remove it to go without LPIPS"
    )
