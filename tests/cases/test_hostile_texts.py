"""Texts and numbers that a stranger wrote: what a terminal and a page show of them, and what tables may hold."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from rich.markup import escape
from rich.table import Table

from fedsim.audit.evaluation.empirical_epsilon import COLUMNS as EPSILON_COLUMNS
from fedsim.audit.evaluation.empirical_epsilon import read_epsilons
from fedsim.audit.scores import SCORE_COLUMNS
from fedsim.base.errors import RunError
from fedsim.cli.options import console
from fedsim.cli.plugins import lay_out
from fedsim.federation.run_folder import RunFolder, as_csv
from fedsim.report.attack_traits import read_scores
from fedsim.report.learning import examine_evaluations
from fedsim.report.run_index import RunIndex, write_index_page
from fedsim.report.sweep_answer import answer_sweep
from fedsim.sweeps.table import read_table, write_table
from tests.support.sweep_tables import LEAKING, make_rows

NAME = "\x1b]0;owned\x07\u202eclient[/]"


def test_no_table_of_the_screen_holds_what_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    """To escape for rich keeps brackets from being styles, and does nothing else."""
    table = Table("name", title=escape(NAME))
    table.add_row(escape(NAME))
    console.file = sys.stdout  # that of this test
    try:
        console.print(table)
        console.print(NAME, markup=False, soft_wrap=True)
    finally:
        console._file = None
    print(lay_out(NAME, [NAME]))
    said = capsys.readouterr().out
    assert said.count("client[") == 5
    assert not set(said) & set("\x1b\x07\u202e")


def test_no_page_holds_what_turns_its_texts_around(tmp_path: Path) -> None:
    """A name that a browser shows from right to left reads as another one."""
    folder = tmp_path / "\u202egnp.exe\x07"
    folder.mkdir()
    page = write_index_page(RunIndex(folder=folder, entries=[], num_skipped=0, num_stores=0)).read_text(
        encoding="utf-8"
    )
    assert "\ufffdgnp.exe\ufffd" in page
    assert not set(page) & set("\u202e\x07")


@pytest.mark.parametrize(
    ("column", "text"),
    [("victim", "x"), ("victim", "-1"), ("victim", "9" * 5000), ("repeat", "1.5"), ("examples", ""), ("round", "1-x")],
)
def test_a_count_in_the_scores_that_is_none_is_one_sentence(column: str, text: str, tmp_path: Path) -> None:
    row = dict.fromkeys(SCORE_COLUMNS, "1") | {column: text}
    folder = RunFolder(tmp_path)
    folder.scores.write_text(as_csv(SCORE_COLUMNS, [row]))
    with pytest.raises(RunError, match=r"scores\.csv: .*has '.*' in place of (a count|rounds)") as caught:
        read_scores(folder)
    assert len(str(caught.value)) < 500 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("column", "text"),
    [("value", "x"), ("accuracy", "nan"), ("bytes", "inf"), ("num_evaluated", ""), ("proved_epsilon", "nan")],
)
def test_a_number_in_a_sweeps_table_that_is_none_is_one_sentence(column: str, text: str, tmp_path: Path) -> None:
    write_table(tmp_path, ("defense",), [row | {column: text} for row in make_rows(LEAKING)])
    with pytest.raises(RunError, match=r"sweep\.csv: cannot be read \(.*\); the same `fedsim sweep` writes it again"):
        read_table(tmp_path)


@pytest.mark.parametrize(("column", "text"), [("client", "1.5"), ("client", "nan"), ("proved", ""), ("confidence", "")])
def test_a_number_of_a_measured_epsilon_that_is_none_is_one_sentence(column: str, text: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    row = dict.fromkeys(EPSILON_COLUMNS, "1") | {column: text}
    folder.epsilons.write_text(as_csv(EPSILON_COLUMNS, [row]))
    with pytest.raises(RunError, match=r"empirical-epsilon\.csv: cannot be read"):
        read_epsilons(folder)


@pytest.mark.parametrize("name", ["sweep.csv", "sweep.csv.seal"])
def test_a_sweeps_table_that_is_a_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    write_table(tmp_path, ("defense",), make_rows(LEAKING))
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(RunError, match=r"sweep\.csv: cannot be read \(it is not a file\)"):
        read_table(tmp_path)


def test_a_sweep_whose_scores_have_no_floor_has_an_answer(tmp_path: Path) -> None:
    rows = [row | {"floor": ""} for row in make_rows(LEAKING)]
    answer = answer_sweep(rows, [], ("defense",))
    assert "nan" not in f"{answer.rows} {answer.lead}"


def test_an_index_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "index.html")
    with pytest.raises(RunError, match="was not written by `fedsim index`"):
        write_index_page(RunIndex(folder=tmp_path, entries=[], num_skipped=0, num_stores=0))


@pytest.mark.parametrize("column", ["accuracy", "num_examples"])
@pytest.mark.parametrize("text", ["nan", "inf"])
def test_an_evaluation_that_is_no_number_shows_no_learning_at_all(column: str, text: str) -> None:
    row = {"client": "server", "guess": "0.1", "num_examples": "400", "accuracy": "0.1", "loss": "2"}
    assert examine_evaluations([row]).sentence
    assert not examine_evaluations([row | {column: text}]).sentence


@pytest.mark.parametrize("column", ["value", "floor", "nearest_public"])
def test_a_score_without_a_number_is_none(column: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.scores.write_text(as_csv(SCORE_COLUMNS, [dict.fromkeys(SCORE_COLUMNS, "1") | {column: ""}]))
    assert read_scores(folder)[0][column] == "nan"


def test_names_of_classes_are_no_pictures() -> None:
    """`:A:` is what Rich takes for an emoji, and a class of an attack may have that name."""
    with console.capture() as shown:
        console.print("mine:A: failed")
    assert shown.get() == "mine:A: failed\n"
