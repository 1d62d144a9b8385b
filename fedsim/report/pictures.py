"""Images of findings as small lossless PNGs, and the grids of the page: originals, attacks, guesses of each victim.

The images of a finding are one PNG, side by side. A style sheet cuts tiles out of it and scales them, so that each
pixel is embedded once, however often it is shown, and decoded when it comes into view.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any
from zlib import Z_BEST_SPEED

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.audit.evaluation.display import ImageGrid
from fedsim.audit.evaluation.examples import MAX_IMAGES
from fedsim.base import metrics
from fedsim.interfaces.metric import describe_metric

Bytes = NDArray[np.uint8]

ROOM, ROOM_FOR_STEPS = 8_500_000, 3_750_000
"""Most bytes of PNGs on a page: of claims, originals and guesses, and of claims at earlier iterations."""
_MAX_BYTES, _LARGEST_STEPS = 600_000, 2_000_000
"""Most bytes of pixels of one finding, at the end and over its iterations; of larger images fewer are shown."""
_TILE_WIDTH, _NARROW_TILE_WIDTH, _PRINTED_TILE_WIDTH = 112, 84, 68
"""CSS pixels that a tile is wide, about; on a narrow screen; on paper."""


@dataclass(frozen=True, kw_only=True)
class Strip:
    """Images side by side in one PNG, with a line of them for each iteration.

    Attributes:
        columns, lines: how many images it has in each direction.
    """

    name: str
    png: bytes
    columns: int
    lines: int = 1


@dataclass(frozen=True, kw_only=True)
class ImageRow:
    """Row of a grid: what an attack claims, or a guess.

    Attributes:
        about: what the finding declares; of a guess its name, and beside which attacks it is judged.
        steps: its images at earlier `iterations`; None where the attack kept none, or there is no room.
        iterations: of `steps`.
        psnr: of each in dB; empty if the truth is unknown.
        certified: whether the attack is sure of each; empty where it never says.
        omitted: how many further images it has.
    """

    about: Mapping[str, Any]
    strip: Strip
    steps: Strip | None = None
    iterations: Sequence[int] = ()
    psnr: Sequence[float] = ()
    certified: Sequence[bool] = ()
    omitted: int = 0


@dataclass(kw_only=True)
class VictimImages:
    """Images of one victim and one message.

    Attributes:
        original: the victim's images; None if they are unknown.
        guesses: the best guesses that attacks are judged beside.
        scores: by metric, the best value that an attack reaches at each image.
        typical: attacks claim what classes look like.
    """

    about: Mapping[str, Any]
    size: tuple[int, int]
    original: Strip | None
    typical: bool
    rows: list[ImageRow] = field(default_factory=list)
    guesses: list[ImageRow] = field(default_factory=list)
    scores: dict[str, list[float]] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """CSS pixels that a tile is wide: each pixel of a small image has as many as any other."""
        return self.size[1] * max(1, round(_TILE_WIDTH / self.size[1]))

    @property
    def narrow_width(self) -> int:
        """CSS pixels that a tile is wide on a narrow screen."""
        return self.size[1] * max(1, _NARROW_TILE_WIDTH // self.size[1])

    @property
    def printed_width(self) -> int:
        """CSS pixels that a tile is wide on paper."""
        return min(_PRINTED_TILE_WIDTH, self.size[1] * max(1, _PRINTED_TILE_WIDTH // self.size[1]))

    @property
    def attacks(self) -> list[str]:
        """Attacks whose claims are shown."""
        return list(dict.fromkeys(str(row.about["attack"]) for row in self.rows))


@dataclass(kw_only=True)
class Gallery:
    """Grids of a page, as many as there is room for.

    Attributes:
        room, room_for_steps: bytes that are left.
        grids: by victim, message and originals, in the order in which findings come.
        full: there was no room for a further victim.
        count: number of findings with images, those that are not shown included.
        shown: number of findings that are shown.
        with_steps, without_steps: of those, how many are shown at earlier iterations too, and for how many there was no
            room for these.
    """

    room: int = field(default_factory=lambda: ROOM)
    room_for_steps: int = field(default_factory=lambda: ROOM_FOR_STEPS)
    grids: dict[tuple[str, ...], VictimImages] = field(default_factory=dict)
    full: bool = False
    count: int = 0
    shown: int = 0
    with_steps: int = 0
    without_steps: int = 0
    _names: int = 0

    def add(
        self,
        about: Mapping[str, Any],
        sheet: ImageGrid,
        *,
        typical: bool,
        guess: Callable[[], tuple[str, Tensor] | None],
        scores: Mapping[str, Sequence[float]],
    ) -> None:
        """Add the images of one finding; findings of one victim and message come one after the other.

        Args:
            typical: it claims what classes look like.
            guess: makes the best guess that it is judged beside: its name, and as many images as are claimed.
            scores: by metric the value of each image.
        """
        self.count += 1
        columns = num_shown_images(sheet.claimed)
        true = None if sheet.true is None else images_as_bytes(sheet.true[:columns])
        # Once the page is full, only victims that it has already get further rows.
        key = _key(about, true)
        if key not in self.grids and (self.full or self.room <= 0):
            self.full = True
            return
        self.shown += 1
        height, width = sheet.claimed.shape[2:]
        grid = self.grids.get(key)
        if grid is None:
            original = None if true is None else self._strip("o", true[None])
            grid = VictimImages(about=about, size=(height, width), original=original, typical=typical)
            self.grids[key] = grid
        steps, iterations = self._steps(sheet, columns)
        grid.rows.append(
            ImageRow(
                about=about,
                strip=self._strip("c", images_as_bytes(sheet.claimed[:columns])[None]),
                steps=steps,
                iterations=iterations,
                psnr=sheet.psnr[:columns],
                certified=sheet.certified[:columns],
                omitted=len(sheet.claimed) - columns,
            )
        )
        _keep_best(grid.scores, {"psnr": sheet.psnr} | dict(scores), columns)
        if sheet.true is not None and (name_and_images := guess()) is not None:
            name, images = name_and_images
            self._add_guess(grid, str(about["attack"]), name, images[:columns], sheet.true[:columns])

    def _add_guess(self, grid: VictimImages, attack: str, name: str, images: Tensor, true: Tensor) -> None:
        """Add a guess to a grid, or note that an equal one there is the guess for this attack as well."""
        strip = self._strip("c", images_as_bytes(images)[None])
        equal = next((guess for guess in grid.guesses if guess.strip.png == strip.png), None)
        if equal is None:
            about = {"attack": name, "judged_attacks": [attack]}
            grid.guesses.append(ImageRow(about=about, strip=strip, psnr=metrics.psnr(images, true).tolist()))
        elif attack not in equal.about["judged_attacks"]:
            equal.about["judged_attacks"].append(attack)

    def _steps(self, sheet: ImageGrid, columns: int) -> tuple[Strip | None, Sequence[int]]:
        """Return the images at earlier iterations, and these; of many the first, the last, and some between."""
        if sheet.steps is None:
            return None, ()
        if self.room_for_steps <= 0:
            self.without_steps += 1
            return None, ()
        step_bytes = images_as_bytes(sheet.steps[0, :columns]).nbytes
        max_steps = min(len(sheet.steps), max(1, _LARGEST_STEPS // step_bytes))
        steps = np.linspace(0, len(sheet.steps) - 1, max_steps).round().astype(int).tolist()
        strip = self._strip("s", np.stack([images_as_bytes(sheet.steps[step, :columns]) for step in steps]))
        self.with_steps += 1
        return strip, [int(sheet.iterations[step]) for step in steps]

    def _strip(self, kind: str, images: Bytes) -> Strip:
        self._names += 1
        strip = Strip(name=f"{kind}{self._names}", png=encode_png(images), columns=images.shape[1], lines=len(images))
        if kind == "s":
            self.room_for_steps -= len(strip.png)
        else:
            self.room -= len(strip.png)
        return strip


def num_shown_images(images: Tensor) -> int:
    """Return how many of `image channel height width` are shown: the first ones, fewer of large ones."""
    image_bytes = images[0].numel() if images.shape[1] == 3 else images[0, 0].numel()
    return max(1, min(MAX_IMAGES, len(images), _MAX_BYTES // image_bytes))


def images_as_bytes(images: Tensor) -> Bytes:
    """Convert `image channel height width` in [0, 1] to bytes.

    Returns:
        `image height width`, or with a last axis of three colours; other than three channels become their mean.
    """
    shown = images.permute(0, 2, 3, 1) if images.shape[1] == 3 else images.mean(1)
    array: Bytes = (shown.double().nan_to_num().clamp(0, 1) * 255).round().to(torch.uint8).numpy()
    return array


def encode_png(images: Bytes) -> bytes:
    """Return `line image height width ...` as one picture without gaps."""
    from PIL import Image

    rows, columns, height, width = images.shape[:4]
    sheet = np.moveaxis(images, 1, 2).reshape(rows * height, columns * width, *images.shape[4:])
    file = io.BytesIO()
    # The default level takes 1.6 times as long for files that are 5 % smaller.
    Image.fromarray(sheet).save(file, format="PNG", compress_level=Z_BEST_SPEED)
    return file.getvalue()


def _key(about: Mapping[str, Any], true: Bytes | None) -> tuple[str, ...]:
    """Return the key of the grid of a finding: victim, message and originals."""
    originals_hash = "" if true is None else sha256(true.tobytes()).hexdigest()
    return str(about["round"]), str(about["victim"]), originals_hash


def _keep_best(best: dict[str, list[float]], values: Mapping[str, Sequence[float]], columns: int) -> None:
    """Update by metric and image the closest value so far."""
    for metric, new_values in values.items():
        facts = describe_metric(metric)
        if not (facts.ranks_examples and facts.of_examples) or len(new_values) < columns:
            continue
        closer = max if facts.higher_is_better else min
        updated = []
        for old, new in zip(best.get(metric, [math.nan] * columns), new_values, strict=False):
            if math.isnan(old):
                updated.append(new)
            else:
                updated.append(old if math.isnan(new) else closer(old, new))
        best[metric] = updated
