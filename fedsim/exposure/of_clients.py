"""How exposed a single client is in a round, as rows of a table: what it measures of itself before it sends.

What is measured is what the client would send without its defenses, of the examples and in the order that it uses in
this round.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.errors import one_line, what_it_said
from fedsim.measure import Measure
from fedsim.task import Loss
from fedsim.training.cohort import Share
from fedsim.training.local_round import LocalRound
from fedsim.training.sent import Sent
from fedsim.training.settings import LocalTraining

log = logging.getLogger(__name__)
COLUMNS = ("round", "state", "client", "example", "measure", "quantity", "value", "larger_means", "failure")
"""`state` is the model that the client starts from, `example` a place among the client's own examples, empty for all of
them together. `larger_means` says whether `more` or `less` is exposed where the value is larger. A row has a `value`,
NaN where it is undefined, or a `failure`, which says why there is none."""
KEPT = "exposure"
"""What a client calls its rows in the state that it keeps."""
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Gauge:
    """A measure, and how an experiment uses it.

    Attributes:
        title: what its rows are filed under.
        measure: what is computed.
        each: of each example besides of all together.
        every: in every such round, beginning with the first.
        memory: bytes that may be used at once.
    """

    title: str
    measure: Measure
    each: bool
    every: int
    memory: int

    def is_due(self, number: int) -> bool:
        """Whether clients measure in round `number`."""
        return (number - 1) % self.every == 0

    def try_out(self, local: LocalRound) -> None:
        """Measure `local`, or each of its examples where that is asked for.

        Raises:
            FedsimError: the measure does not apply to this task, model or training.
        """
        self.apart(local.sent, local.places) if self.each else self.together(local.sent)

    def together(self, sent: Callable[[int], Sent]) -> dict[Any, dict[str, float]]:
        """The values of all examples together, under the name of no example; `sent` is as `LocalRound.sent`."""
        return {"": self.measure.of_sent(sent(self.memory))}

    def apart(self, sent: Callable[[int], Sent], places: Tensor) -> dict[Any, dict[str, float]]:
        """The values of each example by its place, `example`."""
        found = self.measure.each_of_sent(sent(self.memory))
        return {
            example: {name: float(values[place]) for name, values in found.items()}
            for place, example in enumerate(places.tolist())
        }


def rows_of(
    gauges: Sequence[Gauge], model: nn.Module, share: Share, training: LocalTraining, loss: Loss
) -> Iterator[dict[str, Any]]:
    """What `gauges` say of one client; a measure that fails gives a row that says why, and stops no other.

    Args:
        model: with the weights that the client was sent.
        share: what the client trains on, all of it.
        training: as the server's message says.
        loss: of the task, before labels are smoothed.
    """
    local = LocalRound.of(model, share, training, loss)
    sent = cache(local.sent)  # shared by the gauges, with what they have computed of it
    for gauge in gauges:
        yield from _told(gauge, partial(gauge.together, sent))
        if gauge.each:
            yield from _told(gauge, partial(gauge.apart, sent, local.places))


def _told(gauge: Gauge, compute: Callable[[], Mapping[Any, Mapping[str, float]]]) -> list[dict[str, Any]]:
    """A row for each example and quantity that `compute` returns, or one that says why it failed."""
    try:
        found = compute()
    except (Exception, SystemExit) as error:  # a stranger's measure may raise anything, and the client has to go on
        log.debug("%s failed", gauge.title, exc_info=error)
        return [{"measure": gauge.title, "failure": reason(error)}]
    return [
        {
            "example": example,
            "measure": gauge.title,
            "quantity": name,
            "value": value,
            "larger_means": gauge.measure.quantities[name],
        }
        for example, values in found.items()
        for name, value in values.items()
    ]


def reason(error: BaseException) -> str:
    """Why a measure gave no value, in a line that begins after its name."""
    return one_line(what_it_said(error).removeprefix("measure: "))


def packed(rows: Sequence[Row]) -> Tensor:
    """Rows as the bytes of a tensor, which is what a client can keep."""
    return torch.tensor(list(json.dumps(rows).encode()), dtype=torch.uint8)


def unpacked(content: Any) -> list[dict[str, Any]]:
    """The inverse of `packed`, of an array."""
    found: list[dict[str, Any]] = json.loads(bytes(content))
    return found


def failures(rows: Sequence[Row]) -> list[str]:
    """A sentence for each measure and reason for which it has no value, with where that was."""
    where: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.get("failure"):
            place = f"round {row['round']}, client {row['client']}"
            where.setdefault((row["measure"], row["failure"]), []).append(place)
    return [
        f"{title} was not measured ({places[0]}{f', and {len(places) - 1} more' if len(places) > 1 else ''}): {why}"
        for (title, why), places in where.items()
    ]
