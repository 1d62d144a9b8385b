"""Checks of modalities."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import get_args, get_type_hints

import torch
from torch import Tensor

from fedsim.base.randomness import generator
from fedsim.contract import common
from fedsim.contract.checks import CheckedPlugin, DoesNotApply, expect
from fedsim.interfaces.modality import GuessMaterial, Modality, PublicExamples
from fedsim.modalities.drawing import clean_drawing

_CLASSES, _VOCABULARY = 3, 10
_CLAIMS, _EXAMPLES, _PUBLIC_EXAMPLES = 3, 5, 12
_MAX_DRAWING_SIZE = 200_000
"""Most letters of the drawing of one example; a page shows many."""


def is_a_modality(subject: CheckedPlugin) -> None:
    """It derives from fedsim.Modality and has no settings, because data sets only name it."""
    cls = subject.cls
    expect(issubclass(cls, Modality), f"{cls.__name__} does not derive from fedsim.Modality")
    expect(not dataclasses.fields(cls), f"{cls.__name__} has settings, and no data set could set them; remove them")


def names_its_axes(subject: CheckedPlugin) -> None:
    """Its axes have different names, and what it says of them and of its display fits together."""
    modality = common.build_instance(subject, Modality)
    axes = modality.axes
    is_named = isinstance(axes, tuple) and axes and all(isinstance(axis, str) and axis for axis in axes)
    expect(is_named and len(set(axes)) == len(axes), f"axes: expected different names in a tuple, got {axes!r}")
    unknown = [axis for axis in modality.smooth_axes if axis not in axes]
    expect(not unknown, f"smooth_axes: '{unknown[0] if unknown else ''}' is not one of its axes")
    expect(modality.noun and modality.plural, "its noun or its plural is empty")
    displays = get_args(get_args(get_type_hints(Modality)["shown_as"])[0])
    expect(modality.shown_as in displays, f"shown_as: expected one of {', '.join(displays)}, got {modality.shown_as!r}")
    needed_axes = {"images": 3, "rows": 1, "texts": 1}.get(modality.shown_as, len(axes))
    expect(
        len(axes) == needed_axes,
        f"it is shown as {modality.shown_as}, which have {needed_axes} axes, and has {len(axes)}",
    )
    expect(
        (modality.shown_as == "texts") == modality.has_tokens,
        "shown_as and has_tokens disagree: tokens are shown as texts, and nothing else is",
    )
    shape = _trial_shape(modality)
    expect(
        len(shape) == len(axes) and min(shape) > 0,
        f"trial_shape: expected a size for each of {len(axes)} axes, got {shape}",
    )


def floors_are_like_the_data(subject: CheckedPlugin) -> None:
    """Its guesses have the shape and the range of the data, whatever is public and claimed."""
    modality = common.build_instance(subject, Modality)
    for material in _materials(modality):
        public = "with" if material.public else "without"
        for name, guess in modality.guess_examples(material).items():
            expect(isinstance(guess, Tensor), f"its floor '{name}' is a {type(guess).__name__}, expected a Tensor")
            shape = (material.count, *material.shape)
            expect(
                guess.shape == shape,
                f"{public} public examples its floor '{name}' has the shape {tuple(guess.shape)}, expected {shape}",
            )
            expect(
                guess.is_floating_point() != modality.has_tokens,
                f"its floor '{name}' is {guess.dtype}, expected {'integers' if modality.has_tokens else 'numbers'}",
            )
            low, high = guess.min().item(), guess.max().item()
            highest = _VOCABULARY - 1 if modality.has_tokens else 1
            expect(
                0 <= low <= high <= highest,
                f"its floor '{name}' goes from {low:g} to {high:g}, expected values in [0, {highest}]",
            )


def guesses_are_deterministic(subject: CheckedPlugin) -> None:
    """Its guesses follow from what it is given: it uses no global generator and changes nothing."""
    modality = common.build_instance(subject, Modality)
    for first, second in zip(_materials(modality), _materials(modality), strict=True):
        public = None if first.public is None else first.public.data.clone()
        with common.expect_untouched_generators():
            guesses = dict(modality.guess_examples(first))
        with common.seed_global_generators(1):
            repeated = dict(modality.guess_examples(second))
        expect(common.are_equal(guesses, repeated), "from the same material it makes other guesses")
        is_unchanged = public is None or (first.public is not None and torch.equal(public, first.public.data))
        expect(is_unchanged, "it changes the public examples")


def pairs_one_to_one(subject: CheckedPlugin) -> None:
    """Each claim is assigned to at most one true example, and exact claims to the right ones."""
    modality = common.build_instance(subject, Modality)
    true = _draw_examples(modality, _EXAMPLES, "true")
    order = torch.tensor([3, 0, 4, 1, 2])
    assignment = modality.assign_claims(true[order], true)
    expect(
        torch.equal(true[order][assignment], true),
        f"the true examples in another order are paired as {assignment.tolist()}, expected {order.argsort().tolist()}",
    )
    for count in (_EXAMPLES - 2, _EXAMPLES + 2):
        claims = _draw_examples(modality, count, "claims")
        assigned = [index for index in modality.assign_claims(claims, true).tolist() if index >= 0]
        expect(
            len(set(assigned)) == len(assigned) <= min(count, _EXAMPLES) and max(assigned, default=0) < count,
            f"{count} claims are assigned to {_EXAMPLES} examples as {assigned}, expected each at most once",
        )


def identifies_examples(subject: CheckedPlugin) -> None:
    """Each example is more similar to itself than to any other, by a finite similarity of each pair."""
    modality = common.build_instance(subject, Modality)
    examples = _draw_examples(modality, _EXAMPLES, "true")
    similarity = modality.similarity(examples[:-1], examples)
    expected_shape = (_EXAMPLES - 1, _EXAMPLES)
    expect(
        tuple(similarity.shape) == expected_shape,
        f"its similarity has the shape {tuple(similarity.shape)}, expected {expected_shape}, claims by examples",
    )
    expect(bool(similarity.isfinite().all()), "its similarity of random examples is not finite")
    nearest = similarity.argmax(1).tolist()
    expect(nearest == list(range(_EXAMPLES - 1)), f"the examples most similar to examples 0, 1, ... are {nearest}")


def draws_safely(subject: CheckedPlugin) -> None:
    """It draws an example, with the truth and without, as an SVG that does nothing but draw."""
    modality = common.build_instance(subject, Modality)
    if modality.shown_as != "drawings":
        raise DoesNotApply(f"pages show its examples as {modality.shown_as}")
    claimed, true = _draw_examples(modality, 2, "drawn")
    for claim in (claimed, torch.zeros_like(claimed), torch.ones_like(claimed)):
        for truth in (true, None):
            drawing = modality.draw_example(claim, truth)
            clean_drawing(drawing, "trial", subject.name)
            expect("nan" not in drawing.lower(), "its drawing of values in [0, 1] holds NaN")
            expect(
                len(drawing) <= _MAX_DRAWING_SIZE,
                f"the drawing of one example has {len(drawing)} letters, expected at most {_MAX_DRAWING_SIZE}",
            )
            expect(drawing == modality.draw_example(claim, truth), "the same example is drawn in another way")


CHECKS = (
    *common.CHECKS,
    is_a_modality,
    names_its_axes,
    floors_are_like_the_data,
    guesses_are_deterministic,
    pairs_one_to_one,
    identifies_examples,
    draws_safely,
)


def _trial_shape(modality: Modality) -> tuple[int, ...]:
    return modality.trial_shape or (8,) * len(modality.axes)


def _draw_examples(modality: Modality, count: int, key: str) -> Tensor:
    """Return `count` random examples that differ from one another."""
    shape, rng = (count, *_trial_shape(modality)), generator("contract", "modality", key)
    if modality.has_tokens:
        return torch.randint(_VOCABULARY, shape, generator=rng)
    return torch.rand(shape, generator=rng)


def _materials(modality: Modality) -> Iterator[GuessMaterial]:
    """Yield what guesses can be made from: with public examples and without, of classes and targets."""
    data = _draw_examples(modality, _PUBLIC_EXAMPLES, "public")
    public_classes = torch.arange(_PUBLIC_EXAMPLES) % _CLASSES
    # The last class has no public example.
    claimed_classes = torch.tensor([0, 0, _CLASSES])
    targets, public_targets = torch.linspace(-1, 1, _CLAIMS), torch.linspace(-1, 1, _PUBLIC_EXAMPLES)
    for labels, public_labels in ((claimed_classes, public_classes), (targets, public_targets)):
        for public in (PublicExamples(data=data, labels=public_labels), None):
            yield GuessMaterial(
                count=_EXAMPLES,
                shape=_trial_shape(modality),
                labels=labels,
                public=public,
                rng=generator("contract", "modality", "guesses"),
                padding=0 if modality.has_tokens else None,
            )
