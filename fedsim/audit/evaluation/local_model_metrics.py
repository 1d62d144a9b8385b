"""Metrics of claimed local models."""

from __future__ import annotations

from fedsim.interfaces.metric import Metric


class ParameterDistance(Metric):
    """Distance of the claimed and the optimal local model over all parameters, relative to the latter."""

    title = "parameter distance"
    higher_is_better = False
    lowest = 0.0
    preference = 130
    reference = "the optimal local model"
    explanations = (
        "For local models, the floor is the score of the best model that was sent (the first one, the global one, the "
        "one that the victim returned last), or of the best model between two of these. The truth is used to choose "
        "it, so this floor is stricter than any choice that an adversary could make. The score of the optimal local "
        "model is no bound: an attack may be better.",
    )


class ZestSimilarity(ParameterDistance):
    """How alike the claimed and the optimal local model answer."""

    title = "Zest"
    higher_is_better = True
    lowest = -1.0
    highest = 1.0
    preference = 131


class ZestOfOtherStart(ZestSimilarity):
    """How alike the claimed model and an optimum from other random weights answer."""

    title = "Zest, other start"
    preference = 132
    reference = ""


class ZestOfOptima(ZestOfOtherStart):
    """How alike two optima of the same data answer; where that is low, the data do not determine it."""

    title = "Zest of the two optima"
    preference = 136


class LocalLoss(ParameterDistance):
    """Mean loss of the claimed model on the victim's training data."""

    title = "local loss"
    preference = 133


class LocalAccuracy(ParameterDistance):
    """Share of the victim's training examples that the claimed model classifies right."""

    title = "local accuracy"
    higher_is_better = True
    is_share = True
    preference = 134


class LocalPercentageError(ParameterDistance):
    """Mean error of the claimed model on the victim's training data, relative to the true targets."""

    title = "local MAPE"
    unit = "%"
    preference = 135
