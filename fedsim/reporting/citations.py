"""What a report cites: the papers of the attacks, defenses, measures, data and software that a run used."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fedsim.auditing.audit import Audit
from fedsim.errors import FedsimError
from fedsim.paper import Paper
from fedsim.plugins import registry
from fedsim.reporting.summary import listed

log = logging.getLogger(__name__)

FLOWER = Paper(
    title="Flower: A Friendly Federated Learning Research Framework",
    authors="Beutel, Topal, Mathur, Qiu, Fernandez-Marques, Gao, Sani, Li, Parcollet, de Gusmão, Lane",
    venue="arXiv",
    year=2020,
    url="https://arxiv.org/abs/2007.14390",
)
_KINDS = {
    "thesis": ("phdthesis", "school"),
    "technical report": ("techreport", "institution"),
    "journal|transactions|letters|arxiv|proceedings of the ieee": ("article", "journal"),
    "repository|preprint|software": ("misc", "howpublished"),
    "": ("inproceedings", "booktitle"),
}
"""What a venue says of the kind of a publication: the type of its BibTeX entry, and the field for the venue."""


def papers(audit: Audit | None, attacks: Mapping[str, Any], *, recorded: bool) -> list[tuple[str, Paper]]:
    """What to cite, each paper once, with what it is cited for.

    Args:
        attacks: by title, the class of each attack, None where nobody knows it.
        recorded: whether there is a recording, which Flower's messages are in.
    """
    used = [(title, getattr(cls, "paper", None)) for title, cls in attacks.items()]
    used += _of_run(audit) if audit else []
    used += [("Flower, which ran the federation", FLOWER)] if recorded else []
    cited: dict[Paper, list[str]] = {}
    for title, paper in used:
        if paper and title not in cited.setdefault(paper, []):
            cited[paper].append(title)
    return [(listed(titles), paper) for paper, titles in cited.items()]


def _of_run(audit: Audit) -> Iterator[tuple[str, Paper | None]]:
    """Of the parts of the federation, where fedsim ran it."""
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
    """`paper` as a BibTeX entry; authors are listed by the surnames that `Paper` knows."""
    kind, where = next(entry for words, entry in _KINDS.items() if re.search(words, paper.venue, re.IGNORECASE))
    fields = {
        "author": " and ".join(
            f"{{{name.strip()}}}" if " " in name.strip() else name.strip() for name in paper.authors.split(",")
        ),
        "title": f"{{{paper.title}}}",
        where: paper.venue,
        "year": str(paper.year),
    }
    escaped = {name: re.sub(r"([&%$#_])", r"\\\1", text) for name, text in fields.items()} | {"url": paper.url}
    lines = [f"  {name} = {{{text}}}," for name, text in escaped.items() if text]
    return "\n".join([f"@{kind}{{{_key(paper)},", *lines, "}"])


def _key(paper: Paper) -> str:
    word = next(iter(re.findall(r"[a-z]{4,}", paper.title.lower())), "")
    return re.sub(r"\W", "", paper.authors.split(",")[0].lower()) + str(paper.year) + word
