"""Data claimed to be typical of a class at the victim's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim import findings, metrics
from fedsim.errors import DataError
from fedsim.evaluation.case import Case
from fedsim.evaluation.examples import check_kinds, shown
from fedsim.evaluation.kind import About, Bench, Evaluator, Judgement, Owed, Shown, members
from fedsim.evaluation.score import Public, Score
from fedsim.evaluation.truth import Truth

_CLOSENESS: Mapping[str, tuple[Callable[[Tensor, Tensor], Tensor], float | None]] = {
    "class_ssim": (metrics.ssim, 1.0),
    "class_psnr": (metrics.psnr, None),
}


@dataclass(frozen=True)
class Representatives(Evaluator[findings.Representatives]):
    """What classes look like."""

    finding = findings.Representatives

    def form(self, finding: findings.Representatives, owed: Owed) -> None:
        """Of the federation's shape and kind."""
        check_kinds(finding, owed)

    def truth(self, finding: findings.Representatives, about: About, case: Case) -> Truth | None:
        """All that the victim trains on."""
        return case.truth(int(about["victim"]), None, members(about))

    def judge(self, finding: findings.Representatives, about: About, bench: Bench) -> Judgement:
        """See `score_representatives`."""
        truth = self.truth(finding, about, bench.case)
        if truth is None:
            return Judgement()
        if finding.labels.is_floating_point() != truth.labels.is_floating_point():
            raise DataError("truth: the victim's labels are of another kind than the attack claims, classes or targets")
        rng = bench.rng(int(about["victim"]))
        scores = score_representatives(finding, truth.data, truth.labels, public=bench.public, rng=rng)
        return Judgement(scores=scores, examples=len(finding.labels))

    def show(self, finding: findings.Representatives, truth: Truth | None, tokens: Sequence[str], metric: str) -> Shown:
        """Each claimed image above the victim's of that class that is most like it."""
        return shown(finding, most_alike(finding, truth) if truth else None)

    def guess(
        self, finding: findings.Representatives, truth: Truth, name: str, public: Public | None, rng: torch.Generator
    ) -> Tensor | None:
        """The images of a guess, one for each claimed class."""
        return _guesses(finding, public, rng).get(name)


def most_alike(finding: findings.Representatives, truth: Truth) -> Truth | None:
    """For each claimed image the victim's of that class with the least squared error; None where it lacks a class."""
    own = [truth.data[truth.labels == label] for label in finding.labels]
    if not all(map(len, own)) or truth.data.shape[1:] != finding.data.shape[1:]:
        return None
    pairs = zip(own, finding.data, strict=True)
    nearest = [images[(images - claimed).square().flatten(1).sum(1).argmin()] for images, claimed in pairs]
    return Truth(data=torch.stack(nearest), labels=finding.labels)


def score_representatives(
    found: findings.Representatives, data: Tensor, labels: Tensor, *, public: Public | None, rng: torch.Generator
) -> list[Score]:
    """Judge images claimed to be typical of a class at the victim's.

    `class_ssim` is the mean over claims of the best SSIM to any of its images of the claimed class, `class_psnr` of
    the best PSNR in dB; the claim of a class that it has no image of counts 0. The guesses are judged by the same
    rule, as claims of the same classes: the mean of all public images (`mean face`), noise, and mid-grey. Public images
    of the class itself are no guess, because an adversary who has them need not attack; the most alike are shown
    beside the score as `nearest_public`.

    Args:
        data: `example channel height width`, its images in [0, 1].
        labels: `example`, their classes.
        public: public images of the same kind, if there are any.
        rng: draws the noise.

    Raises:
        DataError: claims and its images differ in shape, or are of a regression.
    """
    if found.labels.is_floating_point() or labels.is_floating_point():
        raise DataError("truth: representatives are of classes, and a regression has none; attack a classifier")
    if data.ndim != 4:
        raise DataError(
            f"truth: the victim held data of shape {tuple(data.shape[1:])}, and representatives of classes are "
            "compared as images; for tables, attack their attributes (aia-model, aia-gradient)"
        )
    if found.data.shape[1:] != data.shape[1:]:
        raise DataError(
            f"truth: the victim held data of shape {tuple(data.shape[1:])}, the attack claims representatives of shape "
            f"{tuple(found.data.shape[1:])}; expected images of one shape, check input_shape"
        )
    guesses, other = _guesses(found, public, rng), None if public is None else _nearest(found, public, data, labels)
    scores = []
    for metric, (closeness, ceiling) in _CLOSENESS.items():
        if metric == "class_ssim" and (why := metrics.no_ssim(data)):
            scores.append(Score.not_computed(metric, why))
            continue
        own = _closest(closeness, found.data, found.labels, data, labels)
        floors = {n: _closest(closeness, g, found.labels, data, labels).mean().item() for n, g in guesses.items()}
        scores.append(
            Score.beside(
                metric,
                own.mean().item(),
                floors,
                nearest_public=math.nan if other is None else other[metric],
                ceiling=ceiling,
                per_image=tuple(own.tolist()),
            )
        )
    return scores


def _guesses(found: findings.Representatives, public: Public | None, rng: torch.Generator) -> dict[str, Tensor]:
    shape = found.data.shape
    guesses = {"noise": torch.rand(shape, generator=rng), "mid-grey": torch.full(shape, 0.5)}
    if public is not None:
        guesses["mean face"] = public.data.mean(0).expand(shape)
    return guesses


def _nearest(found: findings.Representatives, public: Public, data: Tensor, labels: Tensor) -> dict[str, float]:
    """What the public images of each claimed class would get that are nearest to the victim's by squared error."""
    values = {name: torch.zeros(len(found.labels)) for name in _CLOSENESS}
    for place, kind in enumerate(found.labels.tolist()):
        held, known = data[labels == kind], public.data[public.labels == kind]
        if len(held) and len(known):
            chosen = known[torch.cdist(held.flatten(1), known.flatten(1)).argmin(1)]
            for name, (closeness, _) in _CLOSENESS.items():
                values[name][place] = closeness(chosen, held).max()
    return {name: own.mean().item() for name, own in values.items()}


def _closest(
    closeness: Callable[[Tensor, Tensor], Tensor], claims: Tensor, classes: Tensor, data: Tensor, labels: Tensor
) -> Tensor:
    """`claim`: the best `closeness` to any of the images in `data` of the claim's class, 0 where there is none."""
    best = torch.zeros(len(claims))
    for place, (claim, kind) in enumerate(zip(claims, classes.tolist(), strict=True)):
        held = data[labels == kind]
        if len(held):
            best[place] = closeness(claim.expand_as(held), held).max()
    return best
