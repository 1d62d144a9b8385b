"""Papers that a report cites: those of the attacks, defenses, measures, data and software that a run used."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fedsim.audit.audit import Audit
from fedsim.base.errors import FedsimError
from fedsim.base.papers import Paper, cite
from fedsim.plugins import registry
from fedsim.report.summary import join_titles

log = logging.getLogger(__name__)

FLOWER = cite("beutel2020flower")
_ENTRY_TYPES = {
    "thesis": ("phdthesis", "school"),
    "technical report": ("techreport", "institution"),
    "journal|transactions|letters|arxiv|proceedings of the ieee": ("article", "journal"),
    "repository|preprint|software": ("misc", "howpublished"),
    "": ("inproceedings", "booktitle"),
}
"""Type of a BibTeX entry and field for the venue, by words in the venue; the first match counts."""


def papers(audit: Audit | None, attacks: Mapping[str, Any], *, recorded: bool) -> list[tuple[str, Paper]]:
    """Return what to cite, each paper once, with what it is cited for.

    Args:
        attacks: by title, the class of each attack, None where nobody knows it.
        recorded: whether there is a recording, which Flower's messages are in.
    """
    used = [(title, getattr(cls, "paper", None)) for title, cls in attacks.items()]
    used += _papers_of_federation(audit) if audit else []
    used += [("Flower, which ran the federation", FLOWER)] if recorded else []
    titles_by_paper: dict[Paper, list[str]] = {}
    for title, paper in used:
        if paper and title not in titles_by_paper.setdefault(paper, []):
            titles_by_paper[paper].append(title)
    return [(join_titles(titles), paper) for paper, titles in titles_by_paper.items()]


def _papers_of_federation(audit: Audit) -> Iterator[tuple[str, Paper | None]]:
    """Yield the papers of the parts of the federation, where fedsim ran it."""
    if audit.experiment is None:
        return
    config = audit.experiment.config
    tables: list[tuple[registry.Group, str, str]] = [("defenses", table.name, table.name) for table in config.defense]
    tables += [("measures", table.name, table.title) for table in config.measure]
    tables += [("datasets", config.data.name, f"the data set {config.data.name}")]
    for group, name, title in tables:
        try:
            yield title, getattr(registry.load(group, name), "paper", None)
        except FedsimError as error:
            log.warning("%s", error)


def bibtex(paper: Paper) -> str:
    """Format `paper` as a BibTeX entry; authors are listed by the surnames that `Paper` knows."""
    entry_type, venue_field = next(
        entry for words, entry in _ENTRY_TYPES.items() if re.search(words, paper.venue, re.IGNORECASE)
    )
    # Braces keep BibTeX from splitting a surname of several words.
    authors = []
    for author in paper.authors.split(","):
        surname = author.strip()
        authors.append(f"{{{surname}}}" if " " in surname else surname)
    fields = {
        "author": " and ".join(authors),
        "title": f"{{{paper.title}}}",
        venue_field: paper.venue,
        "year": str(paper.year),
    }
    escaped = {name: re.sub(r"([&%$#_])", r"\\\1", text) for name, text in fields.items()} | {"url": paper.url}
    lines = [f"  {name} = {{{text}}}," for name, text in escaped.items() if text]
    return "\n".join([f"@{entry_type}{{{_citation_key(paper)},", *lines, "}"])


def _citation_key(paper: Paper) -> str:
    """Return the first surname, the year and the first longer word of the title."""
    word = next(iter(re.findall(r"[a-z]{4,}", paper.title.lower())), "")
    return re.sub(r"\W", "", paper.authors.split(",")[0].lower()) + str(paper.year) + word
