"""Where methods, data sets and software were published; `papers.bib` beside this file has them all.

A docstring cites a paper by its key in brackets, as in `[Zhu2019], Sect. 4`. Whoever shows the
docstring adds what `list_citations` returns for it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_QUOTED_KEY = re.compile(r"\[([A-Z][A-Za-z]*\d{4}[a-z]?)\]")
_ENTRY = re.compile(r"^@\w+\{([^,]+),\n.*?^\}", re.MULTILINE | re.DOTALL)
_VENUE_FIELDS = ("booktitle", "journal", "howpublished", "school", "institution")


@dataclass(frozen=True, kw_only=True)
class Paper:
    """Publication of a method or a data set; reports cite it.

    Attributes:
        title: the title.
        authors: their surnames, separated by commas.
        venue: conference or journal.
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

    >>> print(cite("Zhu2019"))
    Zhu, Liu, Han: Deep Leakage from Gradients. NeurIPS, 2019.

    Raises:
        KeyError: the bibliography has no such key.
    """
    return read_bibliography()[key]


def find_entry(paper: Paper) -> str | None:
    """Return the BibTeX entry of `paper` as it stands in `papers.bib`; None if there is none."""
    for key, known_paper in read_bibliography().items():
        if known_paper == paper:
            return _read_entries()[key]
    return None


def quoted_keys(text: str) -> list[str]:
    """Return the keys that `text` quotes in brackets, each once, in the order of the text.

    >>> quoted_keys("As [Zhu2019], Sect. 4, and [Zhao2020] do; [0, 1] is not a key.")
    ['Zhu2019', 'Zhao2020']
    """
    return list(dict.fromkeys(_QUOTED_KEY.findall(text)))


def list_citations(text: str) -> list[str]:
    """Return the papers that `text` quotes by key, a line each with its key and address.

    >>> list_citations("As [Nocedal2006], Algorithm 7.4, does.")
    ['[Nocedal2006] Nocedal, Wright: Numerical Optimization. Springer, 2006.']
    """
    bibliography = read_bibliography()
    lines = []
    for key in quoted_keys(text):
        if key in bibliography:  # a stranger's docstring may have brackets of its own
            paper = bibliography[key]
            lines.append(f"[{key}] {paper} {paper.url}".rstrip())
    return lines


@cache
def _read_entries() -> dict[str, str]:
    """Return the entries of `papers.bib`, each as it stands, by key."""
    text = Path(__file__).with_suffix(".bib").read_text(encoding="utf-8")
    return {match[1]: match[0] for match in _ENTRY.finditer(text)}


@cache
def read_bibliography() -> dict[str, Paper]:
    """Read all papers of `papers.bib` by key."""
    from pybtex.database import parse_string  # a tenth of a second, which only plug-ins need

    bibliography = {}
    for key, entry in parse_string("\n".join(_read_entries().values()), "bibtex").entries.items():
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
