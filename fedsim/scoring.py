"""The evaluator: the only place where a finding and the truth meet.

No attack may import this module; import-linter checks it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedsim import metrics
from fedsim.errors import DataError
from fedsim.findings import Reconstruction


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What the victim held.

    Attributes:
        data: `example channel height width` images in [0, 1], or `example feature` rows of a table.
        labels: `example`, class indices, or targets of a regression.
    """

    data: Tensor
    labels: Tensor

    @classmethod
    def load(cls, path: Path) -> Truth:
        """Read a safetensors file with `data` and `labels`.

        Raises:
            DataError: it is missing, damaged, or its values leave [0, 1].
        """
        try:
            tensors = load_file(path)
            data, labels = tensors["data"].float(), tensors["labels"]
            labels = labels.float() if labels.is_floating_point() else labels.long()
        except (OSError, SafetensorError, KeyError) as error:
            raise DataError(f"truth: {path} is not a safetensors file with 'data' and 'labels' ({error})") from error
        negative = not labels.is_floating_point() and bool((labels < 0).any())
        if data.ndim not in (2, 4) or not len(data) or labels.shape != data.shape[:1] or negative:
            raise DataError(
                f"truth: {path}: expected data of shape (example, channel, height, width) or (example, feature) and a "
                f"label for each, got {tuple(data.shape)} and {tuple(labels.shape)}"
            )
        if not (data.min() >= 0 and data.max() <= 1):
            raise DataError(f"truth: {path}: data lies in [{data.min():.3g}, {data.max():.3g}], expected [0, 1]")
        return cls(data=data, labels=labels)


@dataclass(frozen=True, kw_only=True)
class Public:
    """What anybody may know of such data without seeing the victim's: examples of the same kind.

    Attributes:
        data: `example channel height width`, in [0, 1].
        labels: `example`, class indices.
    """

    data: Tensor
    labels: Tensor


@dataclass(frozen=True, kw_only=True)
class Score:
    """One number about one finding.

    Attributes:
        metric: name of the metric.
        value: mean over the victim's images.
        floor: what guessing gets; the best guess by this metric.
        floor_guess: which guess that was.
        nearest_public: what the public example closest to each true one would get, NaN where none is
            known. No guess: it takes the truth to pick it. An attack that stays below may have found the
            kind of data, rather than the data.
        ceiling: what a perfect finding would get, None where the metric has no bound.
        higher_is_better: direction, from the adversary's point of view.
        per_image: `example`, the values behind the mean; empty where there are none.
        missing: why there is no value; then `value` is NaN.
    """

    metric: str
    value: float
    floor: float = math.nan
    floor_guess: str = ""
    nearest_public: float = math.nan
    ceiling: float | None = None
    higher_is_better: bool = True
    per_image: tuple[float, ...] = ()
    missing: str = ""


_DIRECTION = {"psnr": True, "ssim": True, "mse": False, "lpips": False}
_CEILING = {"psnr": None, "ssim": 1.0, "mse": 0.0, "lpips": 0.0}


def score(
    finding: Reconstruction,
    truth: Truth,
    *,
    public: Public | None,
    rng: torch.Generator,
    weights: Path | None = None,
    labels_granted: bool = False,
) -> list[Score]:
    """Judge a reconstruction against the truth, next to what guessing would have got.

    The guesses are as many images as the victim held: uniform noise, mid-grey, and where `public`
    data are known, random ones of them, their mean image, and their class means for the labels that the
    finding claims.

    Args:
        rng: draws the noise and the random public images.
        weights: folder with network weights for LPIPS.
        labels_granted: the labels were given to the attack, so they are not scored.

    Raises:
        DataError: the reconstruction and the truth differ in shape.
    """
    if finding.data.shape != truth.data.shape:
        raise DataError(
            f"truth: the victim held data of shape {tuple(truth.data.shape)}, "
            f"the attack claims {tuple(finding.data.shape)}; check input_shape and the truth file"
        )
    claimed = image_metrics(finding.data, truth, weights)
    guesses = {name: image_metrics(data, truth, weights) for name, data in _guesses(finding, public, rng).items()}
    nearest = paired_metrics(_nearest(truth, public), truth, weights) if public else {}
    scores = [
        _image_score(name, value, {g: v[name] for g, v in guesses.items()}, nearest.get(name))
        for name, value in claimed.items()
    ]
    if "l_sim" in finding.trace:
        scores.append(_similarity(finding.trace["l_sim"]))
    if not (labels_granted or truth.labels.is_floating_point()):
        scores.append(_label_score(finding.labels, truth.labels, public))
    return scores


