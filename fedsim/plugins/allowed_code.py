"""The references to code, `module:attribute`, that the current command may load.

A run folder may come from somebody else, and its settings are nested, so no list of the settings
that can name code would be complete. Every reference is therefore checked when it is loaded: the
command line loads only references that the user typed, those in files of the user's own, and with
`--trust` any. A Python program, which could import the same code itself, is not restricted.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from fedsim.base.environment import environment
from fedsim.base.errors import TrustError

ALLOWED_CODE_VARIABLE = "FEDSIM_ALLOWED_CODE"
"""Environment variable with a JSON list of references, which child processes inherit."""
_ANYTHING = "*"
ANY_CODE = json.dumps([_ANYTHING])
"""Value of the variable that allows every reference."""
# It begins where a word does and takes nothing back, or a long text would take the square of its length.
_REFERENCE = re.compile(r"(?<![\w.])(?:[^\W\d]\w*+\.)*+[^\W\d]\w*+:[^\W\d]\w*(?:\.\w+)*")


def find_references(value: object, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Find references `module:attribute` in the texts of nested tables and lists.

    >>> list(find_references({"defense": [{"measure": {"name": "m:X"}}], "rounds": 3}))
    [(('defense', '0', 'measure', 'name'), 'm:X')]

    Yields:
        The keys that lead to the text, and a reference in it.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from find_references(inner, (*keys, str(key)))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from find_references(inner, (*keys, str(index)))
    elif isinstance(value, str):
        for reference in _REFERENCE.findall(value):
            yield keys, reference


@contextmanager
def restrict_code(*sources: object, anything: bool = False) -> Iterator[None]:
    """Restrict the block to references in `sources`, and those that `allow_code` adds.

    Args:
        sources: values with references, such as words that the user typed.
        anything: allow any reference.
    """
    with environment({ALLOWED_CODE_VARIABLE: ANY_CODE if anything else json.dumps([])}):
        allow_code(*sources)
        yield


def allow_code(*sources: object) -> None:
    """Allow the references in these values, which are the user's own."""
    if ALLOWED_CODE_VARIABLE in os.environ:
        allowed = {*json.loads(os.environ[ALLOWED_CODE_VARIABLE])}
        allowed.update(reference for _, reference in find_references(sources))
        os.environ[ALLOWED_CODE_VARIABLE] = json.dumps(sorted(allowed))


def check_allowed(reference: str) -> None:
    """Raise TrustError where the current command may not load `reference`."""
    allowed = json.loads(os.environ.get(ALLOWED_CODE_VARIABLE, ANY_CODE))
    if _ANYTHING not in allowed and reference not in allowed:
        raise TrustError(
            f"'{reference}' is code that neither you nor a file of yours names, so it is not run; pass --trust if "
            "you trust whoever wrote the files"
        )
