"""Which code the files of this work may name: asked where `module:attribute` is loaded, whoever names it.

A run folder may be a stranger's, and its settings are nested: a list of the places in which a file can name code is
never whole. So the command line loads nothing but what the user typed, what stands in a file of the user's own, and
with `--trust` anything. A Python program, which could import the same code itself, is not restricted.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from fedsim.errors import TrustError

_VARIABLE = "FEDSIM_ALLOWED_CODE"
"""A JSON list of references in the environment, so that processes that are started meanwhile keep to it, too."""
_ANYTHING = "*"
_REFERENCE = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*(?:\.\w+)*")


def references_in(value: object, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Find what looks like `module:attribute` in texts, however deep in tables and lists.

    >>> list(references_in({"defense": [{"measure": {"name": "m:X"}}], "rounds": 3}))
    [(('defense', '0', 'measure', 'name'), 'm:X')]

    Yields:
        The keys that lead to a text, and a reference in it.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from references_in(inner, (*place, str(key)))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from references_in(inner, (*place, str(number)))
    elif isinstance(value, str):
        for reference in _REFERENCE.findall(value):
            yield place, reference


@contextmanager
def restricted_code(*named: object, anything: bool = False) -> Iterator[None]:
    """Load nothing within but what `named` names, and what is allowed meanwhile.

    Args:
        named: values with references, such as words that the user typed.
        anything: load whatever is named.
    """
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = json.dumps([_ANYTHING] if anything else [])
    allow_code(*named)
    try:
        yield
    finally:
        os.environ.pop(_VARIABLE)
        if before is not None:
            os.environ[_VARIABLE] = before


def allow_code(*named: object) -> None:
    """Let code be loaded that is named in these values, which are the user's own."""
    if _VARIABLE in os.environ:
        allowed = {*json.loads(os.environ[_VARIABLE]), *(reference for _, reference in references_in(named))}
        os.environ[_VARIABLE] = json.dumps(sorted(allowed))


def check_allowed(reference: str) -> None:
    """Raise TrustError where this work may not load `reference`."""
    allowed = json.loads(os.environ.get(_VARIABLE, f'["{_ANYTHING}"]'))
    if _ANYTHING not in allowed and reference not in allowed:
        raise TrustError(
            f"'{reference}' is code that neither you nor a file of yours names, and is not run unasked; pass --trust "
            "if you trust whoever wrote the files"
        )
