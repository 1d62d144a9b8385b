"""Networks of LPIPS: layers of an ImageNet network, whose outputs the heads of the package `lpips` weigh.

The package itself imports torchvision, and with it torch's compiler, which takes seconds in each
process that scores images. Only its files of heads (v0.1) are read here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

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
