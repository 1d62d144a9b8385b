"""Where a method, a data set or a library was published."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Paper:
    """Where a method or a data set was published; the report cites it.

    Attributes:
        authors: their surnames, separated by commas.
        venue: the conference or journal; what kind of publication it is follows from it in BibTeX.
    """

    title: str
    authors: str
    venue: str
    year: int
    url: str = ""

    def __str__(self) -> str:
        stop = "" if self.title.endswith("?") else "."
        return f"{self.authors}: {self.title}{stop} {self.venue}, {self.year}."
