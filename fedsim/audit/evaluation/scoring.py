"""Score reconstructed examples against the truth.

No attack may import this module; import-linter checks it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedsim.audit.evaluation.guess_similarities import measure_guess_similarities, measure_similarities
from fedsim.audit.evaluation.identification import score_identification
from fedsim.audit.evaluation.mask_scores import PaintedMasks, score_masks
from fedsim.audit.evaluation.matches import CHANCE, Pool
from fedsim.audit.evaluation.measurement_cache import MeasurementCache
from fedsim.audit.evaluation.measurements import (
    CPU,
    MetricValues,
    find_instruments,
    measure_chance_matches,
    measure_nearest,
    measure_sets,
)
from fedsim.audit.evaluation.score import Score, name_without_public
from fedsim.audit.evaluation.similarity import AttackedUpdate
from fedsim.audit.evaluation.table_scores import score_columns
from fedsim.audit.evaluation.target_scores import index_rows, score_targets
from fedsim.audit.evaluation.truth import Truth
from fedsim.base.errors import DataError, PluginError
from fedsim.base.task import Goal, are_masks, sort_targets
from fedsim.interfaces.findings import Reconstruction, Texts
from fedsim.interfaces.metric import EXPLANATION_OF_GUESSES, Metric, find_metric
from fedsim.interfaces.modality import GuessMaterial, PublicExamples
from fedsim.modalities import find_modality
from fedsim.modalities.diverse_guesses import centres_of_claims, clusters_of_claims, medians_of_claims

CERTIFIED = 60.0
"""PSNR in dB that an example which an attack calls certified must reach."""
_ROUNDING = 1e-5
"""Values of guesses this far beyond [0, 1] are rounding errors."""
_NOT_MEASURED = "it could not be measured"


class CertifiedShare(Metric):
    """Share of the true examples that the attack certifies as exact, right or wrong."""

    title = "certified"
    higher_is_better = True
    is_share = True
    evidence = "none"
    meaning = "certified by the attack itself, without the ground truth"


class FalseCertificates(Metric):
    """Share of the certified claims that are not exact."""

    title = "false certificates"
    higher_is_better = False
    is_share = True
    evidence = "none"
    meaning = "share of the certified claims that are not exact; above 0, the attack is wrong"


class LabelAccuracy(Metric):
    """Share of the labels that are recovered, as multisets."""

    title = "label accuracy"
    higher_is_better = True
    is_share = True
    preference = 120
    explanations = (
        EXPLANATION_OF_GUESSES,
        "For label accuracy, the floor is the better of two guesses: every class equally often, and each class as "
        "often as in the public data.",
    )


def score_examples(
    finding: Reconstruction | Texts,
    truth: Truth,
    *,
    public: PublicExamples | None,
    rng: torch.Generator,
    others: PublicExamples | None = None,
    weights: Path | None = None,
    auxiliary: PublicExamples | None = None,
    labels_granted: bool = False,
    message: AttackedUpdate | None = None,
    goal: Goal = "classes",
    cache: MeasurementCache | None = None,
    device: torch.device = CPU,
    num_classes: int | None = None,
) -> list[Score]:
    """Score a finding against the truth, with what guesses get as floors.

    A finding may claim fewer examples than there are, or more. Each true example is scored with the
    claim assigned to it; one without a claim counts as mid-grey, a text as no token at all, so that
    leaving it out is never better than the floor. Claims that are left over count for nothing,
    except as labels (`label_accuracy`). A true text without any token is left out of text metrics.
    `recovered` is the share of the images whose claim reaches `RECOVERED` dB, or of texts that are
    found whole.

    There are as many guesses as examples, or as claims where these are more: those that the data's
    modality makes, see `Modality.guess_examples`; and of more claims than examples, the auxiliary
    records. Labels are guessed as in `uniform_guess_accuracy`
    and, where public data are known, as in `frequency_guess_accuracy`.

    Args:
        rng: draws the noise and the random public images.
        others: examples that the victim does not hold; `public` where they are left out.
        weights: folder with network weights for LPIPS.
        auxiliary: records that the attack was granted, and may claim in place of what the message says.
        labels_granted: the labels were granted to the attack, so they are not scored.
        message: update that the finding was read from; None where it is not known, or where the
            finding was read from several updates.
        goal: what the model predicts; it only distinguishes labels from numbers, if an example has several.
        cache: measurements of guesses that findings about the same victim share; `public`, `weights`
            and the recording have to be the same for all of them.
        device: on which claims, guesses and public examples are compared with the true ones.
    """
    data, claimed_labels, true_labels = claimed_data(finding), finding.labels, truth.labels
    if not claimed_labels.is_floating_point():
        claimed_labels = claimed_labels.long()  # a loss takes no shorter integers
    public_with_targets = public
    _check_comparable(finding, truth)
    if goal == "labels" and true_labels.ndim > 1:
        # Guesses may know an example's labels as they may know its class: each kind of row counts as one.
        finding, truth, public, others = _index_labels(finding, truth, public, others)
    further_scores: list[Score] = []
    cache = cache or MeasurementCache()
    # Compute the metrics of the claims, of each guess, and of the nearest public examples.
    guesses = dict(guess_examples(finding, truth, public, rng))
    if auxiliary is not None and len(data) > len(truth.data):
        guesses["auxiliary records"] = _choose_records(auxiliary, finding.labels)
    if goal == "masks":  # each is another one, so that all examples count as of one class
        finding, truth, public, others = _leave_out_labels(finding, truth, public, others)
    values, guess_values = _measure_all(data, guesses, truth, weights, cache, device)
    nearest: MetricValues = {}
    if public is not None:
        measure = partial(measure_nearest, truth, public, weights, device)
        nearest = cache.find(measure, "nearest", truth.data, truth.labels)
    if isinstance(finding, Reconstruction):
        if message is not None:
            explaining_guesses = {name: guess[: len(data)] for name, guess in guesses.items()}
            values |= measure_similarities(lambda: message.similarities(data, claimed_labels))
            for name, similarities in measure_guess_similarities(
                message, explaining_guesses, claimed_labels, cache
            ).items():
                guess_values[name] |= similarities
        further_scores += _certificate_scores(finding, truth)
        if truth.columns and public is not None:
            clusters = {"k-means clusters by class": clusters_of_claims(public, finding.labels)}
            if not _are_counted(finding.labels, truth.labels):
                clusters["k-means clusters"] = clusters_of_claims(public, torch.zeros(len(data)))
            further_scores.append(score_columns(data, truth, public, guesses, clusters, rng))
    # How often claims match by chance.
    scored_truth, others = truth.without_empty_texts(), others or public
    if not len(scored_truth.labels):
        others = None
    further_scores.append(score_identification(data, scored_truth, Pool.from_truth(scored_truth, others), device))
    chance_matches = measure_chance_matches(data, scored_truth, others, weights, device)
    # Make a score of each metric, and of the labels.
    scores, instruments = [], find_instruments(truth, weights)
    for metric, value in values.items():
        floors = {name: guess_metrics.get(metric, _NOT_MEASURED) for name, guess_metrics in guess_values.items()}
        score = _metric_score(metric, value, floors, nearest.get(metric))
        if metric in chance_matches:
            score = _with_chance_floor(score, chance_matches[metric])
        scores.append(replace(score, instrument=instruments.get(metric, "")))
    scores += further_scores
    if not labels_granted and goal == "masks":
        scores.append(score_masks(claimed_labels, true_labels, public_with_targets, rng))
    elif not labels_granted and true_labels.ndim > 1:
        scores.append(score_targets(claimed_labels, true_labels, goal, public_with_targets, rng))
    elif not (labels_granted or true_labels.is_floating_point()):
        scores.append(_label_score(claimed_labels, true_labels, public, num_classes))
    return scores


def _leave_out_labels(
    finding: Reconstruction | Texts, truth: Truth, public: PublicExamples | None, others: PublicExamples | None
) -> tuple[Reconstruction | Texts, Truth, PublicExamples | None, PublicExamples | None]:
    """Return all with the same class for each example."""

    def merge_classes(part: Any) -> Any:
        return None if part is None else replace(part, labels=torch.zeros(len(part.labels), dtype=torch.int64))

    return merge_classes(finding), merge_classes(truth), merge_classes(public), merge_classes(others)


def _index_labels(
    finding: Reconstruction | Texts, truth: Truth, public: PublicExamples | None, others: PublicExamples | None
) -> tuple[Reconstruction | Texts, Truth, PublicExamples | None, PublicExamples | None]:
    """Return all with an index of each kind of row in place of several labels an example."""
    parts = [part.labels for part in (finding, truth, public, others) if part is not None]
    indices = iter(index_rows(None if public is None else public.labels, *parts))
    finding, truth = replace(finding, labels=next(indices)), replace(truth, labels=next(indices))
    public = None if public is None else replace(public, labels=next(indices))
    return finding, truth, public, None if others is None else replace(others, labels=next(indices))


def _check_comparable(finding: Reconstruction | Texts, truth: Truth) -> None:
    """Raise DataError where finding and truth differ in kind or in shape."""
    if isinstance(finding, Texts) != truth.has_tokens:
        true_kind, claimed_kind = ("texts", "numbers") if truth.has_tokens else ("numbers", "texts")
        raise DataError(
            f"truth: the victim held {true_kind}, the attack claims {claimed_kind}; check the attack and the truth file"
        )
    axes = find_modality(truth.modality).axes
    if len(axes) != truth.data.ndim - 1:
        raise DataError(
            f"truth: the victim held examples of shape {tuple(truth.data.shape[1:])}, but their modality "
            f"'{truth.modality}' has the axes {', '.join(axes)}; correct the modality that the truth file names"
        )
    claimed_shape, true_shape = claimed_data(finding).shape[1:], truth.data.shape[1:]
    if claimed_shape != true_shape:
        raise DataError(
            f"truth: the victim held examples of shape {tuple(true_shape)}, "
            f"the attack claims {tuple(claimed_shape)}; check input_shape and the truth file"
        )


def claimed_data(finding: Reconstruction | Texts) -> Tensor:
    """Return the examples that a finding claims."""
    return finding.tokens if isinstance(finding, Texts) else finding.data


def _certificate_scores(finding: Reconstruction, truth: Truth) -> list[Score]:
    """Score how many of the true examples are certified, and which share of certificates is wrong.

    A certificate is right where the claim has at least `CERTIFIED` dB to some true example.
    """
    if finding.certified is None:
        return []
    certified = finding.data[finding.certified]
    distances = torch.cdist(certified.flatten(1).double(), truth.data.flatten(1).double())
    errors = distances.square() / truth.data[0].numel()
    wrong = errors.amin(1) > 10 ** (-CERTIFIED / 10)
    false_share = float(wrong.double().mean()) if len(certified) else 0.0
    certified_share = min(1.0, len(certified) / len(truth.data))
    return [
        Score.against_guesses("certified", certified_share, {"none": 0.0}),
        Score(metric="false_certificates", value=false_share, ceiling=0.0),
    ]


def _measure_all(
    data: Tensor,
    guesses: Mapping[str, Tensor],
    truth: Truth,
    weights: Path | None,
    cache: MeasurementCache,
    device: torch.device,
) -> tuple[MetricValues, dict[str, MetricValues]]:
    """Return the metrics of claims and of each guess, as copies to add to; all that are not known yet at once."""
    claimed_sets = [data, *guesses.values()]

    def measure(missing: list[int]) -> list[MetricValues]:
        return measure_sets([claimed_sets[position] for position in missing], truth, weights, device)

    common = truth.data, truth.labels, truth.modality, truth.padding
    measured = cache.find_several(measure, [("claims", claimed, *common) for claimed in claimed_sets])
    values, *guess_values = [dict(set_values) for set_values in measured]
    return values, dict(zip(guesses, guess_values, strict=True))


def label_accuracy(claimed: Tensor, true: Tensor) -> float:
    """Return the fraction of the labels recovered, as multisets; 1 is perfect.

    Where more labels are claimed than there are, the surplus counts as wrong.

    >>> label_accuracy(torch.tensor([0, 0, 1]), torch.tensor([1, 0, 2]))
    0.6666666666666666
    """
    classes = int(max(claimed.max(), true.max())) + 1
    overlap = torch.minimum(claimed.bincount(minlength=classes), true.bincount(minlength=classes))
    return int(overlap.sum()) / max(len(true), len(claimed))


def uniform_guess_accuracy(true: Tensor, classes: int) -> float:
    """Return the expected `label_accuracy` of guessing each of `classes` equally often.

    Of N labels, each class is guessed floor(N / classes) times; the remaining guesses go to classes
    that are drawn at random without replacement, one each.
    """
    times, remaining = divmod(len(true), classes)
    counts = true.bincount(minlength=classes)
    certain_hits = int(counts.clamp(max=times).sum())
    possible_hits = int((counts > times).sum())
    return (certain_hits + possible_hits * remaining / classes) / len(true)


def frequency_guess_accuracy(true: Tensor, frequencies: Tensor) -> float:
    """Return the expected `label_accuracy` of the best guess from class frequencies only.

    The k-th copy of a class is worth the probability that N random labels hold it at least k times;
    the N copies that are worth most are guessed. Where only some of the copies of equal worth can
    be guessed, they are drawn at random.

    Args:
        true: `example`, N labels.
    """
    from scipy.special import betainc

    count = len(true)
    copies = torch.arange(1, count + 1)
    # The probability of at least k hits in N, as scipy.stats gives it, whose import takes most of a second.
    worth = torch.from_numpy(betainc(copies.numpy(), count + 1 - copies.numpy(), frequencies.double().numpy()[:, None]))
    is_hit = true.bincount(minlength=len(frequencies))[:, None] >= copies
    # Copies worth more than the N-th are all guessed, those worth as much by chance.
    least_worth = worth.flatten().sort(descending=True).values[count - 1]
    certain, tied = worth > least_worth, worth == least_worth
    remaining = count - int(certain.sum())
    certain_hits, tied_hits = int(is_hit[certain].sum()), int(is_hit[tied].sum())
    return (certain_hits + tied_hits * remaining / int(tied.sum())) / count


def guess_examples(
    finding: Reconstruction | Texts, truth: Truth, public: PublicExamples | None, rng: torch.Generator
) -> Mapping[str, Tensor]:
    """Return the guesses of the modality, by name, as many examples as are claimed or true.

    Guesses by wrong labels are worse than a guess by none. So where the claimed labels are not those
    of the true examples, there are centres and medians of all public examples as well.
    """
    shape = tuple(truth.data.shape[1:])
    masks = None
    if are_masks(finding.labels):
        masks = PaintedMasks(finding.labels, public)
        finding, truth, public, _ = _leave_out_labels(finding, truth, public, None)
    material = GuessMaterial(
        count=max(len(claimed_data(finding)), len(truth.data)),
        shape=shape,
        labels=finding.labels,
        public=public,
        rng=rng,
        padding=truth.padding,
    )
    guesses = dict(find_modality(truth.modality).guess_examples(material))
    if masks is not None and masks.can_be_painted:
        guesses["mean colour per class of the masks"] = masks.paint(material.count)
    if public is not None and not truth.has_tokens and not _are_counted(finding.labels, truth.labels):
        no_labels = torch.zeros(material.count)  # one class of all examples
        guesses["k-means of public data"] = centres_of_claims(public, no_labels)
        guesses["medians of public data"] = medians_of_claims(public, no_labels)
    for name, guess in guesses.items():
        if guess.shape != (material.count, *shape):
            raise PluginError(
                f"modalities: the floor '{name}' of '{truth.modality}' has the shape {tuple(guess.shape)}, expected "
                f"{(material.count, *shape)} like the data; fix its guess_examples"
            )
        # A guess beyond the data is a worse one, and what it is the floor of would look like leakage.
        is_same_kind = guess.is_floating_point() != truth.has_tokens
        if not (is_same_kind and (truth.has_tokens or bool(((guess - 0.5).abs() <= 0.5 + _ROUNDING).all()))):
            raise PluginError(
                f"modalities: the floor '{name}' of '{truth.modality}' is {guess.dtype} from {guess.min().item():g} to "
                f"{guess.max().item():g}, expected {'tokens' if truth.has_tokens else 'numbers in [0, 1]'} like the "
                "data; fix its guess_examples"
            )
    return guesses if public is not None else name_without_public(guesses)


def _choose_records(records: PublicExamples, labels: Tensor) -> Tensor:
    """Choose a record for each claimed label, each of its class in turn; of a class without records, of all."""
    chosen: list[int] = []
    positions: dict[float, int] = {}
    is_class = labels.ndim == records.labels.ndim == 1 and not labels.is_floating_point()
    for label in labels.tolist() if is_class else [-1] * len(labels):
        members = (records.labels == label).nonzero()[:, 0] if is_class else torch.arange(0)
        members = members if len(members) else torch.arange(len(records.data))
        position = positions.get(label, 0)
        chosen.append(int(members[position % len(members)]))
        positions[label] = position + 1
    return records.data[torch.tensor(chosen)]


def _are_counted(claimed: Tensor, labels: Tensor) -> bool:
    """Return whether each class is claimed as often as there are true examples of it."""
    return torch.equal(sort_targets(claimed), sort_targets(labels).to(claimed))


def _metric_score(
    name: str, value: Tensor | str, floors: Mapping[str, Tensor | str], nearest: Tensor | str | None
) -> Score:
    if isinstance(value, str):
        return Score.from_reason(name, value)
    guesses: dict[str, float] = {}
    for guess, floor in floors.items():
        # The floor is the best guess, which may be the very one that has no value.
        if isinstance(floor, str):
            return Score.from_reason(name, f"the guess '{guess}' has no value: {floor}")
        guesses[guess] = floor.nanmean().item()
    return Score.against_guesses(
        name,
        value.nanmean().item(),
        guesses,
        nearest_public=nearest.nanmean().item() if isinstance(nearest, Tensor) else math.nan,
        per_image=tuple(value.tolist()) if find_metric(name).of_examples else (),
    )


def _with_chance_floor(score: Score, chance: Tensor | str) -> Score:
    """Return a score whose floor is the share that chance matches, or more where a guess matches more.

    The floor is named after chance either way, since that allows a verdict on one victim.
    """
    if isinstance(chance, str):
        return Score.from_reason(score.metric, chance)
    floor = max(chance.item(), score.floor) if math.isfinite(score.floor) else chance.item()
    return replace(score, floor=floor, floor_guess=CHANCE)


def _label_score(claimed: Tensor, true: Tensor, public: PublicExamples | None, num_classes: int | None) -> Score:
    """Score labels; without public examples and the number of classes there is no guess.

    The largest claimed label says nothing of it: one wild claim would make each guess bad.
    """
    value, guesses = label_accuracy(claimed, true), dict[str, float]()
    known_labels = true if public is None else torch.cat([true, public.labels])
    if num_classes is not None or public is not None:
        classes = max(num_classes or 0, int(known_labels.max()) + 1)
        guesses["every class as often"] = uniform_guess_accuracy(true, classes)
    if public is not None:
        frequencies = public.labels.bincount(minlength=classes) / len(public.labels)
        guesses["public class frequencies"] = frequency_guess_accuracy(true, frequencies)
    if not guesses:
        return Score(metric="label_accuracy", value=value, ceiling=1.0)
    return Score.against_guesses("label_accuracy", value, guesses)
