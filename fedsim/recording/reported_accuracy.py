"""Accuracy that the clients of a recorded app told the server when it asked them to evaluate the model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fedsim.recording.clear_text import count_examples
from fedsim.recording.header import is_number
from fedsim.recording.messages import RecordedExchange, RecordedMessage, read_messages

EVALUATION_KIND = "evaluate"
"""Kind of the messages by which Flower's servers ask clients to evaluate; apps may add `.name` to it."""
_ACCURACY_NAMES = re.compile(
    r"((eval|evaluation|val|valid|validation|test|centralized|distributed)[-_ ]?)?acc(uracy)?", re.IGNORECASE
)
_PERCENT = 100.0
_ROUNDING = 1e-6
"""By how much a share may be above 1, as a sum of rounded weights is."""


@dataclass(frozen=True, kw_only=True)
class ReportedAccuracy:
    """Mean accuracy that clients reported of one model.

    Attributes:
        accuracy: mean over clients, weighted by their examples where all say how many these are.
        clients: number of clients that reported one.
        examples: on which they evaluated; 0 where one of them does not say how many these are.
        round: that the messages name; 0 where they name none.
        remark: a sentence on the examples; empty where there is nothing to say.
    """

    accuracy: float
    clients: int
    examples: int
    round: int
    remark: str = ""


def read_reported_accuracy(folder: Path) -> ReportedAccuracy | None:
    """Return the accuracy that clients reported last; None where none reported any, or one several of several models.

    Values above 1 anywhere in a recording are percentages, and so are all others there.
    """
    last: list[_ClientAccuracy] = []
    last_exchange = ("", 0)
    largest = 0.0
    for exchange in read_messages(folder):
        if not (reports := list(_read_reports(exchange))):
            continue
        # A server may ask one client after another in a round.
        is_next = exchange.round > 0 and last_exchange == (exchange.kind, exchange.round)
        goes_on = is_next and not {report.client for report in reports} & {report.client for report in last}
        last = [*last, *reports] if goes_on else reports
        last_exchange = exchange.kind, exchange.round
        largest = max(largest, *(report.accuracy for report in reports))
    if not last or largest > _PERCENT or len({report.client for report in last}) < len(last):
        return None
    scale = _PERCENT if largest > 1 + _ROUNDING else 1.0
    counts = [report.examples for report in last]
    weights = counts if all(counts) else [1] * len(last)
    mean = math.fsum(report.accuracy * weight for report, weight in zip(last, weights, strict=True)) / sum(weights)
    return ReportedAccuracy(
        accuracy=min(mean / scale, 1.0),
        clients=len(last),
        examples=sum(counts) if all(counts) else 0,
        round=last_exchange[1],
    )


def describe_tested_examples(tested: int, trained: int) -> str:
    """Say that clients train on examples that an app tests on.

    >>> describe_tested_examples(8, 8)[:82]
    'Clients train on 8 of the 8 examples that this app tests on, so that the accuracy '
    """
    return (
        f"Clients train on {trained} of the {tested} examples that this app tests on, so that the accuracy that it "
        "reports partly measures memory, and members are hard to distinguish from non-members; test on other examples."
    )


class _ClientAccuracy(NamedTuple):
    """Accuracy as a client reported it, and its number of examples."""

    client: int
    accuracy: float
    examples: int


def _read_reports(exchange: RecordedExchange) -> Iterator[_ClientAccuracy]:
    """Yield what each reply to an evaluation reports that has an accuracy."""
    if exchange.kind.partition(".")[0] != EVALUATION_KIND:
        return
    for reply in exchange.replies:
        value = _find_accuracy(reply)
        if value is not None:
            yield _ClientAccuracy(reply.client, value, count_examples(reply))


def _find_accuracy(reply: RecordedMessage) -> float | None:
    """Return the first number in a reply whose name is that of an accuracy."""
    # Flower's legacy layer puts metrics among the config.
    for records in (reply.metrics, reply.config):
        for values in records.values():
            for name, value in values.items():
                if is_number(value) and _ACCURACY_NAMES.fullmatch(name) and math.isfinite(value) and value >= 0:
                    return float(value)
    return None
