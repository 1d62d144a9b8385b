"""What measures foresee of reconstructions by three weights of the prior, with the image's energy held."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from studies.lavp.controls import (
    DATA_COLOUR,
    HELD,
    OUTCOMES,
    OWN_COLOUR,
    Measured,
    Numbers,
    Table,
    draw_partial,
    format_partial,
)  # fmt: skip
from studies.lavp.study import DISTANCES, ENERGY, ByImage
from studies.running import STUDIES, read_rows
from studies.writing import format_drawn

OF = ("cifar10", "lenet")
WEIGHTS = ("1.0", "0.1", "0.01")
MEAN_IMAGE = "image.mean-image"
CONTROLS: Mapping[str, tuple[str, ...]] = {
    "": (),
    "energy": (ENERGY,),
    "energy and mean image": (ENERGY, MEAN_IMAGE),
    "energy and contrast": (ENERGY, OWN_COLOUR),
}
"""What is held, by title."""
COLUMNS = [("mse", held) for held in CONTROLS] + list(product(("ssim", "lpips"), ("", "energy and mean image")))
LOST = 0.8
"""Share of reconstructions that lose to their own mean colour from which on a cell is not comparable."""
COMMAND = "export FEDSIM_DATA=DIR OMP_NUM_THREADS=1\npython -m studies lavp_measures lavp_prior"


@dataclass
class Claims:
    """Reconstructions of one cell: the best start of each image by the attack's own objective.

    Attributes:
        scores: by score, the value of each image.
        halves: the half of each image.
        starts: how many starts each image had.
    """

    scores: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    halves: dict[str, str] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, row: Mapping[str, str]) -> None:
        """Add a start, and keep its scores if it matches better than earlier ones."""
        image = row["image"]
        self.halves[image] = row["half"]
        self.starts[image] += 1
        if float(row["objective"]) < self.scores["objective"].get(image, np.inf):
            for score in ("objective", *OUTCOMES):
                self.scores[score][image] = float(row[score])


def read_claims() -> Mapping[tuple[str, str], Claims]:
    """Return the reconstructions by distance and weight."""
    claims: dict[tuple[str, str], Claims] = defaultdict(Claims)
    for row in read_rows(STUDIES / "lavp_prior" / "results.csv"):
        claims[row["distance"], row["weight"]].add(row)
    return claims


def prior_tables(measured: Measured) -> Iterator[tuple[str, str, Table]]:
    """Yield name, command and table of all that follows from the rows."""
    claims, values = read_claims(), {name: values for (*of, name), values in measured.items() if (*of,) == OF}
    cells = [cell for cell in product(DISTANCES, WEIGHTS) if cell in claims]
    yield "prior-quality", COMMAND, quality_table(claims, values, cells)
    yield "prior", "", correlation_table(claims, values, cells)
    yield "prior-change", "", change_table(claims, values)
    yield "prior-halves", "", halves_table(claims, values, cells)


def quality_table(
    claims: Mapping[tuple[str, str], Claims], values: Mapping[str, ByImage], cells: Sequence[tuple[str, str]]
) -> Table:
    """Return how good reconstructions are, how many lose to one colour, and how they follow the image's energy."""
    lines = []
    for distance, weight in cells:
        cell = claims[distance, weight]
        mse = cell.scores["mse"]
        means = [f"{np.mean(list(cell.scores[score].values())):.3f}" for score in OUTCOMES]
        lost = [np.mean([mse[image] > values[colour][image] for image in mse]) for colour in (OWN_COLOUR, DATA_COLOUR)]
        starts = "-".join(map(str, sorted({min(cell.starts.values()), max(cell.starts.values())})))
        verdict = "no" if lost[0] >= LOST else "yes"
        energy = format_partial([(values[ENERGY], mse, ())])
        lines.append(
            [distance, weight, str(len(mse)), starts, *means, *(f"{100 * x:.0f} %" for x in lost), energy, verdict]
        )
    head = ["distance", "weight", "images", "starts", *OUTCOMES.values(), "lose to their own mean colour"]
    return [*head, "to the data set's", "MSE with energy", "comparable"], lines


def correlation_table(
    claims: Mapping[tuple[str, str], Claims], values: Mapping[str, ByImage], cells: Sequence[tuple[str, str]]
) -> Table:
    """Return correlations of each measure as they are and with controls held."""
    lines = []
    for (distance, weight), (measure, title) in product(cells, HELD.items()):
        scores = claims[distance, weight].scores
        texts = [format_drawn(draw_held(values, measure, scores[score], held)) for score, held in COLUMNS]
        count = len(values[measure].keys() & scores["mse"].keys() & values[MEAN_IMAGE].keys())
        lines.append([distance, weight, title, str(count), *texts])
    columns = [f"{OUTCOMES[score]}{f', {held}' if held else ''}" for score, held in COLUMNS]
    return ["distance", "weight", "measure", "images", *columns], lines


def change_table(claims: Mapping[tuple[str, str], Claims], values: Mapping[str, ByImage]) -> Table:
    """Return by how much the correlation with the MSE is larger with the weakest prior than with the study's."""
    lines = []
    for distance, (measure, title) in product(DISTANCES, HELD.items()):
        if not all((distance, weight) in claims for weight in WEIGHTS):
            continue
        strong, weak = (claims[distance, weight].scores["mse"] for weight in (WEIGHTS[0], WEIGHTS[-1]))
        both = strong.keys() & weak.keys()
        strong, weak = ({image: mse[image] for image in both} for mse in (strong, weak))
        changes = [
            draw_held(values, measure, weak, held) - draw_held(values, measure, strong, held) for held in CONTROLS
        ]
        lines.append([distance, title, *map(format_drawn, changes)])
    return ["distance", "measure", "MSE", *(f"MSE, {held}" for held in CONTROLS if held)], lines


def halves_table(
    claims: Mapping[tuple[str, str], Claims], values: Mapping[str, ByImage], cells: Sequence[tuple[str, str]]
) -> Table:
    """Return what the minimum of the attack's own distance foresees in each half of the images."""
    lines = []
    for (distance, weight), half in product(cells, ("1", "2")):
        measure = "lavp-10.min" if distance == "l2" else "lavp-10.ang_min"
        cell = claims[distance, weight]
        mse = {image: value for image, value in cell.scores["mse"].items() if cell.halves[image] == half}
        if mse.keys() & values[measure].keys():
            texts = [format_drawn(draw_held(values, measure, mse, held)) for held in CONTROLS]
            lines.append([distance, weight, HELD[measure], half, str(len(mse)), *texts])
    head = ["distance", "weight", "measure", "half", "images", "MSE"]
    return [*head, *(f"MSE, {held}" for held in CONTROLS if held)], lines


def draw_held(values: Mapping[str, ByImage], measure: str, outcome: ByImage, held: str) -> Numbers:
    """Return the correlation of a measure and an outcome with controls held, then that of images drawn anew."""
    # The mean image is only needed as a control, but all columns are of the same images.
    images = values[measure].keys() & outcome.keys() & values[MEAN_IMAGE].keys()
    first, second, *controls = (
        {image: by_image[image] for image in images}
        for by_image in (values[measure], outcome, *(values[name] for name in CONTROLS[held]))
    )
    return draw_partial([(first, second, controls)])
