"""Judge images that are claimed to be typical of a class of the victim's data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.audit.evaluation.case import Case
from fedsim.audit.evaluation.display import Display
from fedsim.audit.evaluation.evaluator import (
    EvaluationContext,
    Evaluator,
    FindingMetadata,
    FindingSpec,
    Judgement,
    group_members,
)
from fedsim.audit.evaluation.examples import check_kinds, display_examples
from fedsim.audit.evaluation.score import Score, name_without_public
from fedsim.audit.evaluation.truth import Truth
from fedsim.base import metrics
from fedsim.base.errors import DataError
from fedsim.interfaces import findings
from fedsim.interfaces.metric import EXPLANATION_OF_GUESSES, Metric
from fedsim.interfaces.modality import PublicExamples

_SIMILARITIES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "class_ssim": metrics.ssim,
    "class_psnr": metrics.psnr,
}


class ClassPsnr(Metric):
    """PSNR of each claim to the image of its class that it is most like."""

    title = "class PSNR"
    unit = "dB"
    higher_is_better = True
    lowest = 0.0
    of_examples = True
    ranks_examples = True
    preference = 20
    explanations = (EXPLANATION_OF_GUESSES,)


class ClassSsim(Metric):
    """SSIM of each claim to the image of its class that it is most like."""

    title = "class SSIM"
    higher_is_better = True
    lowest = -1.0
    highest = 1.0
    of_examples = True
    ranks_examples = True
    preference = 40
    explanations = (EXPLANATION_OF_GUESSES,)


@dataclass(frozen=True)
class RepresentativesEvaluator(Evaluator[findings.Representatives]):
    """Judge of claims of what classes look like."""

    finding = findings.Representatives

    def check_form(self, finding: findings.Representatives, spec: FindingSpec) -> None:
        """Check that the examples have the federation's shape and kind."""
        check_kinds(finding, spec)

    def truth(self, finding: findings.Representatives, about: FindingMetadata, case: Case) -> Truth | None:
        """Return all training data of the victim."""
        return case.truth(int(about["victim"]), None, group_members(about))

    def judge(self, finding: findings.Representatives, about: FindingMetadata, context: EvaluationContext) -> Judgement:
        """Score representatives, see `score_representatives`."""
        truth = self.truth(finding, about, context.case)
        if truth is None:
            return Judgement()
        if finding.labels.is_floating_point() != truth.labels.is_floating_point():
            raise DataError("truth: the victim's labels are of another kind than the attack claims, classes or targets")
        rng = context.guess_generator(int(about["victim"]))
        scores = score_representatives(
            finding, truth.data, truth.labels, public=context.public, rng=rng, modality=truth.modality
        )
        return Judgement(scores=scores, examples=len(finding.labels))

    def show(
        self,
        finding: findings.Representatives,
        truth: Truth | None,
        tokens: Sequence[str],
        metric: str,
    ) -> Display:
        """Display each claimed image with the most similar image of the victim of that class."""
        return display_examples(finding, _most_similar(finding, truth) if truth else None)

    def guess(
        self,
        finding: findings.Representatives,
        truth: Truth,
        name: str,
        public: PublicExamples | None,
        rng: torch.Generator,
    ) -> Tensor | None:
        """Return the images of a guess, one for each claimed class."""
        return _guesses(finding, public, rng).get(name)


def _most_similar(finding: findings.Representatives, truth: Truth) -> Truth | None:
    """Return for each claim the victim's image of its class with the least squared error.

    None where the victim lacks one of the classes.
    """
    images_of_claims = [truth.data[truth.labels == label] for label in finding.labels]
    if not all(map(len, images_of_claims)) or truth.data.shape[1:] != finding.data.shape[1:]:
        return None
    nearest: list[Tensor] = []
    for images, claim in zip(images_of_claims, finding.data, strict=True):
        errors = (images - claim).square().flatten(1).sum(1)
        nearest.append(images[errors.argmin()])
    return Truth(data=torch.stack(nearest), labels=finding.labels)


