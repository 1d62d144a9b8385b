"""The publication of a method, a data set or a library."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Paper:
    """Publication of a method or data set, which the report cites.

    Attributes:
        authors: surnames, separated by commas.
        venue: conference or journal, from which the type of a BibTeX entry follows.
    """

    title: str
    authors: str
    venue: str
    year: int
    url: str = ""

    def __str__(self) -> str:
        stop = "" if self.title.endswith("?") else "."
        return f"{self.authors}: {self.title}{stop} {self.venue}, {self.year}."
