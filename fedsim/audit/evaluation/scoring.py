"""Score reconstructed examples against the truth.

No attack may import this module; import-linter checks it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from fedsim.audit.evaluation import text_metrics
from fedsim.audit.evaluation.diverse_guesses import centres_of, clusters_of_claims
from fedsim.audit.evaluation.perceptual_distance import lpips_distances
from fedsim.audit.evaluation.score import PublicExamples, Score
from fedsim.audit.evaluation.similarity import SIMILARITY_AT_BROADCAST, SIMILARITY_ON_LINE, AttackedUpdate
from fedsim.audit.evaluation.table_scores import score_columns
from fedsim.audit.evaluation.truth import Truth
from fedsim.base import metrics
from fedsim.base.errors import DataError, FedsimError, first_line
from fedsim.interfaces.findings import Reconstruction, Texts

RECOVERED = 20.0
"""PSNR in dB from which on an image counts as recovered.

SME calls images below 18 dB visually corrupted.
"""
EXACT = 40.0
"""PSNR in dB from which on an image counts as exact.

A row of a table does where each value differs by at most 1/10000 of its range.
"""
CERTIFIED = 60.0
"""PSNR in dB that an example which an attack calls certified must reach."""
_EXACT_DIFFERENCE = 1e-4
_DIRECTION = {"psnr": True, "ssim": True, "mse": False, "lpips": False}
_CEILING = {"psnr": None, "ssim": 1.0, "mse": 0.0, "lpips": 0.0}
_SHARES = ("recovered", "exact", "recover_rate", "tokens_found", "words_found")
_DIRECTION |= dict.fromkeys(_SHARES, True)
_CEILING |= dict.fromkeys(_SHARES, 1.0)
_DIRECTION |= dict.fromkeys((SIMILARITY_AT_BROADCAST, SIMILARITY_ON_LINE), False)
_CEILING |= dict.fromkeys((SIMILARITY_AT_BROADCAST, SIMILARITY_ON_LINE), 0.0)
_METRICS_OF_BATCH = ("words_found", SIMILARITY_AT_BROADCAST, SIMILARITY_ON_LINE)
"""Metrics of all examples together, which have no value for a single example."""


def score_examples(
    finding: Reconstruction | Texts,
    truth: Truth,
    *,
    public: PublicExamples | None,
    rng: torch.Generator,
    weights: Path | None = None,
    labels_granted: bool = False,
    message: AttackedUpdate | None = None,
) -> list[Score]:
    """Score a finding against the truth, with what guesses get as floors.

    A finding may claim fewer examples than there are, or more. Each true example is scored with the
    claim assigned to it; one without a claim counts as mid-grey, a text as no token at all, so that
    leaving it out is never better than the floor. Claims that are left over count for nothing,
    except as labels (`label_accuracy`). A true text without any token is left out of text metrics.
    `recovered` is the share of the images whose claim reaches `RECOVERED` dB, or of texts that are
    found whole.

    There are as many guesses as examples, or as claims where these are more: uniform noise and
    mid-grey; where `public` data are known, random ones of them, their mean image, and for the
    claimed labels the public class means and as many centres of each class as are claimed
    (`diverse_guesses`). For texts they are random public texts; for each claimed label the most
    frequent token at each position, and the likeliest tokens whatever their positions; and the most
    frequent words. Labels are guessed as in `uniform_guess_accuracy` and, where public data are
    known, as in `frequency_guess_accuracy`.

    Args:
        rng: draws the noise and the random public images.
        weights: folder with network weights for LPIPS.
        labels_granted: the labels were granted to the attack, so they are not scored.
        message: update that the finding was read from; None where it is not known, or where the
            finding was read from several updates.

    Raises:
        DataError: the finding and the truth differ in kind or in shape.
    """
    data = claimed_data(finding)
    _check_comparable(finding, truth)
    count = max(len(data), len(truth.data))
    further_scores: list[Score] = []
    guess_values: dict[str, dict[str, Tensor | str]] = {}
    # Compute the metrics of the claims, of each guess, and of the nearest public examples.
    if isinstance(finding, Texts):
        values = compute_text_metrics(finding.tokens, truth)
        nearest = _nearest_text_metrics(truth, public) if public else {}
        for name, guess in _text_guesses(finding, count, truth, public, rng).items():
            guess_values[name] = compute_text_metrics(guess, truth)
    else:
        guesses = numeric_guesses(finding, count, public, rng)
        values = image_metrics(data, truth, weights)
        values |= _message_similarities(data, finding.labels, message)
        for name, guess in guesses.items():
            similarities = _message_similarities(guess[: len(data)], finding.labels, message)
            guess_values[name] = image_metrics(guess, truth, weights) | similarities
        nearest = paired_metrics(_nearest_examples(truth, public), truth, weights) if public else {}
        further_scores += _certificate_scores(finding, truth)
        if truth.columns and public is not None:
            clusters = clusters_of_claims(public, finding.labels)
            further_scores.append(score_columns(data, truth, public, guesses, clusters, rng))
    # Make a score of each metric, and of the labels.
    scores = []
    for metric, value in values.items():
        floors: dict[str, Tensor | str] = {}
        for name, guess_metrics in guess_values.items():
            if metric in guess_metrics:
                floors[name] = guess_metrics[metric]
        scores.append(_metric_score(metric, value, floors, nearest.get(metric)))
    scores += further_scores
    if not (labels_granted or truth.labels.is_floating_point()):
        scores.append(_label_score(finding.labels, truth.labels, public))
    return scores


def _check_comparable(finding: Reconstruction | Texts, truth: Truth) -> None:
    """Raise DataError where finding and truth differ in kind or in shape."""
    if isinstance(finding, Texts) != truth.is_text:
        true_kind, claimed_kind = ("texts", "numbers") if truth.is_text else ("numbers", "texts")
        raise DataError(
            f"truth: the victim held {true_kind}, the attack claims {claimed_kind}; check the attack and the truth file"
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


def compute_text_metrics(claimed: Tensor, truth: Truth) -> dict[str, Tensor | str]:
    """Compute text metrics in [0, 1] of claims that are assigned one-to-one to the true texts.

    `recover_rate` is the fraction of a text's tokens that are claimed at their positions, which is
    how Table VIII of TGIAs-RO marks errors; `tokens_found` the fraction that is claimed at any
    position; `words_found` the fraction of the different words of all true texts that any claim
    contains. A text of only padding has no value (NaN).
    """
    empty = text_metrics.are_empty(truth.data, truth.padding)
    if empty.all():
        return dict.fromkeys(("recover_rate", "tokens_found", "recovered", "words_found"), "no text has any token")
    paired = text_metrics.pair_texts(claimed, truth.data, truth.padding)
    rate = text_metrics.position_accuracy(paired, truth.data, truth.padding).diagonal()
    tokens_found = text_metrics.token_recall(paired, truth.data, truth.padding).diagonal()
    is_whole = (rate == 1) & text_metrics.ends_match(paired, truth.data, truth.padding)
    return {
        "recover_rate": rate.masked_fill(empty, math.nan),
        "tokens_found": tokens_found.masked_fill(empty, math.nan),
        "recovered": is_whole.float().masked_fill(empty, math.nan),
        "words_found": torch.tensor([text_metrics.word_recall(claimed, truth.data, truth.padding)]),
    }


def _text_guesses(
    finding: Texts, count: int, truth: Truth, public: PublicExamples | None, rng: torch.Generator
) -> dict[str, Tensor]:
    if public is None:
        return {}
    length = truth.data.shape[1]
    # For each claim the public texts of its label; all public texts where no label is claimed.
    similar_texts: list[Tensor] = []
    for label in finding.labels.tolist():
        texts_of_label = public.data[public.labels == label]
        similar_texts.append(texts_of_label if len(texts_of_label) else public.data)
    similar_texts += [public.data] * (count - len(similar_texts))
    random_indices = torch.randint(len(public.data), (count,), generator=rng)
    likeliest = [text_metrics.likeliest_tokens(texts, length, truth.padding) for texts in similar_texts]
    frequent_words = text_metrics.frequent_words(public.data, count * length, truth.padding)
    return {
        "public example": public.data[random_indices],
        "frequent at each place": torch.stack([texts.mode(0).values for texts in similar_texts]),
        "likeliest tokens": torch.stack(likeliest),
        "frequent words": frequent_words.reshape(count, -1),
    }


def _nearest_text_metrics(truth: Truth, public: PublicExamples) -> dict[str, Tensor | str]:
    """Compute for each true text the metrics of the public text that is best by each metric."""
    empty = text_metrics.are_empty(truth.data, truth.padding)
    rates = text_metrics.position_accuracy(public.data, truth.data, truth.padding).max(1).values
    tokens_found = text_metrics.token_recall(public.data, truth.data, truth.padding).max(1).values
    return {
        "recover_rate": rates.masked_fill(empty, math.nan),
        "tokens_found": tokens_found.masked_fill(empty, math.nan),
    }


def image_metrics(claimed: Tensor, truth: Truth, weights: Path | None) -> dict[str, Tensor | str]:
    """Assign claims to the true examples and compute `paired_metrics`."""
    return paired_metrics(metrics.pair_examples(claimed, truth.data), truth, weights)


def paired_metrics(paired: Tensor, truth: Truth, weights: Path | None) -> dict[str, Tensor | str]:
    """Compute the metrics of examples that are in the order of the true ones.

    All have MSE and `exact`; images also PSNR, SSIM, LPIPS and `recovered`. A text in place of
    values says why there are none.
    """
    if truth.data.ndim != 4:
        largest_difference = (paired - truth.data).abs().flatten(1).amax(1)
        exact = (largest_difference <= _EXACT_DIFFERENCE).float()
        return {"mse": metrics.mse(paired, truth.data), "exact": exact}
    psnr = metrics.psnr(paired, truth.data)
    return {
        "psnr": psnr,
        "ssim": metrics.explain_missing_ssim(truth.data) or metrics.ssim(paired, truth.data),
        "mse": metrics.mse(paired, truth.data),
        "lpips": lpips_distances(paired, truth.data, weights),
        "recovered": (psnr >= RECOVERED).float(),
        "exact": (psnr >= EXACT).float(),
    }


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
        Score.against_guesses("certified", certified_share, {"none": 0.0}, ceiling=1.0),
        Score(metric="false_certificates", value=false_share, ceiling=0.0, higher_is_better=False),
    ]


def _message_similarities(data: Tensor, labels: Tensor, message: AttackedUpdate | None) -> dict[str, Tensor | str]:
    """Compute how well examples explain the update; empty where the update is not known."""
    if message is None:
        return {}
    try:
        similarities = message.similarities(data, labels)
    except FedsimError as error:
        return {SIMILARITY_AT_BROADCAST: str(error)}
    except Exception as error:  # a foreign model may raise anything; no other score is lost for it
        return {SIMILARITY_AT_BROADCAST: f"the model raised {type(error).__name__}: {first_line(error)}"}
    return {metric: torch.tensor([value]) for metric, value in similarities.items()}


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
        frequencies: `class`, which sum to 1.
    """
    from scipy.stats import binom

    count = len(true)
    copies = torch.arange(1, count + 1)
    worth = torch.from_numpy(binom.sf(copies.numpy() - 1, count, frequencies.double().numpy()[:, None]))
    is_hit = true.bincount(minlength=len(frequencies))[:, None] >= copies
    # Copies worth more than the N-th are all guessed, those worth as much by chance.
    least_worth = worth.flatten().sort(descending=True).values[count - 1]
    certain, tied = worth > least_worth, worth == least_worth
    remaining = count - int(certain.sum())
    certain_hits, tied_hits = int(is_hit[certain].sum()), int(is_hit[tied].sum())
    return (certain_hits + tied_hits * remaining / int(tied.sum())) / count


