"""Where methods, data sets and software were published; `papers.bib` beside this file has them all."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

_VENUE_FIELDS = ("booktitle", "journal", "howpublished", "school", "institution")


@dataclass(frozen=True, kw_only=True)
class Paper:
    """Publication of a method or a data set; reports cite it.

    Attributes:
        title: the title.
        authors: their surnames, separated by commas.
        venue: conference or journal; it decides which kind of publication BibTeX is told.
        year: the year.
        url: where it can be read.
    """

    title: str
    authors: str
    venue: str
    year: int
    url: str = ""

    def __str__(self) -> str:
        stop = "" if self.title.endswith("?") else "."
        return f"{self.authors}: {self.title}{stop} {self.venue}, {self.year}."


def cite(key: str) -> Paper:
    """Return the paper with this key in `papers.bib`.

    >>> print(cite("zhu2019deep"))
    Zhu, Liu, Han: Deep Leakage from Gradients. NeurIPS, 2019.

    Raises:
        KeyError: the bibliography has no such key.
    """
    return _read_bibliography()[key]


@cache
def _read_bibliography() -> dict[str, Paper]:
    from pybtex.database import parse_string  # a tenth of a second, which only plug-ins need

    text = Path(__file__).with_suffix(".bib").read_text(encoding="utf-8")
    bibliography = {}
    for key, entry in parse_string(text, "bibtex").entries.items():
        fields = {name: _without_escapes(value) for name, value in entry.fields.items()}
        bibliography[key] = Paper(
            title=fields["title"].removeprefix("{").removesuffix("}"),
            authors=", ".join(_without_escapes(str(author)).strip("{}") for author in entry.persons["author"]),
            venue=next(fields[name] for name in _VENUE_FIELDS if name in fields),
            year=int(fields["year"]),
            url=fields.get("url", ""),
        )
    return bibliography


def _without_escapes(text: str) -> str:
    for character in "&%$#_":
        text = text.replace(f"\\{character}", character)
    return text
