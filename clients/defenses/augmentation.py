"""Data augmentation: clients train on randomly cropped, flipped and transformed images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from fedsim.base.constraints import NonNegativeInt, Share
from fedsim.base.errors import ConfigError, RunError, did_you_mean, first_line
from fedsim.base.papers import cite
from fedsim.base.randomness import seed_globals_with
from fedsim.interfaces.attack import Paper
from fedsim.interfaces.defense import Defense, Participation, Setting, copy_with_facts, mixing_defenses
from fedsim.interfaces.defense_calls import describe_value
from fedsim.interfaces.defense_checks import name_of_defense
from fedsim.interfaces.local_context import LocalContext


@dataclass(frozen=True, kw_only=True)
class Augmentation(Defense):
    """Crop, flip and transform each image of a batch at random; labels stay.

    Crops and flips move values and do not change them; pixels from beyond the edge have the lowest
    value, black. The listed transforms act on values in [0, 1], scaled from the lowest and highest
    value of the data set, whatever the scale of the model's inputs. No formal guarantee: a server
    that matches gradients reconstructs the transformed image.

    Args:
        padding: largest shift of an image in pixels, along both axes; 0 shifts none.
        flip: probability that an image is mirrored, left to right; 0 mirrors none.
        transforms: transforms of `torchvision.transforms.v2`, in this order, each a table of its
            `name` and settings, as `{name = "RandomRotation", degrees = 10}`. Each image is
            transformed separately, which takes time.

    Raises:
        ConfigError: a setting is out of range, a transform is not known or does not accept its
            settings or these images, or the data are no images.

    References:
        [Gao2021]. Differs: the policy is given, not searched for. Crop and flip are those commonly
        used to train networks for CIFAR-10.
    """

    padding: NonNegativeInt = 4
    flip: Share = 0.5
    transforms: tuple[Mapping[str, Any], ...] = ()

    against: ClassVar[str] = "a server that reconstructs images: it finds them as they were transformed"
    cost: ClassVar[str] = "accuracy, where classes do not survive a transform; listed transforms cost time"
    value_range: ClassVar[tuple[tuple[float, ...], tuple[float, ...]] | None] = None
    paper: ClassVar[Paper] = cite("Gao2021")

    def __post_init__(self) -> None:
        super().__post_init__()
        for index, table in enumerate(self.transforms):
            _build_transform(table, f"transforms.{index}")

    def check(self, setting: Setting) -> None:
        """Check that the data are images larger than the padding, and try each transform on one."""
        if setting.task.modality != "image":
            raise ConfigError("it transforms images, but the data set has none; remove it")
        if setting.task.goal == "masks":
            raise ConfigError("it would transform images and leave their masks as they are; leave it out")
        if self.padding >= min(setting.task.input_shape[1:]):
            raise ConfigError(
                f"padding: images of {' x '.join(map(str, setting.task.input_shape[1:]))} pixels would be moved by up "
                f"to {self.padding} pixels; choose fewer than they have"
            )
        image = torch.rand(setting.task.input_shape, generator=torch.Generator().manual_seed(0))
        for index, table in enumerate(self.transforms):
            transform = _build_transform(table, f"transforms.{index}")
            _try_transform(transform, image, f"transforms.{index}: '{table['name']}'")

    def check_combination(self, defenses: Sequence[Defense], position: int) -> None:
        """Raise ConfigError if a defense before this one mixes images."""
        for other in mixing_defenses(defenses[:position]):
            raise ConfigError(
                f"it would transform the mixtures of {name_of_defense(other)} instead of images; put it before that"
            )

    def of_client(self, participation: Participation) -> Self:
        """Return a copy that knows the range of the data's values."""
        return copy_with_facts(self, value_range=participation.value_range)

    def on_batch(self, inputs: Tensor, labels: Tensor, context: LocalContext) -> tuple[Tensor, Tensor]:
        """Return the batch with each image cropped, flipped and transformed."""
        if self.value_range is None:
            raise RunError(
                "Augmentation: the range of values is not known; train with the copy that of_client returns for a "
                "Participation with value_range"
            )
        low, high = (torch.tensor(bound).to(inputs).view(-1, 1, 1) for bound in self.value_range)
        if self.padding:
            inputs = _shift_images(inputs, self.padding, low, context.rng)
        if self.flip:
            is_mirrored = (torch.rand(len(inputs), generator=context.rng) < self.flip).to(inputs.device)
            inputs = torch.where(is_mirrored.view(-1, 1, 1, 1), inputs.flip(-1), inputs)
        if self.transforms:
            inputs = low + (high - low) * self._apply_transforms((inputs - low) / (high - low), context.rng)
        return inputs, labels

    def _apply_transforms(self, images: Tensor, rng: torch.Generator) -> Tensor:
        """Return `images`, in [0, 1], each transformed by independent draws."""
        with seed_globals_with(int(torch.randint(2**63 - 1, (), generator=rng))):
            for transform in self._built_transforms:
                images = torch.stack([transform(image) for image in images])
        return images

    @cached_property
    def _built_transforms(self) -> list[Any]:
        return [_build_transform(table, f"transforms.{index}") for index, table in enumerate(self.transforms)]


def _shift_images(images: Tensor, padding: int, fill: Tensor, rng: torch.Generator) -> Tensor:
    """Shift each image by up to `padding` pixels along both axes, with `fill` beyond the edge.

    Args:
        images: `image channel height width`.
        fill: `channel 1 1`, a value for each channel.
    """
    count, channels, height, width = images.shape
    padded = fill.expand(count, channels, height + 2 * padding, width + 2 * padding).clone()
    padded[..., padding : padding + height, padding : padding + width] = images
    rows, columns = (
        (torch.randint(2 * padding + 1, (count, 1), generator=rng) + torch.arange(size)).to(images.device)
        for size in (height, width)
    )
    index = torch.arange(count, device=images.device)[:, None, None]
    return padded.movedim(1, -1)[index, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)


def _build_transform(table: Mapping[str, Any], where: str) -> Any:
    """Return the transform of `torchvision.transforms.v2` that `table` names.

    Raises:
        ConfigError: there is none of that name, or it does not accept the settings.
    """
    from torchvision.transforms import v2

    known: dict[str, Any] = {}
    for class_name, cls in vars(v2).items():
        if isinstance(cls, type) and issubclass(cls, v2.Transform) and cls is not v2.Transform:
            known[class_name] = cls
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


def _try_transform(transform: Any, image: Tensor, where: str) -> None:
    """Raise ConfigError unless `transform` returns an image of the same shape."""
    try:
        with seed_globals_with(0):
            result = transform(image)
    except Exception as error:
        raise ConfigError(f"{where} does not take images of this data set ({first_line(error)})") from error
    if not isinstance(result, Tensor) or not result.is_floating_point() or result.shape != image.shape:
        raise ConfigError(
            f"{where} makes {describe_value(result)} of an image of shape {tuple(image.shape)}; expected "
            "an image of that shape"
        )
