"""What answers of clients say in clear about single people, found from arrays and metrics and not by app."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.base.errors import TranscriptError
from fedsim.recording.clear_text import SECAGG_RECORD, count_examples
from fedsim.recording.cohort_answers import is_histogram
from fedsim.recording.header import EXAMPLE_COUNT_KEYS, parse_count
from fedsim.recording.messages import RecordedExchange, RecordedMessage
from fedsim.recording.transcript import Transcript

_QUERY = "query"
_MAX_CELLS = 10_000
"""Most cells of a histogram that is looked for among updates."""
_MAX_VALUES = 4
"""Most values in one sentence."""
_COUNT = re.compile(r"(.*?)[-_ ]?(count|num|size|n)$", re.IGNORECASE)
_SQUARES = re.compile(r"(.*?)[-_ ]?(sum[-_ ]?)?(sqd|squares|squared|sum2|sumsq)$", re.IGNORECASE)
_SUM = re.compile(r"(.*?)[-_ ]?(sum|total)$", re.IGNORECASE)
_ORDERED = re.compile(r"(^|[-_ .])(min|max|minimum|maximum|median|quantiles?|percentiles?|q\d+|p\d+)($|[-_ .\d])", re.I)
_ROUNDING = 1e-9


def describe_answers(exchanges: Iterable[RecordedExchange]) -> dict[int, list[str]]:
    """Return for each client sentences on the numbers that it answered to queries.

    Answers are the replies to messages of the kind `query`, and histograms in any reply: whole
    numbers that add up to N.
    """
    sentences: dict[int, dict[str, None]] = {}
    for exchange in exchanges:
        is_query = exchange.kind.split(".")[0] == _QUERY
        sent = {message.node: message for message in exchange.sent}
        for reply in exchange.replies:
            if reply.error or SECAGG_RECORD in reply.config:
                continue
            if not is_query and reply.node in sent:
                reply = replace(reply, arrays=_select_changed(reply.arrays, sent[reply.node].arrays))
            found = list(_describe_reply(reply, only_histograms=not is_query))
            sentences.setdefault(reply.client, {}).update(dict.fromkeys(found))
    return {client: list(found) for client, found in sorted(sentences.items()) if found}


def _select_changed(arrays: Mapping[str, Any], sent: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the arrays of a reply without those that came back as they were sent, as a layer that is not trained."""
    old = [value for record in sent.values() for value in record.values() if isinstance(value, np.ndarray)]
    changed: dict[str, dict[str, Any]] = {}
    for record, values in arrays.items():
        changed[record] = {
            key: value
            for key, value in values.items()
            if not (isinstance(value, np.ndarray) and any(np.array_equal(value, other) for other in old))
        }
    return changed


def read_first_updates(transcript: Transcript) -> Iterator[RecordedExchange]:
    """Yield the updates of single clients in the first round that can be read, as replies to training messages."""
    for number in transcript.rounds:
        replies: list[RecordedMessage] = []
        try:
            for reply in transcript.header(number).replies:
                if reply.members or not transcript.holds_arrays(number, reply):
                    continue
                update = transcript.recorded_update(number, reply.client, reply.message)
                small = {name: tensor for name, tensor in update.after.items() if tensor.numel() <= _MAX_CELLS}
                small = {
                    name: tensor
                    for name, tensor in small.items()
                    if name not in update.before or not tensor.equal(update.before[name])
                }
                arrays = {name: tensor.double().numpy() for name, tensor in small.items() if not tensor.is_complex()}
                counts = {"metrics": {EXAMPLE_COUNT_KEYS[0]: update.num_examples}}
                replies.append(RecordedMessage(node=0, client=reply.client, metrics=counts, arrays={"arrays": arrays}))
        except TranscriptError:  # which has been told
            continue
        yield RecordedExchange(number=number, kind="train", round=number, recorded_as=number, sent=[], replies=replies)
        return


def _describe_reply(reply: RecordedMessage, *, only_histograms: bool) -> Iterator[str]:
    arrays, numbers = _read_numbers(reply)
    reported = count = count_examples(reply)
    if not count and not only_histograms and len(arrays) == 2:  # times with events need no N to be seen
        count = _count_events(list(arrays.values()))
    rows = [name for name, values in arrays.items() if not only_histograms and 1 < count == len(values)]
    rows = [name for name in rows if arrays[name].ndim > 1 or not is_histogram(arrays[name], count)]
    if rows:
        text = _describe_rows({name: arrays[name] for name in rows}, count)
        yield text if reported else f"{text}; no N is reported, so this goes by their form"
    for name, values in arrays.items():
        if name not in rows:
            yield from _describe_array(name, values, count, only_histograms=only_histograms)
    if not only_histograms:
        yield from _describe_numbers(numbers, count)