def numeric_guesses(
    finding: Reconstruction, count: int, public: PublicExamples | None, rng: torch.Generator
) -> dict[str, Tensor]:
    """Make `count` examples of each guess that uses no update, by name; see `score_examples`."""
    shape = (count, *finding.data.shape[1:])
    guesses = {"noise": torch.rand(shape, generator=rng), "mid-grey": torch.full(shape, 0.5)}
    if public is None:
        return guesses
    mean = public.data.mean(0)
    guesses["public mean"] = mean.expand(shape)
    guesses["public example"] = public.data[torch.randint(len(public.data), (count,), generator=rng)]
    centres = centres_of(public, clusters_of_claims(public, finding.labels))
    centres = torch.cat([centres, mean.expand(shape)[len(centres) :]])
    if finding.labels.is_floating_point():  # targets of a regression are no classes
        return guesses | {"public centres": centres}
    class_means: list[Tensor] = []
    for label in finding.labels.tolist():
        class_mean = public.data[public.labels == label].mean(0)
        # A class without public examples has no mean.
        class_means.append(class_mean if torch.isfinite(class_mean).all() else mean)
    class_means += [mean] * (count - len(class_means))
    guesses["public class mean"] = torch.stack(class_means)
    if not torch.allclose(centres, guesses["public class mean"], atol=1e-5):
        guesses["public class centres"] = centres
    return guesses