def score_representatives(
    finding: findings.Representatives,
    data: Tensor,
    labels: Tensor,
    *,
    public: PublicExamples | None,
    rng: torch.Generator,
    modality: str = "image",
) -> list[Score]:
    """Score images that are claimed to be typical of a class of the victim's data.

    `class_ssim` is the mean over claims of the best SSIM to any of the victim's images of the
    claimed class, `class_psnr` that of the best PSNR in dB; a claim of a class of which the victim
    has no image counts 0. The guesses are scored by the same rule, as claims of the same classes:
    the mean of all public images (`mean face`), noise, and mid-grey. Public images of the class
    itself are no guess, because an adversary that has them need not attack; the value of the most
    similar ones is `nearest_public`.

    Args:
        data: `example channel height width`, the victim's images in [0, 1].
    """
    if finding.labels.is_floating_point() or labels.is_floating_point():
        raise DataError("truth: representatives belong to classes, and a regression has none; attack a classifier")
    if modality != "image":
        raise DataError(
            f"truth: the victim held data of shape {tuple(data.shape[1:])}, and representatives of classes are "
            "compared as images; for tables, attack their attributes (aia-model, aia-gradient)"
        )
    if finding.data.shape[1:] != data.shape[1:]:
        raise DataError(
            f"truth: the victim held data of shape {tuple(data.shape[1:])}, the attack claims representatives of shape "
            f"{tuple(finding.data.shape[1:])}; expected images of one shape, check input_shape"
        )
    guesses = _guesses(finding, public, rng)
    nearest = None if public is None else _nearest_public(finding, public, data, labels)
    scores = []
    for metric, similarity in _SIMILARITIES.items():
        reason = metrics.explain_missing_ssim(data) if metric == "class_ssim" else ""
        if reason:
            scores.append(Score.from_reason(metric, reason))
            continue
        values = _best_similarities(similarity, finding.data, finding.labels, data, labels)
        floors: dict[str, float] = {}
        for name, guess in guesses.items():
            guess_values = _best_similarities(similarity, guess, finding.labels, data, labels)
            floors[name] = guess_values.mean().item()
        scores.append(
            Score.against_guesses(
                metric,
                values.mean().item(),
                floors,
                nearest_public=math.nan if nearest is None else nearest[metric],
                per_image=tuple(values.tolist()),
            )
        )
    return scores


def _guesses(
    finding: findings.Representatives, public: PublicExamples | None, rng: torch.Generator
) -> dict[str, Tensor]:
    shape = finding.data.shape
    guesses = {"noise": torch.rand(shape, generator=rng), "mid-grey": torch.full(shape, 0.5)}
    if public is None:
        return name_without_public(guesses)
    return guesses | {"mean face": public.data.mean(0).expand(shape)}


def _nearest_public(
    finding: findings.Representatives, public: PublicExamples, data: Tensor, labels: Tensor
) -> dict[str, float]:
    """Score the public images of each claimed class that are nearest to the victim's."""
    values = {name: torch.zeros(len(finding.labels)) for name in _SIMILARITIES}
    for index, label in enumerate(finding.labels.tolist()):
        images, public_images = data[labels == label], public.data[public.labels == label]
        if len(images) and len(public_images):
            distances = torch.cdist(images.flatten(1), public_images.flatten(1))
            nearest = public_images[distances.argmin(1)]
            for name, similarity in _SIMILARITIES.items():
                values[name][index] = similarity(nearest, images).max()
    return {name: similarities.mean().item() for name, similarities in values.items()}


def _best_similarities(
    similarity: Callable[[Tensor, Tensor], Tensor],
    claims: Tensor,
    classes: Tensor,
    data: Tensor,
    labels: Tensor,
) -> Tensor:
    """Return each claim's best similarity to an image of its class, 0 where there is none."""
    best = torch.zeros(len(claims))
    for index, (claim, label) in enumerate(zip(claims, classes.tolist(), strict=True)):
        images = data[labels == label]
        if len(images):
            best[index] = similarity(claim.expand_as(images), images).max()
    return best
