"""Clients train on images that are cropped, flipped and transformed at random."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from fedsim.attacks import Paper
from fedsim.defense import Defense, Participation, Setting, called, informed, kind, mixers
from fedsim.errors import ConfigError, RunError, did_you_mean, first_line
from fedsim.randomness import seeded_by


@dataclass(frozen=True, kw_only=True)
class Augmentation(Defense):
    """Crop, flip and transform each image of a batch at random, each time anew; labels stay.

    Crops and flips move values and do not change them; what a crop takes from beyond the edge has the lowest value,
    black. The listed transforms act on values in [0, 1], the lowest and the highest value of the data set, whatever the
    model is fed with. No formal guarantee: a server that matches gradients finds the image as it was transformed.

    Args:
        padding: each image is moved by up to so many pixels, up or down and left or right; 0 moves none.
        flip: probability that an image is mirrored, left to right; 0 mirrors none.
        transforms: of `torchvision.transforms.v2`, in this order, each a table with its `name` and its settings, as
            `{name = "RandomRotation", degrees = 10}`. Each image is transformed by itself, which takes time.

    Raises:
        ConfigError: a setting is out of range, a transform is not known or does not take its settings or these images,
            or the data are no images.

    References:
        Gao et al.: Privacy-preserving Collaborative Learning with Automatic Transformation Search, CVPR 2021. Differs:
        the policy is written out, not searched for. Crop and flip are those that networks for CIFAR-10 are commonly
        trained with.
    """

    padding: int = 4
    flip: float = 0.5
    transforms: tuple[Mapping[str, Any], ...] = ()

    against: ClassVar[str] = "a server that reconstructs images: it finds them as they were transformed"
    cost: ClassVar[str] = "accuracy, where classes do not survive a transform; listed transforms cost time"
    value_range: ClassVar[tuple[tuple[float, ...], tuple[float, ...]] | None] = None
    paper: ClassVar[Paper] = Paper(
        title="Privacy-preserving Collaborative Learning with Automatic Transformation Search",
        authors="Gao, Guo, Zhang, Qiu, Wen, Liu",
        venue="CVPR",
        year=2021,
        url="https://arxiv.org/abs/2011.12505",
    )

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise ConfigError(f"padding: expected at least 0 pixels, got {self.padding}")
        if not 0 <= self.flip <= 1:
            raise ConfigError(f"flip: expected a probability, at least 0 and at most 1, got {self.flip}")
        for place, table in enumerate(self.transforms):
            transform_of(table, f"transforms.{place}")

    def check(self, setting: Setting) -> None:
        """See Defense. Each transform is tried on an image."""
        if setting.task.kind != "image":
            raise ConfigError("it transforms images, and the data set has none; leave it out")
        if self.padding >= min(setting.task.input_shape[1:]):
            raise ConfigError(
                f"padding: images of {' x '.join(map(str, setting.task.input_shape[1:]))} pixels would be moved by up "
                f"to {self.padding} pixels; choose fewer than they have"
            )
        image = torch.rand(setting.task.input_shape, generator=torch.Generator().manual_seed(0))
        for place, table in enumerate(self.transforms):
            _try(transform_of(table, f"transforms.{place}"), image, f"transforms.{place}: '{table['name']}'")

    def check_beside(self, others: Sequence[Defense], place: int) -> None:
        """See Defense."""
        for other in mixers(others[:place]):
            raise ConfigError(
                f"it would transform the mixtures of {called(other)} instead of images; put it before that"
            )

    def of_client(self, participation: Participation) -> Self:
        """See Defense. The copy knows the range of values."""
        return informed(self, value_range=participation.value_range)

    def on_batch(self, inputs: Tensor, labels: Tensor, *, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """See Defense."""
        if self.value_range is None:
            raise RunError(
                "Augmentation: the range of values is not known; train with the copy that of_client returns for a "
                "Participation with value_range"
            )
        low, high = (torch.tensor(end).to(inputs).view(-1, 1, 1) for end in self.value_range)
        if self.padding:
            inputs = moved(inputs, self.padding, low, rng)
        if self.flip:
            mirrored = (torch.rand(len(inputs), generator=rng) < self.flip).to(inputs.device)
            inputs = torch.where(mirrored.view(-1, 1, 1, 1), inputs.flip(-1), inputs)
        if self.transforms:
            inputs = low + (high - low) * self._transformed((inputs - low) / (high - low), rng)
        return inputs, labels

    def _transformed(self, images: Tensor, rng: torch.Generator) -> Tensor:
        """Each of `images`, in [0, 1], transformed by draws of its own."""
        with seeded_by(int(torch.randint(2**63 - 1, (), generator=rng))):
            for transform in self._chain:
                images = torch.stack([transform(image) for image in images])
        return images

    @cached_property
    def _chain(self) -> list[Any]:
        return [transform_of(table, f"transforms.{place}") for place, table in enumerate(self.transforms)]


def moved(images: Tensor, most: int, beyond: Tensor, rng: torch.Generator) -> Tensor:
    """`image channel height width`: each moved by up to `most` pixels along both axes; `beyond` the edge of all."""
    count, channels, height, width = images.shape
    padded = beyond.expand(count, channels, height + 2 * most, width + 2 * most).clone()
    padded[..., most : most + height, most : most + width] = images
    rows, columns = (
        (torch.randint(2 * most + 1, (count, 1), generator=rng) + torch.arange(size)).to(images.device)
        for size in (height, width)
    )
    index = torch.arange(count, device=images.device)[:, None, None]
    return padded.movedim(1, -1)[index, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)


def transform_of(table: Mapping[str, Any], where: str) -> Any:
    """The transform of `torchvision.transforms.v2` that `table` names.

    Raises:
        ConfigError: there is none of that name, or it does not take the settings.
    """
    from torchvision.transforms import v2

    known = {
        name: cls
        for name, cls in vars(v2).items()
        if isinstance(cls, type) and issubclass(cls, v2.Transform) and cls is not v2.Transform
    }
    settings = dict(table)
    name = settings.pop("name", None)
    if name is None:
        raise ConfigError(f"{where}: a table without 'name'; name a class of torchvision.transforms.v2")
    if name not in known:
        raise ConfigError(
            f"{where}: torchvision.transforms.v2 has no transform '{name}', {did_you_mean(str(name), known)}"
        )
    try:
        return known[name](**settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: '{name}' does not take these settings ({first_line(error)})") from error


def _try(transform: Any, image: Tensor, where: str) -> None:
    """Raise ConfigError unless `transform` makes of `image` another one of its form."""
    try:
        with seeded_by(0):
            got = transform(image)
    except Exception as error:
        raise ConfigError(f"{where} does not take images of this data set ({first_line(error)})") from error
    if not isinstance(got, Tensor) or not got.is_floating_point() or got.shape != image.shape:
        raise ConfigError(
            f"{where} makes {kind(got)} of an image of shape {tuple(image.shape)}; expected an image of that shape"
        )