def _nearest_examples(truth: Truth, public: PublicExamples) -> Tensor:
    """Return the public example with the least squared error to each true one."""
    distances = torch.cdist(truth.data.flatten(1), public.data.flatten(1))
    return public.data[distances.argmin(1)]


def _metric_score(
    name: str, value: Tensor | str, floors: Mapping[str, Tensor | str], nearest: Tensor | str | None
) -> Score:
    if isinstance(value, str):
        return Score.from_reason(name, value, higher_is_better=_DIRECTION[name])
    guesses: dict[str, float] = {}
    for guess, floor in floors.items():
        if isinstance(floor, Tensor):
            guesses[guess] = floor.nanmean().item()
    return Score.against_guesses(
        name,
        value.nanmean().item(),
        guesses,
        nearest_public=nearest.nanmean().item() if isinstance(nearest, Tensor) else math.nan,
        ceiling=_CEILING[name],
        higher_is_better=_DIRECTION[name],
        per_image=() if name in _METRICS_OF_BATCH else tuple(value.tolist()),
    )


def _label_score(claimed: Tensor, true: Tensor, public: PublicExamples | None) -> Score:
    classes = int(max(claimed.max(), true.max(), public.labels.max() if public else 0)) + 1
    guesses = {"every class as often": uniform_guess_accuracy(true, classes)}
    if public is not None:
        frequencies = public.labels.bincount(minlength=classes) / len(public.labels)
        guesses["public class frequencies"] = frequency_guess_accuracy(true, frequencies)
    return Score.against_guesses("label_accuracy", label_accuracy(claimed, true), guesses, ceiling=1.0)
