"""The faces of AT&T Laboratories Cambridge, also known as ORL."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import torch
from annotated_types import Ge, Lt
from PIL import Image
from torch import Tensor

from fedsim.base.constraints import CheckedSettings, PositiveInt
from fedsim.base.errors import ConfigError, DataError
from fedsim.base.papers import Paper, cite
from fedsim.data import Dataset, Examples
from fedsim.data.cache import load_cached
from fedsim.data.checks import memory_complaint
from fedsim.data.files import describe_error, find_file, require_data_folder, verify_checksum

_PEOPLE, _IMAGES = 40, 10
_REMEDY = "get the 'AT&T database of faces' (40 folders s1 to s40 of 10 PGM files each) and put it there as att_faces"


@dataclass(frozen=True, kw_only=True)
class AttFaces(CheckedSettings):
    """400 faces of 40 people, grey; the classes are the people, and so are the natural groups.

    Args:
        size: height and width to resize to, bilinearly with antialiasing. LMRA ([Driouich2022],
            App. C.1) speaks of 70 x 80 pixels, width first, which are the default (80, 70); the
            files have 92 x 112 pixels, width first, which (112, 92) does not change.
        test_images: how many images of each person are test examples, from 1 to 9: the last ones,
            by number. (LMRA distributes all 400 to clients; a server that measures accuracy needs
            some.)

    References:
        [Samaria1994].
    """

    paper: ClassVar[Paper] = cite("Samaria1994")

    size: tuple[PositiveInt, PositiveInt] = (80, 70)
    test_images: Annotated[int, Ge(1), Lt(_IMAGES)] = 2

    def load(self, folder: Path | None) -> Dataset:
        """Read `att_faces/s1/1.pgm` to `att_faces/s40/10.pgm`."""
        folder = require_data_folder(folder, "att-faces")
        paths = []
        for person in range(1, _PEOPLE + 1):
            for image in range(1, _IMAGES + 1):
                paths.append(find_file(folder / "att_faces", [f"s{person}/{image}.pgm"], _REMEDY))
        return load_cached(self, paths, lambda: self._parse(paths, folder))

    def _parse(self, paths: list[Path], folder: Path) -> Dataset:
        height, width = self.size
        # The images are in memory twice: together, and in two parts.
        if complaint := memory_complaint(2 * len(paths) * height * width):
            raise ConfigError(f"data.size: {len(paths)} images of {height} x {width} {complaint}; lower it")
        raw = torch.stack([self._read_image(path, folder) for path in paths])[:, None]
        people = torch.arange(_PEOPLE).repeat_interleave(_IMAGES)
        held_out = (torch.arange(_IMAGES) >= _IMAGES - self.test_images).repeat(_PEOPLE)

        def select(mask: Tensor) -> Examples:
            return Examples(raw=raw[mask], labels=people[mask], scale=1 / 255, groups=people[mask].clone())

        names = tuple(f"s{person}" for person in range(1, _PEOPLE + 1))
        return Dataset(
            name="att-faces",
            modality="image",
            train=select(~held_out),
            test=select(held_out),
            num_classes=_PEOPLE,
            source="AT&T Laboratories Cambridge (F. Samaria, A. Harter 1994): The ORL database of faces",
            licence="for research, with credit to the Olivetti Research Laboratory",
            class_names=names,
            group_names=names,
        )

    def _read_image(self, path: Path, folder: Path) -> Tensor:
        """Return the resized image, `height width`, uint8."""
        height, width = self.size
        try:
            with Image.open(verify_checksum(path, folder)) as image:
                resized = image.convert("L").resize((width, height), Image.Resampling.BILINEAR)
        except (OSError, SyntaxError, ValueError) as error:
            raise DataError(f"{path}: is not a whole image ({describe_error(error)}); get it again") from error
        return torch.from_numpy(np.array(resized))
