"""Values that clients sent to the server in clear, summarised by kind of message and by name.

A server need not attack what it receives in clear. Values with one row for each of a client's
examples are marked, because they reveal the most.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedsim.recording.header import names_example_count, parse_count
from fedsim.recording.messages import RecordedExchange, RecordedMessage

SECAGG_RECORD = "secaggplus_configs"
"""Record in which Flower's SecAgg+ sends its stages."""
_PICKLE = re.compile(rb"\x80[\x02-\x05].*\.", re.DOTALL)


@dataclass(kw_only=True)
class ClearText:
    """Values that clients sent in clear under one name in messages of one kind.

    Attributes:
        kind: kind of the messages, such as `train` or `query.survival`.
        name: record and key.
        clients: clients that sent such a value.
        kinds: kinds of the values, such as `float64 array`.
        sizes: numbers of values along the first axis, or of bytes; empty for single numbers and
            texts.
        numbers: lowest and highest of single numbers.
        per_example: whether there is a row for each example: as many rows as the client reports
            examples, or a number of rows that differs from client to client.
    """

    kind: str
    name: str
    clients: set[int] = field(default_factory=set)
    kinds: set[str] = field(default_factory=set)
    sizes: set[int] = field(default_factory=set)
    numbers: tuple[float, float] | None = None
    per_example: bool = False

    @property
    def description(self) -> str:
        """Return a description in a few words."""
        if self.name.startswith(f"{SECAGG_RECORD}."):
            return "a stage of SecAgg+: keys, shares and masked vectors"
        text = " or ".join(sorted(self.kinds))
        if self.sizes:
            text += f", {' to '.join(map(str, sorted({min(self.sizes), max(self.sizes)})))} long"
        elif self.numbers is not None:
            low, high = self.numbers
            text += f", {low:.4g}" + (f" to {high:.4g}" if high > low else "")
        return text


def find_clear_texts(exchanges: Iterable[RecordedExchange]) -> list[ClearText]:
    """Return the values that clients sent in clear, in the order in which each name came first.

    Arrays of which a recording keeps only type and shape belong to updates, and are left out.
    """
    texts_by_key: dict[tuple[str, str], ClearText] = {}
    num_rows: dict[tuple[str, str], dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for exchange in exchanges:
        for reply in exchange.replies:
            count = count_examples(reply)
            for name, value in _iterate_values(reply):
                key = exchange.kind, name
                clear_text = texts_by_key.setdefault(key, ClearText(kind=exchange.kind, name=name))
                clear_text.clients.add(reply.client)
                kind, size = _describe_value(value)
                clear_text.kinds.add(kind)
                if size is None:
                    if isinstance(value, int | float):
                        low, high = clear_text.numbers or (value, value)
                        clear_text.numbers = float(min(low, value)), float(max(high, value))
                    continue
                clear_text.sizes.add(size)
                if "bytes" not in kind:
                    num_rows[key][reply.client].add(size)
                    clear_text.per_example |= size > 1 and size == count

    # A number of rows that is constant for each client and differs between clients follows N.
    for key, sizes_of_clients in num_rows.items():
        all_sizes = set[int]().union(*sizes_of_clients.values())
        follows_client = len(all_sizes) > 1 and all(len(sizes) == 1 for sizes in sizes_of_clients.values())
        texts_by_key[key].per_example |= follows_client and not key[1].startswith(f"{SECAGG_RECORD}.")
    return list(texts_by_key.values())


def _iterate_values(reply: RecordedMessage) -> Iterable[tuple[str, Any]]:
    for records in (reply.arrays, reply.metrics, reply.config):
        for record, values in records.items():
            for key, value in values.items():
                if records is not reply.arrays or not isinstance(value, str):
                    yield f"{record}.{key}" if record else key, value


def count_examples(reply: RecordedMessage) -> int:
    """Return N as the client reports it; 0 where it does not."""
    for metrics in reply.metrics.values():
        for name, value in metrics.items():
            if names_example_count(name):
                return parse_count(value)
    return 0


def _describe_value(value: Any) -> tuple[str, int | None]:
    """Return the kind of a value, and its number of rows, items or bytes."""
    if isinstance(value, np.ndarray):
        if value.dtype == np.uint8 and value.ndim == 1:  # recorded bytes are such arrays
            return ("a pickle of bytes" if _PICKLE.fullmatch(value.tobytes()) else "bytes"), len(value)
        row_shape = f" with rows of {' x '.join(map(str, value.shape[1:]))}" if value.ndim > 1 else ""
        return f"{value.dtype} array{row_shape}", len(value) if value.ndim else None
    if isinstance(value, list):
        are_numbers = all(isinstance(item, int | float) for item in value)
        return f"list of {'numbers' if are_numbers else 'texts'}", len(value)
    return {bool: "true or false", int: "number", float: "number", str: "text"}.get(type(value), "value"), None