def _count_events(columns: Sequence[NDArray[Any]]) -> int:
    """Return the number of rows of two columns that look like times and events; else 0.

    Times are not negative, so that weights with a bias are no event table.
    """
    if len({len(values) for values in columns}) > 1 or any(values.ndim != 1 for values in columns):
        return 0
    flags = [set(np.unique(values).tolist()) == {0, 1} for values in columns]
    if sum(flags) != 1:
        return 0
    times = columns[flags.index(False)]
    return 0 if (times < 0).any() else len(times)


def _read_numbers(reply: RecordedMessage) -> tuple[dict[str, NDArray[Any]], dict[str, float]]:
    """Return arrays and lists of numbers, and single numbers, by record and key."""
    arrays: dict[str, NDArray[Any]] = {}
    numbers: dict[str, float] = {}
    for records in (reply.arrays, reply.metrics, reply.config):
        for record, values in records.items():
            for key, value in values.items():
                is_list = isinstance(value, list) and value and all(isinstance(item, int | float) for item in value)
                if is_list or (isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.ndim):
                    arrays[f"{record}.{key}"] = np.asarray(value)
                elif isinstance(value, int | float) and not isinstance(value, bool) and records is reply.metrics:
                    numbers[f"{record}.{key}"] = float(value)
    return {name: values for name, values in arrays.items() if values.size}, numbers


def _describe_rows(columns: Mapping[str, NDArray[Any]], count: int) -> str:
    """Say that arrays hold a row for each person, and whether these are times with events."""
    names = ", ".join(columns)
    flags = [name for name, values in columns.items() if set(np.unique(values).tolist()) <= {0, 1}]
    times = [name for name in columns if name not in flags]
    if len(columns) == 2 and flags and times:
        low, high = columns[times[0]].min(), columns[times[0]].max()
        events = int(columns[flags[0]].sum())
        return (
            f"{names}: an event table of {count} people, one row each, with times from {low:g} to {high:g} and "
            f"{events} events; these are the records themselves"
        )
    return f"{names}: one row for each of {count} people; these are the records themselves"


def _describe_array(name: str, values: NDArray[Any], count: int, *, only_histograms: bool) -> Iterator[str]:
    if values.dtype.kind != "b" and is_histogram(values.astype(float), count) and (count or not only_histograms):
        total, alone = int(values.sum()), int((values == 1).sum())
        text = f"{name}: counts of {total} {'person' if total == 1 else 'people'} in {values.size} cells"
        if alone:
            cells = ", ".join(map(str, np.flatnonzero(values.reshape(-1) == 1)[:_MAX_VALUES]))
            people = f"{alone} of them are alone in a cell" if alone > 1 else "one of them is alone in a cell"
            text += f", and {people} ({cells}{', ...' if alone > _MAX_VALUES else ''}), which is its value"
        yield text
    elif not only_histograms and _ORDERED.search(name):
        yield f"{name}: {values.size} order statistics, each the value of a person or of two{_name_people(count)}"
    elif not only_histograms:
        yield f"{name}: {values.size} numbers{_name_people(count)}"


def _describe_numbers(numbers: Mapping[str, float], count: int) -> Iterator[str]:
    """Say of how many people each number is, and what sums over one or two people give away."""
    counts = {match[1]: numbers[name] for name in numbers if (match := _COUNT.fullmatch(name))}
    squares = {match[1]: numbers[name] for name in numbers if (match := _SQUARES.fullmatch(name))}
    for name, value in numbers.items():
        stem = match[1] if (match := _SUM.fullmatch(name)) else name
        people = parse_count(counts.get(stem, count))  # a count with noise says of nobody that it is alone
        if _COUNT.fullmatch(name) or _SQUARES.fullmatch(name) or name.rpartition(".")[2] in EXAMPLE_COUNT_KEYS:
            continue
        if _ORDERED.search(name) and not match:
            yield f"{name}: {value:g} is the value of a person or of two{_name_people(people)}"
        elif people == 1:
            yield f"{name}: {value:g} is of one person, whose value it is"
        elif match and stem in squares and people > 1:
            yield _describe_sum(name, value, squares[stem], people)
        elif people:
            yield f"{name}: {value:g}, over {people} people"
        else:
            yield f"{name}: {value:g}, over a number of people that is not said"


def _describe_sum(name: str, total: float, squares: float, people: int) -> str:
    """Say what a sum and a sum of squares give away."""
    variance = squares / people - (total / people) ** 2
    if abs(variance) <= _ROUNDING * abs(squares / people):
        return f"{name}: {total:g} with its squares, over {people} people, who all have the value {total / people:g}"
    if people == 2 and variance > 0:
        low, high = total / 2 - variance**0.5, total / 2 + variance**0.5
        return f"{name}: {total:g} with its squares, over two people, whose values they give: {low:g} and {high:g}"
    return f"{name}: {total:g} with its squares, over {people} people"


def _name_people(people: int) -> str:
    return f" of {people}" if people else ""
