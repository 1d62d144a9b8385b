"""Skeleton, a modality for fedsim, and a data set of such examples to try it with.

Check it with `fedsim check fedsim.skeletons.modality:Skeleton`. In `fedsim run skeleton.toml` attacks
reconstruct examples of it, which are scored beside its guesses and drawn in the report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.base.randomness import generator
from fedsim.data import Dataset, Examples
from fedsim.interfaces.modality import GuessMaterial, Modality
from fedsim.modalities.guesses import general_guesses

_CLIENTS, _EXAMPLES_PER_CLIENT, _POINTS = 6, 40, 12


@dataclass(frozen=True)
class Skeleton(Modality):
    """Clouds of points in the unit square, each point with its two coordinates."""

    # What the axes of one example mean, in the order in which models get them.
    axes = ("coordinate", "point")
    noun = "cloud"
    plural = "clouds"
    # Along which axes neighbouring values are alike, as along time; here the order is arbitrary.
    smooth_axes = ()
    # A shape of the kind for `fedsim check`; without it each axis has 8 entries.
    trial_shape = (2, 12)

    def guess_examples(self, material: GuessMaterial) -> Mapping[str, Tensor]:
        """Return what somebody can guess who saw no update; an attack has to beat the best of it."""
        # `material.public` are public examples, or None. Values are in [0, 1].
        guesses = general_guesses(material, middle_name="centre")
        if material.public is not None:
            centre = material.public.data.mean(-1, keepdim=True).mean(0)
            guesses["mean point"] = centre.expand(material.count, *material.shape)
        return guesses

    # Claims are assigned one-to-one to the true examples by their mean squared error. Override
    # `misfits` where another error fits better.

    def draw_example(self, claimed: Tensor, true: Tensor | None) -> str:
        """Return an SVG of one example."""
        # The classes `true` and `claimed` have the colours of the page.
        # Escape any text by `markupsafe.escape`; scripts, links and styles are refused.
        circles = []
        for name, points in (("true", true), ("claimed", claimed)):
            if points is not None:
                for x, y in points.T.tolist():
                    circles.append(f'<circle class="{name}" cx="{100 * x:.1f}" cy="{100 - 100 * y:.1f}" r="2"/>')
        return f'<svg viewBox="-3 -3 106 106">{"".join(circles)}</svg>'


def make_examples(modality: str) -> Dataset:
    """Return the data set, which names its modality; an experiment file sets that in [data]."""
    return Dataset(
        name="skeleton",
        modality=modality,
        train=_draw_clouds("train", _EXAMPLES_PER_CLIENT),
        test=_draw_clouds("test", _EXAMPLES_PER_CLIENT // 4),
        num_classes=2,
        class_names=("ring", "cross"),
        group_names=tuple(f"client {client}" for client in range(_CLIENTS)),
        source="drawn at random",
        licence="none needed",
    )


def _draw_clouds(part: str, count: int) -> Examples:
    """Return `count` rings and crosses of each client, every other one a cross."""
    rng = generator("skeleton", part)
    total = _CLIENTS * count
    labels = torch.arange(total) % 2
    turns = torch.rand((total, _POINTS), generator=rng)
    rings = torch.stack([(2 * torch.pi * turns).cos(), (2 * torch.pi * turns).sin()], 1)
    crosses = torch.stack([2 * turns - 1, (2 * turns - 1) * (torch.arange(_POINTS) % 2 * 2 - 1)], 1)
    clouds = torch.where(labels.reshape(-1, 1, 1) == 0, rings, crosses)
    return Examples(
        raw=0.5 + 0.4 * clouds,
        labels=labels,
        scale=1.0,
        groups=torch.arange(_CLIENTS).repeat_interleave(count),
    )
