"""What docstrings say of settings: the sections `Args` and `Attributes` of a class and its bases."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

_SECTION = re.compile(r"^(?:Args|Attributes):\n((?:(?: .*)?\n)*)", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(\w+): (.*\n(?: {8}.*\n)*)", re.MULTILINE)


def read_setting_texts(cls: type) -> dict[str, str]:
    """Return what docstrings say of each setting; a class takes precedence over its bases.

    >>> class Blur:
    ...     '''Blur images.
    ...
    ...     Args:
    ...         width: of the kernel,
    ...             in pixels.
    ...     '''
    >>> read_setting_texts(Blur)
    {'width': 'of the kernel, in pixels.'}
    """
    texts: dict[str, str] = {}
    for owner in reversed(inspect.getmro(cls)):
        texts |= _read_entries(owner.__doc__ or "")
    return texts


def _read_entries(docstring: str) -> Iterator[tuple[str, str]]:
    """Yield name and text of each entry, the text in one line."""
    for section in _SECTION.findall(f"{inspect.cleandoc(docstring)}\n"):
        for name, text in _ENTRY.findall(section):
            yield name, " ".join(text.split())
