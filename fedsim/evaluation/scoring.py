"""The evaluator: the only place where a finding and the truth meet.

No attack may import this module; import-linter checks it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from fedsim import metrics
from fedsim.errors import DataError, FedsimError, first_line
from fedsim.evaluation import text_metrics
from fedsim.evaluation.diverse_guesses import centres_of, clusters_of_claims
from fedsim.evaluation.score import Public, Score
from fedsim.evaluation.similarity import AT_BROADCAST, ON_LINE, Message
from fedsim.evaluation.table_scores import columns_score
from fedsim.evaluation.truth import Truth
from fedsim.findings import Reconstruction, Texts

RECOVERED = 20.0
"""PSNR in dB from which on an image counts as recovered; SME calls what is below 18 visually corrupted."""
EXACT = 40.0
"""PSNR in dB from which on an image counts as exact; of rows of tables each value is, to 1/10000 of its range."""
CERTIFIED = 60.0
"""PSNR in dB that an example which an attack calls certified must reach."""
_SAME_VALUE = 1e-4
_DIRECTION = {"psnr": True, "ssim": True, "mse": False, "lpips": False}
_CEILING = {"psnr": None, "ssim": 1.0, "mse": 0.0, "lpips": 0.0}
_SHARES = ("recovered", "exact", "recover_rate", "tokens_found", "words_found")
_DIRECTION |= dict.fromkeys(_SHARES, True)
_CEILING |= dict.fromkeys(_SHARES, 1.0)
_DIRECTION |= dict.fromkeys((AT_BROADCAST, ON_LINE), False)
_CEILING |= dict.fromkeys((AT_BROADCAST, ON_LINE), 0.0)
_OF_ALL = ("words_found", AT_BROADCAST, ON_LINE)
"""Metrics of all examples together, which no single example has."""


def score(
    finding: Reconstruction | Texts,
    truth: Truth,
    *,
    public: Public | None,
    rng: torch.Generator,
    weights: Path | None = None,
    labels_granted: bool = False,
    message: Message | None = None,
) -> list[Score]:
    """Judge a finding against the truth, next to what guessing would have got.

    A finding may claim fewer examples than there are, or more. Each true example is judged with the claim assigned to
    it; one that is left without any counts as mid-grey, of texts as no token at all, so that leaving it out is never
    better than the floor. Claims that are left over count for nothing, but as labels, see `label_accuracy`.
    A true text without any token is left out of the metrics of texts.
    `recovered` is the share of the images whose claim reaches `RECOVERED` dB, of texts that of those found whole.

    The guesses are as many as there are examples, or claims where these are more: uniform noise, mid-grey, and where
    `public` data are known, random ones of them, their mean image, and for the labels that the finding claims their
    class means and as many centres of each class as are claimed (`diverse_guesses`). Of texts they are random public
    ones, for each claimed label the most frequent token at each place and the likeliest tokens whatever their places,
    and the most frequent words. Labels are guessed as in `every_class_as_often` and, where public data are known, as in
    `by_frequencies`.

    Args:
        rng: draws the noise and the random public images.
        weights: folder with network weights for LPIPS.
        labels_granted: the labels were given to the attack, so they are not scored.
        message: what the finding was read from; None where it is not known, or is several messages.

    Raises:
        DataError: the finding and the truth differ in kind or in shape.
    """
    data = claimed_data(finding)
    if isinstance(finding, Texts) != truth.texts:
        held, claims = ("texts", "numbers") if truth.texts else ("numbers", "texts")
        raise DataError(
            f"truth: the victim held {held}, the attack claims {claims}; check the attack and the truth file"
        )
    if data.shape[1:] != truth.data.shape[1:]:
        raise DataError(
            f"truth: the victim held examples of shape {tuple(truth.data.shape[1:])}, "
            f"the attack claims {tuple(data.shape[1:])}; check input_shape and the truth file"
        )
    count, more = max(len(data), len(truth.data)), list[Score]()
    if isinstance(finding, Texts):
        claimed, nearest = text_metrics_of(finding.tokens, truth), _nearest_texts(truth, public) if public else {}
        guesses = {
            name: text_metrics_of(g, truth) for name, g in _text_guesses(finding, count, truth, public, rng).items()
        }
    else:
        made = guesses_of(finding, count, public, rng)
        claimed = image_metrics(data, truth, weights) | _similarities(data, finding.labels, message)
        guesses = {
            name: image_metrics(g, truth, weights) | _similarities(g[: len(data)], finding.labels, message)
            for name, g in made.items()
        }
        nearest = paired_metrics(_nearest(truth, public), truth, weights) if public else {}
        more += _certificates(finding, truth)
        if truth.columns and public is not None:
            clusters = clusters_of_claims(public, finding.labels)
            more.append(columns_score(data, truth, public, made, clusters, rng))
    scores = [
        _metric_score(name, value, {g: v[name] for g, v in guesses.items() if name in v}, nearest.get(name))
        for name, value in claimed.items()
    ]
    scores += more
    if not (labels_granted or truth.labels.is_floating_point()):
        scores.append(_label_score(finding.labels, truth.labels, public))
    return scores


def claimed_data(finding: Reconstruction | Texts) -> Tensor:
    """What a finding claims that the victim held."""
    return finding.tokens if isinstance(finding, Texts) else finding.data


def text_metrics_of(claimed: Tensor, truth: Truth) -> dict[str, Tensor | str]:
    """Recover rate, tokens found and words found of texts assigned one-to-one to the true ones, in [0, 1].

    `recover_rate` is the fraction of a text's tokens that stand in their places, which is how Table VIII of TGIAs-RO
    marks errors; `tokens_found` the fraction that are there, wherever they stand; `words_found` that of the different
    words of all texts together that are in any text. A text of padding alone has nothing to find, and is NaN.
    """
    empty = text_metrics.are_empty(truth.data, truth.padding)
    if empty.all():
        return dict.fromkeys(("recover_rate", "tokens_found", "recovered", "words_found"), "no text has any token")
    paired = text_metrics.paired_texts(claimed, truth.data, truth.padding)
    rate = text_metrics.right_places(paired, truth.data, truth.padding).diagonal()
    found = text_metrics.found_tokens(paired, truth.data, truth.padding).diagonal()
    whole = (rate == 1) & text_metrics.ends_right(paired, truth.data, truth.padding)
    return {
        "recover_rate": rate.masked_fill(empty, math.nan),
        "tokens_found": found.masked_fill(empty, math.nan),
        "recovered": whole.float().masked_fill(empty, math.nan),
        "words_found": torch.tensor([text_metrics.words_found(claimed, truth.data, truth.padding)]),
    }


def _text_guesses(
    finding: Texts, count: int, truth: Truth, public: Public | None, rng: torch.Generator
) -> dict[str, Tensor]:
    if public is None:
        return {}
    length = truth.data.shape[1]
    own = [chosen if len(chosen := public.data[public.labels == c]) else public.data for c in finding.labels.tolist()]
    own += [public.data] * (count - len(own))
    return {
        "public example": public.data[torch.randint(len(public.data), (count,), generator=rng)],
        "frequent at each place": torch.stack([texts.mode(0).values for texts in own]),
        "likeliest tokens": torch.stack([text_metrics.likeliest_tokens(t, length, truth.padding) for t in own]),
        "frequent words": text_metrics.frequent_words(public.data, count * length, truth.padding).reshape(count, -1),
    }


def _nearest_texts(truth: Truth, public: Public) -> dict[str, Tensor | str]:
    """What the public text that is most alike gets, for each true one."""
    empty = text_metrics.are_empty(truth.data, truth.padding)
    found = {
        "recover_rate": text_metrics.right_places(public.data, truth.data, truth.padding).max(1).values,
        "tokens_found": text_metrics.found_tokens(public.data, truth.data, truth.padding).max(1).values,
    }
    return {name: value.masked_fill(empty, math.nan) for name, value in found.items()}


def image_metrics(claimed: Tensor, truth: Truth, weights: Path | None) -> dict[str, Tensor | str]:
    """What `paired_metrics` says of each true example with the claimed one assigned to it."""
    return paired_metrics(metrics.paired(claimed, truth.data), truth, weights)


def paired_metrics(paired: Tensor, truth: Truth, weights: Path | None) -> dict[str, Tensor | str]:
    """MSE, and of images PSNR, SSIM, LPIPS and which are recovered, of examples in the order of the true ones."""
    if truth.data.ndim != 4:
        apart = (paired - truth.data).abs().flatten(1).amax(1)
        return {"mse": metrics.mse(paired, truth.data), "exact": (apart <= _SAME_VALUE).float()}
    psnr = metrics.psnr(paired, truth.data)
    return {
        "psnr": psnr,
        "ssim": metrics.no_ssim(truth.data) or metrics.ssim(paired, truth.data),
        "mse": metrics.mse(paired, truth.data),
        "lpips": metrics.lpips(paired, truth.data, weights),
        "recovered": (psnr >= RECOVERED).float(),
        "exact": (psnr >= EXACT).float(),
    }


def _certificates(finding: Reconstruction, truth: Truth) -> list[Score]:
    """How many of the true examples are certified, and which share of the certificates is wrong.

    A certificate is right where some true example differs by less than `CERTIFIED` allows.
    """
    if finding.certified is None:
        return []
    sure = finding.data[finding.certified]
    apart = torch.cdist(sure.flatten(1).double(), truth.data.flatten(1).double()).square() / truth.data[0].numel()
    wrong = apart.amin(1) > 10 ** (-CERTIFIED / 10)
    false = float(wrong.double().mean()) if len(sure) else 0.0
    return [
        Score.beside("certified", min(1.0, len(sure) / len(truth.data)), {"none": 0.0}, ceiling=1.0),
        Score(metric="false_certificates", value=false, ceiling=0.0, higher_is_better=False),
    ]


def _similarities(data: Tensor, labels: Tensor, message: Message | None) -> dict[str, Tensor | str]:
    """How well examples explain the message; nothing where that is not known."""
    if message is None:
        return {}
    try:
        return {name: torch.tensor([value]) for name, value in message.similarities(data, labels).items()}
    except FedsimError as error:
        return {AT_BROADCAST: str(error)}
    except Exception as error:  # whatever a stranger's model does with what is claimed; no other score is lost for it
        return {AT_BROADCAST: f"the model raised {type(error).__name__}: {first_line(error)}"}


def label_accuracy(claimed: Tensor, true: Tensor) -> float:
    """Fraction of the labels recovered, as multisets; 1 is perfect. Of more labels than there are the rest is wrong."""
    classes = int(max(claimed.max(), true.max())) + 1
    overlap = torch.minimum(claimed.bincount(minlength=classes), true.bincount(minlength=classes))
    return int(overlap.sum()) / max(len(true), len(claimed))


def every_class_as_often(true: Tensor, classes: int) -> float:
    """`label_accuracy` expected of guessing each of `classes` equally often.

    Of N labels that is floor(N / classes) of every class; as many classes as are left over, drawn at random without
    replacement, get one more.
    """
    often, left = divmod(len(true), classes)
    counts = true.bincount(minlength=classes)
    sure, likely = int(counts.clamp(max=often).sum()), int((counts > often).sum())
    return (sure + likely * left / classes) / len(true)


def by_frequencies(true: Tensor, frequencies: Tensor) -> float:
    """`label_accuracy` expected of the best guess for who knows only how frequent each class is among all.

    The k-th copy of a class is worth the probability that N random labels hold it k times; the N copies that are worth
    most are guessed. Among copies of equal worth, of which some are left out, chance decides.

    Args:
        true: `example`, N labels.
        frequencies: `class`, which sum to 1.
    """
    from scipy.stats import binom

    count = len(true)
    copies = torch.arange(1, count + 1)
    worth = torch.from_numpy(binom.sf(copies.numpy() - 1, count, frequencies.double().numpy()[:, None]))
    there = true.bincount(minlength=len(frequencies))[:, None] >= copies
    least = worth.flatten().sort(descending=True).values[count - 1]
    sure, even = worth > least, worth == least
    left = count - int(sure.sum())
    return (int(there[sure].sum()) + int(there[even].sum()) * left / int(even.sum())) / count


def guesses_of(finding: Reconstruction, count: int, public: Public | None, rng: torch.Generator) -> dict[str, Tensor]:
    """By name, as many examples as `count` of each guess that uses no update, see `score`."""
    shape = (count, *finding.data.shape[1:])
    guesses = {"noise": torch.rand(shape, generator=rng), "mid-grey": torch.full(shape, 0.5)}
    if public is not None:
        mean = public.data.mean(0)
        guesses["public mean"] = mean.expand(shape)
        guesses["public example"] = public.data[torch.randint(len(public.data), (count,), generator=rng)]
        if finding.labels.is_floating_point():  # targets are no classes
            centres = centres_of(public, clusters_of_claims(public, finding.labels))
            return guesses | {"public centres": torch.cat([centres, mean.expand(shape)[len(centres) :]])}
        means = [public.data[public.labels == c].mean(0) for c in finding.labels.tolist()]
        means += [mean] * (count - len(means))
        guesses["public class mean"] = torch.stack([m if torch.isfinite(m).all() else mean for m in means])
        centres = centres_of(public, clusters_of_claims(public, finding.labels))
        centres = torch.cat([centres, mean.expand(shape)[len(centres) :]])
        if not torch.allclose(centres, guesses["public class mean"], atol=1e-5):
            guesses["public class centres"] = centres
    return guesses


def _nearest(truth: Truth, public: Public) -> Tensor:
    """The public example with the least squared error to each true one."""
    return public.data[torch.cdist(truth.data.flatten(1), public.data.flatten(1)).argmin(1)]


def _metric_score(
    name: str, value: Tensor | str, floors: Mapping[str, Tensor | str], nearest: Tensor | str | None
) -> Score:
    if isinstance(value, str):
        return Score.not_computed(name, value, higher_is_better=_DIRECTION[name])
    return Score.beside(
        name,
        value.nanmean().item(),
        {guess: floor.nanmean().item() for guess, floor in floors.items() if isinstance(floor, Tensor)},
        nearest_public=nearest.nanmean().item() if isinstance(nearest, Tensor) else math.nan,
        ceiling=_CEILING[name],
        higher_is_better=_DIRECTION[name],
        per_image=() if name in _OF_ALL else tuple(value.tolist()),
    )


def _label_score(claimed: Tensor, true: Tensor, public: Public | None) -> Score:
    classes = int(max(claimed.max(), true.max(), public.labels.max() if public else 0)) + 1
    guesses = {"every class as often": every_class_as_often(true, classes)}
    if public is not None:
        frequencies = public.labels.bincount(minlength=classes) / len(public.labels)
        guesses["public class frequencies"] = by_frequencies(true, frequencies)
    return Score.beside("label_accuracy", label_accuracy(claimed, true), guesses, ceiling=1.0)
