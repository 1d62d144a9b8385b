"""Claims that explain the message and look like noise: the attack's settings, not the message, are in the way."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedsim.report.summary import enumerate_words

if TYPE_CHECKING:
    from fedsim.report.finding_views import FindingView

_EXPLAINED = 0.05
"""Largest L_sim, the cosine distance to the message, at which an attack explains it."""
_NOISY = 1.5
"""How many times as rough as public images claims that look like noise are at least."""
_PUBLIC_QUANTILE, _MAX_PUBLIC = 0.95, 500
"""Of the roughness of so many public images this quantile counts, as some images are rough by nature."""


def usual_roughness(public: Tensor | None) -> float:
    """Return the roughness that few public images exceed; NaN where they are no images.

    An image's roughness is its total variation. White noise has a third of the range, saturated noise a half;
    photographs have about a twentieth.
    """
    if public is None or public.ndim != 4 or not len(public):
        return math.nan
    return float(_roughness(public[:_MAX_PUBLIC]).quantile(_PUBLIC_QUANTILE))


def relative_roughness(claimed: Tensor, usual: float) -> float:
    """Return how many times as rough as public images the median claim is; NaN where they are no images.

    >>> import torch
    >>> smooth = torch.linspace(0, 1, 16).expand(2, 1, 16, 16)
    >>> relative_roughness(torch.rand(2, 1, 16, 16), usual_roughness(smooth)) > 5
    True
    """
    if claimed.ndim != 4 or not len(claimed):
        return math.nan
    return float(_roughness(claimed).median() / usual) if usual > 0 else math.nan


def _roughness(images: Tensor) -> Tensor:
    """Return the total variation of each image, as `fedsim.inversion.priors.total_variation` computes it."""
    total = images.new_zeros(len(images))
    for dimension in (2, 3):
        # One row or column has no neighbours; the mean of nothing is NaN.
        if images.shape[dimension] > 1:
            total = total + images.diff(dim=dimension).abs().mean((1, 2, 3))
    return total / 2


def explain_noise(findings: Sequence[FindingView]) -> str:
    """Return a sentence where most findings of one attack explain the message and look like noise; else nothing."""
    noisy = [finding for finding in findings if _is_noisy(finding)]
    if not noisy or 2 * len(noisy) < len(findings):
        return ""
    distance = fmean(map(_last_distance, noisy))
    roughness = fmean(finding.roughness for finding in noisy)
    remedies = _remedies(noisy[0].about)
    return (
        f"It matches the message (L_sim {distance:.2g}), but its claims look like noise, {roughness:.1f} times "
        f"as rough as public images. So its settings may not fit this network and data; try {remedies}."
    )


def _is_noisy(finding: FindingView) -> bool:
    if not finding.roughness >= _NOISY or "l_sim" not in finding.curves:
        return False
    return _last_distance(finding) <= _EXPLAINED


def _last_distance(finding: FindingView) -> float:
    _, values = finding.curves["l_sim"]
    return float(values[-1])


def _remedies(about: Mapping[str, Any]) -> str:
    """Return what to try, of the settings that the attack has."""
    settings, remedies = about["settings"], []
    if not about.get("tuned"):
        remedies.append("fedsim tune, which chooses settings on public data")
    if settings.get("signed") is False:
        remedies.append("step_size = 0.1 with signed = true")
    if "tv_weight" in settings:
        remedies.append(f"a stronger prior (tv_weight = {max(10 * settings['tv_weight'], 0.01):g})")
    return enumerate_words(remedies or ["more iterations"])
