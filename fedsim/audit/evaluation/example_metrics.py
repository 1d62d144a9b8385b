"""Metrics of claimed examples: how near each one comes to the true example that it is assigned to."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedsim.audit.evaluation.perceptual_distance import find_backbone, lpips_distances
from fedsim.base import metrics, text_metrics
from fedsim.interfaces.metric import ANY_NUMERIC, EXPLANATION_OF_GUESSES, ExampleContext, ExampleMetric, Metric
from fedsim.modalities import find_modality

RECOVERED = 20.0
"""PSNR in dB from which on an image counts as recovered.

SME calls images below 18 dB visually corrupted.
"""
EXACT = 40.0
"""PSNR in dB from which on an image counts as exact.

A row of a table does where each value differs by at most 1/10000 of its range.
"""
_EXACT_DIFFERENCE = 1e-4
_SINGLE_PRECISION = 1e-5
"""Error of a mean squared error in single precision, at most."""
_IMAGE, _TEXT = "image", "text"


class Psnr(ExampleMetric):
    """Peak signal-to-noise ratio of images."""

    title = "PSNR"
    unit = "dB"
    higher_is_better = True
    lowest = 0.0
    exact_from = EXACT
    preference = 10
    modalities = frozenset({_IMAGE})

    def measure(self, claimed: Tensor, true: Tensor, context: ExampleContext) -> Tensor | str:
        """Return the PSNR of each image."""
        return metrics.psnr(claimed, true)


class Ssim(ExampleMetric):
    """Structural similarity of images."""

    title = "SSIM"
    higher_is_better = True
    lowest = -1.0
    highest = 1.0
    preference = 30
    modalities = frozenset({_IMAGE})

    def measure(self, claimed: Tensor, true: Tensor, context: ExampleContext) -> Tensor | str:
        """Return the SSIM of each image, or that the images are too small."""
        return metrics.explain_missing_ssim(true) or metrics.ssim(claimed, true)


class MeanSquaredError(ExampleMetric):
    """Mean squared error of numbers in [0, 1]."""

    title = "MSE"
    higher_is_better = False
    lowest = 0.0
    highest = 1.0
    preference = 60
    modalities = frozenset({ANY_NUMERIC})

    def measure(self, claimed: Tensor, true: Tensor, context: ExampleContext) -> Tensor | str:
        """Return the mean squared error of each example."""
        return metrics.mse(claimed, true)


class Lpips(ExampleMetric):
    """Perceptual distance of images, by a trained network."""

    title = "LPIPS"
    higher_is_better = False
    lowest = 0.0
    preference = 70
    modalities = frozenset({_IMAGE})

    def measure(self, claimed: Tensor, true: Tensor, context: ExampleContext) -> Tensor | str:
        """Return the LPIPS of each image, or that there is no network for such images."""
        return lpips_distances(claimed, true, context.weights)

    def instrument(self, context: ExampleContext) -> str:
        """Return the network whose features are compared: `alex`, `vgg` or `squeeze`."""
        backbone = find_backbone(context.weights)
        return "" if backbone is None else backbone[0].name


class PositionAccuracy(ExampleMetric):
    """Share of a text's tokens that are claimed at their positions.

    Table VIII of TGIAs-RO marks errors so.
    """

    title = "recover rate"
    higher_is_better = True
    is_share = True
    preference = 80
    modalities = frozenset({_TEXT})

    def measure(self, claimed: Tensor, true: Tensor, context: ExampleContext) -> Tensor | str:
        """Return the share of each text."""
        return text_metrics.paired_position_accuracy(claimed, true, context.padding)


class TokenRecall(ExampleMetric):
    """Share of a text's tokens that are claimed at any position."""

    title = "tokens found"
    higher_is_better = True
    is_share = True
    preference = 81
    modalities = frozenset({_TEXT})

    def measure(self, claimed: Tensor, true: Tensor, context: ExampleContext) -> Tensor | str:
        """Return the share of each text."""
        recall = torch.zeros(len(true))
        texts, numbers = torch.unique(true, dim=0, return_inverse=True)
        for number, text in enumerate(texts):
            selected = numbers == number
            recall[selected] = text_metrics.token_recall(claimed[selected], text[None], context.padding)[0]
        return recall


class RecoveredShare(ExampleMetric):
    """Share of the images whose claims reach 20 dB, or of the texts that are found whole."""

    title = "share recovered"
    higher_is_better = True
    is_share = True
    ranks_examples = False
    evidence = "matches"
    preference = 90
    modalities = frozenset({_IMAGE, _TEXT})

    def measure(self, claimed: Tensor, true: Tensor, context: ExampleContext) -> Tensor | str:
        """Return 1 for each example that is recovered, 0 for others."""
        if context.modality == _IMAGE:
            return (metrics.psnr(claimed, true) >= RECOVERED).float()
        rates = text_metrics.paired_position_accuracy(claimed, true, context.padding)
        return ((rates == 1) & text_metrics.ends_match(claimed, true, context.padding)).float()

    def find_matches(self, claimed: Tensor, examples: Tensor, context: ExampleContext) -> Tensor:
        """Return the pairs of images that reach `RECOVERED` dB, or of equal texts."""
        if context.modality == _IMAGE:
            return reach_psnr(claimed, examples, RECOVERED)
        return super().find_matches(claimed, examples, context)


class ExactShare(ExampleMetric):
    """Share of the examples that are exact: images from 40 dB on, others where no value differs by 1/10000."""

    title = "share exact"
    higher_is_better = True
    is_share = True
    ranks_examples = False
    evidence = "matches"
    preference = 91
    modalities = frozenset({ANY_NUMERIC})

    def measure(self, claimed: Tensor, true: Tensor, context: ExampleContext) -> Tensor | str:
        """Return 1 for each example that is exact, 0 for others."""
        if context.modality == _IMAGE:
            return (metrics.psnr(claimed, true) >= EXACT).float()
        largest_difference = (claimed - true).abs().flatten(1).amax(1)
        return (largest_difference <= _EXACT_DIFFERENCE).float()

    def find_matches(self, claimed: Tensor, examples: Tensor, context: ExampleContext) -> Tensor:
        """Return the pairs of images that reach `EXACT` dB, or of examples that are equal."""
        if context.modality == _IMAGE:
            return reach_psnr(claimed, examples, EXACT)
        return torch.cdist(claimed.flatten(1), examples.flatten(1), p=math.inf) <= _EXACT_DIFFERENCE

    def depends_on_class(self, context: ExampleContext) -> bool:
        """Return False for images and series, since no class says what all of their values are."""
        return not find_modality(context.modality).smooth_axes


def reach_psnr(claimed: Tensor, images: Tensor, decibels: float) -> Tensor:
    """Return `claim image`, whether the PSNR of each pair is at least so many dB."""
    limit = 10 ** (-decibels / 10)
    errors = torch.cdist(claimed.flatten(1), images.flatten(1)).square() / images[0].numel()
    is_reached = errors <= limit
    # The few pairs that single precision cannot decide.
    for pairs in torch.split(((errors - limit).abs() <= _SINGLE_PRECISION).nonzero(), 1024):
        claim_numbers, image_numbers = pairs.T
        differences = claimed[claim_numbers].double() - images[image_numbers].double()
        is_reached[claim_numbers, image_numbers] = differences.square().flatten(1).mean(1) <= limit
    return is_reached


class WordRecall(Metric):
    """Share of the different words of all true texts that any claim contains."""

    title = "words found"
    higher_is_better = True
    is_share = True
    ranks_examples = True
    preference = 82
    explanations = (EXPLANATION_OF_GUESSES,)
