"""What correlations of studies/lavp rest on: pooled networks, images' contrast, claims worse than one colour."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from studies.lavp.study import (
    DATA,
    DISTANCES,
    ENERGY,
    EPOCHS,
    FEWEST,
    RESAMPLED,
    SEED,
    ByImage,
    format_correlation,
)
from studies.writing import draw_places, format_drawn, spearman_of_rows

Numbers = NDArray[np.float64]
Qualities = Mapping[tuple[str, str, str, str], ByImage]
Measured = Mapping[tuple[str, str, str], ByImage]
OWN_COLOUR, DATA_COLOUR = "image.own-mean", "image.data-mean"
"""MSE of one colour in the place of an image: its own mean, which no attacker knows, or that of the data set."""
CONTROLS = (ENERGY, OWN_COLOUR)
HELD = {
    "gradient-norm.norm": "norm", "lavp-10.max": "max", "lavp-10.min": "min", "lavp-10.ang_max": "ang_max",
    "lavp-10.ang_min": "ang_min", "expected-error-cosine.error": "`expected-error` `error`",
    "expected-error-cosine.share": "`expected-error` `share`",
}  # fmt: skip
OUTCOMES = {"mse": "MSE", "ssim": "SSIM", "lpips": "LPIPS"}
Table = tuple[list[str], list[list[str]]]


def format_pooled(pairs: Sequence[tuple[ByImage, ByImage]]) -> str:
    """Format Spearman's over all images of all networks at once, and the interval by drawing images anew.

    An image that is drawn brings its points of all networks.
    """
    images = sorted(set().union(*(set(values) & set(others) for values, others in pairs)))
    drawn = draw_places(len(images), RESAMPLED, SEED)
    columns = []
    for side in (0, 1):
        by_network = [np.array([pair[side].get(image, np.nan) for image in images])[drawn] for pair in pairs]
        columns.append(np.concatenate(by_network, axis=1))
    return format_drawn(spearman_of_rows(*columns))


def format_partial(triples: Sequence[tuple[ByImage, ByImage, Sequence[ByImage]]]) -> str:
    """Format Spearman's within each network with controls held, averaged, and the interval by drawing images anew."""
    return format_drawn(draw_partial(triples))


def draw_partial(triples: Sequence[tuple[ByImage, ByImage, Sequence[ByImage]]]) -> Numbers:
    """Return Spearman's within each network with controls held, averaged, then that of images drawn anew.

    The images are those that have all values in all networks.
    """
    of_all = [values for first, second, controls in triples for values in (first, second, *controls)]
    images = sorted(set.intersection(*map(set, of_all)))
    drawn = draw_places(len(images), RESAMPLED, SEED)
    of_networks = []
    for first, second, controls in triples:
        columns = [np.array([values[image] for image in images])[drawn] for values in (first, second, *controls)]
        ranks = [rankdata(column, axis=1) for column in columns]
        of_networks.append(correlate_held(ranks[0], ranks[1], ranks[2:]))
    return np.asarray(np.mean(of_networks, 0))


def correlate_held(first: Numbers, second: Numbers, controls: Sequence[Numbers]) -> Numbers:
    """Return in each row the correlation of what least squares by the controls leave of both."""
    given = np.stack([np.ones_like(first), *controls], -1)
    outcomes = np.stack([first, second], -1)
    left = outcomes - given @ np.linalg.pinv(given) @ outcomes
    squares = (left**2).sum(1)
    return np.asarray((left[..., 0] * left[..., 1]).sum(1) / np.sqrt(squares[:, 0] * squares[:, 1]))


def partial_table(quality: Qualities, measured: Measured) -> Table:
    """Return correlations of each measure as it is, and with the image's energy and contrast held."""
    lines = []
    for data, distance, (measure, title) in product(DATA, DISTANCES, HELD.items()):
        models = []
        for model in EPOCHS[data]:
            known = [measured.get((data, model, name), {}).keys() for name in (measure, *CONTROLS)]
            if len(set.intersection(*map(set, known)) & quality[data, model, distance, "mse"].keys()) >= FEWEST:
                models.append(model)
        if not models:
            continue
        texts = []
        for score in OUTCOMES:
            pairs = [(measured[data, model, measure], quality[data, model, distance, score]) for model in models]
            controls = [[measured[data, model, name] for name in CONTROLS] for model in models]
            triples = [(*pair, held) for pair, held in zip(pairs, controls, strict=True)]
            texts += [format_correlation(pairs).partition(" ")[0], format_partial(triples)]
        lines.append([data, distance, title, *texts])
    head = ["", "distance", "measure"]
    for title in OUTCOMES.values():
        head += [title, f"{title}, held"]
    return head, lines


def colour_table(quality: Qualities, measured: Measured) -> Table:
    """Return how many reconstructions are farther from the image than one colour is."""
    return ["", "distance", "network", "images", "its own mean colour", "the data set's"], list(
        _colour_lines(quality, measured)
    )


def _colour_lines(quality: Qualities, measured: Measured) -> Iterator[list[str]]:
    for data, distance in product(DATA, DISTANCES):
        for model in EPOCHS[data]:
            mse = quality[data, model, distance, "mse"]
            if (data, model, OWN_COLOUR) not in measured:
                continue
            shares = []
            for name in (OWN_COLOUR, DATA_COLOUR):
                colour = measured[data, model, name]
                shares.append(f"{100 * np.mean([value > colour[image] for image, value in mse.items()]):.0f} %")
            yield [data, distance, model, str(len(mse)), *shares]
