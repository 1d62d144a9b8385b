"""What clients told the server in clear: by kind of message and by name, of what kind the values are.

A server need not attack what it is told. Where values have a row for each of a client's examples, that is said aloud.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedsim.recording.header import count_in
from fedsim.recording.messages import Messages, Sent

MASKED = "secaggplus_configs"
"""What Flower's SecAgg+ calls the record of its stages."""
_COUNTS = re.compile(r"num[-_]?(examples|samples)|n_samples", re.IGNORECASE)
_PICKLE = re.compile(rb"\x80[\x02-\x05].*\.", re.DOTALL)


@dataclass(kw_only=True)
class ClearText:
    """What clients said under one name in messages of one kind.

    Attributes:
        kind: of the messages, such as `train` or `query.survival`.
        name: record and key.
        clients: who said it.
        kinds: what the values are, such as `float64 array`.
        sizes: numbers of values along the first axis, or of bytes; empty of single numbers and texts.
        numbers: lowest and highest of single numbers.
        per_example: whether there is a row for each example: as many rows as the client says it has examples, or other
            numbers of rows from client to client.
    """

    kind: str
    name: str
    clients: set[int] = field(default_factory=set)
    kinds: set[str] = field(default_factory=set)
    sizes: set[int] = field(default_factory=set)
    numbers: tuple[float, float] | None = None
    per_example: bool = False

    @property
    def what(self) -> str:
        """In a few words."""
        if self.name.startswith(f"{MASKED}."):
            return "a stage of SecAgg+: keys, shares and masked vectors"
        text = " or ".join(sorted(self.kinds))
        if self.sizes:
            text += f", {' to '.join(map(str, sorted({min(self.sizes), max(self.sizes)})))} long"
        elif self.numbers is not None:
            low, high = self.numbers
            text += f", {low:.4g}" + (f" to {high:.4g}" if high > low else "")
        return text


def clear_texts(exchanges: Iterable[Messages]) -> list[ClearText]:
    """What clients said in these messages, in the order in which it was said first; what failed says nothing.

    Arrays of which a recording keeps type and shape alone are those of updates, and left out.
    """
    found: dict[tuple[str, str], ClearText] = {}
    rows: dict[tuple[str, str], dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for messages in exchanges:
        for reply in messages.replies:
            count = _count(reply)
            for name, value in _values(reply):
                key = messages.kind, name
                said = found.setdefault(key, ClearText(kind=messages.kind, name=name))
                said.clients.add(reply.client)
                kind, size = _described(value)
                said.kinds.add(kind)
                if size is None:
                    if isinstance(value, int | float):
                        low, high = said.numbers or (value, value)
                        said.numbers = float(min(low, value)), float(max(high, value))
                    continue
                said.sizes.add(size)
                if "bytes" not in kind:
                    rows[key][reply.client].add(size)
                    said.per_example |= size > 1 and size == count
    for key, sizes in rows.items():
        differing = len(set().union(*sizes.values())) > 1 and all(len(own) == 1 for own in sizes.values())
        found[key].per_example |= differing and not key[1].startswith(f"{MASKED}.")
    return list(found.values())


def _values(reply: Sent) -> Iterable[tuple[str, Any]]:
    for records in (reply.arrays, reply.metrics, reply.config):
        for record, values in records.items():
            for key, value in values.items():
                if records is not reply.arrays or not isinstance(value, str):
                    yield f"{record}.{key}" if record else key, value


def _count(reply: Sent) -> int:
    """N, as the client says it; 0 where it does not."""
    said = [v for values in reply.metrics.values() for k, v in values.items() if _COUNTS.fullmatch(k)]
    return count_in(next(iter(said), 0))


def _described(value: Any) -> tuple[str, int | None]:
    """Of what kind it is, and how many rows, items or bytes it has."""
    if isinstance(value, np.ndarray):
        if value.dtype == np.uint8 and value.ndim == 1:  # bytes, too
            return ("a pickle of bytes" if _PICKLE.fullmatch(value.tobytes()) else "bytes"), len(value)
        each = f" with rows of {' x '.join(map(str, value.shape[1:]))}" if value.ndim > 1 else ""
        return f"{value.dtype} array{each}", len(value) if value.ndim else None
    if isinstance(value, list):
        kinds: Mapping[bool, str] = {True: "numbers", False: "texts"}
        return f"list of {kinds[all(isinstance(item, int | float) for item in value)]}", len(value)
    return {bool: "true or false", int: "number", float: "number", str: "text"}.get(type(value), "value"), None
