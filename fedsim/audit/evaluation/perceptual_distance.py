"""LPIPS: how different two images look to a trained network, by the heads of the authors' package `lpips`.

The package brings the linear heads (v0.1). It is not imported itself, as it imports torchvision, and with it torch's
compiler, which takes seconds in each process that scores images. The network below the heads, trained on ImageNet, is
read from the data folder and never downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from fedsim.base.errors import DataError, describe_error
from fedsim.base.randomness import use_one_thread
from fedsim.federation.data_folder import WEIGHTS_FOLDER

IMAGES_AT_ONCE = 256
"""Pairs of images whose features are in memory together."""
_SHIFT = (-0.030, -0.088, -0.188)
_SCALE = (0.458, 0.448, 0.450)
"""Mean and standard deviation of ImageNet's channels, for images in [-1, 1]."""
_SMALLEST_NORM = 1e-10
_VGG_WIDTHS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""Channels of VGG16's convolutions, by block."""
LAST_LAYERS: dict[str, Sequence[int]] = {
    "alex": (1, 4, 7, 9, 11),
    "vgg": (3, 8, 15, 22, 29),
    "squeeze": (1, 4, 7, 9, 10, 11, 12),
}
"""By network, the layers whose outputs are compared."""


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
    located = find_backbone(weights)
    smallest = min(backbone.smallest for backbone in BACKBONES) if located is None else located[0].smallest
    if min(true.shape[-2:]) < smallest:
        return f"images of {true.shape[-2]} x {true.shape[-1]} are too small for its network"
    if located is None:
        return f"no network weights at {(weights or WEIGHTS_FOLDER) / BACKBONES[-1].files}"
    network = _load_network(*located, claimed.device)
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
    located = find_backbone(weights)
    if located is None:
        return
    is_too_small = shape is not None and (len(shape) != 3 or min(shape[1:]) < located[0].smallest)
    if not is_too_small:
        _load_network(*located, torch.device("cpu"))


@lru_cache(maxsize=2)
def _load_network(backbone: Backbone, path: Path, device: torch.device) -> nn.Module:
    network, trained = PerceptualNetwork(backbone.name), _read_weights(path)
    try:
        network.load_state_dict({name: trained[name] for name in network.state_dict()})
    except (KeyError, RuntimeError) as error:
        raise _unreadable_weights_error(path, f"it holds another network than {backbone.name}") from error
    return network.eval().to(device)


def _read_weights(path: Path) -> Mapping[str, Tensor]:
    try:
        tensors: Mapping[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        finite = all(tensor.isfinite().all() for tensor in tensors.values())
    except Exception as error:  # what unpickling a damaged file may raise is no short list
        raise _unreadable_weights_error(path, describe_error(error)) from error
    if not finite:
        raise _unreadable_weights_error(path, "it holds NaN or infinite values")
    return tensors


def _unreadable_weights_error(path: Path, reason: str) -> DataError:
    return DataError(
        f"{path}: is not a readable file of weights ({reason}); get it again, or remove it to go without LPIPS"
    )


class PerceptualNetwork(nn.Module):
    """Compute LPIPS of pairs of images in [-1, 1] ([Zhang2018b], the package's version 0.1)."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.features = _LAYERS[name]()
        self._last_layers = LAST_LAYERS[name]
        for number, head in enumerate(_read_heads(name)):
            self.register_buffer(f"head_{number}", head, persistent=False)
        self.requires_grad_(False)

    def forward(self, images: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """Return the distance of each pair of images.

        Args:
            images: `image channel height width`, each of which is seen once.
            first: `pair`, the number of the one image of each pair.
            second: `pair`, that of the other.
        """
        total = images.new_zeros(())
        for number, output in enumerate(self._compute_outputs(images)):
            features = _normalise(output)
            squares = (features[first] - features[second]) ** 2
            total = total + nn.functional.conv2d(squares, self.get_buffer(f"head_{number}")).mean([2, 3], keepdim=True)
        return total

    def _compute_outputs(self, images: Tensor) -> list[Tensor]:
        shift, scale = (images.new_tensor(moment)[:, None, None] for moment in (_SHIFT, _SCALE))
        values = (images - shift) / scale
        outputs: list[Tensor] = []
        for number, layer in enumerate(self.features[: self._last_layers[-1] + 1]):
            values = layer(values)
            if number in self._last_layers:
                outputs.append(values)
        return outputs


def _normalise(features: Tensor) -> Tensor:
    """Scale the channels at each position to norm 1."""
    return features / (torch.sqrt(torch.sum(features**2, dim=1, keepdim=True)) + _SMALLEST_NORM)


def _read_heads(name: str) -> list[Tensor]:
    """Return the weights of each compared layer's channels, from the package's files."""
    package = find_spec("lpips")
    assert package is not None
    assert package.origin is not None
    file = Path(package.origin).parent / "weights" / "v0.1" / f"{name}.pth"
    heads: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    return [heads[f"lin{number}.model.1.weight"] for number in range(len(LAST_LAYERS[name]))]


def _build_alexnet() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(), nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2)),
    )


def _build_vgg16() -> nn.Sequential:
    layers: list[nn.Module] = []
    channels = 3
    for widths in _VGG_WIDTHS:
        for inner, outer in pairwise((channels, *widths)):
            layers += [nn.Conv2d(inner, outer, 3, padding=1), nn.ReLU()]
        layers.append(nn.MaxPool2d(2, 2))
        channels = widths[-1]
    return nn.Sequential(*layers)


class _Fire(nn.Module):
    """Block of SqueezeNet."""

    def __init__(self, channels: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, squeezed, 1)
        self.expand1x1 = nn.Conv2d(squeezed, expanded, 1)
        self.expand3x3 = nn.Conv2d(squeezed, expanded, 3, padding=1)

    def forward(self, values: Tensor) -> Tensor:
        """Squeeze the channels, then expand them by convolutions of two sizes."""
        values = self.squeeze(values).relu()
        return torch.cat([self.expand1x1(values).relu(), self.expand3x3(values).relu()], 1)


def _build_squeezenet() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 3, stride=2), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True)),
        *(_Fire(64, 16, 64), _Fire(128, 16, 64), nn.MaxPool2d(3, 2, ceil_mode=True)),
        *(_Fire(128, 32, 128), _Fire(256, 32, 128), nn.MaxPool2d(3, 2, ceil_mode=True)),
        *(_Fire(256, 48, 192), _Fire(384, 48, 192), _Fire(384, 64, 256), _Fire(512, 64, 256)),
    )


_LAYERS: dict[str, Callable[[], nn.Sequential]] = {
    "alex": _build_alexnet,
    "vgg": _build_vgg16,
    "squeeze": _build_squeezenet,
}