def image_metrics(claimed: Tensor, truth: Truth, weights: Path | None) -> dict[str, Tensor | str]:
    """MSE, and of images PSNR, SSIM and LPIPS, of each true example with the claimed one assigned to it."""
    return paired_metrics(claimed[metrics.match(claimed, truth.data)], truth, weights)


def paired_metrics(paired: Tensor, truth: Truth, weights: Path | None) -> dict[str, Tensor | str]:
    """The same of examples that stand in the order of the true ones."""
    if truth.data.ndim != 4:
        return {"mse": metrics.mse(paired, truth.data)}
    return {
        "psnr": metrics.psnr(paired, truth.data),
        "ssim": metrics.ssim(paired, truth.data),
        "mse": metrics.mse(paired, truth.data),
        "lpips": metrics.lpips(paired, truth.data, weights),
    }


def label_accuracy(claimed: Tensor, true: Tensor) -> float:
    """Fraction of the labels recovered, as multisets; 1 is perfect."""
    classes = int(max(claimed.max(), true.max())) + 1
    overlap = torch.minimum(claimed.bincount(minlength=classes), true.bincount(minlength=classes))
    return int(overlap.sum()) / len(true)


def _guesses(finding: Reconstruction, public: Public | None, rng: torch.Generator) -> dict[str, Tensor]:
    shape = finding.data.shape
    guesses = {"noise": torch.rand(shape, generator=rng), "mid-grey": torch.full(shape, 0.5)}
    if public is not None:
        mean = public.data.mean(0)
        guesses["public mean"] = mean.expand(shape)
        guesses["public example"] = public.data[torch.randint(len(public.data), shape[:1], generator=rng)]
        if finding.labels.is_floating_point():
            return guesses  # targets are no classes
        means = [public.data[public.labels == c].mean(0) for c in finding.labels.tolist()]
        guesses["public class mean"] = torch.stack([m if torch.isfinite(m).all() else mean for m in means])
    return guesses


def _nearest(truth: Truth, public: Public) -> Tensor:
    """The public example with the least squared error to each true one."""
    return public.data[torch.cdist(truth.data.flatten(1), public.data.flatten(1)).argmin(1)]


def _image_score(
    name: str, value: Tensor | str, floors: Mapping[str, Tensor | str], nearest: Tensor | str | None
) -> Score:
    if isinstance(value, str):
        return Score(metric=name, value=math.nan, missing=value, higher_is_better=_DIRECTION[name])
    numbers = {guess: floor.mean().item() for guess, floor in floors.items() if isinstance(floor, Tensor)}
    best = (max if _DIRECTION[name] else min)(numbers, key=lambda guess: numbers[guess])
    return Score(
        metric=name,
        value=value.mean().item(),
        floor=numbers[best],
        floor_guess=best,
        nearest_public=nearest.mean().item() if isinstance(nearest, Tensor) else math.nan,
        ceiling=_CEILING[name],
        higher_is_better=_DIRECTION[name],
        per_image=tuple(value.tolist()),
    )


def _similarity(trace: Tensor) -> Score:
    """The attack's own gradient-matching loss; its floor is that of the random start."""
    return Score(
        metric="l_sim",
        value=trace[-1].item(),
        floor=trace[0].item(),
        floor_guess="random start",
        ceiling=0.0,
        higher_is_better=False,
    )


def _label_score(claimed: Tensor, true: Tensor, public: Public | None) -> Score:
    classes = int(max(claimed.max(), true.max(), public.labels.max() if public else 0)) + 1
    balanced = torch.arange(len(true)) % classes
    return Score(
        metric="label_accuracy",
        value=label_accuracy(claimed, true),
        floor=label_accuracy(balanced, true),
        floor_guess="every class as often",
        ceiling=1.0,
    )
