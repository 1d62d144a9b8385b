"""Panel of how to make the page again, and what to cite."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from markupsafe import Markup

from fedsim.base.errors import FedsimError
from fedsim.base.papers import Paper, cite, find_entry
from fedsim.federation.config import Config
from fedsim.federation.open_run import OpenRun
from fedsim.federation.run_folder import RunFolder
from fedsim.interfaces.panel import Panel
from fedsim.plugins import registry
from fedsim.report.html import render_fragment
from fedsim.report.reported_run import ReportedRun
from fedsim.report.reproduction import reproduction_of
from fedsim.report.summary import join_titles


class ReproductionPanel(Panel):
    """Offer the files that reproduce the page, say what else they need, and what to cite."""

    title = "How to reproduce this page"
    link = "Reproduce"
    order = 130

    def render(self, run: ReportedRun) -> Markup:
        """Return the files, their commands, hashes of what they make, and a bibliography."""
        reproduction = reproduction_of(run)
        cited_papers = papers(run.config, run.attacks, recorded=bool(run.recording.headers))
        return render_fragment(
            "reproduction.html.j2",
            reproduction=reproduction,
            identity=_identity(run, reproduction.hash),
            recording=run.recording,
            has_experiment=run.experiment is not None,
            papers=cited_papers,
            bibliography="\n\n".join(bibtex(paper) for _, paper in cited_papers),
        )


def _identity(run: ReportedRun, findings_hash: str) -> dict[str, str]:
    """Return what identifies this run, and a run that should equal it."""
    recording = run.recording
    return {
        "Run": _run_id(run.folder),
        "Seed": str(run.config.federation.seed) if run.config else "",
        "Versions": _versions(run.folder),
        f"SHA-256 of the {'intact rounds' if recording.damaged else 'recording'}": recording.hash,
        "SHA-256 of all findings": findings_hash,
    }


def _versions(folder: RunFolder) -> str:
    try:
        versions = json.loads((folder.path / "versions.json").read_text(encoding="utf-8"))
        return ", ".join(f"{name} {version}" for name, version in versions.items())
    except (OSError, ValueError, AttributeError):
        return ""


def _run_id(folder: OpenRun) -> str:
    with suppress(FedsimError):  # the facts say under Integrity what was altered
        manifest = folder.manifest.contents
        return manifest.run if manifest else ""
    return ""


log = logging.getLogger(__name__)

FLOWER = cite("Beutel2020")


def papers(config: Config | None, attacks: Mapping[str, Any], *, recorded: bool) -> list[tuple[str, Paper]]:
    """Return what to cite, each paper once, with what it is cited for."""
    used = [(title, getattr(cls, "paper", None)) for title, cls in attacks.items()]
    used += _papers_of_federation(config) if config else []
    used += [("Flower, which ran the federation", FLOWER)] if recorded else []
    titles_by_paper: dict[Paper, list[str]] = {}
    for title, paper in used:
        if paper and title not in titles_by_paper.setdefault(paper, []):
            titles_by_paper[paper].append(title)
    return [(join_titles(titles), paper) for paper, titles in titles_by_paper.items()]


def _papers_of_federation(config: Config) -> Iterator[tuple[str, Paper | None]]:
    """Yield the papers of the parts of the federation, where fedsim ran it."""
    tables: list[tuple[registry.Group, str, str]] = [("defenses", table.name, table.name) for table in config.defense]
    if config.algorithm is not None:
        tables.append(("algorithms", config.algorithm.name, config.algorithm.name))
    tables += [("measures", table.name, table.title) for table in config.measure]
    tables += [("datasets", config.data.name, f"the data set {config.data.name}")]
    for group, name, title in tables:
        try:
            yield title, getattr(registry.load(group, name), "paper", None)
        except FedsimError as error:
            log.warning("%s", error)


def bibtex(paper: Paper) -> str:
    """Return the entry of `paper` in fedsim's bibliography, or an entry for a stranger's paper."""
    return find_entry(paper) or _format_entry(paper)


def _format_entry(paper: Paper) -> str:
    """Format a paper that no bibliography has; its kind of publication is unknown."""
    # Braces keep BibTeX from splitting a surname of several words.
    authors = []
    for author in paper.authors.split(","):
        surname = author.strip()
        authors.append(f"{{{surname}}}" if " " in surname else surname)
    fields = {
        "author": " and ".join(authors),
        "title": f"{{{paper.title}}}",
        "howpublished": paper.venue,
        "year": str(paper.year),
    }
    escaped = {name: re.sub(r"([&%$#_])", r"\\\1", text) for name, text in fields.items()} | {"url": paper.url}
    lines = [f"  {name} = {{{text}}}," for name, text in escaped.items() if text]
    return "\n".join([f"@misc{{{_citation_key(paper)},", *lines, "}"])


def _citation_key(paper: Paper) -> str:
    """Return the first surname, the year and the first longer word of the title."""
    word = next(iter(re.findall(r"[a-z]{4,}", paper.title.lower())), "")
    return re.sub(r"\W", "", paper.authors.split(",")[0].lower()) + str(paper.year) + word
