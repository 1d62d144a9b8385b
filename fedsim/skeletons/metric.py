"""Skeleton, a metric of claimed images for fedsim.

Install it, and each reconstructed image is measured by it, each guess, and the nearest public
image: in `fedsim run skeleton.toml`, in its report, in sweeps and in comparisons.
"""

from __future__ import annotations

from torch import Tensor

from fedsim.interfaces.metric import ExampleContext, ExampleMetric


class Skeleton(ExampleMetric):
    """Mean absolute error of the differences between neighbouring pixels."""

    # What tables and charts call it, and its unit, where it has one.
    title = "edge error"
    # Whether a higher value means that the attack came closer to the truth.
    higher_is_better = False
    # The smallest and the largest possible value; leave out an end that is not known. What a
    # perfect claim gets is the better end. For a share of something, say `is_share = True` instead.
    lowest = 0.0
    highest = 2.0
    # The kinds of examples that it is for; "numeric" is all whose examples are numbers.
    modalities = frozenset({"image"})

    def measure(self, claimed: Tensor, true: Tensor, context: ExampleContext) -> Tensor | str:
        """Return the error of each image."""
        # Both are `example channel height width` in [0, 1]; each claim stands where the true image
        # does that it is assigned to. Return one number an image, or a sentence that says why there
        # is none. `context` has what else is known, as the folder with weights of networks.
        if min(true.shape[-2:]) < 2:
            return "images of one pixel have no edges"
        across = (claimed.diff(dim=-1) - true.diff(dim=-1)).abs().flatten(1).mean(1)
        down = (claimed.diff(dim=-2) - true.diff(dim=-2)).abs().flatten(1).mean(1)
        return (across + down) / 2
