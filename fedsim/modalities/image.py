"""Images: `channel height width`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedsim.base import metrics
from fedsim.interfaces.modality import GuessMaterial, Modality
from fedsim.modalities.guesses import general_guesses


@dataclass(frozen=True)
class ImageModality(Modality):
    """Images, whose neighbouring pixels are alike."""

    axes = ("channel", "height", "width")
    noun = "image"
    plural = "images"
    smooth_axes = ("height", "width")
    trial_shape = (3, 32, 32)
    shown_as = "images"

    def guess_examples(self, material: GuessMaterial) -> Mapping[str, Tensor]:
        """Return the general guesses."""
        return general_guesses(material)

    def misfits(self, claimed: Tensor, true: Tensor) -> Tensor:
        """Return `true claimed`, the negative PSNR, which is the metric that is reported."""
        return metrics.image_misfits(claimed, true)
