"""How well claims and guesses explain an update, by as few gradients as the floors need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from fedsim.audit.evaluation.line_search import LinePoint
from fedsim.audit.evaluation.measurement_cache import MeasurementCache
from fedsim.audit.evaluation.measurements import MetricValues
from fedsim.audit.evaluation.similarity import SIMILARITY_AT_BROADCAST, SIMILARITY_ON_LINE, AttackedUpdate
from fedsim.base.errors import FedsimError, describe_error

_CLOSE = 0.05
"""Most by which a guess may explain the update worse at w_t than the best one does, and be searched on the line."""


def measure_similarities(compute: Callable[[], Mapping[str, float]]) -> MetricValues:
    """Compute how well examples explain the update, or say why that is not known."""
    try:
        similarities = compute()
    except FedsimError as error:
        return {SIMILARITY_AT_BROADCAST: str(error)}
    except Exception as error:  # a foreign model may raise anything; no other score is lost for it
        return {SIMILARITY_AT_BROADCAST: f"the model raised {describe_error(error)}"}
    return {metric: torch.tensor([value]) for metric, value in similarities.items()}


def measure_guess_similarities(
    message: AttackedUpdate, guesses: Mapping[str, Tensor], labels: Tensor, cache: MeasurementCache
) -> dict[str, MetricValues]:
    """Return how well each guess explains the update.

    The floor on the line is that of the best guess, and a search there takes several gradients,
    where the value at w_t takes one. So only guesses that are close to the best one at w_t are
    searched, and the others count with that value, which the line does not exceed.
    """
    update = message.update

    def measure_at_broadcast(missing: list[int]) -> list[MetricValues]:
        tensors = [tuple(guesses.values())[position] for position in missing]
        return _measure_at_broadcast(message, tensors, labels)

    # All at w_t.
    inputs = [("similarity at w_t", update.round, update.client, guess, labels) for guess in guesses.values()]
    measured = cache.find_several(measure_at_broadcast, inputs)
    values: dict[str, MetricValues] = {}
    at_broadcast: dict[str, float] = {}
    for name, guess_values in zip(guesses, measured, strict=True):
        values[name] = dict(guess_values)
        value = values[name][SIMILARITY_AT_BROADCAST]
        if isinstance(value, Tensor):
            at_broadcast[name] = value.item()
    if update.gradient is not None:
        return values
    # The best ones on the line.
    best = min(at_broadcast.values(), default=0.0)
    searched: dict[str, tuple[Tensor, float]] = {}
    for name, distance in sorted(at_broadcast.items(), key=lambda item: item[1]):
        values[name][SIMILARITY_ON_LINE] = torch.tensor([distance])
        if distance <= best + _CLOSE:
            searched[name] = guesses[name], distance
    tensors = [guess for guess, _ in searched.values()]
    search = partial(_search_guesses, message, list(searched.values()), labels)
    searched_values = cache.find(search, "similarity on the line", update.round, update.client, labels, *tensors)
    for name, line_values in zip(searched, searched_values, strict=True):
        values[name] |= line_values
    return values


def _measure_at_broadcast(message: AttackedUpdate, guesses: Sequence[Tensor], labels: Tensor) -> list[MetricValues]:
    """Return how well guesses explain the update at w_t; all at once where that saves time."""

    def measure(guess: Tensor) -> dict[str, float]:
        return {SIMILARITY_AT_BROADCAST: message.similarity_at_broadcast(guess, labels)}

    try:
        similarities = message.similarities_at_broadcast(guesses, labels)
    except Exception:  # also of a foreign model; each says for itself what is wrong
        similarities = None
    if similarities is not None:
        return [{SIMILARITY_AT_BROADCAST: torch.tensor([value])} for value in similarities]
    return [measure_similarities(partial(measure, guess)) for guess in guesses]


def _search_guesses(
    message: AttackedUpdate, guesses: Sequence[tuple[Tensor, float]], labels: Tensor
) -> list[MetricValues]:
    """Return how well guesses explain the update on the line, where the best one of them is searched for.

    Lines of guesses have their valleys at about the same position. So each guess is measured where
    the best one so far is lowest, and searched only if it is lower there.

    Args:
        guesses: examples and their similarity at w_t; the best ones first.
    """
    position = "position"

    def search(guess: Tensor, at_broadcast: float, rival: LinePoint | None) -> dict[str, float]:
        lowest = message.search_line(guess, labels, at_broadcast, rival)
        return {SIMILARITY_ON_LINE: lowest.value, position: lowest.position}

    values: list[MetricValues] = []
    best: LinePoint | None = None
    for guess, at_broadcast in guesses:
        measured = measure_similarities(partial(search, guess, at_broadcast, best))
        where = measured.pop(position, None)
        if isinstance(where, Tensor):
            value = measured[SIMILARITY_ON_LINE]
            assert isinstance(value, Tensor)
            if best is None or value.item() < best.value:
                best = LinePoint(value.item(), where.item())
        values.append(measured)
    return values
