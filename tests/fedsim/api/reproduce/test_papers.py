"""What papers print and what we got belong together, and a name that nobody published is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsim.api.reproduce import papers as read
from fedsim.api.reproduce.figures import FigureVerdict
from fedsim.api.reproduce.papers import PublishedTable, compare_figures, find_tables, read_papers, read_results
from fedsim.base.errors import ConfigError
from fedsim.federation.table_validation import validate_tables

FIVE = ["angular-lipschitz", "lavp", "lmra", "sme", "tgias-ro"]
FIELD = "field"
"""Tables of our own, which compare attacks of several papers."""
SOME = {
    "title": "Table 1",
    "setting": "theirs",
    "quantities": {
        "a": {"title": "a"},
        "b": {"title": "b", "tolerance": 0.5},
        "gain": {"title": "gain", "minus": ["b", "a"]},
        "floor": {"title": "floor"},
    },
    "rows": {"one": {"a": "1.0", "b": "3.25"}, "two": {"a": "2.0"}},
}


def test_the_five_papers_are_there_and_every_figure_of_theirs_and_ours_is_one() -> None:
    assert sorted(read_papers()) == sorted([*FIVE, FIELD])
    for name, paper in read_papers().items():
        for table, published in paper.table.items():
            assert any(published.published_figures(table).values()) is (name != FIELD), table
        for kept in read_results()[name].kept:
            assert compare_figures(name, kept.table, kept.rows, kept.name), kept.name
            assert kept.command, kept.name


@pytest.mark.parametrize("name", read_papers())
def test_results_say_why_they_miss_a_paper_and_only_then(name: str) -> None:
    for kept in read_results()[name].kept:
        verdicts = {comparison.verdict for comparison in compare_figures(name, kept.table, kept.rows, kept.name)}
        assert bool(kept.why_missed) == (FigureVerdict.MISSED in verdicts), f"{name}/{kept.table}: {kept.name}"


@pytest.mark.parametrize("name", FIVE)
def test_results_for_one_table_have_names_of_their_own(name: str) -> None:
    names = [(kept.table, kept.name) for kept in read_results()[name].kept] + [
        ("", d.name) for d in read_results()[name].details
    ]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", FIVE)
def test_lines_of_our_own_tables_are_as_long_as_their_heads(name: str) -> None:
    for details in read_results()[name].details:
        assert {len(row) for row in details.rows} == {len(details.head)}, details.name


def test_a_difference_that_the_paper_does_not_print_follows_from_its_figures() -> None:
    figures = validate_tables(PublishedTable, SOME, "here").published_figures("here")
    assert figures["one"]["gain"].text == "+2.25"
    assert "gain" not in figures["two"]


def test_ours_stand_beside_theirs_with_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    table = validate_tables(PublishedTable, {**SOME, "incomparable": {"a": "why"}}, "here")
    paper = read.PublishedPaper(title="P", key="Zhu2019", table={"t": table})
    monkeypatch.setattr(read, "read_papers", lambda: {"p": paper})
    ours = {"one": {"b": "2.5", "a": "1.0", "floor": ".1"}}
    found = {(one.row, one.quantity): one.verdict for one in compare_figures("p", "t", ours, "kept")}
    assert found == {
        ("one", "a"): FigureVerdict.NOT_COMPARABLE,
        ("one", "b"): FigureVerdict.MISSED,
        ("one", "floor"): None,
    }
    with pytest.raises(ConfigError, match=r"kept: no row of p/t is 'oen', did you mean 'one'\?"):
        compare_figures("p", "t", {"oen": {}}, "kept")
    with pytest.raises(ConfigError, match=r"kept: one: no quantity is called 'gian', did you mean 'gain'\?"):
        compare_figures("p", "t", {"one": {"gian": "1"}}, "kept")


def test_tables_are_chosen_by_name_or_by_the_number_that_several_share() -> None:
    assert find_tables("sme/table6") == [("sme", "table6")]
    assert find_tables("sme/table2") == [("sme", "table2-femnist"), ("sme", "table2-cifar100")]
    assert len(find_tables("lmra")) == len(read_papers()["lmra"].table)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("smee", r"no paper is called 'smee', did you mean 'sme'\?"),
        (
            "sme/table66",
            r"no table of sme that fedsim has is called 'table66', known: table2-femnist, .*, table6, table7, table1, ",
        ),
        ("lavp/table1-cifar10", None),
        ("sme/", None),
    ],
)
def test_a_table_that_nobody_published_is_told(name: str, sentence: str | None) -> None:
    if sentence is None:
        assert find_tables(name)
    else:
        with pytest.raises(ConfigError, match=sentence):
            find_tables(name)


def test_a_result_for_a_table_that_is_not_there_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "papers").symlink_to(read.PACKAGE_FOLDER / "papers")
    text = 'paper = "sme"\n[[kept]]\ntable = "table66"\nname = "x"\ndate = 2026-11-25\ncommand = "c"\nrows = {}\n'
    (tmp_path / "kept" / "mine.toml").write_text(text)
    monkeypatch.setattr(read, "PACKAGE_FOLDER", tmp_path)
    read_results.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"mine.toml: no table of sme is called 'table66', did you mean 'table6'"):
            read_results()
        (tmp_path / "kept" / "mine.toml").write_text(text.replace('"sme"', '"sem"'))
        with pytest.raises(ConfigError, match=r"mine.toml: no paper is called 'sem', did you mean 'sme'"):
            read_results()
    finally:
        read_results.cache_clear()
