"""The user's own images: a folder of folders, one a class."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from fedsim.base.constraints import CheckedSettings, PositiveInt, PositiveShareBelowOne
from fedsim.base.errors import DataError
from fedsim.base.machine import count_cores
from fedsim.data import Dataset, Examples
from fedsim.data.cache import load_cached
from fedsim.data.checks import memory_complaint
from fedsim.data.files import correct_path, describe_error, require_folder_of, verify_checksum
from fedsim.data.holdout import choose_distinct

_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}

_PART_NAMES = {"train", "training", "val", "valid", "validation", "dev", "eval", "test", "testing"}
"""Names of folders, in lower case, that are no class."""
_DARKEST = 32
"""An eighth of the range: images none of which is brighter were stored for another one."""
_MAX_PIXELS = 50_000_000
"""Most pixels of one image, before and after it is resized; a small file can claim many more."""
_FIRST_FRAME = "of images with several frames or pages, only the first is read; save each as an image"
_LabelledPaths = list[tuple[Path, int]]


@dataclass(frozen=True, kw_only=True)
class ImageFolder(CheckedSettings):
    """Images of your own, colour: one folder a class, named as the class.

    Where there are folders `train` and `val` (or else `test`), they hold the class folders of the
    two parts; otherwise part of the images is held out. Images are found at any depth; files with
    other suffixes than those of images are ignored. Photographs are turned as their EXIF
    orientation says.

    Args:
        path: the folder, within the data folder or absolute.
        size: side in pixels. The shorter side of an image is resized to it, bilinearly with
            antialiasing, then the central square is cut out, as torchvision's Resize and CenterCrop
            do. Sixteen bits become eight, real numbers have to be from 0 to 1, transparency is laid
            over white.
        test_fraction: share of the images to test on, in (0, 1): 0.2 takes every fifth in the order
            of classes and file names; equal images stay on one side. Not used where there is a `val` or `test`.
    """

    path: str = ""
    size: PositiveInt = 224
    test_fraction: PositiveShareBelowOne = 0.2

    def load(self, folder: Path | None) -> Dataset:
        """Read all images below `path`."""
        home = self._find_home(folder)
        names, parts = _list_images(home)
        sources = [path for part in parts for path, _ in part]
        return load_cached(self, sources, lambda: self._parse(home, folder or home, names, parts))

    def _find_home(self, folder: Path | None) -> Path:
        if not self.path:
            raise DataError("data: 'image-folder' needs the folder of images; set data.path")
        path = Path(self.path).expanduser()
        home = path if path.is_absolute() else require_folder_of(path, folder, "image-folder") / path
        if not home.is_dir():
            remedy = correct_path(self.path, "set data.path to a folder with one folder of images a class")
            raise DataError(f"{home}: no such folder; {remedy}")
        return home

    def _parse(self, home: Path, folder: Path, names: Sequence[str], parts: list[_LabelledPaths]) -> Dataset:
        self._check_memory(home, sum(map(len, parts)))
        images, labels, remarks = [], [], set[str]()
        for part in parts:
            images.append(self._read_images([verify_checksum(path, folder) for path, _ in part], remarks))
            labels.append(torch.tensor([label for _, label in part]))
        if max(int(part.max()) for part in images) < _DARKEST:
            raise DataError(
                f"{home}: no image is brighter than an eighth of its range; scale images of 12 bits, or whose pixels "
                "are indices of classes, to the whole range"
            )

        # Hold out test images where there is no folder of them.
        if len(parts) == 1:
            held_out = choose_distinct(images[0], labels[0], self.test_fraction)
            if held_out.all() or not held_out.any():
                raise DataError(
                    f"{home}: {len(held_out)} images, of which equal ones count as one, are too few to hold out a "
                    f"share of {self.test_fraction:g}; add images or change data.test_fraction"
                )
            images = [images[0][~held_out], images[0][held_out]]
            labels = [labels[0][~held_out], labels[0][held_out]]
        return Dataset(
            name="image-folder",
            modality="image",
            train=Examples(raw=images[0], labels=labels[0], scale=1 / 255),
            test=Examples(raw=images[1], labels=labels[1], scale=1 / 255),
            num_classes=len(names),
            source=f"images in {home.name}",
            licence="whatever the owners of the images say",
            class_names=tuple(names),
            remarks=tuple(sorted(remarks)),
        )

    def _check_memory(self, home: Path, images: int) -> None:
        """Raise a DataError where all images, which are read before they are cached, do not fit."""
        if complaint := memory_complaint(images * 3 * self.size**2):
            raise DataError(
                f"{home}: {images} images of {self.size} x {self.size} {complaint}; lower data.size or choose a "
                "smaller folder"
            )

    def _read_images(self, paths: Sequence[Path], remarks: set[str]) -> Tensor:
        """Return `image channel height width`, uint8; Pillow decodes several at once in threads.

        Args:
            remarks: gets what is not read as it is.
        """
        images = torch.empty((len(paths), 3, self.size, self.size), dtype=torch.uint8)
        with warnings.catch_warnings(), ThreadPoolExecutor(count_cores()) as pool:
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            try:
                for index, pixels in enumerate(pool.map(partial(self._decode, remarks=remarks), paths)):
                    images[index] = torch.from_numpy(pixels).permute(2, 0, 1)
            except DataError:
                pool.shutdown(cancel_futures=True)
                raise
        return images

    def _decode(self, path: Path, remarks: set[str]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        """Return the central square of a resized image, `height width channel`."""
        try:
            with Image.open(path) as original:
                shorter = min(original.size)
                width, height = (int(self.size * side / shorter) for side in original.size)
                if max(math.prod(original.size), width * height) > _MAX_PIXELS:
                    raise DataError(
                        f"{path}: is {original.width} x {original.height} pixels, and {width} x {height} once resized, "
                        f"expected at most {_MAX_PIXELS}; make it smaller or take it out of the folder"
                    )
                if getattr(original, "is_animated", False) and original.format != "MPO":  # a photo and its preview
                    remarks.add(_FIRST_FRAME)
                # A camera that is held upright says so, and may not turn.
                ImageOps.exif_transpose(original, in_place=True)
                width, height = (int(self.size * side / shorter) for side in original.size)
                image = _convert_to_rgb(original, path, remarks)
        except DataError:
            raise
        except Exception as error:  # a damaged image makes its decoder raise all kinds of things
            raise DataError(
                f"{path}: is not a whole image ({describe_error(error)}); fix it or take it out of the folder"
            ) from error
        image = image.resize((width, height), Image.Resampling.BILINEAR)
        left, top = round((width - self.size) / 2), round((height - self.size) / 2)
        return np.array(image.crop((left, top, left + self.size, top + self.size)))


def _convert_to_rgb(image: Image.Image, path: Path, remarks: set[str]) -> Image.Image:
    """Convert an image to eight bits a channel, scaling other ranges, which Pillow would clip.

    Grey of 16 bits is scaled from that range, real numbers from [0, 1]; transparency is laid over
    white.
    """
    if image.mode.startswith(("I", "F")):
        values = np.asarray(image, np.float64)
        highest = 1.0 if image.mode == "F" else 65535.0
        if not (values.min() >= 0 and values.max() <= highest):  # written so that NaN is refused
            raise DataError(
                f"{path}: has values from {values.min():g} to {values.max():g}, expected from 0 to {highest:g} in an "
                f"image of {'real' if image.mode == 'F' else 'whole'} numbers; scale them, or save it in eight bits"
            )
        return Image.fromarray((values * (255 / highest)).round().astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        remarks.add("what is transparent in images is laid over white")
        coloured = image.convert("RGBA")
        white = Image.new("RGBA", coloured.size, "white")
        return Image.alpha_composite(white, coloured).convert("RGB")
    return image.convert("RGB")


def _list_images(home: Path) -> tuple[list[str], list[_LabelledPaths]]:
    """Return the class names, and the labelled images of train and test, or all in one part."""
    test = next((home / name for name in ("val", "test") if (home / name).is_dir()), None)
    if test is None or not (home / "train").is_dir():
        names = _class_names(home)
        return names, [_find_images(home, names)]
    names = _class_names(home / "train")
    if unknown := sorted(set(_subfolder_names(test)) - set(names)):
        raise DataError(f"{test / unknown[0]}: 'train' has no class of this name; rename or remove it")
    return names, [_find_images(home / "train", names), _find_images(test, names, every_class=False)]


def _class_names(home: Path) -> list[str]:
    names = _subfolder_names(home)
    parts = [name for name in names if name.lower() in _PART_NAMES]
    # A single one may be a class, as 'train' beside 'bus' and 'tram' is.
    if len(parts) > 1 or (parts and len(_subfolder_names(home / parts[0])) > 1):
        raise DataError(
            f"{home / parts[0]}: is named as a part of the data and would be a class; call the parts 'train' and 'val' "
            "(or 'test'), each with one folder a class"
        )
    if len(names) < 2:
        inner = f"; set data.path to {home / names[0]}, if that is where they are" if names else ""
        raise DataError(f"{home}: expected two or more folders of images, one a class, got {len(names)}{inner}")
    return names


def _subfolder_names(home: Path) -> list[str]:
    return sorted(path.name for path in home.iterdir() if path.is_dir() and not path.name.startswith("."))


def _find_images(home: Path, names: Sequence[str], *, every_class: bool = True) -> _LabelledPaths:
    images: _LabelledPaths = []
    for label, name in enumerate(names):
        candidates = (home / name).rglob("*")
        paths = sorted(path for path in candidates if path.suffix.lower() in _SUFFIXES and path.is_file())
        if not paths and (every_class or (home / name).is_dir()):
            raise DataError(f"{home / name}: holds no image; add some ({', '.join(sorted(_SUFFIXES))}) or remove it")
        images += [(path, label) for path in paths]
    return images
