"""Which clients and examples are exposed most: the rows of `exposure.csv` ranked, drawn, and beside what leaked."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from fedsim.audit.variants import name_variants
from fedsim.exposure.of_clients import Row, failure_sentences
from fedsim.report import figures
from fedsim.report.verdicts import ScoreReading

Who = tuple[int, str]
"""A client, and the number of one of its examples; empty for all of them together."""
MOST, LEAST, CLIENTS = 24, 12, 30
"""Most examples shown from either end of the ranking, and most clients shown."""
_MAX_TABLE_CLIENTS = 40


@dataclass(frozen=True, kw_only=True)
class ExposureQuantity:
    """Values of one quantity of a measure for several clients or examples.

    Attributes:
        larger_means: `more` or `less` is exposed where it is larger.
        values: by client or example, the mean over all rounds.
        undefined: clients or examples for which it has no value.
    """

    measure: str
    name: str
    larger_means: str
    values: Mapping[Who, float]
    undefined: Sequence[Who]

    @property
    def title(self) -> str:
        """Measure and quantity."""
        return f"{self.measure}: {self.name}"

    @property
    def meaning(self) -> str:
        """Meaning of a larger value."""
        return f"larger: {self.larger_means} exposed"

    @property
    def ranking(self) -> list[Who]:
        """Clients or examples, the most exposed first."""
        sign = -1 if self.larger_means == "more" else 1
        return sorted(self.values, key=lambda who: (sign * self.values[who], who[0], int(who[1] or 0)))


def mean_quantities(rows: Iterable[Row], *, of_examples: bool = False) -> list[ExposureQuantity]:
    """Average what was measured over rounds, for each quantity of each measure in their order."""
    # Collect the finite values of each client or example.
    values_by_quantity: dict[tuple[str, str], dict[Who, list[float]]] = {}
    meanings = {}
    for row in rows:
        example = str(row.get("example", ""))
        if not row.get("quantity") or bool(example) != of_examples:
            continue
        key = row["measure"], row["quantity"]
        meanings[key] = row["larger_means"]
        values = values_by_quantity.setdefault(key, defaultdict(list))[int(row["client"]), example]
        if math.isfinite(float(row["value"])):
            values.append(float(row["value"]))
    quantities = []
    for (measure, name), by_who in values_by_quantity.items():
        means = {who: fmean(values) for who, values in by_who.items() if values}
        undefined = [who for who in by_who if who not in means]
        quantities.append(
            ExposureQuantity(
                measure=measure,
                name=name,
                larger_means=meanings[measure, name],
                values=means,
                undefined=undefined,
            )
        )
    return quantities


def draw_examples(quantities_of_examples: Sequence[ExposureQuantity], image_of: Callable[[Who], Tensor]) -> bytes:
    """Draw a PNG of examples for each quantity, the most exposed first; of many, those at either end."""
    rows = []
    for quantity in quantities_of_examples:
        ranked = quantity.ranking
        if len(ranked) <= MOST + LEAST:
            parts = [("most exposed first", ranked)]
        else:
            parts = [
                ("most exposed first", ranked[:MOST]),
                (f"the {LEAST} least exposed of {len(ranked)}", ranked[-LEAST:]),
            ]
        for description, examples in parts:
            rows.append(
                figures.GalleryRow(
                    title=f"{quantity.title} ({quantity.meaning}), {description}",
                    images=torch.stack([image_of(who) for who in examples]),
                    captions=[f"{quantity.values[who]:.3g}\nclient {who[0]}: {who[1]}" for who in examples],
                )
            )
    return figures.gallery(rows)


def draw_clients(quantities_of_clients: Sequence[ExposureQuantity]) -> bytes:
    """Draw a PNG of clients in the order of each quantity, the most exposed on top; of many, the first ones."""
    ladders = []
    for quantity in quantities_of_clients:
        names, values = list[str](), list[float]()
        for who in quantity.ranking[:CLIENTS]:
            names.append(f"client {who[0]}")
            values.append(quantity.values[who])
        ladders.append(figures.Ladder(title=quantity.title, xlabel=quantity.meaning, names=names, values=values))
    return figures.draw_ladders(ladders)


@dataclass(frozen=True, kw_only=True)
class ExposureTable:
    """Exposure of clients beside what leaked of them, with a line for each client.

    Attributes:
        headings: of the columns, each with what a larger value says.
        lines: a client and a text for each column; the client that is exposed most by the first column comes first.
        measures: how many of the columns say what was measured; the others say what leaked.
        clients: how many clients there are, of which `lines` may show some.
    """

    headings: Sequence[tuple[str, str]]
    lines: Sequence[tuple[int, Sequence[str]]]
    measures: int
    clients: int
    failures: Sequence[str]


def exposure_table(
    rows: Sequence[Row],
    readings: Sequence[ScoreReading],
    scores: Iterable[Mapping[str, Any]],
    names: Mapping[tuple[str, str], str],
) -> ExposureTable | None:
    """Compare how exposed clients were with what leaked of them; None where nothing was measured."""
    measured = mean_quantities(rows)
    if not rows:
        return None
    leaked = _mean_scores(readings, name_variants(scores, names))
    # Of many clients, show the most exposed and all that were attacked.
    ranked = list(dict.fromkeys(client for item in measured for client, _ in [*item.ranking, *item.undefined]))
    attacked = {client for values in leaked.values() for client in values}
    clients = [client for rank, client in enumerate(ranked) if rank < _MAX_TABLE_CLIENTS or client in attacked]
    lines = []
    for client in clients:
        exposure_texts = [_text(item, client) for item in measured]
        score_texts = [_number(values.get(client)) for values in leaked.values()]
        lines.append((client, [*exposure_texts, *score_texts]))
    return ExposureTable(
        headings=[*((item.title, item.meaning) for item in measured), *leaked],
        lines=lines,
        measures=len(measured),
        clients=len(ranked),
        failures=failure_sentences(rows),
    )


def _mean_scores(
    readings: Sequence[ScoreReading], scores: Iterable[Mapping[str, Any]]
) -> dict[tuple[str, str], dict[int, float]]:
    """Return by heading of each attack the mean score of each victim, by the first metric that is judged."""
    main_readings: dict[str, ScoreReading] = {}
    for reading in readings:
        if reading.verdict and not reading.summary.missing and not reading.baseline:
            main_readings.setdefault(reading.summary.attack, reading)
    values: dict[str, dict[int, list[float]]] = {attack: defaultdict(list) for attack in main_readings}
    for row in scores:
        attack = str(row["attack"])
        if attack in main_readings and row["metric"] == main_readings[attack].summary.metric and not row["missing"]:
            values[attack][int(row["victim"])].append(float(row["value"]))
    means = {}
    for attack, reading in main_readings.items():
        heading = f"{attack}: {reading.summary.name}", f"{reading.summary.direction}: more leaked"
        means[heading] = {client: fmean(client_values) for client, client_values in values[attack].items()}
    return means


def _text(item: ExposureQuantity, client: int) -> str:
    return "undefined" if (client, "") in item.undefined else _number(item.values.get((client, "")))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
