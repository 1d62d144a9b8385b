"""Denoisers of public images: small U-Nets that are trained once for a set of records, and kept in the cache."""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.base.content_hashes import hash_json
from fedsim.base.files import cache_folder
from fedsim.base.randomness import generator, seed_globals
from fedsim.base.task import are_classes
from fedsim.interfaces.attack import Records
from fedsim.inversion.cached_networks import load_or_train
from fedsim.inversion.input_scaling import InputScaling

log = logging.getLogger(__name__)

_LEVEL = 3.0
"""Standard deviation of the noise, in those of the images."""
_WIDTHS = (8, 16, 32)
"""Channels at full, half and quarter resolution."""
_EXAMPLES, _BATCH_SIZE, _STEP_SIZE = 60_000, 64, 2e-3
"""Noisy examples of a training, those of one step, and Adam's step size, which falls to 0 along a cosine."""
_UNLABELLED_SHARE = 0.1
"""Share of the examples in training whose class is not told, so that examples without a class are denoised, too."""
_LEAST_DEVIATION = 1e-3
_VERSION = 1
"""Raise it when the same records make another denoiser."""


class Denoiser(nn.Module):
    """U-Net of three scales that estimates images from what Gaussian noise of one level left of them.

    The noise is so strong that there is about one plausible image: the estimate is nearly linear in a noisy image, and
    what looks for noisy images by gradients does not end in one of many modes. The network sees its input at variance
    1, and estimates what the best multiple of it leaves to estimate (the preconditioning of [Karras2022]).

    Attributes:
        num_classes: of the records; the last embedding stands for an unknown class.
        mean: of all values of the records, in [0, 1].
        deviation: their standard deviation.
        has_records: `class`, whether there are records of it; examples of another count as of an unknown class, because
            its embedding is as it was drawn.
    """

    mean: Tensor
    deviation: Tensor
    has_records: Tensor

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("deviation", torch.ones(()))
        self.register_buffer("has_records", torch.ones(num_classes + 1, dtype=torch.bool), persistent=False)
        first, second, third = _WIDTHS
        self.shifts = nn.ModuleList(nn.Embedding(num_classes + 1, width) for width in (*_WIDTHS, second, first))
        self.begin = nn.Conv2d(channels, first, 3, padding=1)
        self.down = nn.ModuleList([_block(first, first), _block(first, second), _block(second, third)])
        self.up = nn.ModuleList([_block(third + second, second), _block(second + first, first)])
        self.end = nn.Conv2d(first, channels, 3, padding=1)

    @property
    def level(self) -> Tensor:
        """Return the standard deviation of the noise, as a share of the range of the inputs."""
        return _LEVEL * self.deviation

    def forward(self, noisy: Tensor, classes: Tensor) -> Tensor:
        """Return the estimated images.

        Args:
            noisy: `example channel height width`, values of the records are in [0, 1].
            classes: `example`, `num_classes` where it is unknown.
        """
        classes = torch.where(self.has_records[classes], classes, self.num_classes)
        centred = noisy - self.mean
        size = (1 + _LEVEL**2) ** 0.5
        shifts = [shift(classes)[:, :, None, None] for shift in self.shifts]
        # Down.
        full = self.down[0](self.begin(centred / (self.deviation * size))) + shifts[0]
        half = self.down[1](F.avg_pool2d(full, 2, ceil_mode=True)) + shifts[1]
        quarter = self.down[2](F.avg_pool2d(half, 2, ceil_mode=True)) + shifts[2]
        # Up.
        up = self.up[0](torch.cat([F.interpolate(quarter, size=half.shape[2:]), half], 1)) + shifts[3]
        up = self.up[1](torch.cat([F.interpolate(up, size=full.shape[2:]), full], 1)) + shifts[4]
        correction = self.end(F.silu(up)) * self.level / size
        estimate: Tensor = self.mean + centred / size**2 + correction
        return estimate


def _block(channels: int, width: int) -> nn.Sequential:
    """Return two convolutions, each of them after a nonlinearity."""
    return nn.Sequential(
        nn.SiLU(), nn.Conv2d(channels, width, 3, padding=1), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1)
    )


def load_denoiser(records: Records, records_hash: str, scaling: InputScaling, device: torch.device) -> Denoiser:
    """Return the denoiser of these records: from the cache, or else trained, which takes minutes, and kept there.

    Args:
        records: images, inputs in model units; their classes are told to the network.
        scaling: the range of the inputs.
        device: where it is trained and used.
    """
    ends = [scaling.low.flatten().tolist(), scaling.high.flatten().tolist()]
    settings = [_LEVEL, _WIDTHS, _EXAMPLES, _BATCH_SIZE, _STEP_SIZE]
    key = hash_json([_VERSION, torch.__version__, records_hash, ends, settings, device.type])
    low, high = scaling.low.cpu(), scaling.high.cpu()
    images = ((records.inputs.float().cpu() - low) / (high - low)).contiguous()
    has_classes = are_classes(records.labels)
    num_classes = int(records.labels.max()) + 1 if has_classes else 0
    with seed_globals("denoiser", key):
        denoiser = Denoiser(images.shape[1], num_classes)
    if has_classes:
        denoiser.has_records[:num_classes] = torch.bincount(records.labels.cpu(), minlength=num_classes) > 0
    path = cache_folder() / "denoisers" / f"{key}.safetensors"

    def train() -> bool:
        log.info("a denoiser is trained on %d auxiliary records, which takes minutes", len(images))
        classes = records.labels.cpu() if has_classes else torch.zeros(len(images), dtype=torch.int64)
        _train(denoiser.to(device), images, classes, key)
        return True

    load_or_train(denoiser, path, train)
    return denoiser.to(device).eval().requires_grad_(False)


@torch.enable_grad()
def _train(denoiser: Denoiser, images: Tensor, classes: Tensor, key: str) -> None:
    """Train by mean squared errors of denoised images."""
    rng, device = generator("denoiser", key), denoiser.mean.device
    denoiser.mean.fill_(images.mean())
    denoiser.deviation.fill_(images.std().clamp_min(_LEAST_DEVIATION))
    level = denoiser.level.cpu()
    optimizer = torch.optim.Adam(denoiser.parameters(), _STEP_SIZE)
    steps = math.ceil(_EXAMPLES / _BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        # Draw on the CPU, for any device.
        rows = torch.randint(len(images), (_BATCH_SIZE,), generator=rng)
        is_unlabelled = torch.rand(_BATCH_SIZE, generator=rng) < _UNLABELLED_SHARE
        told = torch.where(is_unlabelled, denoiser.num_classes, classes[rows])
        noisy = images[rows] + level * torch.randn(images[rows].shape, generator=rng)
        errors = denoiser(noisy.to(device), told.to(device)) - images[rows].to(device)
        optimizer.zero_grad()
        (errors / denoiser.deviation).square().mean().backward()
        optimizer.step()
        schedule.step()
