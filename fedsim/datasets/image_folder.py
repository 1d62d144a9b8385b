"""Images of one's own: a folder of folders, one a class."""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedsim.datasets import Dataset, Examples
from fedsim.datasets.cache import cached
from fedsim.datasets.checks import beyond_memory
from fedsim.datasets.files import data_folder, reason, verify
from fedsim.datasets.holding_out import every_nth
from fedsim.errors import ConfigError, DataError

log = logging.getLogger(__name__)

_ENDINGS = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}

_MOST_PIXELS = 50_000_000
"""Of one image, before and after it is resized; a few bytes of a file can claim to be many more."""

_Labelled = list[tuple[Path, int]]


@dataclass(frozen=True, kw_only=True)
class ImageFolder:
    """Images of your own, colour: one folder a class, named as the class.

    Where there are folders `train` and `val` (or else `test`), they hold the class folders of the two
    parts; otherwise part of the images is held out. Images are found at any depth; files that do not end
    like an image are left alone.

    Args:
        path: the folder, within the data folder or absolute.
        size: side in pixels. The shorter side of an image is resized to it, bilinearly with
            antialiasing, then the central square is cut out, as torchvision's Resize and CenterCrop do.
            Sixteen bits become eight, real numbers have to be from 0 to 1, transparency is laid over white.
        test_fraction: share of the images to test on, in (0, 1): 0.2 takes every fifth in the order of
            classes and file names. Means nothing where there is a `val` or `test`.
    """

    path: str = ""
    size: int = 224
    test_fraction: float = 0.2

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"size: expected at least 1, got {self.size}")
        if not 0 < self.test_fraction < 1:
            raise ConfigError(f"test_fraction: expected a value between 0 and 1, got {self.test_fraction}")

    def load(self, folder: Path | None) -> Dataset:
        """See `DatasetPlugin`."""
        home = self._home(folder)
        names, parts = _listed(home)
        sources = [path for part in parts for path, _ in part]
        return cached(self, sources, lambda: self._parse(home, folder or home, names, parts))

    def _home(self, folder: Path | None) -> Path:
        if not self.path:
            raise DataError("data: 'image-folder' needs the folder of images; set data.path")
        path = Path(self.path).expanduser()
        home = path if path.is_absolute() else data_folder(folder, "image-folder") / path
        if not home.is_dir():
            raise DataError(f"{home}: no such folder; set data.path to a folder with one folder of images a class")
        return home

    def _parse(self, home: Path, folder: Path, names: Sequence[str], parts: list[_Labelled]) -> Dataset:
        labels = [torch.tensor([label for _, label in part]) for part in parts]
        self._check_memory(home, sum(map(len, labels)))
        images = [self._read([verify(path, folder) for path, _ in part]) for part in parts]
        if len(parts) == 1:
            held_out = every_nth(labels[0], self.test_fraction)
            if held_out.all() or not held_out.any():
                raise DataError(
                    f"{home}: {len(held_out)} images are too few to hold out a share of {self.test_fraction:g}; "
                    "add images or change data.test_fraction"
                )
            images, labels = ([whole[0][~held_out], whole[0][held_out]] for whole in (images, labels))
        train, test = (Examples(raw=raw, labels=own, scale=1 / 255) for raw, own in zip(images, labels, strict=True))
        return Dataset(
            name="image-folder",
            train=train,
            test=test,
            num_classes=len(names),
            source=f"images in {home.name}",
            licence="whatever the owners of the images say",
            class_names=tuple(names),
        )

    def _check_memory(self, home: Path, images: int) -> None:
        """All images wait in memory until they are in the cache."""
        if complaint := beyond_memory(images * 3 * self.size**2):
            raise DataError(
                f"{home}: {images} images of {self.size} x {self.size} {complaint}; lower data.size or choose a "
                "smaller folder"
            )

    def _read(self, paths: Sequence[Path]) -> Tensor:
        """`image channel height width`, uint8; decoded in threads, since Pillow lets go of Python's lock."""
        images = torch.empty((len(paths), 3, self.size, self.size), dtype=torch.uint8)
        with warnings.catch_warnings(), ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            try:
                for index, pixels in enumerate(pool.map(self._decode, paths)):
                    images[index] = torch.from_numpy(pixels).permute(2, 0, 1)
            except DataError:
                pool.shutdown(cancel_futures=True)
                raise
        return images

    def _decode(self, path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        """`height width channel`."""
        try:
            with Image.open(path) as opened:
                short = min(opened.size)
                width, height = (int(self.size * side / short) for side in opened.size)
                if max(math.prod(opened.size), width * height) > _MOST_PIXELS:
                    raise DataError(
                        f"{path}: is {opened.width} x {opened.height} pixels, and {width} x {height} once resized, "
                        f"expected at most {_MOST_PIXELS}; make it smaller or take it out of the folder"
                    )
                image = _as_rgb(opened, path)
        except DataError:
            raise
        except Exception as error:  # a damaged image makes its decoder raise all kinds of things
            raise DataError(
                f"{path}: is no whole image ({reason(error)}); mend it or take it out of the folder"
            ) from error
        image = image.resize((width, height), Image.Resampling.BILINEAR)
        left, top = round((width - self.size) / 2), round((height - self.size) / 2)
        return np.array(image.crop((left, top, left + self.size, top + self.size)))


def _as_rgb(image: Image.Image, path: Path) -> Image.Image:
    """Return `image` in eight bits a channel: without what Pillow makes of other ranges, which it clips.

    Grey of 16 bits is scaled by these, real numbers from 0 to 1 by 255; what is transparent shows white.

    Raises:
        DataError: it has other numbers.
    """
    if image.mode.startswith(("I", "F")):
        values = np.asarray(image, np.float64)
        most = 1.0 if image.mode == "F" else 65535.0
        if not (values.min() >= 0 and values.max() <= most):  # NaN is neither
            raise DataError(
                f"{path}: has values from {values.min():g} to {values.max():g}, expected from 0 to {most:g} in an "
                f"image of {'real' if image.mode == 'F' else 'whole'} numbers; scale them, or save it in eight bits"
            )
        return Image.fromarray((values * (255 / most)).round().astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        _say_transparent()
        coloured = image.convert("RGBA")
        white = Image.new("RGBA", coloured.size, "white")
        return Image.alpha_composite(white, coloured).convert("RGB")
    return image.convert("RGB")


@cache
def _say_transparent() -> None:
    log.warning("data: what is transparent in images is laid over white")


def _listed(home: Path) -> tuple[list[str], list[_Labelled]]:
    """Names of the classes, and the images with their classes: those of train and test, or all in one."""
    test = next((home / name for name in ("val", "test") if (home / name).is_dir()), None)
    if test is None or not (home / "train").is_dir():
        names = _classes(home)
        return names, [_images(home, names)]
    names = _classes(home / "train")
    if strangers := sorted(set(_folders(test)) - set(names)):
        raise DataError(f"{test / strangers[0]}: 'train' has no class of this name; rename or remove it")
    return names, [_images(home / "train", names), _images(test, names, every_class=False)]


def _classes(home: Path) -> list[str]:
    names = _folders(home)
    if len(names) < 2:
        inner = f"; set data.path to {home / names[0]}, if that is where they are" if names else ""
        raise DataError(f"{home}: expected two or more folders of images, one a class, got {len(names)}{inner}")
    return names


def _folders(home: Path) -> list[str]:
    return sorted(path.name for path in home.iterdir() if path.is_dir() and not path.name.startswith("."))


def _images(home: Path, names: Sequence[str], *, every_class: bool = True) -> _Labelled:
    found: _Labelled = []
    for label, name in enumerate(names):
        own = sorted(path for path in (home / name).rglob("*") if path.suffix.lower() in _ENDINGS and path.is_file())
        if not own and (every_class or (home / name).is_dir()):
            raise DataError(f"{home / name}: holds no image; add some ({', '.join(sorted(_ENDINGS))}) or remove it")
        found += [(path, label) for path in own]
    return found
