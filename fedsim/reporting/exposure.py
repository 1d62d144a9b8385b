"""Who and what is exposed most: the rows of `exposure.csv` in order, drawn, and beside what leaked."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from fedsim.auditing.variants import named
from fedsim.exposure.of_clients import Row, failures
from fedsim.reporting import figures
from fedsim.reporting.summary import Line

Who = tuple[int, str]
"""A client, and a place among its examples, empty for all of them together."""
MOST, LEAST, CLIENTS = 24, 12, 30
"""Examples shown from either end, and clients shown, where there are more."""
_LISTED = 40


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One value of a measure, of several clients or examples.

    Attributes:
        measure: its title.
        name: of the value.
        larger_means: `more` or `less` is exposed where it is larger.
        values: of whom it is defined, the mean over all rounds of it.
        undefined: of whom it is not.
    """

    measure: str
    name: str
    larger_means: str
    values: Mapping[Who, float]
    undefined: Sequence[Who]

    @property
    def title(self) -> str:
        """Measure and value."""
        return f"{self.measure}: {self.name}"

    @property
    def meaning(self) -> str:
        """What a larger value says."""
        return f"larger: {self.larger_means} exposed"

    @property
    def ranked(self) -> list[Who]:
        """Who is exposed most comes first."""
        sign = -1 if self.larger_means == "more" else 1
        return sorted(self.values, key=lambda who: (sign * self.values[who], who[0], int(who[1] or 0)))


def quantities(rows: Iterable[Row], *, each: bool = False) -> list[Quantity]:
    """What `rows` say of clients, or with `each` of single examples; measures in their order."""
    found: dict[tuple[str, str], dict[Who, list[float]]] = {}
    meanings = {}
    for row in rows:
        example = str(row.get("example", ""))
        if not row.get("quantity") or bool(example) != each:
            continue
        key = row["measure"], row["quantity"]
        meanings[key] = row["larger_means"]
        values = found.setdefault(key, defaultdict(list))[int(row["client"]), example]
        values += [float(row["value"])] if math.isfinite(float(row["value"])) else []
    return [
        Quantity(
            measure=measure,
            name=name,
            larger_means=meanings[measure, name],
            values={who: fmean(values) for who, values in by.items() if values},
            undefined=[who for who, values in by.items() if not values],
        )
        for (measure, name), by in found.items()
    ]


def pictured(found: Sequence[Quantity], image_of: Callable[[Who], Tensor]) -> bytes:
    """A PNG of examples, the most exposed first, for each of `found`; of many, those at either end.

    Args:
        found: of single examples, each with at least one value.
        image_of: an image, `channel height width` in [0, 1].
    """
    rows = []
    for item in found:
        order = item.ranked
        few = len(order) <= MOST + LEAST
        ends = [("most exposed first", order if few else order[:MOST])]
        ends += [] if few else [(f"the {LEAST} least exposed of {len(order)}", order[-LEAST:])]
        rows += [
            figures.Row(
                title=f"{item.title} ({item.meaning}), {end}",
                images=torch.stack([image_of(who) for who in shown]),
                captions=[f"{item.values[who]:.3g}\nclient {who[0]}: {who[1]}" for who in shown],
            )
            for end, shown in ends
        ]
    return figures.gallery(rows)


def drawn(found: Sequence[Quantity]) -> bytes:
    """A PNG of clients in the order of each quantity, the most exposed on top; of many, the first ones."""
    ladders = [
        figures.Ladder(
            title=item.title,
            xlabel=item.meaning,
            names=[f"client {client}" for client, _ in item.ranked[:CLIENTS]],
            values=[item.values[who] for who in item.ranked[:CLIENTS]],
        )
        for item in found
    ]
    return figures.ladders(ladders)


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What clients measured, beside what leaked of them; a line for each client.

    Attributes:
        headings: of the columns, each with what a larger value says.
        lines: a client, and a text for each column; the client comes first that is exposed most by the first column.
        measures: how many of the columns say what was measured; the others say what leaked.
        clients: how many there are, of which `lines` may show some.
        failures: a sentence for each measure that failed.
    """

    headings: Sequence[tuple[str, str]]
    lines: Sequence[tuple[int, Sequence[str]]]
    measures: int
    clients: int
    failures: Sequence[str]


def beside(
    rows: Sequence[Row],
    leaks: Sequence[Line],
    scores: Iterable[Mapping[str, Any]],
    names: Mapping[tuple[str, str], str],
) -> Beside | None:
    """What the page says of how exposed clients were; None where nothing was measured.

    Args:
        rows: of `exposure.csv`.
        leaks: what leaked, the main metric of an attack first.
        scores: the rows of `scores.csv`.
        names: see `fedsim.auditing.variants.named`.
    """
    found = quantities(rows)
    if not rows:
        return None
    leaked = _leaked(leaks, named(scores, names))
    order = list(dict.fromkeys(client for item in found for client, _ in [*item.ranked, *item.undefined]))
    attacked = {client for values in leaked.values() for client in values}
    shown = [client for place, client in enumerate(order) if place < _LISTED or client in attacked]
    told = [(client, [_text(item, client) for item in found]) for client in shown]
    return Beside(
        headings=[*((item.title, item.meaning) for item in found), *leaked],
        lines=[(c, [*texts, *(_number(values.get(c)) for values in leaked.values())]) for c, texts in told],
        measures=len(found),
        clients=len(order),
        failures=failures(rows),
    )


def _leaked(leaks: Sequence[Line], scores: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], dict[int, float]]:
    """Of each attack the mean score of each victim by its first metric that is judged."""
    first: dict[str, Line] = {}
    for line in leaks:
        if line.verdict and not line.summary.missing and not line.baseline:
            first.setdefault(line.summary.attack, line)
    found: dict[str, dict[int, list[float]]] = {attack: defaultdict(list) for attack in first}
    for row in scores:
        attack = str(row["attack"])
        if attack in first and row["metric"] == first[attack].summary.metric and not row["missing"]:
            found[attack][int(row["victim"])].append(float(row["value"]))
    return {
        (f"{attack}: {line.summary.name}", f"{line.summary.direction}: more leaked"): {
            client: fmean(values) for client, values in found[attack].items()
        }
        for attack, line in first.items()
    }


def _text(item: Quantity, client: int) -> str:
    return "undefined" if (client, "") in item.undefined else _number(item.values.get((client, "")))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
