"""Images of findings as small lossless PNGs, and what the page shows of each victim: originals, attacks, guesses.

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

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim import metrics
from fedsim.evaluation.examples import IMAGES
from fedsim.evaluation.kind import Sheet
from fedsim.reporting.image_scores import CLOSENESS

Bytes = NDArray[np.uint8]

ROOM, ROOM_FOR_STEPS = 8_000_000, 3_500_000
"""Bytes of PNGs on a page: of what was claimed, held and guessed, and of what attacks had before."""
_LARGEST, _LARGEST_STEPS = 600_000, 2_000_000
"""Bytes of the pixels of one finding: of larger images fewer are shown, and fewer iterations."""
_SIDE, _LEAST_SIDE, _PRINTED_SIDE = 112, 84, 68
"""CSS pixels that a tile is wide, about, on a narrow screen, and on paper."""


@dataclass(frozen=True, kw_only=True)
class Strip:
    """Images side by side in one PNG, and below one another, a line each, those of other iterations.

    Attributes:
        name: of the CSS class that shows it.
        png: the picture.
        columns, lines: how many images it has in each direction.
    """

    name: str
    png: bytes
    columns: int
    lines: int = 1


@dataclass(frozen=True, kw_only=True)
class Row:
    """What an attack claims, or a guess.

    Attributes:
        about: what the finding says of itself; of a guess its name, and beside which attacks it is judged.
        strip: its images.
        steps: what the attack had of them at `iterations`; None where it kept nothing, or there is no room.
        iterations: of `steps`.
        psnr: of each in dB; empty where nobody knows the truth.
        certified: whether the attack is sure of each; empty where it never says.
        left: how many further images it has.
    """

    about: Mapping[str, Any]
    strip: Strip
    steps: Strip | None = None
    iterations: Sequence[int] = ()
    psnr: Sequence[float] = ()
    certified: Sequence[bool] = ()
    left: int = 0


@dataclass(kw_only=True)
class Grid:
    """All that is shown of one victim and one message.

    Attributes:
        about: of the first finding.
        size: height and width of an image.
        original: what it held; None where nobody knows.
        rows: the attacks.
        guesses: what the best guesses look like that attacks are judged beside.
        scores: by metric, the best value that an attack reaches at each image.
        typical: attacks claim what classes look like.
    """

    about: Mapping[str, Any]
    size: tuple[int, int]
    original: Strip | None
    typical: bool
    rows: list[Row] = field(default_factory=list)
    guesses: list[Row] = field(default_factory=list)
    scores: dict[str, list[float]] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """CSS pixels that a tile is wide: each pixel of a small image has as many as any other."""
        return self.size[1] * max(1, round(_SIDE / self.size[1]))

    @property
    def narrow(self) -> int:
        """The same on a narrow screen."""
        return self.size[1] * max(1, _LEAST_SIDE // self.size[1])

    @property
    def printed(self) -> int:
        """The same on paper."""
        return min(_PRINTED_SIDE, self.size[1] * max(1, _PRINTED_SIDE // self.size[1]))

    @property
    def attacks(self) -> list[str]:
        """The attacks whose claims are shown."""
        return list(dict.fromkeys(str(row.about["attack"]) for row in self.rows))


@dataclass(kw_only=True)
class Gallery:
    """The grids of a page, as many as there is room for.

    Attributes:
        room, room_for_steps: bytes that are left.
        grids: by victim, message and originals, in the order in which findings come.
        full: there was no room for a further victim.
        count: of findings with images, those that are not shown included.
        shown: of findings that are shown.
        with_steps, without_steps: of those, how many are shown at earlier iterations too, and of how many there was no
            room for these.
    """

    room: int = field(default_factory=lambda: ROOM)
    room_for_steps: int = field(default_factory=lambda: ROOM_FOR_STEPS)
    grids: dict[tuple[str, ...], Grid] = field(default_factory=dict)
    full: bool = False
    count: int = 0
    shown: int = 0
    with_steps: int = 0
    without_steps: int = 0
    _names: int = 0

    def add(
        self,
        about: Mapping[str, Any],
        sheet: Sheet,
        *,
        typical: bool,
        guess: Callable[[], tuple[str, Tensor] | None],
        scores: Mapping[str, Sequence[float]],
    ) -> None:
        """Take in the images of one finding; findings of one victim and message come one after the other.

        Args:
            about: what the finding says of itself.
            sheet: its images.
            typical: it claims what classes look like.
            guess: makes the best guess that it is judged beside: its name, and as many images as are claimed.
            scores: by metric the value of each image.
        """
        self.count += 1
        columns = columns_of(sheet.claimed)
        true = None if sheet.true is None else as_bytes(sheet.true[:columns])
        key = _key(about, true)
        if key not in self.grids and (self.full or self.room <= 0):
            self.full = True
            return
        self.shown += 1
        height, width = sheet.claimed.shape[2:]
        grid = self.grids.get(key)
        if grid is None:
            original = None if true is None else self._strip("o", true[None])
            grid = Grid(about=about, size=(height, width), original=original, typical=typical)
            self.grids[key] = grid
        steps, iterations = self._steps(sheet, columns)
        grid.rows.append(
            Row(
                about=about,
                strip=self._strip("c", as_bytes(sheet.claimed[:columns])[None]),
                steps=steps,
                iterations=iterations,
                psnr=sheet.psnr[:columns],
                certified=sheet.certified[:columns],
                left=len(sheet.claimed) - columns,
            )
        )
        _keep_best(grid.scores, {"psnr": sheet.psnr} | dict(scores), columns)
        if sheet.true is not None and (made := guess()) is not None:
            self._add_guess(grid, str(about["attack"]), made[0], made[1][:columns], sheet.true[:columns])

    def _add_guess(self, grid: Grid, attack: str, name: str, images: Tensor, true: Tensor) -> None:
        strip = self._strip("c", as_bytes(images)[None])
        same = next((other for other in grid.guesses if other.strip.png == strip.png), None)
        if same is None:
            made = {"attack": name, "beside": [attack]}
            grid.guesses.append(Row(about=made, strip=strip, psnr=metrics.psnr(images, true).tolist()))
        elif attack not in same.about["beside"]:
            same.about["beside"].append(attack)

    def _steps(self, sheet: Sheet, columns: int) -> tuple[Strip | None, Sequence[int]]:
        """What the attack had before, and after which iterations; of many the first, the last, and some between."""
        if sheet.steps is None:
            return None, ()
        if self.room_for_steps <= 0:
            self.without_steps += 1
            return None, ()
        each = as_bytes(sheet.steps[0, :columns]).nbytes
        most = min(len(sheet.steps), max(1, _LARGEST_STEPS // each))
        kept = np.linspace(0, len(sheet.steps) - 1, most).round().astype(int).tolist()
        strip = self._strip("s", np.stack([as_bytes(sheet.steps[place, :columns]) for place in kept]))
        self.with_steps += 1
        return strip, [int(sheet.iterations[place]) for place in kept]

    def _strip(self, kind: str, images: Bytes) -> Strip:
        self._names += 1
        strip = Strip(name=f"{kind}{self._names}", png=png_of(images), columns=images.shape[1], lines=len(images))
        if kind == "s":
            self.room_for_steps -= len(strip.png)
        else:
            self.room -= len(strip.png)
        return strip


def columns_of(images: Tensor) -> int:
    """How many of `image channel height width` are shown: the first ones, fewer of large ones."""
    each = images[0].numel() if images.shape[1] == 3 else images[0, 0].numel()
    return max(1, min(IMAGES, len(images), _LARGEST // each))


def as_bytes(images: Tensor) -> Bytes:
    """`image height width`, or with a last axis of three colours; other than three channels become their mean."""
    shown = images.permute(0, 2, 3, 1) if images.shape[1] == 3 else images.mean(1)
    found: Bytes = (shown.double().nan_to_num().clamp(0, 1) * 255).round().to(torch.uint8).numpy()
    return found


def png_of(images: Bytes) -> bytes:
    """`line image height width ...` as one picture without gaps."""
    from PIL import Image

    lines, columns, height, width = images.shape[:4]
    sheet = np.moveaxis(images, 1, 2).reshape(lines * height, columns * width, *images.shape[4:])
    file = io.BytesIO()
    Image.fromarray(sheet).save(file, format="PNG")
    return file.getvalue()


def _key(about: Mapping[str, Any], true: Bytes | None) -> tuple[str, ...]:
    """Findings of one grid: of one victim and message, whose originals are the same."""
    held = "" if true is None else sha256(true.tobytes()).hexdigest()
    return str(about["round"]), str(about["victim"]), held


def _keep_best(best: dict[str, list[float]], values: Mapping[str, Sequence[float]], columns: int) -> None:
    """Note by metric and image what is closer than all before."""
    for metric, own in values.items():
        if metric not in CLOSENESS or len(own) < columns:
            continue
        closer = max if CLOSENESS[metric] else min
        known = best.get(metric, [math.nan] * columns)
        best[metric] = [
            new if math.isnan(old) else old if math.isnan(new) else closer(old, new)
            for old, new in zip(known, own, strict=False)
        ]
