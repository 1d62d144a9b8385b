"""Measures that a client takes of its own data in each round before it sends, as rows of a table.

They describe what the client would send without its defenses, for the examples and in the order
that it uses in this round.
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

from fedsim.base.errors import ends_training, error_reason, one_line
from fedsim.base.task import Loss
from fedsim.exposure.measure import Measure
from fedsim.training.cohort import LocalData
from fedsim.training.local_round import LocalRound
from fedsim.training.message_function import ClientMessage
from fedsim.training.settings import LocalTraining

log = logging.getLogger(__name__)
COLUMNS = ("round", "state", "client", "example", "measure", "quantity", "value", "larger_means", "failure")
"""Columns of the table.

`state` is the model that the client starts from. `example` is an index into the client's own
examples, empty for all of them together. `larger_means` says whether `more` or `less` is exposed
where the value is larger. A row has a `value`, NaN where it is undefined, or a `failure`, the reason
why there is none.
"""
STATE_KEY = "exposure"
"""Name of a client's rows in its `Context.state`."""
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class MeasureSchedule:
    """A measure, and when and for which examples an experiment computes it.

    Attributes:
        title: the name of the measure in the table's rows.
        measure: what is computed.
        per_example: whether it is also computed for each example, not only for all together.
        interval: rounds between two evaluations; the first round is one.
        memory_budget: bytes that may be used at once.
    """

    title: str
    measure: Measure
    per_example: bool
    interval: int
    memory_budget: int

    def is_due(self, number: int) -> bool:
        """Return whether clients compute the measure in round `number`."""
        return (number - 1) % self.interval == 0

    def compute_once(self, local: LocalRound) -> None:
        """Compute the measure for `local`, or for each of its examples where `per_example` is set.

        Raises:
            FedsimError: the measure does not apply to this task, model or training.
        """
        self.measure_examples(local.client_message, local.indices) if self.per_example else self.measure_batch(
            local.client_message
        )

    def measure_batch(self, sent: Callable[[int], ClientMessage]) -> dict[Any, dict[str, float]]:
        """Return the values for all examples together, under the example name "".

        Args:
            sent: makes the client's message within a memory budget, as `LocalRound.sent`.
        """
        return {"": self.measure.compute_for_message(sent(self.memory_budget))}

    def measure_examples(self, sent: Callable[[int], ClientMessage], indices: Tensor) -> dict[Any, dict[str, float]]:
        """Return the values for each example, by its index.

        Args:
            sent: makes the client's message within a memory budget, as `LocalRound.sent`.
            indices: `example`, its index among the client's examples.
        """
        values_by_name = self.measure.compute_per_example_for_message(sent(self.memory_budget))
        values_by_example: dict[Any, dict[str, float]] = {}
        for position, example in enumerate(indices.tolist()):
            values_by_example[example] = {name: float(values[position]) for name, values in values_by_name.items()}
        return values_by_example


def measure_client(
    schedules: Sequence[MeasureSchedule], model: nn.Module, share: LocalData, training: LocalTraining, loss: Loss
) -> Iterator[dict[str, Any]]:
    """Compute all measures for one client and yield their rows.

    A measure that fails gives a row with the reason, and stops no other.

    Args:
        model: with the weights that the server broadcast.
        share: all examples that the client trains on.
        training: local training as the server's message asks for it.
        loss: the task's loss, before label smoothing.
    """
    local = LocalRound.create(model, share, training, loss)
    make_message = cache(local.client_message)  # shared by the measures, with all that they compute of it
    for schedule in schedules:
        yield from _measure_rows(schedule, partial(schedule.measure_batch, make_message))
        if schedule.per_example:
            yield from _measure_rows(schedule, partial(schedule.measure_examples, make_message, local.indices))


def _measure_rows(
    schedule: MeasureSchedule, compute: Callable[[], Mapping[Any, Mapping[str, float]]]
) -> list[dict[str, Any]]:
    """Return a row for each example and quantity, or one row with the failure of `compute`."""
    try:
        values_by_example = compute()
    except (Exception, SystemExit) as error:  # a plug-in may raise anything; the client goes on
        if ends_training(error):
            raise
        log.debug("%s failed", schedule.title, exc_info=error)
        return [{"measure": schedule.title, "failure": failure_reason(error)}]
    rows = []
    for example, values in values_by_example.items():
        for name, value in values.items():
            row = {
                "example": example,
                "measure": schedule.title,
                "quantity": name,
                "value": value,
                "larger_means": schedule.measure.quantities[name],
            }
            rows.append(row)
    return rows


def failure_reason(error: BaseException) -> str:
    """Return in one line why a measure gave no value, without the prefix "measure: "."""
    return one_line(error_reason(error).removeprefix("measure: "))


def pack_rows(rows: Sequence[Row]) -> Tensor:
    """Encode rows as JSON in a tensor of bytes, which a client can keep in its state.

    >>> unpack_rows(pack_rows([{"measure": "lavp", "value": 0.5}]).numpy())
    [{'measure': 'lavp', 'value': 0.5}]
    """
    return torch.tensor(list(json.dumps(rows).encode()), dtype=torch.uint8)


def unpack_rows(content: Any) -> list[dict[str, Any]]:
    """Decode rows from an array of bytes, the inverse of `pack_rows`."""
    rows: list[dict[str, Any]] = json.loads(bytes(content))
    return rows


def failure_sentences(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for each measure and reason for missing values, and where they are."""
    updates_by_failure: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.get("failure"):
            update = f"round {row['round']}, client {row['client']}"
            updates_by_failure.setdefault((row["measure"], row["failure"]), []).append(update)
    sentences = []
    for (title, failure), updates in updates_by_failure.items():
        more = f", and {len(updates) - 1} more" if len(updates) > 1 else ""
        sentences.append(f"{title} was not measured ({updates[0]}{more}): {failure}")
    return sentences
