"""Papers stand in one bibliography: docstrings and pages quote it by key, and no entry is idle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from fedsim.api.reproduce.papers import read_papers
from fedsim.base.papers import Paper, cite, find_entry, list_citations, quoted_keys, read_bibliography
from tests.support.scripts import load_script

ROOT = Path(__file__).parent.parent
PACKAGES = ("fedsim", "strategies", "adversaries", "clients")
PAGES = sorted(page for page in (ROOT / "docs").glob("**/*.md") if page.name != "bibliography.md")
STRANGERS_TEXTS = {"fedsim/base/papers.py", "fedsim/skeletons/attack.py", "fedsim/skeletons/defense.py"}
"""The first shows what a citation looks like; strangers, who fill in the others, have no entry."""
CITED_IN_CODE = re.compile(r'\bcite\("(\w+)"\)')
CITED_ON_PAGES = re.compile(r"bibliography\.md#(\w+)")


@cache
def docstrings() -> dict[str, str]:
    """Read all docstrings by file, those below attributes too, with white space made plain."""
    texts = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if name not in STRANGERS_TEXTS:
                texts[name] = plain("\n".join(_read_docstrings(path)))
    return texts


def _read_docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield text


def plain(text: str) -> str:
    return re.sub(r"\s+", " ", text)


@cache
def hand_written_patterns() -> list[re.Pattern[str]]:
    """Return what only a citation by hand has: a long title, a venue with its year, authors with one."""
    papers = read_bibliography().values()
    titles = []
    for paper in papers:
        # The part before a colon is how a method is called, as in "LEAF: A Benchmark ...".
        titles += [re.escape(part) for part in (paper.title, *paper.title.split(": ")) if len(part.split()) > 3]
    venues = {re.escape(paper.venue) for paper in papers} | {"S&P", "USENIX Security"}
    surnames = {re.escape(paper.authors.split(", ")[-1]) for paper in papers}
    year = r",? \(?(19|20)\d\d\b"
    return [
        re.compile("|".join(titles)),  # in small letters it may be what a method does
        re.compile(rf"\b({'|'.join(venues)}){year}"),
        re.compile(rf"\bet al\.{year}"),
        re.compile(rf"\b[A-Z]\w+( and |, )({'|'.join(surnames)}){year}"),
    ]


def citations_by_hand(text: str) -> list[str]:
    return [match[0] for pattern in hand_written_patterns() for match in pattern.finditer(text)]


def keys_in_use() -> dict[str, str]:
    """Return each key that is cited somewhere, with a file that cites it."""
    users: dict[str, str] = {}
    for name, text in docstrings().items():
        users |= dict.fromkeys(quoted_keys(text), name)
        code = (ROOT / name).read_text(encoding="utf-8")
        users |= dict.fromkeys(CITED_IN_CODE.findall(code), name)
    users |= {paper.key: name for name, paper in read_papers().items() if paper.key}
    return users


def test_each_key_that_is_used_has_an_entry() -> None:
    unknown = {key: name for key, name in keys_in_use().items() if key not in read_bibliography()}
    assert unknown == {}, "add these to fedsim/base/papers.bib"


def test_each_link_of_a_page_leads_to_an_entry() -> None:
    keys = {key.lower() for key in read_bibliography()}
    for page in PAGES:
        assert set(CITED_ON_PAGES.findall(page.read_text(encoding="utf-8"))) <= keys, page


def test_no_entry_is_unused() -> None:
    linked = {key for page in PAGES for key in CITED_ON_PAGES.findall(page.read_text(encoding="utf-8"))}
    used = {key.lower() for key in keys_in_use()} | linked
    assert [key for key in read_bibliography() if key.lower() not in used] == []


def test_no_docstring_cites_by_hand() -> None:
    by_hand = {name: found for name, text in docstrings().items() if (found := citations_by_hand(text))}
    assert by_hand == {}, "quote the bibliography, as in [Zhu2019], Sect. 4"


def test_no_page_cites_by_hand() -> None:
    """Links, whose text names authors and year, lead to the bibliography; a paper's page has its entry."""
    titles = [str(cite(paper.key)) for paper in read_papers().values() if paper.key]
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for title in titles:
            text = text.replace(title, "")
        links = r"\[[^\]]+\]\([\w./-]*bibliography\.md#\w+\)"
        text = re.sub(rf"{links}|^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        assert citations_by_hand(plain(text)) == [], page


@pytest.mark.parametrize(
    "text",
    [
        "Zhu, Liu, Han: Deep Leakage from Gradients.",
        "a recipe (Inverting Gradients - How easy is it to break privacy in federated learning?)",
        "SME (ICML 2023), App. D",
        "first shown at NeurIPS, 2019",
        "as Geiping et al. 2020 do",
        "as in Geiping et al. (2020)",
        "(Golub and Welsch 1969)",
        "(Zhu, Liu, Han 2019)",
    ],
)
def test_a_citation_by_hand_is_noticed(text: str) -> None:
    assert len(citations_by_hand(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "[Zhu2019], Sect. 4",
        "Geiping et al. themselves sign it",
        "the 1994 US census",
        "SPEAR, deep leakage from gradients",
    ],
)
def test_what_cites_nothing_by_hand_is_no_citation_by_hand(text: str) -> None:
    assert citations_by_hand(text) == []


def test_the_papers_of_a_text_are_listed_once_in_its_order() -> None:
    text = "As [Zhao2020] and [Zhu2019], Alg. 1, do in [0, 1]; [Zhao2020] again, and [Nobody1999]."
    first, second = list_citations(text)
    assert first.startswith("[Zhao2020] Zhao, Mopuri, Bilen: iDLG: ")
    assert second.startswith("[Zhu2019] Zhu, Liu, Han: Deep Leakage from Gradients.")
    assert second.endswith(cite("Zhu2019").url)


def test_the_site_adds_papers_in_full_to_a_docstring() -> None:
    lines = ["Match gradients.", "", "References:", "    [Zhu2019], Sect. 4."]
    load_script(ROOT / "docs" / "conf.py")._prepare(None, "class", "Dlg", object, None, lines)
    assert lines[-2:] == ["", f"- [Zhu2019] {cite('Zhu2019')} {cite('Zhu2019').url}"]


def test_an_entry_is_quoted_as_it_stands() -> None:
    file = (ROOT / "fedsim" / "base" / "papers.bib").read_text(encoding="utf-8")
    entries = {key: find_entry(paper) for key, paper in read_bibliography().items()}
    for key, entry in entries.items():
        assert entry is not None
        assert entry in file
        assert entry.split("\n")[0].endswith(f"{{{key},")
    assert file.count("@") == len(entries)
    assert find_entry(Paper(title="A Title", authors="One", venue="Nowhere", year=2020)) is None


def test_keys_are_surname_and_year_and_stand_in_order() -> None:
    keys = list(read_bibliography())
    assert keys == sorted(keys, key=str.lower)
    for key, paper in read_bibliography().items():
        assert key.rstrip("abc").endswith(str(paper.year))
