"""Score claimed masks, the classes of pixels, and paint what somebody would guess who knew them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedsim.audit.evaluation.score import Score
from fedsim.audit.evaluation.target_scores import best_sum, mean_of_draws
from fedsim.base.errors import DataError
from fedsim.base.task import are_masks, describe_ignored_pixels
from fedsim.interfaces.metric import Metric
from fedsim.interfaces.modality import PublicExamples
from fedsim.modalities.diverse_guesses import centres_of_claims


class MaskIou(Metric):
    """Intersection over union of claimed and true masks, the mean over the classes in either, after assignment."""

    title = "mask IoU"
    higher_is_better = True
    is_share = True
    preference = 123
    explanations = (
        "Claimed masks are assigned to the true ones as is best for them, and so are the guesses beside them: random "
        "pixels, one class everywhere, the class that is most frequent at each pixel, masks of public examples, and as "
        "many centres of these as there are claims. A guess of the images paints the masks that are "
        "claimed or known, each class in the mean colour that it has in public examples.",
    )


@dataclass(frozen=True)
class PaintedMasks:
    """Images that somebody would guess who knows the masks: the mean public colour of each class, pixel by pixel."""

    masks: Tensor
    public: PublicExamples | None

    @property
    def can_be_painted(self) -> bool:
        """Return whether public examples with masks are known."""
        return self.public is not None and are_masks(self.public.labels)

    def paint(self, count: int) -> Tensor:
        """Return `count` images, `example channel height width` in [0, 1]; without a mask, one of the mean colour."""
        assert self.public is not None
        pixels = self.public.data.movedim(1, -1).flatten(0, -2)
        classes = self.public.labels.flatten()
        number = int(max(self.masks.max(), classes.max())) + 1
        sums = torch.zeros(number, pixels.shape[1]).index_add_(0, classes, pixels.float())
        counts = classes.bincount(minlength=number)[:, None]
        colours = torch.where(counts > 0, sums / counts.clamp_min(1), pixels.float().mean(0))
        painted = colours[self.masks[:count]].movedim(-1, 1)
        missing = pixels.float().mean(0)[:, None, None].expand(count - len(painted), *painted.shape[1:])
        return torch.cat([painted, missing])


def score_masks(claimed: Tensor, true: Tensor, public: PublicExamples | None, rng: torch.Generator) -> Score:
    """Score claimed masks; the floor is the best of guesses that are as many and as diverse."""
    if complaint := describe_ignored_pixels(true):
        raise DataError(f"the masks to score by: {complaint}")
    count, shape = max(len(claimed), len(true)), true.shape[1:]
    masks = None if public is None else public.labels
    # A claimed class is no reason for guesses of it: a wild one would make them bad, and as many as classes below it.
    classes = int(max(part.max() for part in (true, masks) if part is not None)) + 1

    def draw_pixels() -> Tensor:
        return torch.randint(classes, (count, *shape), generator=rng)

    guesses = {"random pixels": mean_of_draws(lambda: mask_iou(draw_pixels(), true))}
    for number in range(classes):
        guesses[f"class {number} everywhere"] = mask_iou(torch.full((count, *shape), number), true)
    if masks is not None:
        shares = one_hot(masks, classes).flatten(1, 2).float()  # public pixel class
        without_labels = PublicExamples(data=shares, labels=torch.zeros(len(shares)))
        centres = centres_of_claims(without_labels, torch.zeros(count))
        guesses["k-means of public masks"] = mask_iou(centres.argmax(2).reshape(-1, *shape), true)
        guesses["most frequent class per pixel"] = mask_iou(
            shares.mean(0).argmax(1).reshape(shape).expand(count, *shape), true
        )
        guesses["random public masks"] = mean_of_draws(
            lambda: mask_iou(masks[torch.randint(len(masks), (count,), generator=rng)], true)
        )
    return Score.against_guesses("mask_iou", mask_iou(claimed, true), guesses)


def mask_iou(claimed: Tensor, true: Tensor) -> float:
    """Return the mean IoU of the true masks with the claims that are assigned to them; one without a claim counts 0.

    The IoU of two masks is the mean over the classes that are in either of them.

    >>> mask_iou(torch.tensor([[[0, 0, 1, 1]]]), torch.tensor([[[0, 0, 0, 1]]]))  # 2 of 3, and 1 of 2
    0.5833333333333333
    """
    first, second = claimed.flatten(1), true.flatten(1)
    total, present = (torch.zeros(len(first), len(second), dtype=torch.float64) for _ in range(2))
    for number in torch.unique(torch.cat([first.flatten(), second.flatten()])).tolist():
        in_first, in_second = (first == number).double(), (second == number).double()
        both = in_first @ in_second.T
        either = in_first.sum(1)[:, None] + in_second.sum(1)[None] - both
        total += both / either.clamp_min(1)
        present += either > 0
    return best_sum(total / present, maximize=True) / len(true)
