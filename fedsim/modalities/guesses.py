"""Guesses that fit every modality of numbers, made of public examples and the claimed labels."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.interfaces.modality import GuessMaterial, PublicExamples
from fedsim.modalities.diverse_guesses import centres_of_claims, medians_of_claims, share_by_public


def general_guesses(material: GuessMaterial, middle_name: str = "mid-grey") -> dict[str, Tensor]:
    """Return `count` examples of each guess, by name.

    They are uniform noise and the middle of the range; where public examples are known, random ones
    of them, their mean, and for the claimed labels random ones of the classes, their means, and as
    many centres and medians of each class as are claimed (`diverse_guesses`).

    Args:
        material: what guesses are made from.
        middle_name: name of the guess in the middle of the range.
    """
    shape, public = (material.count, *material.shape), material.public
    guesses = {
        "noise": torch.rand(shape, generator=material.rng),
        middle_name: torch.full(shape, 0.5),
    }
    if public is None:
        return guesses
    mean = _class_mean(public, None)
    drawn = torch.randint(len(public.data), (material.count,), generator=material.rng)
    guesses["mean of public data"] = mean.expand(shape)
    guesses["random public examples"] = public.data[drawn]
    centres, medians = centres_of_claims(public, material.labels), medians_of_claims(public, material.labels)
    rest = mean.expand(shape)[len(centres) :]
    centres, medians = torch.cat([centres, rest]), torch.cat([medians, rest])
    if material.labels.is_floating_point():  # targets of a regression are no classes
        return guesses | {"k-means of public data": centres, "medians of public data": medians}
    guesses["medians of public data by class"] = medians
    guesses["random public examples of the class"] = _draw_of_classes(public, material)
    guesses["class means of public data"] = class_means(public, material.labels, material.count)
    if not torch.allclose(centres, guesses["class means of public data"], atol=1e-5):
        guesses["k-means of public data by class"] = centres
    return guesses


def _draw_of_classes(public: PublicExamples, material: GuessMaterial) -> Tensor:
    """Return for each claimed label a random public example of its class, which looks more like others than means do.

    Where a class has none, and beyond the claims, it is one of any class.
    """
    rng = material.rng.clone_state()  # what is drawn after this guess is as without it
    indices = []
    for label in [*material.labels.tolist(), *[None] * (material.count - len(material.labels))]:
        of_class = (public.labels == label).nonzero().flatten() if label is not None else torch.empty(0)
        of_class = of_class if len(of_class) else torch.arange(len(public.data))
        indices.append(of_class[torch.randint(len(of_class), (), generator=rng)])
    return public.data[torch.stack(indices)]


def class_means(public: PublicExamples, labels: Tensor, count: int) -> Tensor:
    """Return `count` means of public examples: of the class of each label, then of all examples.

    A class without public examples has the mean of all.
    """
    means = [_class_mean(public, label) for label in labels.tolist()]
    means += [_class_mean(public, None)] * (count - len(means))
    return torch.stack(means)


def _class_mean(public: PublicExamples, label: float | None) -> Tensor:
    """Return the mean of the public examples of a class; of all for None, and where the class has none."""

    def average() -> Tensor:
        if label is None:
            return public.data.mean(0)
        class_mean = public.data[public.labels == label].mean(0)
        return class_mean if torch.isfinite(class_mean).all() else _class_mean(public, None)

    return share_by_public(public, ("mean", label), average)
